"""Slices of a tensor's transfers: together they are the whole, in the order of contributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import PlanError
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.schedule.slices import POSITIONS, Pace, Slice, restrict
from reshard.testing.strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]


def joined(parts: list[Transfers]) -> Transfers:
    names = Transfers.__dataclass_fields__
    return Transfers(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def slices(cuts: list[int]) -> list[Slice]:
    edges = sorted({cut for cut in cuts if cut > 0})
    return [Slice(a, b) for a, b in zip([0, *edges], [*edges, None], strict=True)]


@given(movements(), st.lists(st.integers(0, 3 * POSITIONS), max_size=5))
def test_slices_that_follow_one_another_are_the_whole(movement: Movement, cuts: list[int]) -> None:
    (source, _), (target, _) = movement
    plan = reshard.plan(source, target)
    parts = [restrict(plan.transfers, part) for part in slices(cuts)]
    plan.verify(joined(parts))


@given(movements(), st.integers(0, 2 * POSITIONS), st.integers(1, POSITIONS))
def test_both_ends_cut_a_transfer_alike(movement: Movement, start: int, length: int) -> None:
    (source, _), (target, _) = movement
    plan, part = reshard.plan(source, target), Slice(start, start + length)
    whole = restrict(plan.transfers, part)
    for rank in range(max(source.slots, target.slots)):
        mine = restrict(plan.for_rank(rank), part)
        ours = whole.take((whole.source_slot == rank) | (whole.target_slot == rank))
        assert sorted(str(mine).splitlines()) == sorted(str(ours).splitlines())


@pytest.mark.parametrize("cut", [p * POSITIONS // 5 for p in (2, 5, 6, 10, 14)])
def test_a_contribution_comes_after_the_ones_before_it(cut: int) -> None:
    mesh = reshard.DeviceMesh.of(x=3)
    partial, rows = (reshard.spec(mesh, t).layout((90, 4)) for t in ("-, - | sum(x)", "x, -"))
    transfers = reshard.plan(partial, rows).transfers
    done = restrict(transfers, Slice(0, cut))
    assert int(done.order.max()) == (cut - 1) // POSITIONS
    # What has begun needs all that is combined before it.
    before = transfers.order < done.order.max()
    assert done.take(done.order < done.order.max()).elements.sum() == 360 * done.order.max()
    assert transfers.elements[before].sum() == 360 * done.order.max()


def test_transfers_are_cut_along_their_longest_dimension() -> None:
    moved = Layout.whole((2, 70, 3), [0], 2), Layout.whole((2, 70, 3), [1], 2)
    transfers = reshard.plan(*moved).transfers
    half = restrict(transfers, Slice(0, POSITIONS // 2))
    assert half.shape[0].tolist() in ([2, 35, 3], [2, 36, 3])
    assert Pace.of(transfers).row_elements.tolist() == [6]


@given(movements(), st.integers(0, 2 * POSITIONS))
def test_when_rows_are_done(movement: Movement, start: int) -> None:
    (source, _), (target, _) = movement
    transfers = reshard.plan(source, target).transfers
    pace = Pace.of(transfers)
    transfer, position, rows = pace.finishes(np.arange(len(transfers)))
    assert rows.sum() == pace.rows.sum()
    before, after = np.zeros_like(pace.rows), np.zeros_like(pace.rows)
    np.add.at(before, transfer[position <= start], rows[position <= start])
    assert before.tolist() == pace.rows_before(start).tolist()
    if (position > start).any():
        following = pace.next_finish(start)
        assert following == position[position > start].min()
        np.add.at(after, transfer[position <= following], rows[position <= following])
        assert after.tolist() == pace.rows_before(following).tolist()


def test_more_rows_than_positions() -> None:
    size = 5 * POSITIONS + 3
    transfers = reshard.plan(Layout.whole((size,), [0], 2), Layout.whole((size,), [1], 2)).transfers
    pace = Pace.of(transfers)
    _, position, rows = pace.finishes(np.array([0]))
    assert rows.sum() == size
    assert set(rows.tolist()) == {5, 6}
    assert position.tolist() == list(range(1, POSITIONS + 1))
    assert pace.rows_before(7).tolist() == [rows[:7].sum()]


def test_all_transfers_advance_together() -> None:
    """Half of the positions is half of what every rank sends, but for one row a transfer."""
    mesh = reshard.DeviceMesh.of(x=4)
    rows, columns = (reshard.spec(mesh, text).layout((400, 400)) for text in ("x, -", "-, x"))
    moving = reshard.plan(rows, columns).transfers.moving
    half = restrict(moving, Slice(0, POSITIONS // 2))
    sent = np.bincount(half.source_slot, half.elements, minlength=4)
    assert (abs(sent - 15_000) <= 300).all()


def test_rows_of_many_small_transfers_are_apart() -> None:
    """Of a block-cyclic tensor, whose transfers are single elements, no position has many."""
    mesh = reshard.DeviceMesh.of(x=2)
    cyclic, even = (reshard.spec(mesh, t).layout((4096,)) for t in ("x@cyclic1", "x"))
    moving = reshard.plan(cyclic, even).transfers.moving
    assert set(moving.elements.tolist()) == {1}
    _, position, _ = Pace.of(moving).finishes(np.arange(len(moving)))
    assert np.bincount(position).max() <= 4


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 4), (5, 2)])
def test_a_slice_has_a_beginning_and_an_end_behind_it(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match=f"position {start} to {stop}"):
        Slice(start, stop)
