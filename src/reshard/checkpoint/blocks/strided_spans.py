"""Spans of a block in a shard that is not row major.

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
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.blocks.tiles import Span, Tile
from reshard.checkpoint.files.aligned_memory import PAGE_BYTES
from reshard.layout import Box


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


def spans_of(
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
