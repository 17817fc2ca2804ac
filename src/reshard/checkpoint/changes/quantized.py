"""Weights quantised to float8 in blocks of 128 by 128, with a float32 scale for each.

`X.weight` becomes `X.weight` of float8_e4m3fn and `X.weight_scale_inv`; an element is the product
of the two. A scale is the block's greatest absolute value divided by 448 (`block_scaling`).

A row of blocks is read at once, in pieces of whole blocks where it is long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.changes.computed import ReadBox
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType, dtype
from reshard.elements import MAX_E4M3FN, CastCounts, as_float32, round_to_e4m3fn, scale_blocks
from reshard.layout import Box

BLOCK = 128
# Columns of a row of blocks that are read at once, and those that are in float32 at once: 1 MiB.
_READ_COLUMNS = 16384
_COLUMNS = 2048


@dataclass(frozen=True)
class Float8Weight:
    """The elements of a two-dimensional weight in float8, or its scales."""

    source: StoredTensor
    is_scales: bool

    @property
    def dtype(self) -> DType:
        """float8, or float32 of scales."""
        return dtype("float32" if self.is_scales else "float8_e4m3fn")

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's, or that in blocks."""
        if not self.is_scales:
            return self.source.shape
        return tuple(-(-size // BLOCK) for size in self.source.shape)

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The weight."""
        return (self.source,)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """A piece of a row of blocks."""
        columns = min(_READ_COLUMNS, self.source.shape[1])
        return (BLOCK * columns * self.source.dtype.itemsize_bytes,)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The box's elements or scales; blocks that it has in part are read whole."""
        counts = CastCounts()
        for part, bare in self._read_pieces(box, read):
            rows = np.array(as_float32(bare, self.source.dtype))
            counts += CastCounts(not_finite=int(np.count_nonzero(~np.isfinite(rows))))
            scales = scale_blocks(rows, BLOCK, MAX_E4M3FN, _find_largest)
            if self.is_scales:
                row, column = (a // BLOCK - b for a, b in zip(part.start, box.start, strict=True))
                out[row, column : column + len(scales)] = np.array(scales, np.float32).view("u4")
                continue
            # What the box has of the piece: where in the piece, and where in the box.
            start = tuple(map(max, box.start, part.start))
            stop = tuple(map(min, box.stop, part.stop))
            inside = _slice(start, stop, part.start)
            out[_slice(start, stop, box.start)] = round_to_e4m3fn(rows[inside])
        return counts

    def _read_pieces(self, box: Box, read: ReadBox) -> Iterator[tuple[Box, NDArray[Any]]]:
        """Pieces of rows of whole blocks that cover a box of elements or of scales."""
        unit = BLOCK if self.is_scales else 1
        low = [a * unit // BLOCK * BLOCK for a in box.start]
        ends = zip(box.stop, self.source.shape, strict=True)
        high = [min(-(-b * unit // BLOCK) * BLOCK, size) for b, size in ends]
        for row in range(low[0], high[0], BLOCK):
            below = min(row + BLOCK, high[0])
            for first in range(low[1], high[1], _READ_COLUMNS):
                last = min(first + _READ_COLUMNS, high[1])
                bare = read(0, Box((row, first), (below, last)))
                for left in range(first, last, _COLUMNS):
                    right = min(left + _COLUMNS, last)
                    part = Box((row, left), (below, right))
                    yield part, bare[:, left - first : right - first]


def _slice(
    start: tuple[int, ...], stop: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, origin, strict=True))


def _find_largest(block: Any) -> Any:
    return block.max(axis=(-2, -1))
