"""Plans against a brute-force oracle: their transfers, amounts and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from oracle import (
    Contents,
    dense_of,
    least_moved,
    reduced,
    shards_of,
)
from reshard.layout import Layout
from reshard.plans.plan import Plan
from reshard.runs import RunTable
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]
# What all else rests on gets more examples than the rest.
MANY = settings(max_examples=3 * settings().max_examples)
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


@MANY
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


@MANY
@given(movements())
def test_no_more_moves_than_must(movement: Movement) -> None:
    (source, held), (target, wanted) = movement
    plan = reshard.plan(source, target, dtype="bfloat16")
    least = least_moved(held, wanted, plan.change.combines)
    assert plan.lower_bound_elements == least
    assert plan.moved_elements == least
    assert (plan.moved_bytes, plan.lower_bound_bytes) == (2 * least, 2 * least)
    assert plan.sent_elements.sum() == plan.received_elements.sum() == least
    plan.verify()


def halos(word: str) -> Layout:
    """Six elements on three slots, 3 + 4 + 3 of them with those of the neighbours."""
    return reshard.spec(reshard.DeviceMesh.of(x=3), f"x@halo[1,1{word}]").layout((6,))


def test_stale_halos_are_filled_and_never_read() -> None:
    plan = reshard.plan(halos(""), halos(""))
    assert plan.moved_elements == plan.lower_bound_elements == 4
    shards = {0: [0, 1, -1], 1: [-1, 2, 3, -1], 2: [-1, 4, 5]}
    result = plan.run({slot: np.array(shard) for slot, shard in shards.items()})
    assert {slot: array.tolist() for slot, array in result.items()} == {
        0: [0, 1, 2],
        1: [1, 2, 3, 4],
        2: [3, 4, 5],
    }


def test_fresh_halos_are_sources() -> None:
    assert reshard.plan(halos(",fresh"), halos("")).moved_elements == 0
    assert reshard.plan(halos(",fresh"), Layout.whole((6,), [1], 2)).moved_elements == 2
    assert reshard.plan(halos(""), Layout.whole((6,), [1], 2)).moved_elements == 4


def test_elements_held_twice_by_a_slot_count_once() -> None:
    boxes = [reshard.Box((0, 0), (3, 3)), reshard.Box((1, 1), (4, 4)), reshard.Box((0, 2), (2, 4))]
    source = Layout.from_boxes(
        (4, 4), [(0, box) for box in boxes] + [(1, reshard.Box((2, 0), (4, 2)))]
    )
    plan = reshard.plan(source, Layout.whole((4, 4), [0], 2))
    # Of 16 elements the three boxes hold 9 + 9 - 4 + 1; only (3, 0) is missing.
    assert plan.moved_elements == plan.lower_bound_elements == 1
    plan.verify()


def test_a_box_held_twice_by_a_slot_is_one_copy() -> None:
    first, second = reshard.Box((0,), (1,)), reshard.Box((1,), (2,))
    source = Layout.from_boxes((2,), [(0, first), (0, first), (1, first), (1, second)])
    plan = reshard.plan(source, Layout.whole((2,), [1], 2))
    assert plan.moved_elements == plan.lower_bound_elements == 0
    plan.verify()


def test_a_part_with_an_index_twice_is_a_source() -> None:
    table = RunTable(3, 1, [(0, 0, 2, 0), (0, 1, 2, 2)])
    twice = Layout((3,), [table], 2, [0], [[0]])
    plan = reshard.plan(twice, Layout.whole((3,), [1], 2))
    assert plan.run({0: np.array([4, 5, 5, 6])})[1].tolist() == [4, 5, 6]
    assert plan.moved_elements == plan.lower_bound_elements == 3
    plan.verify()
    back = reshard.plan(Layout.whole((3,), [1], 2), twice)
    assert back.run({1: np.array([4, 5, 6])})[0].tolist() == [4, 5, 5, 6]
    back.verify()


def test_overlapping_parts_are_sources_of_their_intersection() -> None:
    mesh = reshard.DeviceMesh.of(tp=8)
    heads, whole = (reshard.spec(mesh, text).layout((8, 2)) for text in ("tp@heads4, -", "tp, -"))
    # Eight ranks hold four heads twice, so each has the row that it needs.
    assert reshard.plan(heads, whole).moved_elements == 0
    assert reshard.plan(whole, heads).moved_elements == 8 * 2
