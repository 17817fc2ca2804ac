"""Rounding of shares to whole elements, so that the largest load is least.

Among millions of elements one more or less is nothing. Of five elements that four ranks may
send, one rank sends two, and whether another must send three depends on every choice. So
here one element (a *unit*) is moved at a time, until no move helps:

1. Start at the groups of ranks whose load is the largest.
2. Look for a way to a group that could take one more unit and stay below: from group to class
   where the group has a share, from class to every group that holds it.
3. Move one unit along the way, and begin again. Where there is no way, no other division of
   equal units has a smaller largest load (an augmenting path, as in a maximum flow).
"""

from __future__ import annotations

from collections import deque

from reshard.runs import IntArray


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
