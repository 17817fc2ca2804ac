"""One rank of a job that runs traced functions, and counts the bytes that it receives."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import report_each, reported
from reshard import spec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.shards import process_runner
from reshard.torch.programs import run
from reshard.torch.programs.run import ProgramRun
from selection import choose
from spmd.traced_functions import FUNCTIONS, MESH, Traced

RECEIVED_BYTES = []
redistribute = process_runner.redistribute


def counted(*arguments: Any, **options: Any) -> Any:
    """As `redistribute`; what this rank receives is noted."""
    begun = redistribute(*arguments, async_op=True, **options)
    found = begun.wait()
    RECEIVED_BYTES.append(begun.received_bytes)
    return found


class CountedRun(ProgramRun):
    """A run of a prepared movement, likewise."""

    def finish(self) -> None:
        super().finish()
        RECEIVED_BYTES.append(self.received_bytes)


def check(case: Traced, strategy: str) -> None:
    runner = sp.over_processes()
    traced = sp.trace(case.function, *case.types(), strategy=strategy)
    here = sp.trace(case.function, *case.types(), strategy=strategy).run(*case.arrays())
    RECEIVED_BYTES.clear()
    found = traced.run(*case.arrays(), runner=runner)
    total = torch.tensor(sum(RECEIVED_BYTES))
    dist.all_reduce(total)
    assert int(total) == traced.moved_bytes, (int(total), traced.moved_bytes)
    agree(found, here)
    # The same as a program, which is prepared by its first run.
    jitted = sp.jit(case.function, strategy=strategy)
    given = [
        sp.array(one, kind.spec, runner=runner)
        for one, kind in zip(case.arrays(), traced.inputs, strict=False)
    ]
    moved_bytes = jitted.trace(*given).moved_bytes
    assert moved_bytes <= traced.moved_bytes
    for _ in range(2):
        RECEIVED_BYTES.clear()
        found = jitted(*given)
        total = torch.tensor(sum(RECEIVED_BYTES))
        dist.all_reduce(total)
        assert int(total) == moved_bytes, (int(total), moved_bytes)
        agree(found, here)


def agree(found: Any, here: Any) -> None:
    for (_, one), (_, other) in zip(leaves(found), leaves(here), strict=True):
        assert one.type is other.type
        np.testing.assert_allclose(np.asarray(one), other.to_dense(), 1e-12, 1e-12)


def decided(x: Any, w: Any) -> Any:
    """A scan, a branch and a loop, as the elements of sharded arrays decide."""

    def body(c: Any, part: Any) -> Any:
        c = sp.cond(sp.sum(c) > 0, lambda: sp.tanh(c @ w), lambda: -c)
        c = sp.while_loop(lambda d: sp.max(sp.abs(d)) > 1, lambda d: d / 2, c + part)
        return c, sp.sum(c, axis=0)

    return sp.scan(body, x[0], x)


def decisions_of_elements_are_the_same_on_all_ranks() -> None:
    random = np.random.default_rng(3)
    x, w = random.normal(size=(4, 6, 6)), random.normal(size=(6, 6))
    expected = decided(sp.array(x), sp.array(w))
    slope = sp.grad(lambda w: sp.sum(sp.scan(lambda c, y: (c @ w + y, None), x[0], x)[0]))
    runner = sp.over_processes()
    with sp.running(runner):
        given = sp.array(x, spec(MESH, "-, x, y")), sp.array(w, spec(MESH, "y, x"))
        jitted = sp.jit(decided)
        for _ in range(2):
            for one, other in zip(jitted(*given), expected, strict=True):
                np.testing.assert_allclose(np.asarray(one), other.to_dense(), 1e-12, 1e-12)
        found = [np.asarray(one(given[1])) for one in (slope, sp.jit(slope))]
    for one in found:
        np.testing.assert_allclose(one, slope(sp.array(w)).to_dense(), 1e-11, 1e-11)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    process_runner.redistribute = counted
    run.ProgramRun = CountedRun
    for number, case in list(enumerate(FUNCTIONS))[:: choose(4, 1)]:
        # Starting and agreeing take most of the time: strategies take turns.
        for strategy in ("eager", "basic")[number % 2 :][:1]:
            with reported(f"{case.name}, {strategy}"):
                check(case, strategy)
    report_each([decisions_of_elements_are_the_same_on_all_ranks])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
