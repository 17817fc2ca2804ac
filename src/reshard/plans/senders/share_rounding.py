"""Where few elements are divided, who gets which, so that the largest load is least?

Among millions of elements one more or less is nothing. Of five elements that four ranks may
send, one rank sends two, and whether another must send three depends on every choice. So
here one element (a *grain*) is moved at a time, until no move helps:

1. Start at the groups of ranks whose load is the largest.
2. Look for a way to a group that could take one more grain and stay below: from group to class
   where the group has a share, from class to every group that holds it.
3. Move one grain along the way, and begin again. Where there is no way, no other division of
   equal grains has a smaller largest load (an augmenting path, as in a maximum flow).
"""

from __future__ import annotations

from collections import deque

from reshard.runs import IntArray


def spread_grains(
    shares: IntArray, of_class: IntArray, group: IntArray, size: IntArray, grain_bytes: IntArray
) -> IntArray:
    """Shares with grains moved between the holders of a class, until the largest load is least.

    Row `i` is the share of group `group[i]` in class `of_class[i]`; the `size[g]` members of a
    group divide its load evenly. `grain_bytes` has one entry a class.

    >>> import numpy as np
    >>> shares, of_class, group = np.array([4, 0, 2, 2]), np.array([0, 0, 1, 1]), [0, 1, 1, 2]
    >>> spread_grains(shares, of_class, np.array(group), np.array([1, 1, 1]), [1, 1]).tolist()
    [3, 1, 2, 2]
    """
    share, load = shares.tolist(), [0] * len(size)
    rows_of_group: list[list[int]] = [[] for _ in load]
    rows_of_class: dict[int, list[int]] = {}
    for row, (c, g) in enumerate(zip(of_class.tolist(), group.tolist(), strict=True)):
        load[g] += share[row]
        rows_of_group[g].append(row)
        rows_of_class.setdefault(c, []).append(row)
    grains, sizes = [int(grain) for grain in grain_bytes], size.tolist()
    classes, groups = of_class.tolist(), group.tolist()

    def find_way(starts: list[int], grain: int, below: int) -> list[tuple[int, int]]:
        """Rows to take from and give to, from one of `starts` to a group that stays below."""
        came: dict[int, tuple[int, int] | None] = dict.fromkeys(starts)
        waiting = deque(starts)
        while waiting:
            here = waiting.popleft()
            for row in rows_of_group[here]:
                if share[row] < grain or grains[classes[row]] != grain:
                    continue
                for other in rows_of_class[classes[row]]:
                    there = groups[other]
                    if there in came:
                        continue
                    came[there] = (row, other)
                    if -(-(load[there] + grain) // sizes[there]) < below:
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
        for grain in sorted(set(grains)):
            way = find_way(starts, grain, largest)
            if way:
                break
        else:
            break
        for taken, given in way:
            grain = grains[classes[taken]]
            share[taken] -= grain
            share[given] += grain
            load[groups[taken]] -= grain
            load[groups[given]] += grain
    found: IntArray = shares.copy()
    found[:] = share
    return found
