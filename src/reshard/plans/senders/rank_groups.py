"""Groups of interchangeable ranks: those that belong to exactly the same sets.

A job of thousands of ranks has few different roles: ranks that hold the same parts and want
the same parts are interchangeable. Sets of ranks come in, groups of alike ranks come out::

    set 0   {0 1 2 3}                  group 0   {0 1}    of sets 0, 1
    set 1   {0 1}               ->     group 1   {2 3}    of set 0
    set 2   {4}                        group 2   {4}      of set 2

Every set is a union of whole groups, so what is decided for a group is decided for a set, at a
cost that does not grow with the ranks.

1. Each set has a pseudo-random number; a rank's signature is the sum of those of its sets.
2. Ranks of one signature are a group. Groups are numbered by their first rank.
3. That the groups are right is checked: a set must contain all of a group or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError
from reshard.runs import IntArray, distinct, ragged_arange


@dataclass(frozen=True)
class RankGroups:
    """Ranks in groups of alike ones, and sets as unions of groups.

    `group` has the group of each rank, shape `(ranks,)`; the ranks of group `g` are
    `member[member_begin[g]:member_begin[g + 1]]`, rising. The groups of set `s` are
    `set_group[set_begin[s]:set_begin[s + 1]]`, rising.
    """

    group: IntArray
    member_begin: IntArray
    member: IntArray
    set_begin: IntArray
    set_group: IntArray

    @cached_property
    def size(self) -> IntArray:
        """How many ranks each group has: shape `(groups,)`."""
        return np.diff(self.member_begin)

    @cached_property
    def number(self) -> IntArray:
        """The place of each rank within its group: shape `(ranks,)`."""
        number = np.empty(len(self.group), dtype=np.int64)
        number[self.member] = ragged_arange(self.size)
        return number


def group_ranks(begin: IntArray, rank: IntArray, ranks: int) -> RankGroups:
    """The groups of `ranks` ranks under sets; set `s` is `rank[begin[s]:begin[s + 1]]`.

    Raises:
        PlanError: two sets of ranks that cannot be told apart, which is not known to happen.

    >>> found = group_ranks(np.array([0, 4, 6, 7]), np.array([0, 1, 2, 3, 0, 1, 4]), 5)
    >>> found.group.tolist(), found.set_group.tolist()
    ([0, 0, 1, 1, 2], [0, 1, 0, 2])
    """
    sets = len(begin) - 1
    of_set = np.repeat(np.arange(sets), np.diff(begin))
    signature = np.zeros(ranks, dtype=np.uint64)
    np.add.at(signature, rank, _hash_numbers(sets)[of_set])
    signatures = distinct(signature)
    group = np.searchsorted(signatures, signature)
    first = np.full(len(signatures), ranks, dtype=np.int64)
    # Written backwards, so that the first rank of each group is written last and remains.
    first[group[::-1]] = np.arange(ranks)[::-1]
    place = np.empty(len(signatures), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(signatures))
    group = place[group]
    size = np.bincount(group, minlength=len(signatures))
    # How many ranks of each group are in each set: all, unless two signatures collide.
    pairs, count = np.unique(of_set * len(signatures) + group[rank], return_counts=True)
    set_group = pairs % max(len(signatures), 1)
    if (count != size[set_group]).any():
        raise PlanError("sets of ranks that share a signature; report the layouts as a bug")
    return RankGroups(
        group,
        np.concatenate(([0], np.cumsum(size))),
        np.argsort(group, kind="stable"),
        np.searchsorted(pairs, np.arange(sets + 1) * len(signatures)),
        set_group,
    )


def _hash_numbers(count: int) -> NDArray[np.uint64]:
    """`count` well-mixed 64-bit numbers, the same everywhere (splitmix64; Steele, Lea, Flood)."""
    number = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
