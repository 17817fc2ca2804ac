"""Tiles and spans: which bytes of a shard belong to a block.

Shards with strides: every element of every block is found, in bounded ranges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from oracle import Contents
from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.blocks.spans import (
    Tiles,
    list_strided_spans,
    source_tiles,
    target_tiles,
)
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from rule_definitions import NO_ELEMENT
from strategies import (
    box_layouts,
    flat_range_layouts,
    layouts_with_contents,
    shapes,
    windows,
)

LayoutAndContents = tuple[Layout, Contents]
NOTHING = -2


def assembly(layout: Layout) -> LayoutChange:
    return LayoutChange(layout, Layout.whole(layout.shape, [layout.slots], layout.slots + 1))


def memory_of(contents: Contents) -> dict[int, np.ndarray]:
    """Each slot's memory as the numbers of its elements; those that are no source are rubbish."""
    return {
        slot: np.where(contents.is_source[slot], elements, NO_ELEMENT).ravel()
        for slot, elements in contents.elements.items()
    }


def gather(tiles: Tiles, grid: BlockGrid, memory: dict[int, np.ndarray], most: int) -> list[int]:
    """All blocks read through their spans; answers every element, and counts what was read."""
    found = []
    for index in range(grid.count):
        box = grid.box(index)
        block = np.full(box.shape, NOTHING)
        for tile in tiles.intersecting(box):
            for span in tile.spans(grid, box, tile.offset, most):
                assert 0 < span.size_bytes == math.prod(span.shape)
                piece = memory[tile.slot][span.start_bytes : span.start_bytes + span.size_bytes]
                before = block.copy()
                span.copy(block, piece.reshape(span.shape), into_block=True)
                written = block != before
                assert (before[written] == NOTHING).all(), "an element came from two shards"
                if span.is_all_of(box):
                    assert (block == piece.reshape(box.shape)).all()
        found += block.ravel().tolist()
    return found


@st.composite
def some_layouts(draw: st.DrawFn) -> LayoutAndContents:
    return draw(layouts_with_contents(draw(shapes(max_rank=4)), reductions=()))


@given(some_layouts(), st.sampled_from([1, 5, 30, 1000]), st.sampled_from([1, 7, 1000]))
def test_every_element_of_every_block_comes_from_one_shard(
    pair: LayoutAndContents, block_bytes: int, most_bytes: int
) -> None:
    layout, contents = pair
    grid = BlockGrid.of(layout.shape, 1, block_bytes)
    found = gather(source_tiles(assembly(layout)), grid, memory_of(contents), most_bytes)
    assert found == list(range(math.prod(layout.shape)))


