"""Spans: the byte ranges of a block in the files of shards, and their positions in the block.

A *tile* is a shard, or the used part of it, as pieces in each dimension: intervals that are
contiguous both in the tensor and in the shard. A block has single indices of the leading
dimensions, a chunk of the next dimension, and all indices of the rest, so its part of a shard is
contiguous in the shard's file wherever the chunk is contiguous in the shard::

      block: rows 2..5                 shard: columns 3..7 of all rows

      . . . . . . . . .                rows 2..5 of the shard are one range of its file;
      # # # O O O O # #   <- block     in memory they are spread over the block's rows
      # # # O O O O # #
      . . . . . . . . .

1. `source_tiles` returns the shards that supply a tensor, each element once; `target_tiles` returns
   all shards, and `usable_tiles` their parts that could supply it.
2. `Tile.spans` yields the byte ranges of a block in a shard, split to fit a buffer.
3. `Span.copy` rearranges elements in memory between a span and its block.

PyTorch saves tensors with strides: a transposed weight is stored column by column, a slice of a
larger tensor with gaps. A block's part of such a shard is read in ranges, each of which is an array
with strides over the range (`list_strided_spans`)::

    a 3 x 4 shard, column major           rows 0..1 of it: one range of 11 elements,
    0 3 6 9                               strides 1 and 3; the elements of row 2 in
    1 4 7 10                              between (2 5 8) are read too
    2 5 8 11

1. A range extends from a box's first to its last element.
2. It is split along its largest stride while it is too large for the buffer, or if more than a page
   of unneeded bytes between two indices would be read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.storage.local_files import PAGE_BYTES
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.regions import Region, multiply_runs
from reshard.layout import Box, Layout
from reshard.runs import FRESH_HALO, HALO, OWNED, IntArray, ragged_arange

# Beyond this number of slice assignments, a single copy with index lists is faster.
_MAX_SLICES = 64


class Span(Record):
    """A contiguous range of a shard's file that belongs to one block.

    `shape` is the shape of the range as an array, dense unless it has `strides` (in elements). For
    each dimension, `inside`, `within` and `lengths` describe the pieces: their begins in this array
    and in the block, and their lengths.
    """

    start_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    inside: tuple[IntArray, ...]
    within: tuple[IntArray, ...]
    lengths: tuple[IntArray, ...]
    strides: tuple[int, ...] | None = None

    def is_all_of(self, box: Box) -> bool:
        """Return whether the span is the whole block `box`, in the block's own order."""
        return (self.strides is None and self.shape == box.shape) and all(
            length.tolist() == [size] for length, size in zip(self.lengths, box.shape, strict=True)
        )

    def over(self, elements: NDArray[Any]) -> NDArray[Any]:
        """Return the elements of the range as an array of its shape."""
        if self.strides is None:
            return elements.reshape(self.shape)
        strides = [stride * elements.itemsize for stride in self.strides]
        return np.ndarray(self.shape, elements.dtype, elements, 0, strides)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether the range has positions that no piece fills, such as padding."""
        return math.prod(int(length.sum()) for length in self.lengths) != math.prod(self.shape)

    def copy(self, block: NDArray[Any], span: NDArray[Any], *, into_block: bool) -> None:
        """Copy this span's array into a block's array, or the other way if not `into_block`.

        To copy many tensors at once, both arrays have an additional first dimension.
        """
        for in_block, in_span in self._indices():
            if into_block:
                block[(..., *in_block)] = span[(..., *in_span)]
            else:
                span[(..., *in_span)] = block[(..., *in_block)]

    def _indices(self) -> Iterator[tuple[Any, Any]]:
        # With few pieces, a view for each combination of the dimensions' pieces is fast enough.
        if math.prod(len(length) for length in self.lengths) <= _MAX_SLICES:
            for choice in np.ndindex(*(len(length) for length in self.lengths)):
                yield self._slices(self.within, choice), self._slices(self.inside, choice)
            return
        yield (
            np.ix_(*map(_positions, self.within, self.lengths)),
            np.ix_(*map(_positions, self.inside, self.lengths)),
        )

    def _slices(self, begin: tuple[IntArray, ...], choice: Sequence[int]) -> tuple[slice, ...]:
        return tuple(
            slice(int(starts[i]), int(starts[i] + length[i]))
            for starts, length, i in zip(begin, self.lengths, choice, strict=True)
        )


def _positions(begin: IntArray, length: IntArray) -> IntArray:
    return np.repeat(begin, length) + ragged_arange(length)


class Tile(Record):
    """A shard of `local_shape`, and the pieces of it that are used.

    It is cell `number` of `slot`; if the cells of a slot are stored contiguously, it begins
    `offset` elements after the first cell's begin. For each dimension, `start`, `length` and
    `local` describe the pieces in local order: begin in the tensor, length, begin in the shard.
    """

    slot: int
    number: int
    offset: int
    local_shape: tuple[int, ...]
    start: tuple[IntArray, ...]
    length: tuple[IntArray, ...]
    local: tuple[IntArray, ...]

    @cached_property
    def bounds(self) -> Box:
        """The smallest box of the tensor that contains the tile."""
        low = tuple(int(start.min()) if len(start) else 0 for start in self.start)
        ends = zip(self.start, self.length, strict=True)
        return Box(low, tuple(int((a + n).max()) if len(a) else 0 for a, n in ends))

    def spans(self, grid: BlockGrid, box: Box, start_bytes: int, max_bytes: int) -> Iterator[Span]:
        """Yield the ranges of a file that belong to a block, each of at most `max_bytes`.

        `start_bytes` is the begin of the shard in the file. A single index of the block's dimension
        is never split, even if it is larger than `max_bytes`.
        """
        if not box.start:
            yield Span(start_bytes, grid.itemsize_bytes, (), (), (), ())
            return
        cut = grid.dimension
        # The block has a single index of each dimension before its own; `lead` is the row-major
        # position of these indices in the shard.
        lead = 0
        for d in range(cut):
            at = self._local_index(d, box.start[d])
            if at is None:
                return
            lead = lead * self.local_shape[d] + at
        # The block's dimension: the part of each piece in the block, and its begin in the shard.
        begin = np.maximum(self.start[cut], box.start[cut])
        end = np.minimum(self.start[cut] + self.length[cut], box.stop[cut])
        overlaps = end > begin
        if not overlaps.any() or any(not len(start) for start in self.start[cut + 1 :]):
            return
        local = self.local[cut][overlaps] + (begin - self.start[cut])[overlaps]
        lengths_ = (end - begin)[overlaps].tolist()
        pieces = zip(begin[overlaps].tolist(), lengths_, local.tolist(), strict=True)
        # Following dimensions are taken whole, so consecutive rows are one range of the file.
        row_bytes = math.prod(self.local_shape[cut + 1 :]) * grid.itemsize_bytes
        max_rows = max(1, max_bytes // row_bytes)
        for starts, lengths, locals_ in _stretches(pieces, max_rows):
            first = int(locals_[0])
            rows = int(locals_[-1] + lengths[-1]) - first
            single = np.ones(1, dtype=np.int64)
            zero = np.zeros(1, dtype=np.int64)
            yield Span(
                start_bytes + (lead * self.local_shape[cut] + first) * row_bytes,
                rows * row_bytes,
                (1,) * cut + (rows, *self.local_shape[cut + 1 :]),
                (zero,) * cut + (locals_ - first, *self.local[cut + 1 :]),
                (zero,) * cut + (starts - box.start[cut], *self.start[cut + 1 :]),
                (single,) * cut + (lengths, *self.length[cut + 1 :]),
            )

    def regions(
        self, view: View | None = None, container: Any = None, box: Box | None = None
    ) -> Iterator[Region]:
        """Yield the tile as regions of the tensor, or its part in a box.

        `view` is where the shard's elements are in `container`; if None, the shard is dense and row
        major.
        """
        runs = []
        for d, columns in enumerate(zip(self.start, self.length, self.local, strict=True)):
            start, length, local = columns
            begin, end = start, start + length
            if box is not None:
                begin, end = begin.clip(min=box.start[d]), end.clip(max=box.stop[d])
            inside = end > begin
            parts = (column[inside].tolist() for column in (begin, end, local + begin - start))
            runs.append([*zip(*parts, strict=True)])
        view = view or View.row_major(self.local_shape)
        return multiply_runs(runs, container, view.offset, view.strides)

    def _local_index(self, dimension: int, index: int) -> int | None:
        start, length = self.start[dimension], self.length[dimension]
        pieces = np.flatnonzero((start <= index) & (index < start + length))
        if not len(pieces):
            return None
        piece = pieces[0]
        return int(self.local[dimension][piece] + index - start[piece])


def _stretches(
    pieces: Iterable[tuple[int, int, int]], max_length: int
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Group pieces `(begin, length, local)` in local order into contiguous columns.

    Each group covers at most `max_length` positions; longer pieces are split.
    """
    group: list[tuple[int, int, int]] = []
    for begin, length, local in pieces:
        for offset in range(0, length, max_length):
            piece = (begin + offset, min(max_length, length - offset), local + offset)
            if group:
                first, last = group[0][2], group[-1][2] + group[-1][1]
                # A gap in the shard, or a full buffer, begins another span.
                if piece[2] != last or piece[2] + piece[1] - first > max_length:
                    yield _columns(group)
                    group = []
            group.append(piece)
    if group:
        yield _columns(group)


