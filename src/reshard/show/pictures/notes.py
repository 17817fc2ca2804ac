"""Notes below a picture: the properties of a layout that no drawing can show.

The dimensions that are not drawn, contributions, padding, halos, ranks that hold nothing.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

import numpy as np

from reshard.layout import Layout
from reshard.runs import PAD
from reshard.show.pictures.regions import RegionGrid, region_grid
from reshard.text import short_rank_text

MOST_RANK_LETTERS = 60
# Lengths of padding in one dimension that have a line each.
MOST_PADDINGS = 3


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
        said += _describe_hidden_dimensions(
            layout, [d for d in range(layout.ndim) if d not in drawn]
        )
    if 0 in layout.shape:
        said.append(f"No elements: dimension {layout.shape.index(0)} has length 0.")
    empty = set(layout.holders) - {int(slot) for slot in layout.cell_slot[layout.cell_elements > 0]}
    if empty and 0 not in layout.shape:
        said.append(f"Holding nothing: {_short(sorted(empty))}.")
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
        if len(padding) > MOST_PADDINGS:
            every = sorted(itertools.chain(*padding.values()))
            padded = f"{min(padding)} to {max(padding)}"
            said.append(f"Padding of {padded} in dimension {d}: {_short(every)}.")
        else:
            for length, slots in sorted(padding.items()):
                said.append(f"Padding of {length} in dimension {d}: {_short(sorted(slots))}.")
    if any(h.is_halo for row in grid.holdings for place in row for h in place):
        said.append("In brackets: halo copies.")
    return [line for note in said for line in textwrap.wrap(note, width)]


def _short(slots: list[int]) -> str:
    return short_rank_text(slots, MOST_RANK_LETTERS)


def _describe_hidden_dimensions(layout: Layout, dimensions: Sequence[int]) -> list[str]:
    """Where each of them is cut; those that are not cut in one line."""
    said, whole = [], []
    for d in dimensions:
        grid = region_grid(layout, d, None)
        bounds = [interval.start for interval in grid.rows[1:]]
        if not bounds:
            whole.append(d)
            continue
        shown = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
        cut = f"cut at {shown} (/ between its parts)"
        said.append(f"Not drawn: dimension {d}, of {layout.shape[d]}, {cut}.")
    if whole:
        noun = "dimension" if len(whole) == 1 else "dimensions"
        lengths = _enumerate([layout.shape[d] for d in whole])
        said.append(f"Not drawn: {noun} {_enumerate(whole)}, of {lengths}, not cut.")
    return said


def _enumerate(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
