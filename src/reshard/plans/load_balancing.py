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

Rounding of shares to whole elements, so that the largest load is least.

Among millions of elements one more or less is nothing. Of five elements that four ranks may
send, one rank sends two, and whether another must send three depends on every choice. So
here one element (a *unit*) is moved at a time, until no move helps:

1. Start at the groups of ranks whose load is the largest.
2. Look for a way to a group that could take one more unit and stay below: from group to class
   where the group has a share, from class to every group that holds it.
3. Move one unit along the way, and begin again. Where there is no way, no other division of
   equal units has a smaller largest load (an augmenting path, as in a maximum flow).

Balanced shares: how much each holder sends, so that the maximum load is as small as possible.

Bytes that the same ranks hold and others lack are one *class*: any of its holders may send any
of them. A rank may hold several classes, and its load is the sum of what it sends of all::

    class    demand   held by       shares
      A        8      0 1           5 3            loads  rank 0  1  2  3
      B        4        1 2           1 3                      5  4  5  4
      C        6          2 3           2 4

1. Ranks that hold exactly the same classes are alike: a *group*, whose load is shared evenly.
2. Every class begins with an even split over its holders.
3. In each iteration every class moves its demand towards less loaded holders: a share is divided
   by its holder's load, and the shares of a class are scaled back to its demand. This is
   proportional response, the way to an equilibrium of a linear Fisher market (Zhang 2011;
   Birnbaum, Devanur and Xiao 2011): classes are buyers, ranks are goods, loads are prices. At
   the equilibrium no class can find a less loaded holder, so no other split has a smaller
   largest load, nor a smaller next one.
4. It ends when the largest load is within 1/512 of a lower bound: some classes, and all who
   hold one of them, whose mean no split can go below.
5. Shares are rounded to whole units (elements); the remainder goes to the least loaded holder,
   see `share_rounding` for where that matters.

