"""Pieces of files that share reads: which of them are one range, and what lies between them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.storage.byte_ranges import coalesce, split_equal_steps


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_equal_steps_make_up_the_columns(steps: list[tuple[int, int]]) -> None:
    first, second = np.cumsum(np.array(steps, dtype=np.int64).reshape(-1, 2), axis=0).T
    found = list(split_equal_steps(first, second))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found)][: len(found)]
    assert not steps or found[-1][1] == len(steps)
    for begin, end in found:
        for column in (first, second):
            assert len(set(np.diff(column[begin:end]).tolist())) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(0, 20)), max_size=30),
    st.integers(0, 10),
    st.integers(1, 60),
    st.booleans(),
)
def test_ranges_hold_every_piece_once(
    pieces: list[tuple[int, int, int]], gap: int, most: int, by_piece: bool
) -> None:
    file, start, size = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    # A piece may have a gap behind it that is no longer than itself.
    gaps = np.minimum(size, gap) if by_piece else gap
    found = list(coalesce(file, start, size, gaps, most))
    assert sorted(number for one in found for number in one.pieces.tolist()) == [*range(len(file))]
    for one in found:
        held = one.pieces
        begins, ends = start[held], start[held] + size[held]
        assert set(file[held].tolist()) == {one.file}
        assert (one.start_bytes, one.size_bytes) == (begins[0], ends.max() - begins[0])
        assert one.size_bytes <= most or len(held) == 1
        # Between a piece and the next lies what an earlier one has, or no more than was allowed.
        for before, after in itertools.pairwise(held.tolist()):
            earlier = (file == one.file) & (start <= start[before])
            reach = (start + size)[earlier].max()
            assert start[after] - reach <= (gaps[before] if by_piece else gap)
