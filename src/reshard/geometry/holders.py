"""Holders of each element of a source layout.

An element may have several holders: replicas, parts that overlap (key/value heads), halos that are
declared fresh. They are found for each dimension first, as ranges of indices that
the same set of parts holds (*stretches*), and then for whole cells:

1. Cells that carry the same contribution and take the same parts are copies of each other:
   one *key*, with the slots that hold it (`copies`).
2. If different keys never share an element, a dimension's stretches are simply its runs, and
   every stretch has one holder part. This is the common case, and the only one in which cells
   need not form a grid (ragged shards, chunk lists); then their hulls are compared
   (`box_intersections`).
3. Otherwise the dimension is cut at every boundary of every run, and each stretch is held by
   the set of parts whose runs contain it::

       part 0  |------------|            stretches  a   b    c   d   e
       part 1        |--------------|    held by    {0} {0,1} {1}
       part 2                |-----|                          {1,2} {2}..
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.box_intersections import Boxes, intersecting_boxes
from reshard.geometry.part_runs import PartRuns, share_an_index
from reshard.geometry.replicas import Replicas, find_in, find_replicas
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, OWNED, IntArray, RunTable, distinct, ragged_arange

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class DimensionHolders:
    """One dimension of the source as stretches, and the parts that hold them.

    `start`, `stop` and `holder_set` have shape `(stretches,)` and are sorted by start. Set `s`
    has the parts `set_part[set_begin[s]:set_begin[s + 1]]`. `entry_key` lists
    `stretch * parts + part` in rising order, with the local position of the stretch in that
    part in `entry_local`. Where `is_single`, set `s` is part `s` alone.
    """

    parts: int
    start: IntArray
    stop: IntArray
    holder_set: IntArray
    set_begin: IntArray
    set_part: IntArray
    entry_key: IntArray
    entry_local: IntArray
    is_single: bool

    @property
    def sets(self) -> int:
        """Number of holder sets."""
        return len(self.set_begin) - 1

    @property
    def part_runs(self) -> PartRuns:
        """The stretches of each part, where each is held by one."""
        return PartRuns.of(self.parts, self.holder_set, self.start, self.stop)

    def local_start(self, stretch: IntArray, part: IntArray) -> IntArray:
        """Where a stretch begins in the local order of a part that holds it."""
        at = np.searchsorted(self.entry_key, stretch * self.parts + part)
        return self.entry_local[at]


class KeyCode:
    """One number for a contribution and a part a dimension, equal only for equal ones.

    The number is positional. Where it would outgrow 64 bits, what was read so far is first
    replaced by its rank among the prefixes that occur in the given cells of the layout.
    """

    def __init__(self, layout: Layout, cells: IntArray) -> None:
        self._sizes = [table.parts for table in layout.tables]
        self._prefixes: list[IntArray | None] = []
        code, bound = layout.cell_contribution[cells], layout.contributions
        for dimension, size in enumerate(self._sizes):
            prefix = None
            if bound * size >= 2**62:
                prefix = distinct(code)
                code, bound = np.searchsorted(prefix, code), len(prefix)
            self._prefixes.append(prefix)
            code, bound = code * size + layout.cell_part[cells, dimension], bound * size
        self.of_cells: IntArray = code

    def of(self, contribution: IntArray, parts: list[IntArray]) -> IntArray:
        """The number of each contribution and parts; -1 where the layout has nothing like it."""
        code = contribution
        known = np.ones(len(code), dtype=bool)
        for size, prefix, part in zip(self._sizes, self._prefixes, parts, strict=True):
            if prefix is not None:
                code, known = find_in(prefix, code, known)
            code = code * size + part
        return np.where(known, code, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The whole source: dimensions, keys, and the cells that are copies of each key.

    `keys` has shape `(keys,)`, rising; `copies` says which cells have key number `k`.
    `is_exclusive` says that no element has two keys (of one contribution), and `is_grid` that
    the parts of all keys are disjoint in every dimension.
    """

    layout: Layout
    is_grid: bool
    is_exclusive: bool
    dimensions: tuple[DimensionHolders, ...]
    code: KeyCode
    keys: IntArray
    copies: Replicas

    @property
    def cell_begin(self) -> IntArray:
        """Where the cells of each key begin in `cells`: shape `(keys + 1,)`."""
        return self.copies.begin

    @property
    def cells(self) -> IntArray:
        """The cells of all keys, those of one key in the order of their slots."""
        return self.copies.cells

    @property
    def slot_key(self) -> IntArray:
        """`key * slots + slot` of every entry of `cells`, rising."""
        copies = self.copies
        return copies.slot_key // copies.slots * self.layout.slots + copies.slot

    def key_of(self, contribution: IntArray, parts: list[IntArray]) -> IntArray:
        """The key number of a contribution and a part a dimension, or -1 where no cell has it."""
        at, found = find_in(self.keys, self.code.of(contribution, parts))
        return np.where(found, at, -1)

    def cell_on_slot(self, key: IntArray, slot: IntArray) -> IntArray:
        """The cell of a key that lies on a slot, or -1 where the slot has no copy."""
        return self.copies.cell_on_slot(key, slot)


