"""Values that are computed again: within the limit, the same results, and what is really held."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import PlanError
from selection import keep_covering

MESH = DeviceMesh.of(x=4)
LAYERS, ROWS, WIDTH = 8, 2048, 16


def step(weights: list[Any], x: Any) -> Any:
    def loss(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = x + sp.tanh(sp.sin(x @ w) * 2.0)
        return sp.sum(x * x)

    return sp.value_and_grad(loss)(weights, x)


def arguments() -> tuple[list[sp.ShardedArray], sp.ShardedArray]:
    random = np.random.default_rng(0)
    weights = [random.normal(size=(WIDTH, WIDTH)) / 8 for _ in range(LAYERS)]
    x = sp.array(random.normal(size=(ROWS, WIDTH)), spec(MESH, "x, -"))
    return [sp.array(w, spec(MESH, "-, -")) for w in weights], x


def held_bytes(program: Any, given: Any) -> int:
    program(*given)
    tracemalloc.start()
    try:
        program(*given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("strategy", "share"),
    keep_covering(
        1,
        itertools.product(["eager", "basic"], [0.9, 0.7, 0.5]),
        "every combination; each strategy and each share is in a default case",
    ),
)
def test_a_limit_is_kept_by_computing_again(strategy: str, share: float) -> None:
    given = arguments()
    free = sp.jit(step, strategy=strategy)
    before = free.trace(*given)
    limit = int(share * max(before.peak_bytes.values()))
    limited = sp.jit(step, strategy=strategy, live_bytes=limit)
    traced = limited.trace(*given)
    assert max(traced.peak_bytes.values()) <= limit
    assert traced.strategy == strategy
    assert len(traced.operations) > len(before.operations)
    expected, found = free(*given), limited(*given)
    np.testing.assert_array_equal(found[0].to_dense(), expected[0].to_dense())
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.spec is other.spec
        np.testing.assert_array_equal(one.to_dense(), other.to_dense())


def test_a_program_holds_less() -> None:
    given = arguments()
    free = sp.jit(step)
    traced = free.trace(*given)
    limit = int(0.6 * max(traced.peak_bytes.values()))
    limited = sp.jit(step, live_bytes=limit)
    assert held_bytes(limited, given) < 0.7 * held_bytes(free, given)


def test_less_is_computed_again_the_more_may_be_held() -> None:
    given = arguments()
    peak = max(sp.jit(step).trace(*given).peak_bytes.values())
    counts = [
        len(sp.jit(step, live_bytes=int(share * peak)).trace(*given).operations)
        for share in (1.0, 0.9, 0.7, 0.5)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] < 2 * counts[0]


def test_loops_are_not_run_again() -> None:
    def f(x: Any) -> Any:
        found, _ = sp.scan(lambda c, _: (sp.sin(c), None), x, length=2)
        kept = sp.cos(found)
        for _ in range(3):
            x = sp.exp(-x) @ sp.permute_dims(x, (1, 0)) @ x
        return x * found * kept

    x = sp.array(np.ones((256, 64)) / 64, spec(MESH, "x, -"))
    traced = sp.jit(f).trace(x)
    peak = max(traced.peak_bytes.values())
    size = 256 * 64 * 8 // 4
    limited = sp.jit(f, live_bytes=peak - size // 2).trace(x)
    names = [one.operation.operator for one in limited.operations]
    assert names.count("scan") == 1
    assert names.count("cos") == 2
    with pytest.raises(PlanError, match="computed again"):
        sp.jit(f, live_bytes=2 * size).trace(x)
