"""Holders: which slots hold each element of a source layout.

Cells that carry the same contribution and take the same part of every dimension hold the same
elements, whatever the lengths of the dimensions: they are replicas of a *key*. A replicated tensor
has a single key with a cell on every slot; a fully sharded tensor has a key per slot::

    slot         0  1  2  3         keys   0: slots 0, 2
    part taken   a  b  a  b                1: slots 1, 3

Keys depend on the placement alone, so tensors that are sharded alike share them.

An element may have several holders: replicas, parts that overlap (key/value heads), halos that are
declared fresh. They are found per dimension first, as ranges of indices that the same set of parts
holds (*stretches*), and then for whole cells:

1. If no two keys share an element, the stretches of a dimension are its runs, and every stretch is
   held by a single part. This is the common case. Only here may cells not form a grid
   (ragged shards, lists of chunks); then the bounding boxes of cells are compared (`boxes`).
2. Otherwise the dimension is divided at every boundary of every run, and each stretch is held by
   the set of parts whose runs contain it::

       part 0  |------------|            stretches  a   b    c   d   e
       part 1        |--------------|    held by    {0} {0,1} {1}
       part 2                |-----|                          {1,2} {2}..
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.geometry.boxes import Boxes, PartRuns, intersect_boxes, share_an_index
from reshard.layout import Layout, Placement
from reshard.runs import (
    FRESH_HALO,
    OWNED,
    IntArray,
    RunTable,
    concatenate,
    distinct,
    find_distinct,
    ragged_arange,
    ragged_numbers,
)

BoolArray = NDArray[np.bool_]


class Replicas(Record, eq=False):
    """The keys of a placement, in rising order of contribution and parts.

    The cells of key `k` are `cells[begin[k]:begin[k + 1]]`, at most one per slot, in the order of
    their slots, which are in `slot`; `first[k]` is the first of them. `slot_key` is `key * slots +
    slot` for each entry of `cells`, rising.
    """

    slots: int
    begin: IntArray
    cells: IntArray
    slot: IntArray
    first: IntArray
    slot_key: IntArray

    @property
    def keys(self) -> int:
        """Number of keys."""
        return len(self.first)

    def cell_on_slot(self, key: IntArray, slot: IntArray) -> IntArray:
        """Return the cell of each key on a slot, or -1 for a slot without replicas."""
        if not len(self.cells):
            return np.full(len(key), -1, dtype=np.int64)
        real = (key >= 0) & (slot < self.slots)
        at, is_present = find_in(self.slot_key, np.where(real, key * self.slots + slot, -1))
        return np.where(is_present, self.cells[at], -1)


class KeyCode:
    """A number that identifies a contribution and a part of each dimension.

    The number is positional. Before it would exceed 64 bits, the prefix so far is replaced by its
    rank among the prefixes that occur in the given rows.

    Args:
        contribution: of each row, shape `(rows,)`.
        part: of each row and dimension, shape `(rows, dims)`.
    """

    def __init__(self, contribution: IntArray, part: IntArray) -> None:
        self._sizes = (part.max(axis=0, initial=0) + 1).tolist()
        self._limit = int(contribution.max(initial=0)) + 1
        self._prefixes: list[IntArray | None] = []
        code, bound = contribution, self._limit
        for dimension, size in enumerate(self._sizes):
            prefix = None
            if bound * size >= 2**62:
                prefix = distinct(code)
                code, bound = np.searchsorted(prefix, code), len(prefix)
            self._prefixes.append(prefix)
            code, bound = code * size + part[:, dimension], bound * size
        self.of_rows: IntArray = code
        self.bound: int = bound

    def of(self, contribution: IntArray, parts: list[IntArray]) -> IntArray:
        """Return the number of each contribution and parts, or -1 if they are out of range."""
        code = contribution
        valid = contribution < self._limit
        for size, prefix, part in zip(self._sizes, self._prefixes, parts, strict=True):
            if prefix is not None:
                code, valid = find_in(prefix, code, valid)
            valid = valid & (part < size)
            code = code * size + part
        return np.where(valid, code, -1)


@lru_cache(maxsize=256)
def find_replicas(placement: Placement, apart: bool = False) -> Replicas:
    """Return the keys of a placement, and the cells that are replicas of each.

    A slot may have a key twice, in two places of its memory. Then only the first is a replica; or,
    with `apart`, the second cells of all slots are replicas of a key of their own.

    >>> twice = Placement(np.array([0, 0, 1]), np.array([[5], [5], [5]]), np.array([0, 0, 0]))
    >>> find_replicas(twice).begin.tolist(), find_replicas(twice, apart=True).cells.tolist()
    ([0, 2], [0, 2, 1])
    """
    keys = KeyCode(placement.contribution, placement.part)
    code, bound = keys.of_rows, keys.bound
    # NumPy sorts 16-bit integers by radix, in linear time.
    order = np.argsort(code.astype(np.int16) if bound < 2**15 else code, kind="stable")
    code, slot = code[order], placement.slot[order]
    new = np.diff(code, prepend=-1) != 0
    # Cells are ordered by slot and the sort is stable, so the second cell of a slot with a key
    # follows its first.
    again = ~new & (np.diff(slot, prepend=-1) == 0)
    if again.any() and not apart:
        order, slot, new = order[~again], slot[~again], new[~again]
    elif again.any():
        # The first cells of all slots form a key, the second cells the next, and so on.
        time = _times_in_a_row(again)
        by_time = np.lexsort((slot, time, np.cumsum(new)))
        order, slot, time, new = order[by_time], slot[by_time], time[by_time], new[by_time]
        new = new | (np.diff(time, prepend=0) > 0)
    first = np.flatnonzero(new)
    begin = np.append(first, len(order))
    slots = int(slot.max(initial=-1)) + 1
    number = np.repeat(np.arange(len(first)), np.diff(begin))
    return Replicas(slots, begin, order, slot, order[first], number * slots + slot)


@lru_cache(maxsize=256)
def replica_turns(placement: Placement) -> IntArray:
    """Return for each cell a number by which replicas take different turns at the holders.

    It is the first slot with the cell's key, plus the position of the cell's slot among the slots
    with the key. So replicas spread over the holders, and different keys begin with different
    holders. Adding slots at the end does not change the numbers of the others.

    >>> placement = Placement(np.arange(4), np.array([[0], [1], [0], [1]]), np.zeros(4, int))
    >>> replica_turns(placement).tolist()
    [0, 1, 1, 2]
    """
    copies = find_replicas(placement, apart=True)
    count = np.diff(copies.begin)
    turn = np.empty(len(copies.cells), dtype=np.int64)
    turn[copies.cells] = np.repeat(copies.slot[copies.begin[:-1]], count) + ragged_arange(count)
    return turn


def _times_in_a_row(again: BoolArray) -> IntArray:
    """Return the number of consecutive true entries that end at each position."""
    # The count of true entries, minus the count at the last false entry.
    count = np.cumsum(again)
    times: IntArray = count - np.maximum.accumulate(np.where(again, 0, count))
    return times


def find_in(
    values: IntArray, sought: IntArray, valid: BoolArray | None = None
) -> tuple[IntArray, BoolArray]:
    """Return the position of each value of `sought` in the rising `values`, and whether it is
    present.
    """
    if not len(values):
        return np.zeros(len(sought), dtype=np.int64), np.zeros(len(sought), dtype=bool)
    if values[-1] - values[0] == len(values) - 1:
        # Without gaps, the position of a value is its distance from the first.
        at = np.clip(sought - values[0], 0, len(values) - 1)
        is_present = values[at] == sought
        return at, is_present if valid is None else is_present & valid
    at = np.minimum(np.searchsorted(values, sought), len(values) - 1)
    is_present = values[at] == sought
    return at, is_present if valid is None else is_present & valid


class DimensionHolders(Record, eq=False):
    """A dimension of the source as stretches, and the parts that hold them.

    `start`, `stop` and `holder_set` have shape `(stretches,)` and are sorted by start. Set `s` has
    the parts `set_part[set_begin[s]:set_begin[s + 1]]`. `entry_key` lists `stretch * parts + part`
    in rising order, with the local offset of the stretch in that part in `entry_local`. If
    `is_single`, set `s` is part `s` alone.
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
        """The stretches of each part, if each has a single holder."""
        return PartRuns.of(self.parts, self.holder_set, self.start, self.stop)

    def local_start(self, stretch: IntArray, part: IntArray) -> IntArray:
        """Return the offset of each stretch in the local order of a part that holds it."""
        at = np.searchsorted(self.entry_key, stretch * self.parts + part)
        return self.entry_local[at]


