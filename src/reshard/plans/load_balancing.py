"""Load balancing: shares of holders that minimize the load of the most loaded rank.

Bytes with the same set of holders form a *class*: any holder may send any of them. A rank may hold
several classes, and its load is the sum of its shares::

    class    demand   held by       shares
      A        8      0 1           5 3            loads  rank 0  1  2  3
      B        4        1 2           1 3                      5  4  5  4
      C        6          2 3           2 4

1. Ranks that hold exactly the same classes are interchangeable. They form a *rank group*
   (`group_ranks`), whose load is divided evenly, so that the cost does not grow with the ranks.
2. Every class starts with an even split over its holders.
3. In each iteration every class moves demand towards less loaded holders: a share is divided by
   the load of its holder, and the shares of a class are scaled to its demand. This is
   proportional response, which converges to an equilibrium of a linear Fisher market (Zhang 2011;
   Birnbaum, Devanur and Xiao 2011): classes are buyers, ranks are goods, loads are prices. At the
   equilibrium no class has a less loaded holder, so no other split has a smaller maximum load.
4. The iteration ends when the maximum load is within 1/512 of a lower bound: the mean load of the
   ranks that hold any of some set of classes.
5. Shares are rounded to whole units (elements), and the remainder goes to the least loaded
   holders. With few elements a single unit matters, and units are moved along augmenting paths
   until the maximum load is minimal (`move_units`).

All ranks must compute the same shares, so no result depends on the order of a sum: numbers are
integers below 2**53, whose floating-point sums are exact, and single products and quotients are
rounded in the same way by every processor.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.errors import PlanError
from reshard.runs import IntArray, distinct, find_distinct, ragged_arange, ragged_rows


class RankGroups(Record):
    """A partition of ranks into groups, and sets of ranks as unions of groups.

    `group` is the group of each rank, shape `(ranks,)`. The ranks of group `g` are
    `member[member_begin[g]:member_begin[g + 1]]`, and the groups of set `s` are
    `set_group[set_begin[s]:set_begin[s + 1]]`, both ascending.
    """

    group: IntArray
    member_begin: IntArray
    member: IntArray
    set_begin: IntArray
    set_group: IntArray

    @cached_property
    def size(self) -> IntArray:
        """The number of ranks of each group: shape `(groups,)`."""
        return np.diff(self.member_begin)

    @cached_property
    def number(self) -> IntArray:
        """The index of each rank within its group: shape `(ranks,)`."""
        number = np.empty(len(self.group), dtype=np.int64)
        number[self.member] = ragged_arange(self.size)
        return number


def group_ranks(begin: IntArray, rank: IntArray, ranks: int) -> RankGroups:
    """Group `ranks` ranks that belong to exactly the same sets.

    Set `s` is `rank[begin[s]:begin[s + 1]]`. Every set is then a union of whole groups::

        set 0   {0 1 2 3}                  group 0   {0 1}    of sets 0, 1
        set 1   {0 1}               ->     group 1   {2 3}    of set 0
        set 2   {4}                        group 2   {4}      of set 2

    Each set gets a pseudo-random number, and the signature of a rank is the sum of the numbers of
    its sets. Ranks with equal signatures form a group; groups are numbered by their first rank.

    Raises:
        PlanError: two different ranks with equal signatures, a hash collision.

    >>> groups = group_ranks(np.array([0, 4, 6, 7]), np.array([0, 1, 2, 3, 0, 1, 4]), 5)
    >>> groups.group.tolist(), groups.set_group.tolist()
    ([0, 0, 1, 1, 2], [0, 1, 0, 2])
    """
    sets = len(begin) - 1
    of_set = np.repeat(np.arange(sets), np.diff(begin))
    signature = np.zeros(ranks, dtype=np.uint64)
    np.add.at(signature, rank, _hash_numbers(sets)[of_set])
    signatures = distinct(signature)
    group = np.searchsorted(signatures, signature)
    first = np.full(len(signatures), ranks, dtype=np.int64)
    # Assigned in reverse order, so that the first rank of each group is written last.
    first[group[::-1]] = np.arange(ranks)[::-1]
    number = np.empty(len(signatures), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(signatures))
    group = number[group]
    size = np.bincount(group, minlength=len(signatures))
    # A set must contain all ranks of a group or none, unless two signatures collide.
    pairs, _, number = find_distinct(of_set * len(signatures) + group[rank])
    count = np.bincount(number, minlength=len(pairs))
    set_group = pairs % max(len(signatures), 1)
    if (count != size[set_group]).any():
        raise PlanError("two sets of ranks have the same signature; report the layouts as a bug")
    return RankGroups(
        group,
        np.concatenate(([0], np.cumsum(size))),
        np.argsort(group, kind="stable"),
        np.searchsorted(pairs, np.arange(sets + 1) * len(signatures)),
        set_group,
    )


def _hash_numbers(count: int) -> NDArray[np.uint64]:
    """Return `count` reproducible 64-bit hashes (splitmix64; Steele, Lea, Flood 2014)."""
    number = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def move_units(
    shares: IntArray, of_class: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """Move units between the holders of a class until the maximum load is minimal.

    Row `i` is the share of group `group[i]` in class `of_class[i]`; the `size[g]` members of a
    group divide its load evenly. `unit_bytes` has an entry for each class.

    1. Start at the groups with the maximum load.
    2. Search a path to a group that stays below the maximum with another unit: from a group to
       the classes in which it has a share, from a class to every group that holds it.
    3. Move a unit along the path, and repeat. Without such a path, no other division of
       equal units has a smaller maximum load (an augmenting path, as in a maximum flow).

    >>> import numpy as np
    >>> shares, of_class, group = np.array([4, 0, 2, 2]), np.array([0, 0, 1, 1]), [0, 1, 1, 2]
    >>> move_units(shares, of_class, np.array(group), np.array([1, 1, 1]), [1, 1]).tolist()
    [3, 1, 2, 2]
    """
    share, load = shares.tolist(), [0] * len(size)
    rows_of_group: list[list[int]] = [[] for _ in load]
    rows_of_class: dict[int, list[int]] = {}
    for row, (c, g) in enumerate(zip(of_class.tolist(), group.tolist(), strict=True)):
        # `load` is a group's total; a member sends that divided by the size, rounded up.
        load[g] += share[row]
        rows_of_group[g].append(row)
        rows_of_class.setdefault(c, []).append(row)
    units, sizes = [int(unit) for unit in unit_bytes], size.tolist()
    classes, groups = of_class.tolist(), group.tolist()

    def find_path(starts: list[int], unit: int, limit: int) -> list[tuple[int, int]]:
        """Return the rows to take from and to give to, up to a group that stays below `limit`."""
        previous: dict[int, tuple[int, int] | None] = dict.fromkeys(starts)
        queue = deque(starts)
        while queue:
            here = queue.popleft()
            for row in rows_of_group[here]:
                if share[row] < unit or units[classes[row]] != unit:
                    continue
                for other in rows_of_class[classes[row]]:
                    there = groups[other]
                    if there in previous:
                        continue
                    previous[there] = (row, other)
                    if -(-(load[there] + unit) // sizes[there]) < limit:
                        path: list[tuple[int, int]] = []
                        step = previous[there]
                        while step is not None:
                            path.append(step)
                            step = previous[groups[step[0]]]
                        return path
                    queue.append(there)
        return []

    path: list[tuple[int, int]] = []
    while True:
        loads = [-(-total // count) for total, count in zip(load, sizes, strict=True)]
        maximum = max(loads)
        starts = [group for group, value in enumerate(loads) if value == maximum]
        # Classes with elements of different sizes cannot exchange units with each other.
        for unit in sorted(set(units)):
            path = find_path(starts, unit, maximum)
            if path:
                break
        else:
            break
        for giver, taker in path:
            unit = units[classes[giver]]
            share[giver] -= unit
            share[taker] += unit
            load[groups[giver]] -= unit
            load[groups[taker]] += unit
    result: IntArray = shares.copy()
    result[:] = share
    return result


_Floats = NDArray[np.float64]

_TOLERANCE = 1 + 1 / 512
# Below this ratio of the maximum load to the rounding error, single units matter.
_UNITS_MATTER_BELOW = 64
_MIN_ROUNDS = 16
_MAX_ROUNDS = 4096
# Scales that keep the sums of all demands, and of the weights of a class, exact below 2**53.
_DEMAND_SCALE = 2.0**44
_WEIGHT_SCALE = 2.0**30


def balanced_shares(
    demand_bytes: IntArray, begin: IntArray, holder: IntArray, unit_bytes: IntArray | int = 1
) -> IntArray:
    """Divide the demand of each class among its holders.

    Args:
        demand_bytes: of each class, shape `(classes,)`.
        begin, holder: the ranks that hold class `c` are `holder[begin[c]:begin[c + 1]]`, without
            duplicates.
        unit_bytes: shares are multiples of it, except for the remainder of a demand that is not;
            a number, or an array with an entry for each class.

    Returns:
        The bytes that each entry of `holder` sends, of the same shape. The shares of a class add
        up to its demand; the maximum load is within 1/512 of the minimum, plus rounding to units.

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
    shares = balance_group_shares(
        demand_bytes, groups.set_begin, groups.set_group, groups.size, unit
    )
    of_class = np.repeat(np.arange(classes), np.diff(groups.set_begin))
    parts = divide_among_members(shares, groups.set_group, groups.size, unit[of_class])
    # `parts` are ordered by class and group; they are reordered to match `holder`.
    row, member = ragged_rows(groups.member_begin, groups.set_group)
    computed = np.lexsort((groups.member[member], of_class[row]))
    requested = np.lexsort((holder, np.repeat(np.arange(classes), np.diff(begin))))
    result = np.empty(len(holder), dtype=np.int64)
    result[requested] = parts[computed]
    return result


