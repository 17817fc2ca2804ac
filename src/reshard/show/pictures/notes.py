"""Notes below a picture: the properties of a layout that no drawing can show.

The dimensions that are not drawn, contributions, padding, halos, ranks that hold nothing.
"""

from __future__ import annotations

import textwrap

import numpy as np

from reshard.layout import Layout
from reshard.runs import PAD
from reshard.show.pictures.regions import RegionGrid, region_grid
from reshard.text.rank_sets import rank_text


def notes(layout: Layout, grid: RegionGrid, width: int) -> list[str]:
    """Lines of at most `width` columns on what `grid`, drawn from `layout`, cannot say.

    >>> layout = Layout.flat_ranges((4,), {0: (0, 4), 1: (4, 4)})
    >>> notes(layout, region_grid(layout, None, 0), 80)
    ['Holding nothing: 1.']
    """
    said = []
    drawn = [d for d in (grid.row_dimension, grid.column_dimension) if d is not None]
    if layout.ndim > 2:
        said.append(f"Drawn: dimensions {drawn[0]} (down) and {drawn[1]} (across).")
        for d in range(layout.ndim):
            if d not in drawn:
                said.append(f"Not drawn: dimension {d}, {_describe_hidden_cut(layout, d)}.")
    if 0 in layout.shape:
        said.append(f"No elements: dimension {layout.shape.index(0)} has length 0.")
    empty = set(layout.holders) - {int(slot) for slot in layout.cell_slot[layout.cell_elements > 0]}
    if empty and 0 not in layout.shape:
        said.append(f"Holding nothing: {rank_text(empty)}.")
    if layout.reduction is not None:
        said.append(f"Partial: {layout.contributions} contributions (+), {layout.reduction}.")
    for d in range(layout.ndim):
        padding: dict[int, list[int]] = {}
        runs = layout.tables[d].single_runs()
        pads = runs.role == PAD
        # Of shape (parts,): how many padded positions each part has along the dimension.
        lengths = np.bincount(runs.part[pads], runs.length[pads], layout.tables[d].parts)
        for slot, part in zip(
            layout.cell_slot.tolist(), layout.cell_part[:, d].tolist(), strict=True
        ):
            if lengths[part]:
                padding.setdefault(int(lengths[part]), []).append(slot)
        for length, slots in sorted(padding.items()):
            said.append(f"Padding of {length} in dimension {d}: {rank_text(slots)}.")
    if any(h.is_halo for row in grid.holdings for place in row for h in place):
        said.append("In brackets: halo copies.")
    return [line for note in said for line in textwrap.wrap(note, width)]


def _describe_hidden_cut(layout: Layout, dimension: int) -> str:
    grid = region_grid(layout, dimension, None)
    bounds = [interval.start for interval in grid.rows[1:]]
    length = layout.shape[dimension]
    if not bounds:
        return f"of {length}, not cut"
    shown = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
    return f"of {length}, cut at {shown} (/ between its parts)"
