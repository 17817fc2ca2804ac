"""Origins of the elements of a box: the ranks that send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.show.pictures.drawing import Place
from reshard.show.pictures.regions import Interval, RegionGrid

MOST_BOXES = 4096

Origins = Callable[[RegionGrid, Sequence[Place]], list[int]]


def origins(transfers: Transfers) -> Origins | None:
    """Finds the ranks that send into a region; None where there are too many boxes to look at.

    >>> from reshard.layout import Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> from reshard.show.pictures.regions import region_grid
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> whole = Layout.replicated((6,), 1)
    >>> origins(LayoutChange(half, whole).transfers)(region_grid(whole, None, 0), [(0, 0)])
    [1]
    """
    moving = transfers.moving
    if len(moving) > MOST_BOXES:
        return None
    stop = moving.start + moving.shape
    # A picture is tried in several sizes, and asks for the same rectangle in each of them.
    known: dict[tuple[object, ...], list[int]] = {}

    def into(*sides: tuple[int | None, Interval]) -> list[int]:
        """The ranks that send into a rectangle. Whoever receives elements of it holds it."""
        if sides not in known:
            # Of shape (boxes that move,): those that overlap the rectangle in both drawn
            # dimensions.
            meets = np.ones(len(moving), dtype=bool)
            for dimension, interval in sides:
                if dimension is not None:
                    meets &= moving.start[:, dimension] < interval.stop
                    meets &= stop[:, dimension] > interval.start
            known[sides] = np.unique(moving.source_slot[meets]).tolist()
        return known[sides]

    def senders(grid: RegionGrid, places: Sequence[Place]) -> list[int]:
        ranks: set[int] = set()
        for row, column in places:
            ranks.update(
                into(
                    (grid.row_dimension, grid.rows[row]),
                    (grid.column_dimension, grid.columns[column]),
                )
            )
        return sorted(ranks)

    return senders