class Holders(Record, eq=False):
    """The holders of a whole source: its dimensions, its keys, and the replicas of each key.

    `code` numbers the keys, and `copies` has the cells of each key. `is_exclusive` means that no
    element has two keys of the same contribution, `is_grid` that the parts of all keys are disjoint
    in every dimension.
    """

    layout: Layout
    is_grid: bool
    is_exclusive: bool
    dimensions: tuple[DimensionHolders, ...]
    code: KeyCode
    copies: Replicas

    def key_of(self, contribution: IntArray, parts: list[IntArray]) -> IntArray:
        """Return the key of each contribution and parts, or -1 if no cell has it."""
        at, is_present = find_in(self.code.of_rows, self.code.of(contribution, parts))
        return np.where(is_present, at, -1)


# A model has few distinct sources, and many targets for each.
@lru_cache(maxsize=128)
def find_holders(layout: Layout) -> Holders:
    """Return the holders of each element of `layout` as a source."""
    copies = find_replicas(layout.placement)
    key_code = KeyCode(layout.cell_contribution[copies.first], layout.cell_part[copies.first])
    runs = [_find_stretches(table) for table in layout.tables]
    is_grid = _is_grid(layout, copies.first, runs)
    exclusive = is_grid or _keys_are_disjoint(layout, copies.first, runs)
    if not exclusive:
        runs = [_split_stretches(dimension) for dimension in runs]
    return Holders(layout, is_grid, exclusive, tuple(runs), key_code, copies)


