"""Stacked tensors: where the members of one are, and how each of them is laid out."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from reshard.layout import Layout


# Stacks of all layers are cut alike.
@lru_cache(maxsize=8192)
def position_of(layout: Layout, rank: int, number: int) -> int | None:
    """Where a rank has index `number` of the first dimension; None where it does not have it.

    >>> position_of(Layout.replicated((4, 2)), 0, 3)
    3
    """
    if rank >= layout.slots or not layout.cells_of(rank):
        return None
    part = int(layout.cell_part[layout.cells_of(rank).start, 0])
    return _position_in_part(layout, part, number)


def _position_in_part(layout: Layout, part: int, number: int) -> int | None:
    for start, stop, local_start, _ in layout.tables[0].runs_of(part):
        if start <= number < stop:
            return int(local_start + number - start)
    return None


@lru_cache(maxsize=8192)
def member_layout(layout: Layout, number: int) -> Layout:
    """The layout of one member of a stacked tensor: those who have it, without the first dimension.

    >>> from reshard.layout import Box
    >>> boxes = [(0, Box((0, 0), (2, 2))), (1, Box((2, 0), (4, 2)))]
    >>> halves = Layout.from_boxes((4, 2), boxes)
    >>> member_layout(halves, 3).holders
    (1,)
    """
    parts = [
        part
        for part in range(layout.tables[0].parts)
        if _position_in_part(layout, part, number) is not None
    ]
    # The cells that hold the member, without their part of the stacked dimension.
    chosen = np.isin(layout.cell_part[:, 0], parts)
    return Layout(
        layout.shape[1:],
        layout.tables[1:],
        layout.slots,
        layout.cell_slot[chosen],
        layout.cell_part[chosen, 1:],
        layout.cell_contribution[chosen],
        layout.contributions,
        layout.reduction,
    )