def _columns(group: list[tuple[int, int, int]]) -> tuple[IntArray, IntArray, IntArray]:
    begin, length, local = np.array(group, dtype=np.int64).T
    return begin, length, local


class Tiles(Record):
    """All tiles of a layout; `low` and `high`, of shape `(tiles, dims)`, are their bounds."""

    tiles: tuple[Tile, ...]

    @cached_property
    def low(self) -> IntArray:
        """The begin of each tile in the tensor."""
        return self._bounds([tile.bounds.start for tile in self.tiles])

    @cached_property
    def high(self) -> IntArray:
        """The end of each tile in the tensor."""
        return self._bounds([tile.bounds.stop for tile in self.tiles])

    def _bounds(self, corners: list[tuple[int, ...]]) -> IntArray:
        dims = len(corners[0]) if corners else 0
        return np.array(corners, dtype=np.int64).reshape(len(corners), dims)

    def intersecting(self, box: Box) -> Iterator[Tile]:
        """Yield the tiles whose bounds intersect a box."""
        if not self.tiles:
            return
        # Boxes intersect if they overlap in every dimension; the result has shape (tiles,).
        overlaps = ((self.low < box.stop) & (self.high > box.start)).all(axis=1)
        for number in np.flatnonzero(overlaps).tolist():
            yield self.tiles[number]


