"""Layouts as a table: which ranks, in how many parts each dimension is cut, how many copies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reshard.geometry.holders import Replicas, find_replicas
from reshard.layout import Layout
from reshard.runs import PAD, IntArray, RunTable, distinct
from reshard.text import count_text, short_rank_text, table

# The most sizes of parts that are listed, and the letters that ranks are cut to.
_MOST_SIZES = 4
_MOST_LETTERS = 28


def layout_table(layouts: Mapping[str, Layout]) -> str:
    """Layouts of one tensor, a row each.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> print(layout_table({"source": reshard.spec(mesh, "x, -").layout((6, 8))}))
            ranks  dim 0: 6  dim 1: 8  copies
    ------  -----  --------  --------  ------
    source  0-5    2 x 3     whole          3
    """
    shape = next(iter(layouts.values())).shape
    rows = [(name, *_describe(layout)) for name, layout in layouts.items()]
    headers = ("", "ranks", *(f"dim {d}: {size:,}" for d, size in enumerate(shape)), "copies", "")
    return table(rows, headers, "ll" + "l" * len(shape) + "rl")


def _describe(layout: Layout) -> list[str]:
    """The ranks, the cut of each dimension, the copies and the reduction of a layout."""
    copies = find_replicas(layout.placement)
    # Cells form a grid where every product of the parts in use is a key. Python's whole numbers,
    # for the product may outgrow 64 bits.
    parts = [distinct(layout.cell_part[:, d]) for d in range(layout.ndim)]
    keys = int(np.prod([len(used) for used in parts], dtype=object)) * layout.contributions
    if copies.keys == keys:
        cuts = [
            _describe_cut(table, used) for table, used in zip(layout.tables, parts, strict=True)
        ]
    else:
        # Boxes that are no product of the dimensions' parts.
        cuts = [count_text(copies.keys, "box", "boxes"), *[""] * (layout.ndim - 1)]
    ranks = short_rank_text(layout.holders, _MOST_LETTERS)
    reduction = (
        f"{layout.contributions:,} contributions, {layout.reduction}" if layout.reduction else ""
    )
    return [ranks, *cuts[: layout.ndim], _count_copies(copies), reduction]


def _describe_cut(table: RunTable, parts: IntArray) -> str:
    """The parts of one dimension: how many, how long, and whether they lie apart or overlap."""
    if not len(parts):
        return "nothing"
    sizes = table.element_lengths[parts]
    if len(parts) == 1 and sizes[0] == table.dimension_length:
        return "whole"
    if (sizes == sizes[0]).all():
        text = f"{len(parts)} x {sizes[0]:,}"
    elif len(parts) <= _MOST_SIZES:
        text = "+".join(f"{size:,}" for size in sizes.tolist())
    else:
        text = f"{len(parts)} x {sizes.min():,}..{sizes.max():,}"
    runs = table.single_runs()
    count = np.bincount(runs.part[runs.role != PAD], minlength=table.parts)[parts]
    if count.max() > 1:
        text += f" in {count.max():,} pieces"
    if sizes.sum() > table.dimension_length:
        text += ", overlapping"
    return text


def _count_copies(copies: Replicas) -> str:
    count = distinct(np.diff(copies.begin)).tolist()
    if len(count) <= 1:
        return f"{count[0]:,}" if count else "none"
    return f"{count[0]:,}..{count[-1]:,}"
