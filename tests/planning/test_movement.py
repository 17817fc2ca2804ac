"""Every plan against the oracle: what it moves, how much of it, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from reshard.planning.plan import Plan
from reshard.testing.oracle import (
    Contents,
    dense_of,
    least_moved,
    reduced,
    shards_of,
)
from reshard.testing.strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]
EXACT_REDUCTIONS = ("sum", "max", "min", "product")


def random_dense(contents: Contents, seed: int, dtype: str = "int64") -> list[NDArray[Any]]:
    generator = np.random.default_rng(seed)
    size = (contents.contributions, *contents.shape)
    if contents.reduction == "product":
        return list(generator.integers(1, 4, size).astype(dtype))
    return list(generator.integers(-99, 99, size).astype(dtype))


def run_plan(plan: Plan, source: Contents, dense: Sequence[NDArray[Any]]) -> dict[int, Any]:
    shards = shards_of(source, dense, rubbish=12345)
    before = {slot: shard.copy() for slot, shard in shards.items()}
    result = plan.run(shards)
    for slot, shard in shards.items():
        assert np.array_equal(shard, before[slot])
        assert not any(np.shares_memory(shard, made) for made in result.values())
    return result


@given(movements(EXACT_REDUCTIONS), st.integers(0, 2**16))
def test_a_run_gives_the_dense_computation(movement: Movement, seed: int) -> None:
    (source, held), (target, wanted) = movement
    dense = random_dense(held, seed)
    plan = reshard.plan(source, target)
    result = run_plan(plan, held, dense)
    assert np.array_equal(dense_of(wanted, result), reduced(held.reduction, dense))


@given(movements(("mean",)), st.integers(0, 2**16))
def test_means_come_out_as_means(movement: Movement, seed: int) -> None:
    (source, held), (target, wanted) = movement
    dense = random_dense(held, seed, "float64")
    result = run_plan(reshard.plan(source, target), held, dense)
    np.testing.assert_allclose(
        dense_of(wanted, result), reduced(held.reduction, dense), rtol=1e-12, atol=1e-12
    )


@given(movements())
def test_no_more_moves_than_must(movement: Movement) -> None:
    (source, held), (target, wanted) = movement
    plan = reshard.plan(source, target, dtype="bfloat16")
    least = least_moved(held, wanted, plan.combines)
    assert plan.lower_bound_elements == least
    assert plan.moved_elements == least
    assert (plan.moved_bytes, plan.lower_bound_bytes) == (2 * least, 2 * least)
    assert plan.sent_elements.sum() == plan.received_elements.sum() == least
    plan.verify()
