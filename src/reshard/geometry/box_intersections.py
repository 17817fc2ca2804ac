"""Intersections of two lists of boxes: which share an element with which.

Boxes that form no grid (flat ranges, ragged shards, chunk lists) are compared on a line:

1. Each box is an interval of a line, such that boxes that meet have intervals that meet. One
   line is a dimension. Another is the row-major order, from a box's first element to its last:
   flat ranges, whose inner dimensions are cut anywhere, hardly meet on it::

       +-------------+
       | 0  0  0 +---|      dimension 1   |-0-----||-1-|     |-1---------|   all meet all
       +---------+ 1 |      |-1-----|
       | 1  1 +------+      row major     |-0-----|-1-|-1---|-2-|-2--|       only true ones
       +------+ 2  2 |

2. Two intervals meet exactly where one begins inside the other. With both sides sorted by where
   they begin, those that begin inside an interval are a stretch of the other side. So the
   candidates of a line are counted without listing them, and the line with the fewest is taken.
3. Where that has many still, one dimension is cut into bands and the bands are laid end to end,
   each with the next best dimension: a box is an interval of every band that it touches.
4. Candidates are listed block by block, and those that meet in all dimensions are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.runs import IntArray, ragged_arange

# The most candidates that are compared at a time: columns of 8 MiB.
_BLOCK = 1 << 20
# Bands are tried where there are more candidates for a box than this.
_MANY = 8


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes `start:stop`, both of shape `(dims, boxes)`, none of them empty."""

    start: IntArray
    stop: IntArray

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return int(self.start.shape[1])


class Intervals:
    """Intervals of a line, none empty. Interval `i` belongs to `owner[i]`; itself when None."""

    def __init__(self, start: IntArray, stop: IntArray, owner: IntArray | None = None) -> None:
        self.start, self.stop = start, stop
        self.by_start: IntArray = np.argsort(start, kind="stable")
        self.owner = owner
        self._rising = start[self.by_start]

    def beginning_inside(self, other: Intervals, after: bool) -> tuple[IntArray, IntArray]:
        """For each interval of `other` the stretch of `by_start` that begins inside it, as its
        first and its length; with `after`, without those that begin where it begins.
        """
        low = np.searchsorted(self._rising, other.start, side="right" if after else "left")
        high = np.searchsorted(self._rising, other.stop, side="left")
        return low, np.maximum(high - low, 0)


def intersecting_intervals(
    first: Intervals, second: Intervals
) -> Iterator[tuple[IntArray, IntArray]]:
    """The owners of all intervals that meet, each pair of intervals once, in blocks.

    >>> a = Intervals(np.array([0, 5]), np.array([4, 9]))
    >>> b = Intervals(np.array([3, 4]), np.array([6, 5]))
    >>> [(i.tolist(), j.tolist()) for i, j in intersecting_intervals(a, b)]
    [([0], [0]), ([1], [0])]
    """
    # Of two intervals that meet one begins inside the other. Where both begin at once, only the
    # first pass counts them, so that every pair comes once.
    for outer, inner, after in ((first, second, False), (second, first, True)):
        low, count = inner.beginning_inside(outer, after)
        ends = np.cumsum(count)
        begin = 0
        while begin < len(count):
            # At least one interval a block, however many begin inside it.
            limit = (ends[begin - 1] if begin else 0) + _BLOCK
            end = max(int(np.searchsorted(ends, limit, side="right")), begin + 1)
            some = slice(begin, end)
            begin = end
            over = np.repeat(np.arange(some.start, some.stop), count[some])
            under = inner.by_start[np.repeat(low[some], count[some]) + ragged_arange(count[some])]
            if not len(over):
                continue
            over = over if outer.owner is None else outer.owner[over]
            under = under if inner.owner is None else inner.owner[under]
            yield (over, under) if outer is first else (under, over)


