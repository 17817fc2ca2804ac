"""Which ranks do the elements of a box of a picture come from?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reshard.planning.plan import Plan
from reshard.show.drawing import Place
from reshard.show.regions import RegionGrid

MOST_ROUTES = 4096

Origins = Callable[[RegionGrid, Sequence[Place]], list[int]]


def origins(plan: Plan) -> Origins | None:
    """Finds the ranks that send into a region; None where there are too many routes to look.

    >>> from reshard.layout import Layout
    >>> from reshard.show.regions import region_grid
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> whole = Layout.replicated((6,), 1)
    >>> origins(Plan(half, whole))(region_grid(whole, None, 0), [(0, 0)])
    [1]
    """
    if len(plan.routes.target_cell) > MOST_ROUTES:
        return None
    moving = plan.transfers.moving
    stop = moving.start + moving.shape

    def senders(grid: RegionGrid, places: Sequence[Place]) -> list[int]:
        # Whoever receives elements of a region holds it, so its place alone finds them.
        inside = np.zeros(len(moving), dtype=bool)
        for r, c in places:
            meets = np.ones(len(moving), dtype=bool)
            for dimension, interval in (
                (grid.row_dimension, grid.rows[r]),
                (grid.column_dimension, grid.columns[c]),
            ):
                if dimension is not None:
                    meets &= moving.start[:, dimension] < interval.stop
                    meets &= stop[:, dimension] > interval.start
            inside |= meets
        ranks: list[int] = np.unique(moving.source_slot[inside]).tolist()
        return ranks

    return senders