# Cached, since equal layouts are a single object, and most tensors share the layouts of others.
@lru_cache(maxsize=4096)
def source_tiles(assembly: LayoutChange) -> Tiles:
    """Return the shards that supply a whole tensor, each element from a single shard.

    `assembly` is the layout change that assembles the tensor (`StoredTensor.assembly`).
    """
    routes, layout = assembly.routes, assembly.source
    of_cell: dict[int, list[list[_Pieces]]] = {}
    for route in range(len(routes.source_cell)):
        product: list[_Pieces] = []
        # `product[d]` has the route's pieces along d: begin in the tensor, length, local begin.
        for column in assembly.pieces:
            rows = column.rows(route)
            values = (column.start[rows], column.length[rows], column.source_local[rows])
            product.append(sorted(zip(*(v.tolist() for v in values), strict=True), key=_local))
        of_cell.setdefault(int(routes.source_cell[route]), []).append(product)
    return Tiles(
        tuple(
            _tile(layout, cell, product)
            for cell, products in of_cell.items()
            for product in _merge_products(products)
        )
    )


_Pieces = list[tuple[int, int, int]]


def _local(piece: tuple[int, int, int]) -> int:
    return piece[2]


def _merge_products(products: list[list[_Pieces]]) -> list[list[_Pieces]]:
    """Merge the products of a cell that differ in a single dimension.

    If shards overlap or do not form a grid, several products are parts of the same shard; merged
    into a tile, each row of the shard is read once.
    """
    for dimension in reversed(range(len(products[0]))):
        groups: dict[tuple[tuple[tuple[int, int, int], ...], ...], list[_Pieces]] = {}
        for product in products:
            # Products that agree in all other dimensions are merged.
            others = (*product[:dimension], *product[dimension + 1 :])
            groups.setdefault(tuple(map(tuple, others)), []).append(product[dimension])
        products = [
            [
                *map(list, others[:dimension]),
                _join_pieces(itertools.chain.from_iterable(pieces)),
                *map(list, others[dimension:]),
            ]
            for others, pieces in groups.items()
        ]
    return products


