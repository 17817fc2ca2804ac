"""Holders: which slots hold each element of a source layout.

Cells that carry the same contribution and take the same part of every dimension hold the same
elements, whatever the lengths of the dimensions: they are replicas of a *key*. A replicated tensor
has a single key with a cell on every slot; a fully sharded one has a key per slot::

    slot         0  1  2  3         keys   0: slots 0, 2
    part taken   a  b  a  b                1: slots 1, 3

Keys depend on the placement alone, so tensors that are sharded alike share them.

An element may have several holders: replicas, parts that overlap (key/value heads), halos that are
declared fresh. They are found per dimension first, as ranges of indices that the same set of parts
holds (*stretches*), and then for whole cells:

1. If no two keys share an element, the stretches of a dimension are its runs, and every stretch is
   held by one part. This is the common case, and the only one in which cells need not form a grid
   (ragged shards, lists of chunks); then the bounding boxes of cells are compared (`boxes`).
2. Otherwise the dimension is divided at every boundary of every run, and each stretch is held by
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

from reshard.geometry.boxes import Boxes, PartRuns, intersect_boxes, share_an_index
from reshard.layout import Layout, Placement
from reshard.runs import FRESH_HALO, OWNED, IntArray, RunTable, distinct, ragged_arange

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The keys of a placement, in rising order of contribution and parts.

    The cells of key `k` are `cells[begin[k]:begin[k + 1]]`, one a slot, in the order of their
    slots, which are beside them in `slot`; `first[k]` is the first of them. `slot_key` is
    `key * slots + slot` for each entry of `cells`, rising.
    """

    slots: int
    begin: IntArray
    cells: IntArray
    slot: IntArray
    first: IntArray
    slot_key: IntArray

    @property
    def keys(self) -> int:
        """How many different keys there are."""
        return len(self.first)

    def cell_on_slot(self, key: IntArray, slot: IntArray) -> IntArray:
        """The cell of a key that lies on a slot, or -1 where the slot has no copy."""
        if not len(self.cells):
            return np.full(len(key), -1, dtype=np.int64)
        real = (key >= 0) & (slot < self.slots)
        at, found = find_in(self.slot_key, np.where(real, key * self.slots + slot, -1))
        return np.where(found, self.cells[at], -1)


@lru_cache(maxsize=256)
def find_replicas(placement: Placement, apart: bool = False) -> Replicas:
    """The keys of a placement, and the cells that are copies of each.

    A slot may have a key twice, in two places of its memory. Then only the first is a copy; or,
    with `apart`, the second cells of all slots are copies of a key of their own.

    >>> twice = Placement(np.array([0, 0, 1]), np.array([[5], [5], [5]]), np.array([0, 0, 0]))
    >>> find_replicas(twice).begin.tolist(), find_replicas(twice, apart=True).cells.tolist()
    ([0, 2], [0, 2, 1])
    """
    code = placement.contribution
    bound = int(code.max(initial=0)) + 1
    for dimension in range(placement.part.shape[1]):
        part = placement.part[:, dimension]
        size = int(part.max(initial=0)) + 1
        # Before a number outgrows 64 bits it is replaced by its rank, as in `holders.KeyCode`.
        if bound * size >= 2**62:
            known = distinct(code)
            code, bound = np.searchsorted(known, code), len(known)
        code, bound = code * size + part, bound * size
    # Small numbers are sorted by their digits, in time that only grows with the cells.
    order = np.argsort(code.astype(np.int16) if bound < 2**15 else code, kind="stable")
    code, slot = code[order], placement.slot[order]
    new = np.diff(code, prepend=-1) != 0
    # Cells are in the order of slots and the sort is stable, so a slot's second cell of a key
    # follows its first.
    again = ~new & (np.diff(slot, prepend=-1) == 0)
    if again.any() and not apart:
        order, slot, new = order[~again], slot[~again], new[~again]
    elif again.any():
        # The first cells of all slots are one key, the second cells the next, and so on.
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
    """For each cell a number by which copies that want the same take different turns.

    It is the first slot that wants it, and the place of the cell's slot among all that do: so
    copies spread over those who can send, and different keys begin with different ones. What
    slots behind the others want changes nothing of it.

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
    """How many true entries end at each place, without a false one between."""
    # The count of true entries, less what it was at the last false one.
    count = np.cumsum(again)
    times: IntArray = count - np.maximum.accumulate(np.where(again, 0, count))
    return times


def find_in(
    values: IntArray, wanted: IntArray, known: BoolArray | None = None
) -> tuple[IntArray, BoolArray]:
    """Where in the rising `values` each wanted one is, and whether it is there at all."""
    if not len(values):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=bool)
    if values[-1] - values[0] == len(values) - 1:
        # Without gaps a value's place is its distance from the first.
        at = np.clip(wanted - values[0], 0, len(values) - 1)
        found = values[at] == wanted
        return at, found if known is None else found & known
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    found = values[at] == wanted
    return at, found if known is None else found & known


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
    for left, right in intersect_boxes(boxes, boxes, (layout.contributions, *layout.shape)):
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
