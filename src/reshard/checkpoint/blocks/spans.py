"""Tiles and spans: which bytes of a shard belong to a block, and where in the block they go.

A *tile* is one shard, or the part of it that is used, as pieces in each dimension: stretches
that are consecutive in the tensor and in the shard. A block takes single indices of the
leading dimensions, a chunk of one, and all of the rest, so what it takes of a shard is
contiguous in the shard's file wherever the chunk is contiguous in the shard::

      block: rows 2..5                 shard: columns 3..7 of all rows

      . . . . . . . . .                rows 2..5 of the shard are one range of its file;
      # # # O O O O # #   <- block     in memory they are spread over the block's rows
      # # # O O O O # #
      . . . . . . . . .

1. `source_tiles`: which shards supply a tensor, each element once. `target_tiles`: every shard.
2. `Tile.spans`: the byte ranges a block takes of a shard, split to fit a buffer.
3. `Span.copy`: the rearrangement in memory between a span and its block.

Spans of a block in a shard that is not row major.

PyTorch saves a tensor with its strides: a transposed weight lies column by column, a slice of
a larger tensor with gaps. What a block takes of it is read in ranges, each as an array with
strides over the range::

    a 3 x 4 shard, column major           rows 0..1 of it: one range of 11 elements,
    0 3 6 9                               strides 1 and 3; what it has of row 2 (2 5 8)
    1 4 7 10                              is read along
    2 5 8 11

1. A range runs from the first to the last element that a box takes.
2. It is split along its largest stride while it is too large for the buffer, or where more
   than a page between two indices would be read in vain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.storage.local_files import PAGE_BYTES
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.runs import PAD, IntArray, ragged_arange

# Beyond this many slice assignments, one copy with index lists is quicker.
_MOST_SLICES = 64


@dataclass(frozen=True)
class Span:
    """A contiguous range of a shard's file that lies in one block.

    `shape` is what the range is as an array, dense unless it has `strides` (in elements).
    `inside` and `within` list, for each dimension, the pieces: where in this array and where
    in the block they begin, and their lengths.
    """

    start_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    inside: tuple[IntArray, ...]
    within: tuple[IntArray, ...]
    lengths: tuple[IntArray, ...]
    strides: tuple[int, ...] | None = None

    def is_all_of(self, box: Box) -> bool:
        """Whether the span is the whole block `box`, in the block's own order."""
        return (self.strides is None and self.shape == box.shape) and all(
            length.tolist() == [size] for length, size in zip(self.lengths, box.shape, strict=True)
        )

    def over(self, elements: NDArray[Any]) -> NDArray[Any]:
        """The elements of the range as the array that it is."""
        if self.strides is None:
            return elements.reshape(self.shape)
        strides = [stride * elements.itemsize for stride in self.strides]
        return np.ndarray(self.shape, elements.dtype, elements, 0, strides)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether it has positions that no piece fills: padding between elements."""
        return math.prod(int(length.sum()) for length in self.lengths) != math.prod(self.shape)

    def copy(self, block: NDArray[Any], span: NDArray[Any], *, into_block: bool) -> None:
        """Copy between a block's array and this span's array, one way or the other."""
        for in_block, in_span in self._indices():
            if into_block:
                block[in_block] = span[in_span]
            else:
                span[in_span] = block[in_block]

    def copy_many(self, blocks: NDArray[Any], spans: NDArray[Any], *, into_block: bool) -> None:
        """Copy between the blocks and the spans of many tensors, one behind the other.

        Both arrays have one dimension more than a block and a span, the first.
        """
        for in_block, in_span in self._indices():
            if into_block:
                blocks[(slice(None), *in_block)] = spans[(slice(None), *in_span)]
            else:
                spans[(slice(None), *in_span)] = blocks[(slice(None), *in_block)]

    def _indices(self) -> Iterator[tuple[Any, Any]]:
        # Few pieces: views, one for each combination of the dimensions' pieces.
        if math.prod(len(length) for length in self.lengths) <= _MOST_SLICES:
            for choice in np.ndindex(*(len(length) for length in self.lengths)):
                yield (
                    self._slices(self.within, choice) or (...,),
                    self._slices(self.inside, choice) or (...,),
                )
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


@dataclass(frozen=True)
class Tile:
    """A shard of `local_shape`, and the pieces of it that are used.

    It is cell `number` of `slot`; where the cells of a slot lie one behind the other, it begins
    `offset` elements into them. For each dimension, `start`, `length` and `local` list pieces
    in local order: global begin, length, begin in the shard.
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
        """The smallest box of the tensor around it, in the tensor's indices."""
        low = tuple(int(start.min()) if len(start) else 0 for start in self.start)
        ends = zip(self.start, self.length, strict=True)
        return Box(low, tuple(int((a + n).max()) if len(a) else 0 for a, n in ends))

    def spans(self, grid: BlockGrid, box: Box, start_bytes: int, most_bytes: int) -> Iterator[Span]:
        """The ranges of a file that lie in a block, each at most `most_bytes`.

        `start_bytes` is where the shard begins in the file. One index of the block's dimension
        is never split, whatever its size.
        """
        if not box.start:
            yield Span(start_bytes, grid.itemsize_bytes, (), (), (), ())
            return
        cut = grid.dimension
        # Dimensions before the block's: one index each; `lead` is their row-major index in the
        # shard.
        lead = 0
        for d in range(cut):
            at = self._local_index(d, box.start[d])
            if at is None:
                return
            lead = lead * self.local_shape[d] + at
        # The block's dimension: what each piece has of the block's range, and where in the shard.
        begin = np.maximum(self.start[cut], box.start[cut])
        end = np.minimum(self.start[cut] + self.length[cut], box.stop[cut])
        met = end > begin
        if not met.any() or any(not len(start) for start in self.start[cut + 1 :]):
            return
        local = self.local[cut][met] + (begin - self.start[cut])[met]
        pieces = zip(begin[met].tolist(), (end - begin)[met].tolist(), local.tolist(), strict=True)
        # Dimensions behind it are taken whole, so rows in a row are one range of the file.
        row_bytes = math.prod(self.local_shape[cut + 1 :]) * grid.itemsize_bytes
        most_rows = max(1, most_bytes // row_bytes)
        for starts, lengths, locals_ in _stretches(pieces, most_rows):
            first = int(locals_[0])
            rows = int(locals_[-1] + lengths[-1]) - first
            one = np.ones(1, dtype=np.int64)
            zero = np.zeros(1, dtype=np.int64)
            yield Span(
                start_bytes + (lead * self.local_shape[cut] + first) * row_bytes,
                rows * row_bytes,
                (1,) * cut + (rows, *self.local_shape[cut + 1 :]),
                (zero,) * cut + (locals_ - first, *self.local[cut + 1 :]),
                (zero,) * cut + (starts - box.start[cut], *self.start[cut + 1 :]),
                (one,) * cut + (lengths, *self.length[cut + 1 :]),
            )

    def _local_index(self, dimension: int, index: int) -> int | None:
        start, length = self.start[dimension], self.length[dimension]
        met = np.flatnonzero((start <= index) & (index < start + length))
        if not len(met):
            return None
        return int(self.local[dimension][met[0]] + index - start[met[0]])


def _stretches(
    pieces: Iterable[tuple[int, int, int]], most: int
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Pieces `(begin, length, local)` in local order, as columns of consecutive positions.

    Each group covers at most `most` positions; a piece that is longer is split.
    """
    group: list[tuple[int, int, int]] = []
    for begin, length, local in pieces:
        for offset in range(0, length, most):
            piece = (begin + offset, min(most, length - offset), local + offset)
            if group:
                first, last = group[0][2], group[-1][2] + group[-1][1]
                # A gap in the shard, or more than the buffer holds: another span begins.
                if piece[2] != last or piece[2] + piece[1] - first > most:
                    yield _columns(group)
                    group = []
            group.append(piece)
    if group:
        yield _columns(group)


def _columns(group: list[tuple[int, int, int]]) -> tuple[IntArray, IntArray, IntArray]:
    begin, length, local = np.array(group, dtype=np.int64).T
    return begin, length, local


@dataclass(frozen=True)
class Tiles:
    """All tiles of a layout: `low` and `high`, of shape `(tiles, dims)`, are their bounds."""

    tiles: tuple[Tile, ...]

    @cached_property
    def low(self) -> IntArray:
        """Where each tile begins in the tensor."""
        return self._bounds([tile.bounds.start for tile in self.tiles])

    @cached_property
    def high(self) -> IntArray:
        """Where each tile ends in the tensor."""
        return self._bounds([tile.bounds.stop for tile in self.tiles])

    def _bounds(self, corners: list[tuple[int, ...]]) -> IntArray:
        dims = len(corners[0]) if corners else 0
        return np.array(corners, dtype=np.int64).reshape(len(corners), dims)

    def meeting(self, box: Box) -> Iterator[Tile]:
        """The tiles whose bounds meet a box."""
        if not self.tiles:
            return
        # Of shape (tiles,): boxes meet when they overlap in every dimension.
        met = ((self.low < box.stop) & (self.high > box.start)).all(axis=1)
        for number in np.flatnonzero(met).tolist():
            yield self.tiles[number]


@lru_cache(maxsize=4096)
def source_tiles(assembly: LayoutChange) -> Tiles:
    """The shards that supply a whole tensor, with each element taken from one of them.

    `assembly` is the layout change that assembles the tensor (`StoredTensor.assembly`).
    """
    routes, layout = assembly.routes, assembly.source
    of_cell: dict[int, list[list[_Pieces]]] = {}
    for route in range(len(routes.source_cell)):
        product: list[_Pieces] = []
        # `product[d]` lists the route's pieces along d: (global begin, length, begin in the shard).
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
    """Merge the products of one cell that differ in a single dimension.

    Where shards overlap or form no grid, a shard is supplied in several stretches; read as one
    tile, each row of it is read once.
    """
    for dimension in reversed(range(len(products[0]))):
        groups: dict[tuple[tuple[tuple[int, int, int], ...], ...], list[_Pieces]] = {}
        for product in products:
            # Those that agree in all other dimensions form one product.
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
    """The pieces in local order, with those that continue one another merged."""
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
    """Every shard of a layout, halos included, padding excluded."""
    tiles = []
    for cell in range(layout.cells):
        product = []
        for d, table in enumerate(layout.tables):
            runs = table.runs_of(int(layout.cell_part[cell, d]))
            product.append([(a, b - a, local) for a, b, local, role in runs if role != PAD])
        tiles.append(_tile(layout, cell, product))
    return Tiles(tuple(tiles))


def _tile(layout: Layout, cell: int, product: list[_Pieces]) -> Tile:
    slot = int(layout.cell_slot[cell])
    number = cell - layout.cells_of(slot).start
    offset = int(layout.cell_offset[cell])
    # One matrix a dimension, of shape (3, pieces): its rows are start, length and local.
    matrices = [np.array(pieces, dtype=np.int64).reshape(-1, 3).T for pieces in product]
    start, length, local = (tuple(matrix[row] for matrix in matrices) for row in range(3))
    return Tile(slot, number, offset, tuple(layout.cell_shape[cell].tolist()), start, length, local)


def is_dense(view: View, shape: Sequence[int]) -> bool:
    """Whether a view is row major without gaps, strides of single indices aside.

    >>> is_dense(View(0, (7, 1)), (1, 4)), is_dense(View(0, (1, 3)), (3, 4))
    (True, False)
    """
    dense = View.row_major(shape).strides
    return 0 in shape or all(
        size == 1 or found == expected
        for size, found, expected in zip(shape, view.strides, dense, strict=True)
    )


def extent(view: View, shape: Sequence[int]) -> int:
    """How many elements lie from the first to the last of a shard, both included.

    >>> extent(View(5, (1, 3)), (2, 4)), extent(View(0, (1,)), (0,))
    (11, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, view.strides, strict=True))


def list_spans(
    tile: Tile, view: View | None, grid: BlockGrid, box: Box, start_bytes: int
) -> Iterator[Span]:
    """The ranges of a file that lie in a block of the grid, each at most as long as a block may be.

    `start_bytes` is where the shard begins in the file, and `view` how it lies there: dense and row
    major when None.
    """
    at = (grid, box, start_bytes, grid.block_bytes)
    return tile.spans(*at) if view is None else strided_spans(tile, view, *at)


def strided_spans(
    tile: Tile, view: View, grid: BlockGrid, box: Box, start_bytes: int, most_bytes: int
) -> Iterator[Span]:
    """The ranges of a file that lie in a block, each at most `most_bytes` or one element.

    `start_bytes` is where element 0 of the view lies in the file.
    """
    # Of each dimension: what the block takes, as (begin in the block, begin in the shard, length).
    pieces = []
    for d in range(len(tile.local_shape)):
        begin = np.maximum(tile.start[d], box.start[d])
        count = np.minimum(tile.start[d] + tile.length[d], box.stop[d]) - begin
        met = count > 0
        local = (tile.local[d] + begin - tile.start[d])[met].tolist()
        columns = zip((begin[met] - box.start[d]).tolist(), local, count[met].tolist(), strict=True)
        pieces.append(list(columns))
    most = max(1, most_bytes // grid.itemsize_bytes)
    for product in itertools.product(*pieces):
        within = [piece[0] for piece in product]
        local = [piece[1] for piece in product]
        count = [piece[2] for piece in product]
        for offset, shape in _ranges(view.strides, count, most, PAGE_BYTES // grid.itemsize_bytes):
            at = view.offset + sum(
                (a + b) * stride for a, b, stride in zip(local, offset, view.strides, strict=True)
            )
            size = extent(View(0, view.strides), shape)
            yield Span(
                start_bytes + at * grid.itemsize_bytes,
                size * grid.itemsize_bytes,
                shape,
                tuple(np.zeros(1, dtype=np.int64) for _ in shape),
                tuple(np.array([a + b]) for a, b in zip(within, offset, strict=True)),
                tuple(np.array([n]) for n in shape),
                view.strides,
            )


def _ranges(
    strides: tuple[int, ...], shape: Sequence[int], most: int, largest_gap: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a box into parts that each are read in one range: their offsets and shapes."""
    open_boxes = [((0,) * len(shape), tuple(shape))]
    while open_boxes:
        offset, shape = open_boxes.pop()
        size = extent(View(0, strides), shape)
        widest = max(range(len(shape)), key=lambda d: (shape[d] > 1, strides[d]), default=None)
        if widest is None or shape[widest] == 1:
            yield offset, tuple(shape)
            continue
        # What one index of the widest dimension reaches over; the rest of the stride is a gap.
        inner = size - (shape[widest] - 1) * strides[widest]
        if size <= most and strides[widest] - inner <= largest_gap:
            yield offset, tuple(shape)
            continue
        # As many indices as reach over at most `most` elements: `rows - 1` strides and `inner`.
        rows = max(1, (most - inner) // strides[widest] + 1) if inner <= most else 1
        if strides[widest] - inner > largest_gap:
            rows = 1
        # The last part is the next to come off the stack: the order does not matter.
        for row in range(0, shape[widest], rows):
            count = min(rows, shape[widest] - row)
            open_boxes.append(
                (
                    (*offset[:widest], offset[widest] + row, *offset[widest + 1 :]),
                    (*shape[:widest], count, *shape[widest + 1 :]),
                )
            )