def intersecting_boxes(
    first: Boxes, second: Boxes, shape: Sequence[int]
) -> Iterator[tuple[IntArray, IntArray]]:
    """The numbers of boxes of a tensor of `shape` that meet, in blocks, in no given order.

    Where bands are taken a pair may come more than once.

    >>> a = Boxes(np.array([[0, 1]]), np.array([[1, 4]]))
    >>> b = Boxes(np.array([[0, 2]]), np.array([[2, 4]]))
    >>> [(i.tolist(), j.tolist()) for i, j in intersecting_boxes(a, b, (4,))]
    [([0, 1], [0, 1]), ([1], [0])]
    """
    if not first.count or not second.count:
        return
    line = _choose_intervals(first, second, shape)
    for i, j in intersecting_intervals(*line):
        # Meeting on the line is necessary; boxes meet where they do in every dimension.
        meet = np.ones(len(i), dtype=bool)
        for d in range(len(shape)):
            meet &= first.start[d][i] < second.stop[d][j]
            meet &= second.start[d][j] < first.stop[d][i]
        if not meet.all():
            i, j = i[meet], j[meet]
        if len(i):
            yield i, j


_IntervalSides = tuple[Intervals, Intervals]


def _choose_intervals(first: Boxes, second: Boxes, shape: Sequence[int]) -> _IntervalSides:
    lines: list[_IntervalSides] = []
    # Numbers of elements that outgrow 64 bits have no line.
    if math.prod(shape) < 2**62:
        lines.append((_number_row_major(first, shape), _number_row_major(second, shape)))
    dims = [
        (Intervals(first.start[d], first.stop[d]), Intervals(second.start[d], second.stop[d]))
        for d in range(len(shape))
    ]
    lines += dims
    counts = [_count_candidates(line) for line in lines]
    best = min(range(len(lines)), key=counts.__getitem__)
    # No line separates the boxes well: the two best dimensions together may.
    if counts[best] > _MANY * (first.count + second.count) and len(dims) > 1:
        of_dims = counts[len(counts) - len(dims) :]
        a, b = sorted(range(len(dims)), key=of_dims.__getitem__)[:2]
        banded = _cut_into_bands(first, second, a, b, shape[b], counts[best])
        if banded is not None and _count_candidates(banded) < counts[best]:
            return banded
    return lines[best]


def _count_candidates(line: _IntervalSides) -> int:
    first, second = line
    (_, inside), (_, around) = (
        second.beginning_inside(first, after=False),
        first.beginning_inside(second, after=True),
    )
    return int(inside.sum()) + int(around.sum())


def _number_row_major(boxes: Boxes, shape: Sequence[int]) -> Intervals:
    start, last = np.zeros((2, boxes.count), dtype=np.int64)
    for d, size in enumerate(shape):
        # Horner's scheme: the row-major numbers of each box's first and last element.
        start = start * size + boxes.start[d]
        last = last * size + boxes.stop[d] - 1
    return Intervals(start, last + 1)


def _cut_into_bands(
    first: Boxes, second: Boxes, a: int, b: int, size: int, most: int
) -> _IntervalSides | None:
    """Dimension `b`, of length `size`, once for each band of dimension `a`; None where that is
    more than `most` intervals.
    """
    starts = np.sort(np.concatenate((first.start[a], second.start[a])))
    # About as many bands as the root of the boxes, and in each about as many boxes begin.
    edges = np.unique(starts[:: math.isqrt(len(starts)) + 1])
    sides = []
    for boxes in (first, second):
        low = np.searchsorted(edges, boxes.start[a], side="right") - 1
        count = np.searchsorted(edges, boxes.stop[a], side="left") - low
        sides.append((boxes, low, count))
    if sum(int(count.sum()) for _, _, count in sides) > most:
        return None
    line = []
    for boxes, low, count in sides:
        owner = np.repeat(np.arange(boxes.count), count)
        # Band `k` is the stretch `k * size:(k + 1) * size` of the line, so bands never meet.
        base = (np.repeat(low, count) + ragged_arange(count)) * size
        line.append(Intervals(base + boxes.start[b][owner], base + boxes.stop[b][owner], owner))
    return line[0], line[1]