All ranks must compute the same shares, so no decision depends on the order of a sum: numbers
are integers below 2**53, whose floating-point sums are exact, and every processor rounds
single products and quotients in the same way.
"""

from __future__ import annotations

import math
from collections import deque
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


def move_units(
    shares: IntArray, of_class: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """Shares with units moved between the holders of a class, until the largest load is least.

    Row `i` is the share of group `group[i]` in class `of_class[i]`; the `size[g]` members of a
    group divide its load evenly. `unit_bytes` has one entry a class.

    >>> import numpy as np
    >>> shares, of_class, group = np.array([4, 0, 2, 2]), np.array([0, 0, 1, 1]), [0, 1, 1, 2]
    >>> move_units(shares, of_class, np.array(group), np.array([1, 1, 1]), [1, 1]).tolist()
    [3, 1, 2, 2]
    """
    share, load = shares.tolist(), [0] * len(size)
    rows_of_group: list[list[int]] = [[] for _ in load]
    rows_of_class: dict[int, list[int]] = {}
    for row, (c, g) in enumerate(zip(of_class.tolist(), group.tolist(), strict=True)):
        # `load` is a group's total; one member sends that divided by the size, rounded up.
        load[g] += share[row]
        rows_of_group[g].append(row)
        rows_of_class.setdefault(c, []).append(row)
    units, sizes = [int(unit) for unit in unit_bytes], size.tolist()
    classes, groups = of_class.tolist(), group.tolist()

    def find_way(starts: list[int], unit: int, below: int) -> list[tuple[int, int]]:
        """Rows to take from and give to, from one of `starts` to a group that stays below."""
        came: dict[int, tuple[int, int] | None] = dict.fromkeys(starts)
        waiting = deque(starts)
        while waiting:
            here = waiting.popleft()
            for row in rows_of_group[here]:
                if share[row] < unit or units[classes[row]] != unit:
                    continue
                for other in rows_of_class[classes[row]]:
                    there = groups[other]
                    if there in came:
                        continue
                    came[there] = (row, other)
                    if -(-(load[there] + unit) // sizes[there]) < below:
                        way: list[tuple[int, int]] = []
                        step = came[there]
                        while step is not None:
                            way.append(step)
                            step = came[groups[step[0]]]
                        return way
                    waiting.append(there)
        return []

    way: list[tuple[int, int]] = []
    while True:
        most = [-(-total // count) for total, count in zip(load, sizes, strict=True)]
        largest = max(most)
        starts = [group for group, value in enumerate(most) if value == largest]
        # Where elements are of several sizes, those of one size change places with each other.
        for unit in sorted(set(units)):
            way = find_way(starts, unit, largest)
            if way:
                break
        else:
            break
        for taken, given in way:
            unit = units[classes[taken]]
            share[taken] -= unit
            share[given] += unit
            load[groups[taken]] -= unit
            load[groups[given]] += unit
    found: IntArray = shares.copy()
    found[:] = share
    return found


_Floats = NDArray[np.float64]

_CLOSE_ENOUGH = 1 + 1 / 512
# Where the largest load is so many roundings, one unit more or less is of no account.
_UNITS_MATTER_BELOW = 64
_LEAST_ROUNDS = 16
_MOST_ROUNDS = 4096
# Sums of all demands, and of all weights of one class, stay whole below 2**53.
_DEMAND_SCALE = 2.0**44
_WEIGHT_SCALE = 2.0**30


def balanced_shares(
    demand_bytes: IntArray, begin: IntArray, holder: IntArray, unit_bytes: IntArray | int = 1
) -> IntArray:
    """The bytes each holder sends of each class: shape `(holders of all classes,)`.

    Args:
        demand_bytes: of each class, shape `(classes,)`.
        begin, holder: the ranks that hold class `c` are `holder[begin[c]:begin[c + 1]]`, each
            once.
        unit_bytes: shares are multiples of it, but for what is left of a demand that is none;
            one for all classes, or one each.

    Returns:
        Shares beside `holder`. Those of a class add up to its demand; the largest load is
        within 1/512 of the least possible, and what rounding to units costs.

    Raises:
        PlanError: a demand without a holder.

    >>> begin, holder = np.array([0, 2, 4, 6]), np.array([0, 1, 1, 2, 2, 3])
    >>> shares = balanced_shares(np.array([8, 4, 6]), begin, holder)
    >>> shares.tolist(), np.bincount(holder, shares).tolist()
    ([5, 3, 1, 3, 2, 4], [5.0, 4.0, 5.0, 4.0])
    """
    classes = len(demand_bytes)
    unit = np.broadcast_to(np.asarray(unit_bytes, dtype=np.int64), (classes,))
    ranks = int(holder.max()) + 1 if len(holder) else 0
    groups = group_ranks(begin, holder, ranks)
    shares = group_shares(demand_bytes, groups.set_begin, groups.set_group, groups.size, unit)
    of_class = np.repeat(np.arange(classes), np.diff(groups.set_begin))
    parts = member_shares(shares, groups.set_group, groups.size, unit[of_class])
    # The members of a row's group lie one behind the other; beside `holder` they are by class.
    member = groups.member_begin[groups.set_group]
    size = groups.size[groups.set_group]
    rank = groups.member[np.repeat(member, size) + ragged_arange(size)]
    made = np.lexsort((rank, np.repeat(of_class, size)))
    wanted = np.lexsort((holder, np.repeat(np.arange(classes), np.diff(begin))))
    found = np.empty(len(holder), dtype=np.int64)
    found[wanted] = parts[made]
    return found


def group_shares(
    demand_bytes: IntArray, begin: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """The bytes each group of alike ranks sends of each class, as `balanced_shares`.

    Class `c` is held by the groups `group[begin[c]:begin[c + 1]]`, all `size[g]` members of each.
    """
    unheld = np.flatnonzero((np.diff(begin) == 0) & (demand_bytes > 0))
    if len(unheld):
        raise PlanError(
            f"{demand_bytes[unheld[0]]} bytes of class {unheld[0]} have no holder; every class "
            "with a demand must be held by some rank"
        )
    shares = np.zeros(len(group), dtype=np.int64)
    wanted = demand_bytes > 0
    # Classes without a demand would divide by zero; their shares stay 0.
    row = np.flatnonzero(np.repeat(wanted, np.diff(begin)))
    if not len(row):
        return shares
    count = np.diff(begin)[wanted]
    classes = _DemandClasses(
        demand_bytes[wanted],
        np.cumsum(count) - count,
        np.repeat(np.arange(len(count)), count),
        group[row],
        size,
        unit_bytes[wanted],
    )
    shares[row] = _round_to_units(classes, _balance(classes))
    return shares


def member_shares(
    shares: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """Shares of groups divided among their members, row by row and member by member.

    Members get equal numbers of units, and the rest of one row goes to those behind the ones
    who got the rest of the row before: within a group the totals differ by one unit at most.

    >>> size, unit = np.array([3]), np.array([1, 1])
    >>> member_shares(np.array([4, 4]), np.array([0, 0]), size, unit).tolist()
    [2, 1, 1, 1, 2, 1]
    """
    units, loose = np.divmod(shares, unit_bytes)
    each, rest = np.divmod(units, size[group])
    # Where the first unit of each row goes: behind those of earlier rows of its group.
    order = np.argsort(group, kind="stable")
    given = np.cumsum(rest[order]) - rest[order]
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    base = np.repeat(given[first], np.diff(np.append(first, len(group))))
    shift = np.empty(len(group), dtype=np.int64)
    shift[order] = (given - base) % size[group[order]]
    count = size[group]
    row = np.repeat(np.arange(len(group)), count)
    turn = (ragged_arange(count) - shift[row]) % count[row]
    # What is no whole unit of a mixed class goes to the last member.
    parts = (each[row] + (turn < rest[row])) * unit_bytes[row]
    parts[turn == count[row] - 1] += loose
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class _DemandClasses:
    """Classes with a demand. Rows are pairs of a class and a group that holds it."""

    demand: IntArray
    begin: IntArray
    of_row: IntArray
    group: IntArray
    size: IntArray
    unit: IntArray

    def sum(self, of_rows: _Floats) -> _Floats:
        """Rows added up by class."""
        return np.add.reduceat(of_rows, self.begin)

    def loads(self, shares: _Floats) -> _Floats:
        """The load of one member of each group."""
        return np.bincount(self.group, shares, len(self.size)) / self.size


def _balance(classes: _DemandClasses) -> _Floats:
    """The weight of each row among those of its class, at the equilibrium: whole numbers."""
    # A power of two changes no digit.
    scale = _DEMAND_SCALE / 2.0 ** math.frexp(int(classes.demand.sum()))[1]
    demand = np.maximum(np.floor(classes.demand * scale), 1)
    weights = classes.size[classes.group].astype(np.float64)
    rounds = 0
    while True:
        shares = np.floor(weights * (demand / classes.sum(weights))[classes.of_row])
        loads = np.maximum(classes.loads(shares), 1)
        # The test sorts, so it is not made every round.
        if rounds % 8 == 0 and _is_balanced(classes, demand, loads, rounds):
            return weights
        rounds += 1
        weights = np.floor(shares * (_WEIGHT_SCALE / loads)[classes.group])
        weights = np.maximum(weights, 1)


def _is_balanced(classes: _DemandClasses, demand: _Floats, loads: _Floats, rounds: int) -> bool:
    # Where the holders of every class are equally loaded, no share can be moved to a lower load.
    of_row = loads[classes.group]
    least = np.minimum.reduceat(of_row, classes.begin)
    if rounds >= _MOST_ROUNDS or (np.maximum.reduceat(of_row, classes.begin) == least).all():
        return True
    if rounds < _LEAST_ROUNDS:
        return False
    # Ranks loaded at least so much must carry the classes that only they hold.
    order = np.argsort(-least, kind="stable")
    by_load = np.argsort(-loads, kind="stable")
    held = np.searchsorted(-loads[by_load], -least[order], side="right")
    holders = np.cumsum(classes.size[by_load])[held - 1]
    bound = (np.cumsum(demand[order]) / holders).max()
    return bool(loads.max() <= bound * _CLOSE_ENOUGH)


def _round_to_units(classes: _DemandClasses, weights: _Floats) -> IntArray:
    """The demand of each class in whole units, divided by weight."""
    units, loose = np.divmod(classes.demand, classes.unit)
    weight = np.floor(weights * (_WEIGHT_SCALE / classes.sum(weights))[classes.of_row])
    exact = weight.astype(np.int64)
    total = np.add.reduceat(exact, classes.begin)[classes.of_row]
    of_class = units[classes.of_row]
    # Multiplied in two steps, so that nothing outgrows 64 bits.
    found = of_class // total * exact + of_class % total * exact // total
    left = units - np.add.reduceat(found, classes.begin)
    # Fewer units are left than the class has holders; the least loaded get them.
    loads = classes.loads((found * classes.unit[classes.of_row]).astype(np.float64))
    # Within each class the least loaded first.
    order = np.lexsort((loads[classes.group], classes.of_row))
    place = ragged_arange(np.diff(np.append(classes.begin, len(found))))
    found[order[place < left[classes.of_row]]] += 1
    shares = found * classes.unit[classes.of_row]
    shares[classes.begin] += loose
    rounding = int(np.bincount(classes.group).max() * classes.unit.max())
    if rounding * _UNITS_MATTER_BELOW > classes.loads(shares.astype(np.float64)).max():
        shares = move_units(shares, classes.of_row, classes.group, classes.size, classes.unit)
    return shares
