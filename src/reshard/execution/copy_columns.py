"""Columns of copies between the cells of two layouts, and the NumPy copies they stand for.

Each row is one copy, of a product of *pieces*: in every dimension some ranges of indices, with
where they begin in the cell that is read and in the cell that is written::

    rows of the source    0 1 | . . | 2 3 | . . | 4 5 | . .     3 pieces of 2 rows, 4 apart
    rows of the target    0 1   2 3   4 5                       the same, 2 apart

1. Most rows are one box, or few. The slices of all of these are made at once.
2. The pieces of other rows become windows (`windows`): a row is the product of the windows of its
   dimensions, one NumPy copy each.
3. Where that makes copies of few elements, a row is copied at once, by lists of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard.execution.arrays import Storage
from reshard.execution.copies import BYTES_FOR_A_THREAD, Combine, Copy
from reshard.execution.windows import Window, find_windows, view_windows
from reshard.geometry.overlap import RoutePieces
from reshard.geometry.routes import Routes
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray, ragged_arange, ragged_ranges

# What a copy by windows takes to set up, in elements copied by lists of positions.
_ELEMENTS_FOR_A_WINDOW = 1024
# A strided view takes as long to make as the slices of so many boxes.
_MOST_BOXES = 16

Cells = Mapping[int, Storage]


@dataclass(frozen=True, slots=True, eq=False)
class CopyColumns:
    """Copies from cells to cells, as columns of shape `(copies,)`.

    Args:
        source_cell, target_cell: the numbers of the cells.
        order: the place among the contributions that are combined there; the first replaces.
        elements: how many each copies.
        pieces: of each dimension, the pieces of every copy.
    """

    source_cell: IntArray
    target_cell: IntArray
    order: IntArray
    elements: IntArray
    pieces: tuple[RoutePieces, ...]

    @classmethod
    def of_routes(cls, routes: Routes, pieces: tuple[RoutePieces, ...]) -> CopyColumns:
        """Every route as one copy, of the product of its pieces."""
        return cls(routes.source_cell, routes.target_cell, routes.order, routes.elements, pieces)

    @classmethod
    def of_transfers(cls, transfers: Transfers) -> CopyColumns:
        """Every box as one copy."""
        t = transfers
        pieces = _pieces_of_boxes(t.start, t.shape, t.source_start, t.target_start)
        return cls(t.source_cell, t.target_cell, t.order, t.elements, pieces)

    @classmethod
    def of_cells(cls, source_cell: IntArray, target_cell: IntArray, shape: IntArray) -> CopyColumns:
        """Whole cells, of shape `(copies, dims)`, as they are."""
        begin = np.zeros_like(shape)
        pieces = _pieces_of_boxes(begin, shape, begin, begin)
        return cls(source_cell, target_cell, np.zeros_like(source_cell), shape.prod(axis=1), pieces)

    def copies(self, sources: Cells, targets: Cells, combine: Combine) -> list[Copy]:
        """The NumPy copies between the arrays of cells.

        `combine` is what becomes of an element that is there and one of a later contribution.
        """
        count = np.ones(len(self.order), dtype=np.int64)
        for pieces in self.pieces:
            count *= pieces.count
        # Rows of few boxes are written out together in NumPy; only the others are taken one by one.
        few = count <= _MOST_BOXES
        found = self._copies_of_boxes(np.flatnonzero(few), sources, targets, combine)
        # Most rows share the pieces of a dimension with others.
        known: dict[tuple[int, int, int], list[Window]] = {}
        for row in np.flatnonzero(~few).tolist():
            dims = []
            for dimension, pieces in enumerate(self.pieces):
                key = (dimension, int(pieces.begin[row]), int(pieces.count[row]))
                if key not in known:
                    known[key] = find_windows(*_pieces_of(pieces, row))
                dims.append(known[key])
            found += self._copies_of_row(row, dims, sources, targets, combine)
        return found

    def _copies_of_boxes(
        self, rows: IntArray, sources: Cells, targets: Cells, combine: Combine
    ) -> list[Copy]:
        # The rows written out: of each box its row, and its piece in every dimension.
        at: list[IntArray] = []
        for pieces in self.pieces:
            of, piece = ragged_ranges(pieces.begin[rows], pieces.count[rows])
            if not isinstance(of, slice):
                at = [earlier[of] for earlier in at]
                rows = rows[of]
            at.append(piece)
        columns = list(zip(self.pieces, at, strict=True))
        length = [pieces.length[piece] for pieces, piece in columns]
        begin = [pieces.target_local[piece] for pieces, piece in columns]
        into = _Boxes(targets, self.target_cell[rows], begin, length)
        begin = [pieces.source_local[piece] for pieces, piece in columns]
        out_of = _Boxes(sources, self.source_cell[rows], begin, length)
        places: Iterable[tuple[int | None, int | None]] = itertools.repeat((None, None), len(rows))
        # Addresses only sort the pieces, and copies of few bytes are not sorted.
        if len(rows) and int(self.elements.sum()) * into.itemsize >= BYTES_FOR_A_THREAD:
            places = zip(into.addresses(), out_of.addresses(), strict=True)
        return [
            Copy(target, source, order, combine if order else None, ..., ..., *place)
            for target, source, order, place in zip(
                into.views(), out_of.views(), self.order[rows].tolist(), places, strict=True
            )
        ]

    def _copies_of_row(
        self,
        row: int,
        dims: Sequence[list[Window]],
        sources: Cells,
        targets: Cells,
        combine: Combine,
    ) -> list[Copy]:
        into, out_of = targets[int(self.target_cell[row])], sources[int(self.source_cell[row])]
        order = int(self.order[row])
        reduction = combine if order else None
        count = math.prod(len(windows) for windows in dims)
        # Many small views take longer than one copy by index lists.
        if count > 1 and count * _ELEMENTS_FOR_A_WINDOW > self.elements[row]:
            places, positions = (_positions(self.pieces, row, side) for side in range(2))
            return [Copy(into, out_of, order, reduction, places, positions)]
        return [
            Copy(
                view_windows(into, windows, [(w.target, w.target_step) for w in windows]),
                view_windows(out_of, windows, [(w.source, w.source_step) for w in windows]),
                order,
                reduction,
            )
            for windows in itertools.product(*dims)
        ]


def _pieces_of_boxes(
    start: IntArray, shape: IntArray, source_start: IntArray, target_start: IntArray
) -> tuple[RoutePieces, ...]:
    """Of every dimension one piece for each box."""
    row = np.arange(len(shape))
    one = np.ones_like(row)
    columns = zip(start.T, shape.T, source_start.T, target_start.T, strict=True)
    return tuple(RoutePieces(row, one, *column) for column in columns)


class _Boxes(NamedTuple):
    """Boxes of the arrays of cells: where they begin, and how long they are, by dimension."""

    arrays: Cells
    cell: IntArray
    begin: list[IntArray]
    length: list[IntArray]

    @property
    def itemsize(self) -> int:
        return self.arrays[int(self.cell[0])].itemsize

    def views(self) -> Iterator[Storage]:
        """The boxes, as views of the arrays."""
        slices = [
            map(slice, begin.tolist(), (begin + length).tolist())
            for begin, length in zip(self.begin, self.length, strict=True)
        ]
        # A scalar is shown as an array too, so that it can be written to.
        boxes: Iterable[Any] = itertools.repeat(...)
        if slices:
            boxes = zip(*slices, strict=True)
        cells = zip(self.cell.tolist(), boxes, strict=False)
        return (self.arrays[cell][box] for cell, box in cells)

    def addresses(self) -> list[int]:
        """Where the boxes begin in memory."""
        # Each array gives its address once; the boxes' are computed for all of them together.
        known, place = np.unique(self.cell, return_inverse=True)
        arrays = [self.arrays[cell] for cell in known.tolist()]
        first = np.array([array.__array_interface__["data"][0] for array in arrays])
        found = first[place]
        for dimension, begin in enumerate(self.begin):
            found += begin * np.array([array.strides[dimension] for array in arrays])[place]
        addresses: list[int] = found.tolist()
        return addresses


def _pieces_of(pieces: RoutePieces, row: int) -> tuple[IntArray, IntArray, IntArray]:
    rows = pieces.rows(row)
    return pieces.length[rows], pieces.target_local[rows], pieces.source_local[rows]


def _positions(pieces: tuple[RoutePieces, ...], row: int, side: int) -> Any:
    """The positions of a row's elements in the target's cell (0), or the source's (1)."""
    found = []
    for column in pieces:
        length, *begin = _pieces_of(column, row)
        found.append(np.repeat(begin[side], length) + ragged_arange(length))
    return np.ix_(*found)
