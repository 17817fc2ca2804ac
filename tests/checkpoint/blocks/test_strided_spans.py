"""Shards with strides: every element of every block is found, in bounded ranges."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.blocks.strided_spans import extent, is_dense, strided_spans
from reshard.checkpoint.blocks.tiles import source_tiles
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.testing.strategies import shapes


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    """Any order of the dimensions in memory, with gaps behind each, and an offset."""
    strides = [0] * len(shape)
    step = 1
    for dimension in draw(st.permutations(range(len(shape)))):
        strides[dimension] = step
        step = step * max(shape[dimension], 1) + draw(st.sampled_from([0, 0, 1, 7]))
    return View(draw(st.integers(0, 5)), tuple(strides))


@given(
    st.data(),
    shapes(min_rank=1, max_rank=4),
    st.sampled_from([1, 5, 30, 1000]),
    st.sampled_from([1, 2, 4]),
)
def test_every_element_of_every_block(
    data: st.DataObject, shape: tuple[int, ...], block_bytes: int, itemsize: int
) -> None:
    view = data.draw(views(shape))
    memory = np.full(view.offset + extent(view, shape), -1)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    memory[view.positions(shape)] = numbers
    layout = Layout.from_boxes(shape, [(0, Box((0,) * len(shape), shape))])
    tiles = source_tiles(LayoutChange(layout, Layout.whole(shape, [1], 2)))
    grid = BlockGrid.of(shape, itemsize, block_bytes)
    for index in range(grid.count):
        box = grid.box(index)
        block = np.full(box.shape, -2)
        for tile in tiles.meeting(box):
            for span in strided_spans(tile, view, grid, box, 100, block_bytes):
                assert span.size_bytes <= max(block_bytes, itemsize)
                first = (span.start_bytes - 100) // itemsize
                piece = memory[first : first + span.size_bytes // itemsize]
                span.copy(block, span.over(piece), into_block=True)
        expected = numbers[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        assert (block == expected).all()


def test_wide_gaps_are_not_read() -> None:
    shape, view = (100, 3), View(0, (100_000, 1))
    layout = Layout.from_boxes(shape, [(0, Box((0, 0), shape))])
    (tile,) = source_tiles(LayoutChange(layout, Layout.whole(shape, [1], 2))).tiles
    grid = BlockGrid.of(shape, 4)
    spans = list(strided_spans(tile, view, grid, grid.box(0), 0, 4 << 20))
    assert sum(span.size_bytes for span in spans) == 100 * 3 * 4


def test_narrow_gaps_are_read_along() -> None:
    shape, view = (100, 3), View(0, (5, 1))
    layout = Layout.from_boxes(shape, [(0, Box((0, 0), shape))])
    (tile,) = source_tiles(LayoutChange(layout, Layout.whole(shape, [1], 2))).tiles
    grid = BlockGrid.of(shape, 4)
    (span,) = strided_spans(tile, view, grid, grid.box(0), 0, 4 << 20)
    assert span.size_bytes == (99 * 5 + 3) * 4


def test_dense_is_row_major_without_gaps() -> None:
    assert is_dense(View(3, (12, 4, 1)), (2, 3, 4))
    assert is_dense(View(0, (99, 77, 1)), (1, 1, 4))
    assert is_dense(View(0, (5, 5)), (0, 7))
    assert is_dense(View(0, ()), ())
    assert not is_dense(View(0, (1, 2)), (2, 3))
    assert not is_dense(View(0, (5, 1)), (2, 4))
