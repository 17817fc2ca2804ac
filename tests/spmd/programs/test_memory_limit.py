"""A limit on what each rank holds: placements that keep it, refusals, and what is really held."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import PlanError, UsageError

MESH = DeviceMesh.of(x=4)


def chain(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = sp.tanh(x @ w)
    return sp.sum(x * x)


def arguments() -> tuple[sp.ShardedArray, sp.ShardedArray]:
    generator = np.random.default_rng(0)
    x = sp.array(generator.normal(size=(4096, 16)), spec(MESH, "x, -"))
    return x, sp.array(generator.normal(size=(16, 16)) / 4, spec(MESH, "-, -"))


def peak(program: Any, *given: Any) -> int:
    return max(program.trace(*given).peak_bytes.values())


def test_a_placement_within_the_limit_is_the_strategys_own() -> None:
    given = arguments()
    free = sp.jit(chain, strategy="basic")
    limited = sp.jit(chain, strategy="basic", live_bytes=peak(free, *given))
    assert str(limited.trace(*given)) == str(free.trace(*given))
    assert float(limited(*given)) == float(free(*given))


def test_another_strategy_keeps_the_limit() -> None:
    given = arguments()
    # Few bytes, so that times are latencies: "cost" has all of it on every rank.
    peaks = {one: peak(sp.jit(chain, strategy=one), *given) for one in ("cost", "basic")}
    assert peaks["cost"] > 2 * peaks["basic"]
    limited = sp.jit(chain, strategy="cost", live_bytes=peaks["basic"])
    traced = limited.trace(*given)
    assert traced.strategy != "cost"
    assert max(traced.peak_bytes.values()) <= peaks["basic"]
    np.testing.assert_allclose(float(limited(*given)), float(chain(*given)), rtol=1e-12)
    assert limited.traced_count == 1


def test_a_limit_that_nothing_keeps_is_refused() -> None:
    given = arguments()
    arguments_bytes = 4096 * 16 * 8 // 4 + 16 * 16 * 8
    limited = sp.jit(chain, live_bytes=arguments_bytes)
    with pytest.raises(PlanError) as refused:
        limited(*given)
    text = str(refused.value)
    found = peak(sp.jit(chain), *given)
    assert "sp.jit of <function chain" in text and "'eager'" in text
    assert f"holds {found:,} bytes on rank 0 at %" in text and "tanh(" in text
    assert f"live_bytes={arguments_bytes:,}" in text
    # What it says is enough.
    least = int(text.split("Give live_bytes=")[1].split(". ")[0].split(", cut")[0].replace(",", ""))
    assert float(sp.jit(chain, live_bytes=least)(*given)) == float(chain(*given))
    with pytest.raises(PlanError, match="with its arguments alone"):
        sp.jit(lambda x: x, live_bytes=8).trace(given[0])
    of_one = sp.jit(lambda x: x + 1.0, live_bytes=8)
    with pytest.raises(PlanError, match="more than live_bytes=8"):
        of_one(sp.ones((4,)))


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "8GiB"])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(UsageError, match="live_bytes="):
        sp.jit(chain, live_bytes=limit)


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive"])
def test_a_program_holds_what_its_trace_says(strategy: str) -> None:
    """One rank, whose arrays are all that this process has."""
    mesh = DeviceMesh.of(x=1)

    def f(x: Any, w: Any) -> Any:
        kept = []
        for _ in range(5):
            x = sp.tanh(x @ w)
            kept.append(x)
        for one in reversed(kept):
            x = sp.cos(x * one)
        return x

    generator = np.random.default_rng(0)
    x = sp.array(generator.normal(size=(8192, 16)), spec(mesh, "x, -"))
    w = sp.array(generator.normal(size=(16, 16)), spec(mesh, "-, -"))
    program = sp.jit(f, strategy=strategy)
    stated = peak(program, x, w) - (8192 + 16) * 16 * 8
    array_bytes = 8192 * 16 * 8
    # The first call; and the program, which writes the last result into what it is made of.
    for reused_bytes in (0, array_bytes):
        tracemalloc.start()
        try:
            result = program(x, w)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        del result
        assert 0 <= held - (stated - reused_bytes) < 256 << 10
