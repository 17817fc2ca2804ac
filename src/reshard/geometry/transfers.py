"""Transfers: the boxes to copy, as columns with a row per box.

A route is a product of one-dimensional pieces. Its pieces are found and joined in each dimension
first, and multiplied afterwards (`expand`).

If the parts of a source overlap, the holders of an element change from stretch to stretch, and the
data that a rank sends to another comes in a box for each. `coalesce` merges them::

    held by        | 0      | 0 1    | 1      |
    0 sends to 2   |  box   |  box   |             two boxes, one copy: they are adjacent in the
                                                   tensor and in both local arrays

1. Boxes between the same two cells that differ in a single dimension are sorted along that
   dimension; adjacent boxes are joined.
2. This is repeated for each dimension, until no boxes can be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.overlap import Overlap, RoutePieces
from reshard.geometry.routes import Routes
from reshard.layout import Box, Layout
from reshard.runs import IntArray, ragged_ranges


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Boxes to copy, as columns: `(transfers,)`, or `(transfers, dims)` for the last four.

    `start` and `shape` are the box in the tensor; `source_start` and `target_start` are its offsets
    in the local arrays of its source cell and target cell. `order` is the position of its
    contribution among those combined there. A transfer that `stays` is on the right slot already.
    """

    source_slot: IntArray
    target_slot: IntArray
    source_cell: IntArray
    target_cell: IntArray
    order: IntArray
    stays: NDArray[np.bool_]
    start: IntArray
    shape: IntArray
    source_start: IntArray
    target_start: IntArray

    @classmethod
    def none(cls, ndim: int) -> Transfers:
        """Return no transfers, of a tensor of `ndim` dimensions."""
        nothing, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, ndim), dtype=np.int64)
        stays = np.zeros(0, dtype=bool)
        columns = (nothing, nothing, nothing, nothing, nothing, stays)
        return cls(*columns, boxes, boxes, boxes, boxes)

    def __len__(self) -> int:
        return len(self.source_slot)

    @property
    def elements(self) -> IntArray:
        """Elements of each transfer, shape `(transfers,)`."""
        elements: IntArray = self.shape.prod(axis=1)
        return elements

    @property
    def moving(self) -> Transfers:
        """The transfers between different slots."""
        return self.take(~self.stays)

    @classmethod
    def joined(cls, parts: Iterable[Transfers]) -> Transfers:
        """Concatenate transfers; `parts` must not be empty."""
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, index: Any) -> Transfers:
        """Return the chosen rows, in the given order."""
        # Written out, since a loop over the columns takes twice as long for few rows.
        return Transfers(
            self.source_slot[index],
            self.target_slot[index],
            self.source_cell[index],
            self.target_cell[index],
            self.order[index],
            self.stays[index],
            self.start[index],
            self.shape[index],
            self.source_start[index],
            self.target_start[index],
        )

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All columns, in the order of the fields."""
        return _COLUMNS_OF(self)

    def box(self, row: int) -> Box:
        """Return the box of the tensor that a row copies."""
        return Box.of(self.shape[row].tolist(), self.start[row].tolist())

    def __str__(self) -> str:
        lines = []
        for row in range(len(self)):
            verb = "keeps" if self.stays[row] else f"-> {self.target_slot[row]}"
            lines.append(f"{self.source_slot[row]} {verb} {self.box(row)}")
        return "\n".join(lines)


_COLUMNS_OF: Callable[[Transfers], tuple[NDArray[Any], ...]] = attrgetter(*Transfers.__slots__)


def expand(
    source: Layout, target: Layout, overlaps: tuple[Overlap, ...], routes: Routes
) -> Transfers:
    """Return every box that the routes copy, in the order of the routes."""
    if not len(routes.target_cell):
        return Transfers.none(target.ndim)
    # If every route is a single box, rows are routes and nothing is repeated.
    route: IntArray | slice = slice(None)
    # Row `r` is a box so far: of route `route[r]`, with piece `chosen[d][r]` of dimension `d`.
    # Each further dimension repeats the rows, once for each of its pieces.
    pieces: list[RoutePieces] = []
    chosen: list[IntArray] = []
    for d, overlap in enumerate(overlaps):
        route_pieces = overlap.pieces(routes.pair[d], source.cell_part[routes.source_cell, d])
        row, piece = ragged_ranges(route_pieces.begin[route], route_pieces.count[route])
        if not isinstance(row, slice):
            chosen = [earlier[row] for earlier in chosen]
            route = row if isinstance(route, slice) else route[row]
        pieces.append(route_pieces)
        chosen.append(piece)
    rows = len(chosen[0]) if chosen else len(routes.target_cell)
    # Start, length and both local starts: a block each, returned as views of `(rows, dims)`.
    boxes = np.empty((4, len(overlaps), rows), dtype=np.int64)
    for d, (route_pieces, piece) in enumerate(zip(pieces, chosen, strict=True)):
        boxes[0, d] = route_pieces.start[piece]
        boxes[1, d] = route_pieces.length[piece]
        boxes[2, d] = route_pieces.source_local[piece]
        boxes[3, d] = route_pieces.target_local[piece]
    start, shape, source_start, target_start = (box.T for box in boxes)
    return Transfers(
        source.cell_slot[routes.source_cell][route],
        target.cell_slot[routes.target_cell][route],
        routes.source_cell[route],
        routes.target_cell[route],
        routes.order[route],
        routes.stays[route],
        start,
        shape,
        source_start,
        target_start,
    )


def coalesce(transfers: Transfers) -> Transfers:
    """Merge adjacent boxes, so that no transfer continues another, and keep their order.

    >>> from reshard.layout import Box, Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> source = Layout.from_boxes((9,), [(0, Box((0,), (6,))), (1, Box((4,), (9,)))])
    >>> print(LayoutChange(source, Layout.whole((9,), [0], 2)).transfers)
    0 keeps [0:6]
    1 -> 0 [6:9]
    """
    ndim = transfers.shape.shape[1]
    origin = np.arange(len(transfers))
    # Boxes joined along a dimension may then match along another: repeat until nothing joins.
    previous = -1
    while previous != len(transfers):
        previous = len(transfers)
        for dimension in reversed(range(ndim)):
            transfers, origin = _join_along(transfers, origin, dimension)
    return transfers.take(np.argsort(origin, kind="stable"))


def _join_along(
    transfers: Transfers, place: IntArray, dimension: int
) -> tuple[Transfers, IntArray]:
    """Join boxes along a dimension.

    `place` is the original position of each transfer, or of the first transfer merged into it.
    """
    others = np.delete(np.arange(transfers.shape.shape[1]), dimension)
    start = transfers.start[:, dimension]
    # Rows equal in all of these differ only in their position along `dimension`. The offsets of
    # local positions are among them, so boxes adjacent in the tensor are so in both local arrays.
    alike = np.column_stack(
        (
            transfers.source_cell,
            transfers.target_cell,
            transfers.order,
            transfers.source_start - transfers.start,
            transfers.target_start - transfers.start,
            transfers.start[:, others],
            transfers.shape[:, others],
        )
    )
    order = np.lexsort((start, *alike.T))
    transfers, place, alike = transfers.take(order), place[order], alike[order]
    start, length = transfers.start[:, dimension], transfers.shape[:, dimension]
    follows = (alike[1:] == alike[:-1]).all(axis=1) & (start[:-1] + length[:-1] == start[1:])
    if not follows.any():
        return transfers, place
    first = np.flatnonzero(np.append(True, ~follows))
    shape = transfers.shape[first].copy()
    shape[:, dimension] = np.add.reduceat(length, first)
    return replace(transfers.take(first), shape=shape), np.minimum.reduceat(place, first)
