"""Volumes: the number of elements that must move, counted without building transfers.

*The lower bound.* Every rank must receive the elements that its part of the target needs and it
does not hold: a copy per element and contribution that is combined there. A direct exchange that
never sends elements to their holders reaches this bound.

1. The need of a target slot is the size of its cells, times the contributions it combines.
2. The share it holds already is the overlap of its source cells with its target cells, a product of
   one-dimensional overlaps, or the union of several products if its source cells overlap.

A slot whose target cells overlap (boxes given by hand) needs the shared elements once for each of
them, since each has memory of its own.

*The overlap matrix* counts for every pair of slots how much the first holds of the second's need:

1. Along each dimension, the overlap gives the indices that a target part takes from each set of
   source parts, and so the number that it shares with each part.
2. For a source key and a target key, which are a part per dimension, these numbers are multiplied.
3. Each slot holds the elements of its keys, and needs the elements of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from reshard.geometry.boxes import cover_grid, find_edges, merge_intervals
from reshard.geometry.holders import Holders
from reshard.geometry.overlap import Overlap
from reshard.layout import Layout
from reshard.runs import (
    FRESH_HALO,
    OWNED,
    PAD,
    IntArray,
    RunTable,
    distinct,
    find_distinct,
    ragged_rows,
    sum_by,
)


def lower_bound_elements(
    source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
) -> IntArray:
    """Return the elements each slot of the target must receive, shape `(target.slots,)`.

    `combines[c]` are the source contributions that target contribution `c` combines.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=2, y=3)
    >>> a, b = (spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> lower_bound_elements(a, b, ((0,),)).tolist()
    [2, 5, 6, 6, 5, 2]
    """
    bound = np.zeros(target.slots, dtype=np.int64)
    cache: dict[tuple[int, int, int], _Intervals] = {}
    for slot in target.holders:
        for cell in target.cells_of(slot):
            combined = combines[int(target.cell_contribution[cell])]
            needed = int(target.cell_elements[cell]) * len(combined)
            for contribution in combined:
                needed -= held_elements(source, slot, target, cell, contribution, cache)
            bound[slot] += needed
    return bound


def gather_elements(source: Layout, target: Layout) -> int:
    """Count the elements that move if each rank of the target gathers the whole tensor first.

    An all-gather followed by a slice moves that much: on every rank all contributions, except for
    the elements of them that the rank holds.

    >>> gather_elements(Layout.flat_ranges((6,), {0: (0, 3), 1: (3, 6)}), Layout.replicated((6,)))
    3
    """
    whole = math.prod(source.shape) * source.contributions
    held = sum_by(max(source.slots, target.slots), source.cell_slot, source.cell_elements)
    # Overlapping cells may add up to more than the whole.
    return sum(whole - min(whole, int(held[slot])) for slot in target.holders)


_Intervals = list[tuple[int, int]]


def held_elements(
    source: Layout,
    slot: int,
    target: Layout,
    cell: int,
    contribution: int,
    cache: dict[tuple[int, int, int], _Intervals],
) -> int:
    """Count the elements of a contribution of a target cell that a source slot holds, each once.

    `cache` keeps results between calls; it is empty at first.
    """
    cells = source.cells_of(slot) if slot < source.slots else range(0)
    return _count_union(
        [
            _count_shared(source, int(source_cell), target, cell, cache)
            for source_cell in cells
            if source.cell_contribution[source_cell] == contribution
        ]
    )


def _count_shared(
    source: Layout,
    source_cell: int,
    target: Layout,
    cell: int,
    cache: dict[tuple[int, int, int], _Intervals],
) -> list[_Intervals]:
    """Return per dimension the positions of a target cell that a source cell holds too."""
    shared = []
    for d in range(target.ndim):
        source_part, target_part = (
            int(source.cell_part[source_cell, d]),
            int(target.cell_part[cell, d]),
        )
        key = (d, source_part, target_part)
        if key not in cache:
            cache[key] = _find_positions(
                source.tables[d], source_part, target.tables[d], target_part
            )
        shared.append(cache[key])
    return shared


def _find_positions(
    source: RunTable, source_part: int, target: RunTable, target_part: int
) -> _Intervals:
    """Return the local intervals of a target part whose elements a source part holds."""
    held = [
        (start, stop)
        for start, stop, _, role in source.runs_of(source_part)
        if role in (OWNED, FRESH_HALO)
    ]
    positions: _Intervals = []
    for start, stop, local, role in target.runs_of(target_part):
        if role == PAD:
            continue
        pieces = [(max(start, a), min(stop, b)) for a, b in held if max(start, a) < min(stop, b)]
        positions += [(local + a - start, local + b - start) for a, b in pieces]
    return positions


def _count_union(held: list[list[_Intervals]]) -> int:
    """Return the volume of a union of products of intervals."""
    if not held:
        return 0
    if len(held) == 1:
        merged = map(merge_intervals, held[0])
        return math.prod(sum(stop - start for start, stop in intervals) for intervals in merged)
    # Inclusion and exclusion over the cells of a slot would be exponential; a grid over all
    # boundaries is exact and small.
    edges = find_edges(held)
    # The volume of a covered cell is the product of its widths.
    volume = cover_grid(held, edges).astype(np.int64)
    for edge in reversed(edges):
        volume = volume @ np.diff(edge)
    return int(volume)


def overlap_elements(
    source: Layout,
    target: Layout,
    combines: tuple[tuple[int, ...], ...],
    holders: Holders,
    overlaps: Sequence[Overlap],
) -> IntArray:
    """Count the elements that slot `i` of the source holds of the need of slot `j` of the target.

    See `LayoutChange.overlap_elements`.
    """
    # A row for each source key, a column for each target key.
    key_cell = holders.copies.cells[holders.copies.begin[:-1]]
    described = np.column_stack((target.cell_contribution, target.cell_part))
    _, first, target_key = find_distinct(described)
    # Elements shared by a source key and a target key: the product over their parts, or 0 if the
    # target does not combine the key's contribution.
    shared = np.ones((len(key_cell), len(first)), dtype=np.int64)
    for d, overlap in enumerate(overlaps):
        table = _count_shared_indices(overlap, target.tables[d].parts)
        shared *= table[source.cell_part[key_cell, d][:, None], target.cell_part[first, d]]
    combined = np.zeros((source.contributions, target.contributions), dtype=bool)
    for contribution, sources in enumerate(combines):
        combined[list(sources), contribution] = True
    carried = source.cell_contribution[key_cell][:, None]
    shared *= combined[carried, target.cell_contribution[first]]
    # A slot that has a key twice counts it once.
    key = np.repeat(np.arange(len(key_cell)), np.diff(holders.copies.begin))
    owned = distinct(key * source.slots + source.cell_slot[holders.copies.cells])
    held = np.zeros((source.slots, len(first)), dtype=np.int64)
    if len(owned):
        np.add.at(held, owned % source.slots, shared[owned // source.slots])
    if not holders.is_exclusive:
        _count_once(source, target, combines, first, held)
    # Each replica of a target key has its need.
    held_of_slot = sum_by((target.slots, source.slots), target.cell_slot, held.T[target_key])
    return held_of_slot.T


def _count_shared_indices(overlap: Overlap, target_parts: int) -> IntArray:
    """Count the indices each source part shares with each target part: `(parts, target_parts)`."""
    sets = overlap.holders
    pair, member = ragged_rows(sets.set_begin, overlap.pair_set)
    shared = np.zeros((sets.parts, target_parts), dtype=np.int64)
    where = (sets.set_part[member], overlap.pair_part[pair])
    np.add.at(shared, where, overlap.pair_length[pair])
    return shared


def _count_once(
    source: Layout,
    target: Layout,
    combines: tuple[tuple[int, ...], ...],
    cells: IntArray,
    held: IntArray,
) -> None:
    """Recount exactly for the slots whose cells may share elements."""
    count = np.bincount(source.cell_slot)
    cache: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for slot in np.flatnonzero(count > 1).tolist():
        for column, cell in enumerate(cells.tolist()):
            combined = combines[int(target.cell_contribution[cell])]
            held[slot, column] = sum(
                held_elements(source, slot, target, cell, contribution, cache)
                for contribution in combined
            )
