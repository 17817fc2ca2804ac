"""The compact form of columns of numbers, written and read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NotationError
from reshard.plans.documents import MAX_NUMBER, pack_column, unpack_column

NUMBERS = st.one_of(st.integers(0, 3), st.integers(-MAX_NUMBER, MAX_NUMBER))


@given(st.lists(NUMBERS, max_size=40))
def test_any_column_is_read_back(column: list[int]) -> None:
    assert unpack_column(json.loads(json.dumps(pack_column(column))), "it").tolist() == column


@given(
    st.integers(-9, 9),
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_grids_are_read_back(start: int, steps: list[tuple[int, int]]) -> None:
    column = [start]
    for step, count in steps:
        column = [number + step * i for i in range(count) for number in column]
    assert unpack_column(pack_column(column), "it").tolist() == column
    assert unpack_column([[start, *(n for pair in steps for n in pair)]], "it").tolist() == column


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([], []),
        ([5], [5]),
        ([0, 1], [0, 1]),
        (range(512), [[0, 1, 512]]),
        ([p for _ in range(4) for p in range(8) for _ in range(2)], [[0, 0, 2, 1, 8, 0, 4]]),
        ([3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 2, 6]),
        ([7, 7, 0, 2, 4, 6, 8, 10, 12, 7], [7, 7, [0, 2, 7], 7]),
    ],
)
def test_short_forms(column: list[int], expected: list[object]) -> None:
    assert pack_column(column) == expected


@pytest.mark.parametrize(
    "entries",
    [
        None,
        {},
        [1.5],
        [True],
        ["1"],
        [[1]],
        [[1, 2]],
        [[1, 2, 0]],
        [[1, 2, -3]],
        [[1, 2, 3, 4]],
        [[1, 2, None]],
        [1 << 62],
        [[0, 1, 1 << 30]],
        [[0, 1, 1 << 20, 1, 1 << 20]],
        [[0, 1 << 60, 2]],
    ],
    ids=str,
)
def test_invalid_columns_raise(entries: object) -> None:
    with pytest.raises(NotationError, match="cells"):
        unpack_column(entries, "cells")