def _join_pieces(pieces: Iterable[tuple[int, int, int]]) -> _Pieces:
    """Return the pieces in local order, with contiguous pieces merged."""
    joined: _Pieces = []
    for start, length, local in sorted(pieces, key=_local):
        if joined:
            before, size, at = joined[-1]
            if before + size == start and at + size == local:
                joined[-1] = (before, size + length, at)
                continue
        joined.append((start, length, local))
    return joined


@lru_cache(maxsize=4096)
def target_tiles(layout: Layout) -> Tiles:
    """Return every shard of a layout, with halos and without padding."""
    return _shard_tiles(layout, (OWNED, FRESH_HALO, HALO))


@lru_cache(maxsize=4096)
def usable_tiles(layout: Layout) -> Tiles:
    """Return every shard of a layout, with only the elements that may be read from it."""
    return _shard_tiles(layout, (OWNED, FRESH_HALO))


def _shard_tiles(layout: Layout, roles: Collection[int]) -> Tiles:
    tiles = []
    for cell in range(layout.cells):
        product = [
            [(a, b - a, local) for a, b, local, role in runs if role in roles]
            for runs in layout.cell_runs(cell)
        ]
        tiles.append(_tile(layout, cell, product))
    return Tiles(tuple(tiles))


def _tile(layout: Layout, cell: int, product: list[_Pieces]) -> Tile:
    slot = int(layout.cell_slot[cell])
    number = cell - layout.cells_of(slot).start
    offset = int(layout.cell_offset[cell])
    # A matrix per dimension, of shape (3, pieces): its rows are start, length and local.
    matrices = [np.array(pieces, dtype=np.int64).reshape(-1, 3).T for pieces in product]
    start, length, local = (tuple(matrix[row] for matrix in matrices) for row in range(3))
    return Tile(slot, number, offset, tuple(layout.cell_shape[cell].tolist()), start, length, local)


def list_spans(
    tile: Tile, view: View | None, grid: BlockGrid, box: Box, start_bytes: int
) -> Iterator[Span]:
    """Yield the ranges of a file that belong to a block, each no larger than a block.

    `start_bytes` is the begin of the shard in the file, and `view` its strides there; if None, the
    shard is dense and row major.
    """
    at = (grid, box, start_bytes, grid.block_bytes)
    return tile.spans(*at) if view is None else list_strided_spans(tile, view, *at)


def list_strided_spans(
    tile: Tile, view: View, grid: BlockGrid, box: Box, start_bytes: int, max_bytes: int
) -> Iterator[Span]:
    """Yield a block's ranges of a file, each of at most `max_bytes` or of a single element.

    `start_bytes` is the offset of element 0 of the view in the file.
    """
    max_elements = max(1, max_bytes // grid.itemsize_bytes)
    max_gap = PAGE_BYTES // grid.itemsize_bytes
    for region in tile.regions(view, box=box):
        for part in region.split(max_elements, max_gap=max_gap):
            low, high = part.bounds
            yield Span(
                start_bytes + low * grid.itemsize_bytes,
                (high - low + 1) * grid.itemsize_bytes,
                part.shape,
                tuple(np.zeros(1, dtype=np.int64) for _ in part.start),
                tuple(np.array([a - b]) for a, b in zip(part.start, box.start, strict=True)),
                tuple(np.array([n]) for n in part.shape),
                view.strides,
            )