def balance_group_shares(
    demand_bytes: IntArray, begin: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """Divide the demand of each class among groups of ranks, as `balanced_shares` does.

    Class `c` is held by all `size[g]` members of each group in `group[begin[c]:begin[c + 1]]`.
    """
    unheld = np.flatnonzero((np.diff(begin) == 0) & (demand_bytes > 0))
    if len(unheld):
        raise PlanError(
            f"{demand_bytes[unheld[0]]} bytes of class {unheld[0]} have no holder; every class "
            "with a demand needs at least one holder"
        )
    shares = np.zeros(len(group), dtype=np.int64)
    has_demand = demand_bytes > 0
    # Classes without demand are left out, to avoid a division by zero; their shares stay 0.
    row = np.flatnonzero(np.repeat(has_demand, np.diff(begin)))
    if not len(row):
        return shares
    count = np.diff(begin)[has_demand]
    classes = _DemandClasses(
        demand_bytes[has_demand],
        np.cumsum(count) - count,
        np.repeat(np.arange(len(count)), count),
        group[row],
        size,
        unit_bytes[has_demand],
    )
    shares[row] = _round_to_units(classes, _balance(classes))
    return shares


def divide_among_members(
    shares: IntArray, group: IntArray, size: IntArray, unit_bytes: IntArray
) -> IntArray:
    """Divide the shares of groups among their members, row by row and member by member.

    Members get equal numbers of units. The remaining units of a row go to the members after those
    that got the remaining units of the previous row, so that within a group totals differ by at
    most one unit.

    >>> size, unit = np.array([3]), np.array([1, 1])
    >>> divide_among_members(np.array([4, 4]), np.array([0, 0]), size, unit).tolist()
    [2, 1, 1, 1, 2, 1]
    """
    units, loose = np.divmod(shares, unit_bytes)
    each, rest = np.divmod(units, size[group])
    # The member that gets the first remaining unit of each row.
    order = np.argsort(group, kind="stable")
    earlier = np.cumsum(rest[order]) - rest[order]
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    base = np.repeat(earlier[first], np.diff(np.append(first, len(group))))
    shift = np.empty(len(group), dtype=np.int64)
    shift[order] = (earlier - base) % size[group[order]]
    count = size[group]
    row = np.repeat(np.arange(len(group)), count)
    turn = (ragged_arange(count) - shift[row]) % count[row]
    # The bytes of a class that are not a multiple of its unit go to the last member.
    parts = (each[row] + (turn < rest[row])) * unit_bytes[row]
    parts[turn == count[row] - 1] += loose
    return parts


class _DemandClasses(Record, eq=False):
    """Classes with a demand, in rows: pairs of a class and a group that holds it."""

    demand: IntArray
    begin: IntArray
    of_row: IntArray
    group: IntArray
    size: IntArray
    unit: IntArray

    def sum(self, of_rows: _Floats) -> _Floats:
        """Sum rows by class."""
        return np.add.reduceat(of_rows, self.begin)

    def loads(self, shares: _Floats) -> _Floats:
        """Return the load of a member of each group."""
        return np.bincount(self.group, shares, len(self.size)) / self.size


def _balance(classes: _DemandClasses) -> _Floats:
    """Return the integer weight of each row within its class at the equilibrium."""
    # Scaling by a power of two is exact.
    scale = _DEMAND_SCALE / 2.0 ** math.frexp(int(classes.demand.sum()))[1]
    demand = np.maximum(np.floor(classes.demand * scale), 1)
    weights = classes.size[classes.group].astype(np.float64)
    rounds = 0
    while True:
        shares = np.floor(weights * (demand / classes.sum(weights))[classes.of_row])
        loads = np.maximum(classes.loads(shares), 1)
        # The test sorts, so it does not run in every round.
        if rounds % 8 == 0 and _is_balanced(classes, demand, loads, rounds):
            return weights
        rounds += 1
        weights = np.floor(shares * (_WEIGHT_SCALE / loads)[classes.group])
        weights = np.maximum(weights, 1)


def _is_balanced(classes: _DemandClasses, demand: _Floats, loads: _Floats, rounds: int) -> bool:
    # If the holders of each class are equally loaded, no share can move to a lower load.
    of_row = loads[classes.group]
    lowest = np.minimum.reduceat(of_row, classes.begin)
    if rounds >= _MAX_ROUNDS or (np.maximum.reduceat(of_row, classes.begin) == lowest).all():
        return True
    if rounds < _MIN_ROUNDS:
        return False
    # Lower bound: the ranks with at least a given load must send the classes that only they hold.
    order = np.argsort(-lowest, kind="stable")
    by_load = np.argsort(-loads, kind="stable")
    held = np.searchsorted(-loads[by_load], -lowest[order], side="right")
    holders = np.cumsum(classes.size[by_load])[held - 1]
    bound = (np.cumsum(demand[order]) / holders).max()
    return bool(loads.max() <= bound * _TOLERANCE)


def _round_to_units(classes: _DemandClasses, weights: _Floats) -> IntArray:
    """Divide the units of each class in proportion to the weights."""
    units, loose = np.divmod(classes.demand, classes.unit)
    weight = np.floor(weights * (_WEIGHT_SCALE / classes.sum(weights))[classes.of_row])
    exact = weight.astype(np.int64)
    total = np.add.reduceat(exact, classes.begin)[classes.of_row]
    of_class = units[classes.of_row]
    # Multiplied in two steps, so that products fit in 64 bits.
    rounded = of_class // total * exact + of_class % total * exact // total
    left = units - np.add.reduceat(rounded, classes.begin)
    # Fewer units are left than the class has holders. The least loaded holders get them.
    loads = classes.loads((rounded * classes.unit[classes.of_row]).astype(np.float64))
    order = np.lexsort((loads[classes.group], classes.of_row))
    position = ragged_arange(np.diff(np.append(classes.begin, len(rounded))))
    rounded[order[position < left[classes.of_row]]] += 1
    shares = rounded * classes.unit[classes.of_row]
    shares[classes.begin] += loose
    rounding = int(np.bincount(classes.group).max() * classes.unit.max())
    if rounding * _UNITS_MATTER_BELOW > classes.loads(shares.astype(np.float64)).max():
        shares = move_units(shares, classes.of_row, classes.group, classes.size, classes.unit)
    return shares
