"""Runs and copied bytes against local arrays, element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.plans.local_copies import copies_of
from reshard.plans.schedule.messages import LARGE_PIECE_BYTES
from selection import choose


def offsets(
    layout: Layout, cell: int, start: list[int], shape: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the elements of a box lie in the memory of a cell, in the order of the box."""
    whole = layout.cell_shape[cell].tolist()
    numbers = np.arange(int(np.prod(whole))).reshape(whole)
    index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    return numbers[index].reshape(-1)


def breaks(*sides: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Runs of memory: one, and one more wherever a side does not go on."""
    goes_on = np.ones(len(sides[0]) - 1, dtype=bool)
    for side in sides:
        goes_on &= np.diff(side) == 1
    return 1 + int((~goes_on).sum())


def counted(rows: Transfers, source: Layout, target: Layout, width: int) -> dict[int, list[int]]:
    """Bytes, runs and combined bytes of each rank."""
    ranks = max(source.slots, target.slots)
    totals = {rank: [0, 0, 0] for rank in range(ranks)}
    between: dict[tuple[int, int, int], int] = {}
    keys = list(
        zip(rows.order.tolist(), rows.source_slot.tolist(), rows.target_slot.tolist(), strict=True)
    )
    sizes = (rows.elements * width).tolist()
    for key, size in zip(keys, sizes, strict=True):
        if key[1] != key[2] and size < LARGE_PIECE_BYTES:
            between[key] = between.get(key, 0) + 1
    for row, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        shape = rows.shape[row].tolist()
        here = offsets(source, rows.source_cell[row], rows.source_start[row].tolist(), shape)
        there = offsets(target, rows.target_cell[row], rows.target_start[row].tolist(), shape)
        order, sender, receiver = key
        combined = size if order else 0
        if rows.stays[row]:
            runs = max(breaks(here), breaks(there))
            for place, more in enumerate((size, runs, combined)):
                totals[receiver][place] += more
            continue
        together = size < LARGE_PIECE_BYTES and between[key] > 1
        for rank, side, is_end in ((sender, here, False), (receiver, there, True)):
            if together or breaks(side) > 1 or (is_end and order):
                extra = combined if is_end else 0
                for place, more in enumerate((size, breaks(side), extra)):
                    totals[rank][place] += more
    return totals


@settings(max_examples=choose(24, 80), deadline=None)
@given(pairs())
def test_copies_are_those_of_local_arrays(pair: Pair) -> None:
    before, after, shape = pair
    source, target = before.layout(shape), after.layout(shape)
    plan = reshard.plan(source, target)
    if not len(plan.transfers) or not plan.transfers.elements.all():
        return
    found = copies_of(plan.transfers, source, target, 2)
    expected = counted(plan.transfers, source, target, 2)
    columns = found.by_rank(len(expected))
    assert {rank: [int(c[rank]) for c in columns] for rank in expected} == expected


def test_what_is_in_its_place_is_not_copied() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    rows, columns = (reshard.spec(mesh, text).layout((4, 4)) for text in ("x, -", "-, x"))
    transfers = reshard.plan(rows, columns).transfers
    kept, moved = (copies_of(transfers, rows, columns, 1, keeps=k) for k in (True, False))
    assert kept.by_rank(2)[0].tolist() == [8, 8]
    assert moved.by_rank(2)[0].tolist() == [4, 4]


def test_small_pieces_travel_together_and_large_ones_alone() -> None:
    # Rank 1 gets two stretches of rank 0's: packed at both ends where they are small, though each
    # lies in one run.
    for length, packed in ((8, True), (LARGE_PIECE_BYTES, False)):
        shape = (4 * length,)
        source = Layout.from_boxes(shape, [(0, Box((0,), shape))])
        target = Layout.from_boxes(
            shape, [(1, Box((0,), (length,))), (1, Box((2 * length,), (3 * length,)))]
        )
        found = copies_of(reshard.plan(source, target).transfers, source, target, 1)
        expected = [2 * length, 2 * length] if packed else [0, 0]
        assert found.by_rank(2)[0].tolist() == expected
    alone = Layout.from_boxes((8,), [(1, Box((0,), (4,)))])
    whole = Layout.from_boxes((8,), [(0, Box((0,), (8,)))])
    found = copies_of(reshard.plan(whole, alone).transfers, whole, alone, 1)
    assert not len(found.rank)
