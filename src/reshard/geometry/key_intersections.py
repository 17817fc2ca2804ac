"""Intersections of target cells with the keys of a source that forms no grid.

This answers for cells that form no grid. Where they do, each cell meets what the product of its
dimensions says (`routes`), and nothing has to be compared.

1. Target cells that are copies of each other meet the same, so one stands for all.
2. The hull of a cell is the box from its first to its last index of each dimension, and its
   contribution is one dimension more. Cells can meet only where their hulls do
   (`box_intersections`).
3. Of the parts whose cells' hulls meet, and only of those, the runs are compared. Cells meet if
   their parts share an index in every dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.geometry.box_intersections import intersecting_boxes
from reshard.geometry.holders import find_holders, hulls
from reshard.geometry.overlap import Overlap, overlap_of_pairs, wanted_runs
from reshard.geometry.replicas import find_in, find_replicas
from reshard.layout import Layout
from reshard.runs import IntArray, distinct, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class KeyIntersections:
    """The keys that target cells meet.

    Those of cell `c` are rows `begin[of_cell[c]]:begin[of_cell[c] + 1]`, in the order of
    contributions and source keys; `pair` is the pair of each overlap.
    """

    overlaps: tuple[Overlap, ...]
    of_cell: IntArray
    begin: IntArray
    order: IntArray
    contribution: IntArray
    pair: tuple[IntArray, ...]


@lru_cache(maxsize=128)
def find_key_intersections(
    source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
) -> KeyIntersections:
    """The keys that the cells of `target` meet, of a source in which no element has two keys.

    `combines[c]` are the source contributions that target contribution `c` adds up.
    """
    holders = find_holders(source)
    copies = find_replicas(target.placement, apart=True)
    of_cell = np.empty(target.cells, dtype=np.int64)
    of_cell[copies.cells] = np.repeat(np.arange(copies.keys), np.diff(copies.begin))
    # A row for each contribution that a target key combines.
    counts = np.array([len(sources) for sources in combines], dtype=np.int64)
    # Target contribution `c` combines `flat[first[c]:first[c + 1]]`.
    first = np.concatenate(([0], np.cumsum(counts)))
    flat = np.array([s for sources in combines for s in sources], dtype=np.int64)
    carried = target.cell_contribution[copies.first]
    target_key = np.repeat(np.arange(copies.keys), counts[carried])
    order = ragged_arange(counts[carried])
    contribution = flat[first[carried][target_key] + order]
    source_part = source.cell_part[holders.copies.first]
    target_part = target.cell_part[copies.first]
    held_hulls, held_key = hulls(
        source,
        source.cell_contribution[holders.copies.first],
        source_part,
        [dimension.part_runs for dimension in holders.dimensions],
    )
    wanted_hulls, wanted_row = hulls(
        target, contribution, target_part[target_key], [wanted_runs(t) for t in target.tables]
    )
    shape = (source.contributions, *source.shape)
    # Every pair once, by row and key.
    code = [
        i * held_hulls.count + j for i, j in intersecting_boxes(wanted_hulls, held_hulls, shape)
    ]
    met = distinct(np.concatenate(code)) if code else order[:0]
    row, key = wanted_row[met // held_hulls.count], held_key[met % held_hulls.count]
    overlaps: list[Overlap] = []
    pairs: list[IntArray] = []
    for d, (dimension, table) in enumerate(zip(holders.dimensions, target.tables, strict=True)):
        part, held = target_part[target_key[row], d], source_part[key, d]
        overlap = overlap_of_pairs(dimension, table, part, held)
        # Hulls may meet where the parts share no index: such rows have no pair, and go.
        known = overlap.pair_part * dimension.sets + overlap.pair_set
        pair, found = find_in(known, part * dimension.sets + held)
        if not found.all():
            row, key, pair = row[found], key[found], pair[found]
            pairs = [column[found] for column in pairs]
        overlaps.append(overlap)
        pairs.append(pair)
    begin = np.searchsorted(target_key[row], np.arange(copies.keys + 1))
    return KeyIntersections(
        tuple(overlaps), of_cell, begin, order[row], contribution[row], tuple(pairs)
    )