@given(some_layouts(), st.sampled_from([1, 5, 30, 1000]), st.sampled_from([1, 7, 1000]))
def test_every_position_of_every_shard_is_written(
    pair: LayoutAndContents, block_bytes: int, most_bytes: int
) -> None:
    layout, contents = pair
    grid = BlockGrid.of(layout.shape, 1, block_bytes)
    numbers = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    memory = {slot: np.full(a.size, NO_ELEMENT) for slot, a in contents.elements.items()}
    tiles = target_tiles(layout)
    for index in range(grid.count):
        box = grid.box(index)
        block = numbers[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        for tile in tiles.intersecting(box):
            for span in tile.spans(grid, box, tile.offset, most_bytes):
                piece = np.full(span.shape, NO_ELEMENT)
                span.copy(block, piece, into_block=False)
                assert span.has_gaps == (piece == NO_ELEMENT).any()
                memory[tile.slot][span.start_bytes : span.start_bytes + span.size_bytes] = (
                    piece.ravel()
                )
    for slot, elements in contents.elements.items():
        assert memory[slot].tolist() == elements.ravel().tolist()


def read_bytes(layout: Layout, block_bytes: int) -> int:
    grid = BlockGrid.of(layout.shape, 1, block_bytes)
    tiles = source_tiles(assembly(layout))
    return sum(
        span.size_bytes
        for index in range(grid.count)
        for tile in tiles.intersecting(grid.box(index))
        for span in tile.spans(grid, grid.box(index), tile.offset, block_bytes)
    )


@given(st.data(), shapes(max_rank=4), st.sampled_from([1, 5, 30, 1000]))
def test_disjoint_shards_are_read_once(
    data: st.DataObject, shape: tuple[int, ...], block_bytes: int
) -> None:
    """Also where shards form no grid, so that one shard is supplied in many stretches."""
    layout, _ = data.draw(st.one_of(box_layouts(shape), flat_range_layouts(shape)))
    assert read_bytes(layout, block_bytes) == math.prod(shape)


def test_a_shard_in_many_stretches_is_one_tile() -> None:
    # One box over everything, beside a comb of boxes that cuts both dimensions everywhere.
    comb = [(1 + i, Box((40 + i, i), (41 + i, i + 1))) for i in range(40)]
    rest = [(100 + i, Box((40 + i, 0), (41 + i, i))) for i in range(40)]
    more = [(200 + i, Box((40 + i, i + 1), (41 + i, 40))) for i in range(40)]
    layout = Layout.from_boxes((80, 40), [(0, Box((0, 0), (40, 40))), *comb, *rest, *more])
    tiles = [tile for tile in source_tiles(assembly(layout)).tiles if tile.slot == 0]
    assert len(tiles) == 1
    assert [length.tolist() for length in tiles[0].length] == [[40], [40]]


@given(st.data(), st.integers(1, 30), st.sampled_from([0, 1]))
def test_shards_that_overlap_in_one_dimension_are_read_at_most_whole(
    data: st.DataObject, length: int, dimension: int
) -> None:
    """The slack: a shard's row is read whole, though another shard supplies some of it."""
    rule = data.draw(windows(length, 4))
    mesh = reshard.DeviceMesh.of(tp=4)
    cut = reshard.DimSpec([reshard.Level([reshard.Axis("tp")], rule)])
    dims, shape = [reshard.DimSpec([]), reshard.DimSpec([])], [5, 5]
    dims[dimension], shape[dimension] = cut, length
    layout = reshard.ShardingSpec(mesh, dims).layout(shape)
    stored = sum(math.prod(layout.local_shape(slot) or (0,)) for slot in layout.holders)
    read = read_bytes(layout, data.draw(st.sampled_from([8, 1000])))
    assert math.prod(shape) <= read <= stored
    if dimension == 0:
        assert read == math.prod(shape)


@pytest.mark.parametrize("text", ["-, dp", "tp@heads2, -", "-, tp@heads2", "tp@heads2, dp", "-, -"])
@pytest.mark.parametrize("block_bytes", [8, 100, 10000])
def test_copies_cost_no_reading(text: str, block_bytes: int) -> None:
    mesh = reshard.DeviceMesh.of(dp=2, tp=4)
    layout = reshard.spec(mesh, text).layout((12, 14))
    assert read_bytes(layout, block_bytes) == 12 * 14


def test_a_padded_shard_as_wide_as_the_tensor_is_not_the_block() -> None:
    # Rank 0 has a pad, then elements 0 to 2: four positions, as many as the tensor has columns.
    mesh = reshard.DeviceMesh.of(tp=2)
    layout = reshard.spec(mesh, "-, tp@halo[1,1,padded]").layout((2, 4))
    assert layout.local_shape(0) == (2, 4)
    grid = BlockGrid.of((2, 4), 1)
    spans = [
        span
        for tile in target_tiles(layout).intersecting(grid.box(0))
        for span in tile.spans(grid, grid.box(0), tile.offset, 100)
    ]
    assert not any(span.is_all_of(grid.box(0)) for span in spans)


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
    memory = np.full(view.offset + view.extent(shape), -1)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    memory[view.positions(shape)] = numbers
    layout = Layout.from_boxes(shape, [(0, Box((0,) * len(shape), shape))])
    tiles = source_tiles(LayoutChange(layout, Layout.whole(shape, [1], 2)))
    grid = BlockGrid.of(shape, itemsize, block_bytes)
    for index in range(grid.count):
        box = grid.box(index)
        block = np.full(box.shape, -2)
        for tile in tiles.intersecting(box):
            for span in list_strided_spans(tile, view, grid, box, 100, block_bytes):
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
    spans = list(list_strided_spans(tile, view, grid, grid.box(0), 0, 4 << 20))
    assert sum(span.size_bytes for span in spans) == 100 * 3 * 4


def test_narrow_gaps_are_read_along() -> None:
    shape, view = (100, 3), View(0, (5, 1))
    layout = Layout.from_boxes(shape, [(0, Box((0, 0), shape))])
    (tile,) = source_tiles(LayoutChange(layout, Layout.whole(shape, [1], 2))).tiles
    grid = BlockGrid.of(shape, 4)
    (span,) = list_strided_spans(tile, view, grid, grid.box(0), 0, 4 << 20)
    assert span.size_bytes == (99 * 5 + 3) * 4