@lru_cache(maxsize=256)
def _find_stretches(table: RunTable) -> DimensionHolders:
    """Return the runs of a table that may be sources, each held by its part alone."""
    single = table.single_runs()
    single = single.take((single.role == OWNED) | (single.role == FRESH_HALO))
    single = single.take(np.argsort(single.start, kind="stable"))
    stretch = np.arange(len(single.part))
    # Set `p` is part `p` alone, so the parts of the sets are all parts in order.
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
    """Return whether the parts that the given cells take are disjoint in every dimension."""
    for d, dimension in enumerate(dimensions):
        used = np.zeros(dimension.parts, dtype=bool)
        used[layout.cell_part[cells, d]] = True
        runs = used[dimension.holder_set]
        start, stop = dimension.start[runs], dimension.stop[runs]
        # Runs are sorted by start; a run overlaps if it begins before the furthest stop so far.
        if (start[1:] < np.maximum.accumulate(stop)[:-1]).any():
            return False
    return True


def _keys_are_disjoint(layout: Layout, cells: IntArray, dimensions: list[DimensionHolders]) -> bool:
    """Return whether the given cells, one per key, are disjoint within each contribution."""
    runs = [dimension.part_runs for dimension in dimensions]
    part = layout.cell_part[cells]
    boxes, cell = bounding_boxes(layout, layout.cell_contribution[cells], part, runs)
    # If a part has an index twice, only stretches divided at every edge separate them.
    if any(part_runs.has_twice(distinct(part[cell, d])) for d, part_runs in enumerate(runs)):
        return False
    for left, right in intersect_boxes(boxes, boxes, (layout.contributions, *layout.shape)):
        # Check each pair of cells once, and do not compare a cell to itself.
        other = left < right
        a, b = part[cell[left[other]]], part[cell[right[other]]]
        share = np.ones(len(a), dtype=bool)
        for d, part_runs in enumerate(runs):
            share &= share_an_index(part_runs, part_runs, a[:, d], b[:, d])
        if share.any():
            return False
    return True


def bounding_boxes(
    layout: Layout, contribution: IntArray, part: IntArray, runs: list[PartRuns]
) -> tuple[Boxes, IntArray]:
    """Return the bounding boxes of cells, with the contribution as their first dimension.

    The cells are given by a contribution and a part of each dimension, and `runs` are the runs of
    these parts. Cells without elements have no box; box `i` is that of cell `cell[i]`.
    """
    size = (layout.ndim + 1, len(contribution))
    start, stop = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    start[0], stop[0] = contribution, contribution + 1
    for d, part_runs in enumerate(runs, start=1):
        low, high = part_runs.bounds()
        start[d], stop[d] = low[part[:, d - 1]], high[part[:, d - 1]]
    cell = np.flatnonzero((start < stop).all(axis=0))
    if len(cell) < len(contribution):
        start, stop = start[:, cell], stop[:, cell]
    return Boxes(start, stop), cell


@lru_cache(maxsize=256)
def _split_stretches(dimension: DimensionHolders) -> DimensionHolders:
    """Divide the stretches at every boundary, and collect the parts that hold each piece."""
    # A piece is between two adjacent edges. Rows are pieces with a run that contains them.
    edges = distinct(np.concatenate((dimension.start, dimension.stop)))
    low = np.searchsorted(edges, dimension.start)
    count = np.searchsorted(edges, dimension.stop) - low
    run, piece = ragged_numbers(low, count)
    key = piece * dimension.parts + dimension.holder_set[run]
    # A part that has a piece twice holds it once, at its first offset.
    key, first, _ = find_distinct(key)
    piece, run = piece[first], run[first]
    local = dimension.entry_local[run] + edges[piece] - dimension.start[run]
    begin = np.flatnonzero(np.diff(piece, prepend=-1))
    members = np.split(key % dimension.parts, begin[1:]) if len(begin) else []
    # Pieces held by the same parts share a set; equal lists of parts have equal bytes.
    numbers: dict[bytes, int] = {}
    holder_set = [numbers.setdefault(group.tobytes(), len(numbers)) for group in members]
    sets = [np.frombuffer(group, dtype=np.int64) for group in numbers]
    # Pieces without a holder are not stretches.
    held = piece[begin]
    stretch_of_piece = np.repeat(np.arange(len(held)), np.diff(np.append(begin, len(piece))))
    return DimensionHolders(
        dimension.parts,
        edges[held],
        edges[held + 1] if len(held) else edges[:0],
        np.array(holder_set, dtype=np.int64),
        np.cumsum([0, *(len(group) for group in sets)]),
        concatenate(sets),
        stretch_of_piece * dimension.parts + key % dimension.parts,
        local,
        is_single=False,
    )
