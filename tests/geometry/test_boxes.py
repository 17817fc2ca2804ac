"""Boxes and runs that intersect, against all pairs compared."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.geometry import boxes as box_meetings
from reshard.geometry.boxes import (
    Boxes,
    Intervals,
    PartRuns,
    are_disjoint,
    intersect_boxes,
    intersect_intervals,
    intersect_runs,
    share_an_index,
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
        found = listed(intersect_boxes(first, second, shape))
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
    assert listed(intersect_intervals(*sides)) == expected


def tiles(rows: int, columns: int) -> Boxes:
    """Tiles of 4 x 4 elements."""
    row, column = (grid.reshape(-1) for grid in np.mgrid[0:rows, 0:columns])
    start = np.array([row, column]) * 4
    return Boxes(start, start + 4)


def test_bands_are_taken_where_every_line_has_many_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    original = box_meetings.intersect_intervals

    def counted(first: Intervals, second: Intervals) -> object:
        for i, j in original(first, second):
            compared.append(len(i))
            yield i, j

    monkeypatch.setattr(box_meetings, "intersect_intervals", counted)
    some = tiles(64, 64)
    found = listed(intersect_boxes(some, some, (256, 256)))
    assert set(found) == {(i, i) for i in range(4096)}
    # On the line of a dimension each meets 64 others.
    assert sum(compared) <= 4 * 4096


def test_tensors_whose_elements_outgrow_64_bits() -> None:
    # Modulo 2 ** 64 the last element of the tall box would have the number of its first.
    tall = Boxes(np.array([[0], [0]]), np.array([[2**24 + 1], [1]]))
    others = Boxes(np.array([[5, 5], [0, 1]]), np.array([[6, 6], [1, 2]]))
    assert listed(intersect_boxes(tall, others, (2**40, 2**40))) == {(0, 0): 1}


Run = tuple[int, int, int]
LENGTH, PARTS = 12, 4


@st.composite
def runs_of_parts(draw: st.DrawFn) -> list[Run]:
    """Runs `(part, start, stop)` in any order; parts may have none, several, or overlapping."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, LENGTH - 1))
        found.append((draw(st.integers(0, PARTS - 1)), start, draw(st.integers(start + 1, LENGTH))))
    return found


def columns(runs: list[Run]) -> PartRuns:
    return PartRuns.of(PARTS, *np.array(runs, dtype=np.int64).reshape(-1, 3).T)


PAIRS = st.lists(st.tuples(st.integers(0, PARTS - 1), st.integers(0, PARTS - 1)), max_size=6)


@given(runs_of_parts(), runs_of_parts(), PAIRS)
def test_shared_runs(first: list[Run], second: list[Run], pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    expected = [
        (number, i, j)
        for number, (left, right) in enumerate(pairs)
        for i, (of_i, low_i, high_i) in enumerate(first)
        for j, (of_j, low_j, high_j) in enumerate(second)
        if (of_i, of_j) == (left, right) and max(low_i, low_j) < min(high_i, high_j)
    ]
    found = intersect_runs(columns(first), columns(second), a, b)
    assert sorted(zip(*(column.tolist() for column in found), strict=True)) == sorted(expected)


@given(runs_of_parts(), runs_of_parts())
def test_parts_have_bounds_repeats_and_common_indices(first: list[Run], second: list[Run]) -> None:
    held = [
        [set(range(a, b)) for of, a, b in runs if of == p] for runs in (first,) for p in range(4)
    ]
    wanted = [set().union(*(range(a, b) for of, a, b in second if of == p)) for p in range(PARTS)]
    mine, others = columns(first), columns(second)
    for low, high, sets in zip(*(hull.tolist() for hull in mine.bounds()), held, strict=True):
        every = set().union(*sets)
        assert (low, high) == ((min(every), max(every) + 1) if every else (0, 0))
    for part, sets in enumerate(held):
        twice = sum(map(len, sets)) > len(set().union(*sets))
        assert mine.has_twice(np.array([part])) == twice
    hulls = [
        list(zip(*(hull.tolist() for hull in of.bounds()), strict=True)) for of in (mine, others)
    ]
    pairs = [
        (a, b)
        for a, (low_a, high_a) in enumerate(hulls[0])
        for b, (low_b, high_b) in enumerate(hulls[1])
        if max(low_a, low_b) < min(high_a, high_b)
    ]
    a, b = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    expected = [bool(set().union(*held[i]) & wanted[j]) for i, j in pairs]
    assert share_an_index(mine, others, a, b).tolist() == expected


@given(
    st.lists(
        st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 2))] * 3), min_size=1, max_size=6
    )
)
@example([((0, 1), (0, 1), (0, 1))] * 2)
def test_disjoint_boxes_have_each_point_once(boxes: list[tuple[tuple[int, int], ...]]) -> None:
    low = np.array([[start for start, _ in box] for box in boxes])
    high = low + np.array([[size for _, size in box] for box in boxes])
    points = Counter(
        point
        for a, b in zip(low, high, strict=True)
        for point in itertools.product(*map(range, a, b))
    )
    assert are_disjoint(low, high) == (max(points.values()) == 1)
