"""Boxes and intervals that meet, against comparing all with all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry import box_intersections as box_meetings
from reshard.geometry.box_intersections import (
    Boxes,
    Intervals,
    intersecting_boxes,
    intersecting_intervals,
)

Shape = tuple[int, ...]


@st.composite
def boxes_of(draw: st.DrawFn, shape: Shape) -> Boxes:
    """Any boxes, that may overlap, but are not empty."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        start = [draw(st.integers(0, size - 1)) for size in shape]
        stop = [draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True)]
        found.append((start, stop))
    corners = np.array(found, dtype=np.int64).reshape(len(found), 2, len(shape))
    return Boxes(corners[:, 0].T.copy(), corners[:, 1].T.copy())


@st.composite
def two_lists(draw: st.DrawFn) -> tuple[Boxes, Boxes, Shape]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return draw(boxes_of(shape)), draw(boxes_of(shape)), shape


def meet(first: Boxes, i: int, second: Boxes, j: int) -> bool:
    return all(
        set(range(first.start[d, i], first.stop[d, i]))
        & set(range(second.start[d, j], second.stop[d, j]))
        for d in range(len(first.start))
    )


def listed(blocks: object) -> Counter[tuple[int, int]]:
    found = Counter[tuple[int, int]]()
    for i, j in blocks:  # type: ignore[attr-defined]
        found.update(zip(i.tolist(), j.tolist(), strict=True))
    return found


@pytest.mark.parametrize(("block", "many"), [(1 << 20, 8), (3, 8), (1 << 20, 0), (3, 0)])
def test_the_boxes_that_meet_are_those_that_share_an_element(
    block: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_meetings, "_BLOCK", block)
    monkeypatch.setattr(box_meetings, "_MANY", many)

    @given(two_lists())
    def check(example: tuple[Boxes, Boxes, Shape]) -> None:
        first, second, shape = example
        found = listed(intersecting_boxes(first, second, shape))
        assert set(found) == {
            (i, j)
            for i in range(first.count)
            for j in range(second.count)
            if meet(first, i, second, j)
        }
        if many:
            assert set(found.values()) <= {1}

    check()


@given(two_lists())
def test_intervals_that_meet_come_once(example: tuple[Boxes, Boxes, Shape]) -> None:
    first, second, _ = example
    sides = [Intervals(boxes.start[0], boxes.stop[0]) for boxes in (first, second)]
    every = Boxes(first.start[:1], first.stop[:1]), Boxes(second.start[:1], second.stop[:1])
    expected = {
        (i, j): 1
        for i in range(first.count)
        for j in range(second.count)
        if meet(every[0], i, every[1], j)
    }
    assert listed(intersecting_intervals(*sides)) == expected


def tiles(rows: int, columns: int) -> Boxes:
    """Tiles of 4 x 4 elements."""
    row, column = (grid.reshape(-1) for grid in np.mgrid[0:rows, 0:columns])
    start = np.array([row, column]) * 4
    return Boxes(start, start + 4)


def test_bands_are_taken_where_every_line_has_many_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    original = box_meetings.intersecting_intervals

    def counted(first: Intervals, second: Intervals) -> object:
        for i, j in original(first, second):
            compared.append(len(i))
            yield i, j

    monkeypatch.setattr(box_meetings, "intersecting_intervals", counted)
    some = tiles(64, 64)
    found = listed(intersecting_boxes(some, some, (256, 256)))
    assert set(found) == {(i, i) for i in range(4096)}
    # On the line of a dimension each meets 64 others.
    assert sum(compared) <= 4 * 4096


def test_tensors_whose_elements_outgrow_64_bits() -> None:
    # Modulo 2 ** 64 the last element of the tall box would have the number of its first.
    tall = Boxes(np.array([[0], [0]]), np.array([[2**24 + 1], [1]]))
    others = Boxes(np.array([[5, 5], [0, 1]]), np.array([[6, 6], [1, 2]]))
    assert listed(intersecting_boxes(tall, others, (2**40, 2**40))) == {(0, 0): 1}
