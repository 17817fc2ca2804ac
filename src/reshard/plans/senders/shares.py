"""Balanced shares: how much each holder sends, so that the maximum load is as small as possible.

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError
from reshard.plans.senders.rank_groups import group_ranks
from reshard.plans.senders.share_rounding import move_units
from reshard.runs import IntArray, ragged_arange

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