# A model has few different sources, and many targets for each.
@lru_cache(maxsize=128)
def find_holders(layout: Layout) -> Holders:
    """The holders of each element of `layout`, as a source."""
    copies = find_replicas(layout.placement)
    key_code = KeyCode(layout, copies.first)
    runs = [_find_stretches(table) for table in layout.tables]
    is_grid = _is_grid(layout, copies.first, runs)
    exclusive = is_grid or _keys_are_disjoint(layout, copies.first, runs)
    if not exclusive:
        runs = [_split_stretches(dimension) for dimension in runs]
    return Holders(layout, is_grid, exclusive, tuple(runs), key_code, key_code.of_cells, copies)


@lru_cache(maxsize=256)
def _find_stretches(table: RunTable) -> DimensionHolders:
    """The runs of a table that may be sources, each held by its one part."""
    single = table.single_runs()
    single = single.take((single.role == OWNED) | (single.role == FRESH_HALO))
    single = single.take(np.argsort(single.start, kind="stable"))
    stretch = np.arange(len(single.part))
    # Set `p` is part `p` alone, so the sets' parts are all parts in order.
    every_part = np.arange(table.parts + 1)
    key = stretch * table.parts + single.part
    return DimensionHolders(
        table.parts,
        single.start,
        single.stop,
        single.part,
        every_part,
        every_part[:-1],
        key,
        single.local_start,
        is_single=True,
    )


def _is_grid(layout: Layout, cells: IntArray, dimensions: list[DimensionHolders]) -> bool:
    """Whether the parts that the given cells take are disjoint in every dimension."""
    for d, dimension in enumerate(dimensions):
        used = np.zeros(dimension.parts, dtype=bool)
        used[layout.cell_part[cells, d]] = True
        runs = used[dimension.holder_set]
        start, stop = dimension.start[runs], dimension.stop[runs]
        # Sorted by start, runs overlap where one begins before the furthest stop so far.
        if (start[1:] < np.maximum.accumulate(stop)[:-1]).any():
            return False
    return True


def _keys_are_disjoint(layout: Layout, cells: IntArray, dimensions: list[DimensionHolders]) -> bool:
    """Whether the given cells, one a key, have no element twice within a contribution."""
    runs = [dimension.part_runs for dimension in dimensions]
    part = layout.cell_part[cells]
    boxes, cell = hulls(layout, layout.cell_contribution[cells], part, runs)
    # A part has an index twice: only stretches cut at every edge tell them apart.
    if any(of.has_twice(distinct(part[cell, d])) for d, of in enumerate(runs)):
        return False
    for left, right in intersecting_boxes(boxes, boxes, (layout.contributions, *layout.shape)):
        # Each pair of cells once, and no cell with itself.
        other = left < right
        a, b = part[cell[left[other]]], part[cell[right[other]]]
        share = np.ones(len(a), dtype=bool)
        for d, of in enumerate(runs):
            share &= share_an_index(of, of, a[:, d], b[:, d])
        if share.any():
            return False
    return True


def hulls(
    layout: Layout, contribution: IntArray, part: IntArray, runs: list[PartRuns]
) -> tuple[Boxes, IntArray]:
    """The hulls of cells, as boxes of a tensor with the contributions as its first dimension.

    The cells are given by a contribution and a part of each dimension, and the runs of the parts
    are those of `runs`. Cells without an element have none; box `i` is of cell `cell[i]`.
    """
    size = (layout.ndim + 1, len(contribution))
    start, stop = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    start[0], stop[0] = contribution, contribution + 1
    for d, of in enumerate(runs, start=1):
        low, high = of.hulls()
        start[d], stop[d] = low[part[:, d - 1]], high[part[:, d - 1]]
    cell = np.flatnonzero((start < stop).all(axis=0))
    if len(cell) < len(contribution):
        start, stop = start[:, cell], stop[:, cell]
    return Boxes(start, stop), cell


@lru_cache(maxsize=256)
def _split_stretches(dimension: DimensionHolders) -> DimensionHolders:
    """Cut the stretches at every boundary, and collect the parts that hold each piece."""
    # A piece lies between two neighbouring edges. Rows are pieces with a run that contains them.
    edges = np.unique(np.concatenate((dimension.start, dimension.stop)))
    low = np.searchsorted(edges, dimension.start)
    count = np.searchsorted(edges, dimension.stop) - low
    run = np.repeat(np.arange(len(count)), count)
    piece = np.repeat(low, count) + ragged_arange(count)
    key = piece * dimension.parts + dimension.holder_set[run]
    # A part that has a piece twice holds it once, where it has it first.
    key, first = np.unique(key, return_index=True)
    piece, run = piece[first], run[first]
    local = dimension.entry_local[run] + edges[piece] - dimension.start[run]
    begin = np.flatnonzero(np.diff(piece, prepend=-1))
    members = np.split(key % dimension.parts, begin[1:]) if len(begin) else []
    # Pieces that the same parts hold share a set; equal lists of parts have equal bytes.
    numbers: dict[bytes, int] = {}
    holder_set = [numbers.setdefault(group.tobytes(), len(numbers)) for group in members]
    sets = [np.frombuffer(group, dtype=np.int64) for group in numbers]
    # Pieces without a holder are no stretches.
    held = piece[begin]
    stretch_of_piece = np.repeat(np.arange(len(held)), np.diff(np.append(begin, len(piece))))
    return DimensionHolders(
        dimension.parts,
        edges[held],
        edges[held + 1] if len(held) else edges[:0],
        np.array(holder_set, dtype=np.int64),
        np.cumsum([0, *(len(group) for group in sets)]),
        np.concatenate(sets) if sets else np.zeros(0, dtype=np.int64),
        stretch_of_piece * dimension.parts + key % dimension.parts,
        local,
        is_single=False,
    )
