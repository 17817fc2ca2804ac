"""Positions of the intervals of a dimension on a page, and the indices at their edges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from reshard.show.pictures.regions import Interval

# Pixels of what is left out, enough for a label that says how much; and of the smallest box.
_GAP, _LEAST_BOX = 82.0, 5.0


def interval_edges(intervals: Sequence[Interval], room: float, begin: float) -> list[float]:
    """Where intervals begin and end on the page: to scale, but none too small to see.

    >>> interval_edges([Interval(0, 30), Interval(30, 100)], 110.0, 0.0)
    [0.0, 35.0, 110.0]
    """
    lengths = [0 if one.left_out else one.stop - one.start for one in intervals]
    gaps = sum(1 for one in intervals if one.left_out)
    # What is left out can be seen, however many intervals there are; boxes have less where they
    # are very many.
    gap = min(_GAP, room / 5)
    least = min(_LEAST_BOX, room / len(intervals) / 2)
    # What is left when each interval has its least is shared by length.
    free = room - gaps * gap - least * (len(intervals) - gaps)
    # A dimension of length 0 is one interval, and still has a place on the page.
    total = sum(lengths)
    shares = [length / total for length in lengths] if total else [1.0]
    sizes = [
        gap if one.left_out else least + free * share
        for one, share in zip(intervals, shares, strict=True)
    ]
    return [begin, *(begin + size for size in itertools.accumulate(sizes))]


def spaced_indices(
    edges: Sequence[float], intervals: Sequence[Interval], room: Callable[[str], float]
) -> list[tuple[float, str]]:
    """Indices at edges: the first, the last, and every second, fourth... as there is room.

    `room` is what a text needs, in the unit of the edges.

    >>> quarters = [Interval(start, start + 1) for start in range(4)]
    >>> spaced_indices([0.0, 10.0, 20.0, 30.0, 40.0], quarters, lambda text: 15)
    [(0.0, '0'), (20.0, '2'), (40.0, '4')]
    """
    texts = [f"{bound:,}" for bound in (intervals[0].start, *(one.stop for one in intervals))]
    last = len(edges) - 1

    def is_apart(a: int, b: int) -> bool:
        return edges[b] - edges[a] >= (room(texts[a]) + room(texts[b])) / 2

    stride = 1
    while stride < last:
        kept = [at for at in range(0, last, stride) if at == 0 or is_apart(at, last)]
        if all(is_apart(a, b) for a, b in itertools.pairwise(kept)):
            return [(edges[at], texts[at]) for at in (*kept, last)]
        stride *= 2
    return [(edges[at], texts[at]) for at in (0, last)]
