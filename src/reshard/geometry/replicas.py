"""Replicas: which cells are copies of each other, and on which slots they lie.

Cells that carry the same contribution and take the same part of every dimension hold the same
elements, whatever the lengths of the dimensions: they are copies of one *key*. A replicated
tensor has one key with a cell on every slot; one cut over all slots has a key a slot::

    slot         0  1  2  3         keys   0: slots 0, 2
    part taken   a  b  a  b                1: slots 1, 3

Tensors that are cut alike share their placement, and what is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reshard.layout import Placement
from reshard.runs import IntArray, distinct, ragged_arange

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
