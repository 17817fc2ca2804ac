"""Coalescing: boxes that continue one another are copied as one.

Where the parts of a source overlap, an element's holders change from stretch to stretch, and what
one rank sends to another comes in a box for each::

    held by        | 0      | 0 1    | 1      |
    0 sends to 2   |  box   |  box   |             two boxes, one copy: they continue one another
                                                   in the tensor and in both local arrays

1. Boxes between the same two cells, that are alike in all dimensions but one, are put in order
   along that one; those that follow one another are joined.
2. That is done for one dimension after the other, and again while it joins any.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray


def join_boxes(transfers: Transfers) -> Transfers:
    """The same copies in fewer transfers, none of which continues another, in their order.

    >>> from reshard.layout import Box, Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> source = Layout.from_boxes((9,), [(0, Box((0,), (6,))), (1, Box((4,), (9,)))])
    >>> print(LayoutChange(source, Layout.whole((9,), [0], 2)).transfers)
    0 keeps [0:6]
    1 -> 0 [6:9]
    """
    ndim = transfers.shape.shape[1]
    place = np.arange(len(transfers))
    # What is joined along one dimension may then be alike along another: until nothing joins.
    found = -1
    while found != len(transfers):
        found = len(transfers)
        for dimension in reversed(range(ndim)):
            transfers, place = _join_along(transfers, place, dimension)
    return transfers.take(np.argsort(place, kind="stable"))


def _join_along(
    transfers: Transfers, place: IntArray, dimension: int
) -> tuple[Transfers, IntArray]:
    """Join in one dimension. `place` is where each transfer, or the first of it, stood."""
    others = np.delete(np.arange(transfers.shape.shape[1]), dimension)
    start = transfers.start[:, dimension]
    # Rows equal in all of these differ only in where they lie along `dimension`. The offsets of
    # local positions are among them, so what continues in the tensor does in both local arrays.
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
