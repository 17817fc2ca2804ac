"""Runs that pairs of parts share, against sets of indices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.part_runs import PartRuns, share_an_index, shared_runs

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
    found = shared_runs(columns(first), columns(second), a, b)
    assert sorted(zip(*(column.tolist() for column in found), strict=True)) == sorted(expected)


@given(runs_of_parts(), runs_of_parts())
def test_what_parts_have(first: list[Run], second: list[Run]) -> None:
    held = [
        [set(range(a, b)) for of, a, b in runs if of == p] for runs in (first,) for p in range(4)
    ]
    wanted = [set().union(*(range(a, b) for of, a, b in second if of == p)) for p in range(PARTS)]
    mine, others = columns(first), columns(second)
    for low, high, sets in zip(*(hull.tolist() for hull in mine.hulls()), held, strict=True):
        every = set().union(*sets)
        assert (low, high) == ((min(every), max(every) + 1) if every else (0, 0))
    for part, sets in enumerate(held):
        twice = sum(map(len, sets)) > len(set().union(*sets))
        assert mine.has_twice(np.array([part])) == twice
    hulls = [
        list(zip(*(hull.tolist() for hull in of.hulls()), strict=True)) for of in (mine, others)
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
