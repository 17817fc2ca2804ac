"""Demand of a target: what the copies of each part need, and which slots hold it.

Target cells that are copies of each other need the same, so needs are found once for each
target key and not for each rank. A *need* is a target key, a contribution, and a pair of each
dimension: a product of pieces that the same slots hold; any of them may send it.

1. One cell of each key stands for all. Its needs, and the source keys that hold them, do not
   depend on where the copies are: the layers of all pipeline stages have them in common.
2. The holders of a need are the slots of its source keys.
3. Pieces that are adjacent for every holder are merged, so that the boxes of a need do not
   depend on the sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.contributions import contribution_sources
from reshard.geometry.overlap import Overlap
from reshard.geometry.replicas import Replicas, find_replicas
from reshard.geometry.routes import RouteFinder
from reshard.layout import Layout
from reshard.runs import IntArray, distinct, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class KeyNeeds:
    """The needs of target keys from source keys, as columns of shape `(needs,)`; `pair` has one for
    each dimension. The source keys of need `n` are `key[key_begin[n]:key_begin[n + 1]]`.
    """

    overlaps: tuple[Overlap, ...]
    target_key: IntArray
    order: IntArray
    pair: tuple[IntArray, ...]
    elements: IntArray
    key_begin: IntArray
    key: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """The needs of one plan.

    The slots that hold need `n` are set `holder_set[n]` of the sets
    `set_slot[set_begin[s]:set_begin[s + 1]]`, each rising.
    """

    source: Layout
    target: Layout
    of_keys: KeyNeeds
    source_copies: Replicas
    target_copies: Replicas
    holder_set: IntArray
    set_begin: IntArray
    set_slot: IntArray

    def __len__(self) -> int:
        return len(self.holder_set)

    def source_cell(self, need: IntArray, slot: IntArray) -> IntArray:
        """The cell from which a holder on `slot` sends each `need`, or -1 where it holds none."""
        begin = self.of_keys.key_begin[need]
        count = self.of_keys.key_begin[need + 1] - begin
        if (count == 1).all():
            return self.source_copies.cell_on_slot(self.of_keys.key[begin], slot)
        row = np.repeat(np.arange(len(need)), count)
        key = self.of_keys.key[np.repeat(begin, count) + ragged_arange(count)]
        cell = self.source_copies.cell_on_slot(key, slot[row])
        found = np.full(len(need), -1, dtype=np.int64)
        # Of several keys on one slot the first: written last.
        holds = np.flatnonzero(cell >= 0)[::-1]
        found[row[holds]] = cell[holds]
        return found


@lru_cache(maxsize=1024)
def find_needs(source: Layout, target: Layout) -> Needs:
    """The needs of the movement from `source` to `target`.

    Raises:
        PlanError: an element that no source slot holds.
    """
    held, wanted = find_replicas(source.placement), find_replicas(target.placement, apart=True)
    combines = contribution_sources(source, target)
    needs = _find_key_needs(
        _keep_one_a_key(source, held), _keep_one_a_key(target, wanted), combines
    )
    if needs is None:
        # Keys have no ranks. The search among the cells themselves raises an error that names one.
        RouteFinder.between(source, target, combines).into(wanted.first)
        raise PlanError("the source leaves out an element of the target")
    sets = _number_holder_sets(held, needs.key_begin, needs.key)
    return Needs(source, target, needs, held, wanted, *sets)


@lru_cache(maxsize=1024)
def _keep_one_a_key(layout: Layout, copies: Replicas) -> Layout:
    """The layout with one slot for each key. Layouts of the same cut on any ranks share it."""
    first = copies.first
    return Layout(
        layout.shape,
        layout.tables,
        len(first),
        np.arange(len(first)),
        layout.cell_part[first],
        layout.cell_contribution[first],
        layout.contributions,
        layout.reduction,
    )


@lru_cache(maxsize=256)
def _find_key_needs(
    source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
) -> KeyNeeds | None:
    """The needs of layouts with a slot for each key; None where an element is nowhere."""
    finder = RouteFinder.between(source, target, combines)
    target_key, order, contribution, pair = finder.needs(np.arange(target.cells))
    need, key = finder.candidates(contribution, pair)
    held = np.flatnonzero(np.bincount(need, minlength=len(target_key)))
    # Needs that no key holds are dropped; the check of volumes below finds what is missing.
    if len(held) < len(target_key):
        need = np.searchsorted(held, need)
        target_key, order = target_key[held], order[held]
        pair = tuple(column[held] for column in pair)
    elements = finder.elements(pair, len(target_key))
    try:
        finder.check_complete(np.arange(target.cells), target_key, elements)
    except PlanError:
        # A value and no exception, for exceptions would not be cached.
        return None
    key_begin = np.searchsorted(need, np.arange(len(target_key) + 1))
    return KeyNeeds(finder.overlaps, target_key, order, pair, elements, key_begin, key)


def _number_holder_sets(
    copies: Replicas, key_begin: IntArray, key: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """The set of each need, and the sets' slots: needs of the same source keys share a set."""
    if (np.diff(key_begin) == 1).all():
        # Each need has one source key, whose slots are its set.
        return key, copies.begin, copies.slot
    numbers: dict[bytes, int] = {}
    # Equal lists of keys have equal bytes, and so one number.
    groups = (key[a:b].tobytes() for a, b in pairwise(key_begin.tolist()))
    holder_set = np.array([numbers.setdefault(group, len(numbers)) for group in groups])
    members = [np.frombuffer(group, dtype=np.int64) for group in numbers]
    keys = np.concatenate(members)
    count = copies.begin[keys + 1] - copies.begin[keys]
    slot = copies.slot[np.repeat(copies.begin[keys], count) + ragged_arange(count)]
    of_key = np.repeat(np.arange(len(members)), [len(group) for group in members])
    # A slot with two keys of a set is in it once.
    pairs = distinct(np.repeat(of_key, count) * copies.slots + slot)
    of_set, slot = np.divmod(pairs, copies.slots)
    return holder_set, np.searchsorted(of_set, np.arange(len(members) + 1)), slot
