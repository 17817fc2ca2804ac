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
from reshard.spmd.shards import process_runner
from reshard.spmd.tracing.argument_tree import leaves
from spmd.traced_functions import FUNCTIONS, Traced

RECEIVED_BYTES = []
redistribute = process_runner.redistribute


def counted(*arguments: Any, **options: Any) -> Any:
    """As `redistribute`; what this rank receives is noted."""
    begun = redistribute(*arguments, async_op=True, **options)
    found = begun.wait()
    RECEIVED_BYTES.append(begun.received_bytes)
    return found


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


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    process_runner.redistribute = counted
    for number, case in enumerate(FUNCTIONS):
        # Starting and agreeing take most of the time: strategies take turns.
        for strategy in ("eager", "basic")[number % 2 :][:1]:
            try:
                check(case, strategy)
            except BaseException as error:
                raise RuntimeError(f"{case.name}, {strategy}") from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
