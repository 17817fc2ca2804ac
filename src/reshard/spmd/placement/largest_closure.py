"""Maximum-weight closures: the set of items of greatest gain, each with its requirements.

Things have gains, some negative, and need others. A set that has with each thing those it needs is
closed; the closed set of the greatest sum is found by a least cut::

    gains 5, -2, -4; 0 needs 1, 1 needs 2        {}: 5 - 2 - 4 < 0
    gains 5, -2, -2; the same                    {0, 1, 2}: 1

Source: Picard, "Maximal closure of a graph and applications to combinatorial problems" (1976); the
least cut by shortest augmenting paths, Edmonds and Karp (1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


def largest_closure(gains: Sequence[int], needs: Sequence[Iterable[int]]) -> set[int]:
    """The closed set of the greatest gain; of several the smallest.

    Args:
        gains: of each thing.
        needs: for each, the others without which it is not taken.

    >>> largest_closure([5, -2, -2], [[1], [2], []]), largest_closure([5, -2, -4], [[1], [2], []])
    ({0, 1, 2}, set())
    """
    source, sink = len(gains), len(gains) + 1
    # More than all that can flow, so that no least cut lies there.
    most = sum(gain for gain in gains if gain > 0) + 1
    room: list[dict[int, int]] = [{} for _ in range(len(gains) + 2)]

    def join(start: int, end: int, size: int) -> None:
        room[start][end] = room[start].get(end, 0) + size
        room[end].setdefault(start, 0)

    for thing, gain in enumerate(gains):
        if gain > 0:
            join(source, thing, gain)
        elif gain < 0:
            join(thing, sink, -gain)
        for needed in needs[thing]:
            join(thing, needed, most)
    while True:
        before = _find_paths(room, source)
        if sink not in before:
            # What can be reached is the smallest of the closed sets with the greatest gain.
            return {thing for thing in before if thing < source}
        path, end = [], sink
        while end != source:
            path.append((before[end], end))
            end = before[end]
        flow = min(room[start][end] for start, end in path)
        for start, end in path:
            room[start][end] -= flow
            room[end][start] += flow


def _find_paths(room: Sequence[dict[int, int]], source: int) -> dict[int, int]:
    """What can be reached, each with the one before it on a shortest path."""
    before = {source: source}
    waiting = deque([source])
    while waiting:
        start = waiting.popleft()
        for end, size in room[start].items():
            if size > 0 and end not in before:
                before[end] = start
                waiting.append(end)
    return before
