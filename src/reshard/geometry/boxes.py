"""Boxes and runs of indices as columns, and the pairs of them that intersect.

Boxes that form no grid (flat ranges, ragged shards, lists of chunks) are compared by a sweep along
a line, without a table of all pairs:

1. Each box is mapped to an interval of a line, such that boxes that intersect have intervals that
   intersect. A line is a dimension, or the row-major order from a box's first element to its last:
   flat ranges, whose inner dimensions are split anywhere, hardly intersect on it::

       +-------------+
       | 0  0  0 +---|      dimension 1   |-0-----||-1-|     |-1---------|   all intersect
       +---------+ 1 |      |-1-----|
       | 1  1 +------+      row major     |-0-----|-1-|-1---|-2-|-2--|       true pairs only
       +------+ 2  2 |

2. Two intervals intersect exactly if one begins inside the other. With both sides sorted by start,
   the intervals that begin inside an interval are a contiguous range of the other side. So the
   candidates of a line are counted without listing them, and the line with the fewest is chosen.
3. If that has many candidates still, a dimension is split into bands, and the bands are laid end to
   end, each along the next best dimension: a box is an interval of every band that it touches.
4. Candidates are listed in blocks; pairs that intersect in all dimensions are kept.

The parts of a dimension may have several runs each. `intersect_runs` finds the runs that share an
index for given pairs of parts, so the work grows with the pairs that matter: pairs of single runs
are compared directly; otherwise each pair gets a section of a common line, and the sweep finds the
runs that intersect on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.runs import (
    IntArray,
    concatenate,
    distinct,
    ragged_arange,
    ragged_numbers,
    ragged_ranges,
)

# Number of candidates that are compared at a time: columns of 8 MiB.
_BLOCK = 1 << 20
# A larger grid takes longer than a sweep.
_MAX_GRID = 1 << 22
# Bands are tried if there are more candidates per box than this.
_MANY = 8


class Boxes(Record, eq=False):
    """Boxes `start:stop`, both arrays of shape `(dims, boxes)`; none is empty."""

    start: IntArray
    stop: IntArray

    @property
    def count(self) -> int:
        """Number of boxes."""
        return int(self.start.shape[1])


class Intervals:
    """Non-empty intervals of a line.

    Interval `i` belongs to `owner[i]`, or to `i` if `owner` is None.
    """

    def __init__(self, start: IntArray, stop: IntArray, owner: IntArray | None = None) -> None:
        self.start, self.stop = start, stop
        self.by_start: IntArray = np.argsort(start, kind="stable")
        self.owner = owner
        self._rising = start[self.by_start]

    def beginning_inside(self, other: Intervals, after: bool) -> tuple[IntArray, IntArray]:
        """Return for each interval of `other` the range of `by_start` that begins inside it.

        The range is given by its first position and its length. With `after`, intervals that begin
        at the same index are excluded.
        """
        low = np.searchsorted(self._rising, other.start, side="right" if after else "left")
        high = np.searchsorted(self._rising, other.stop, side="left")
        return low, np.maximum(high - low, 0)


def intersect_intervals(first: Intervals, second: Intervals) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the owners of all pairs of intervals that intersect, each pair once, in blocks.

    >>> a = Intervals(np.array([0, 5]), np.array([4, 9]))
    >>> b = Intervals(np.array([3, 4]), np.array([6, 5]))
    >>> [(i.tolist(), j.tolist()) for i, j in intersect_intervals(a, b)]
    [([0], [0]), ([1], [0])]
    """
    # If two intervals intersect, one begins inside the other. Only the first pass finds pairs with
    # equal starts, so that every pair occurs once.
    for outer, inner, after in ((first, second, False), (second, first, True)):
        low, count = inner.beginning_inside(outer, after)
        ends = np.cumsum(count)
        begin = 0
        while begin < len(count):
            # A block has at least a single interval, even if more than `_BLOCK` begin inside it.
            limit = (ends[begin - 1] if begin else 0) + _BLOCK
            end = max(int(np.searchsorted(ends, limit, side="right")), begin + 1)
            block = slice(begin, end)
            begin = end
            over = np.repeat(np.arange(block.start, block.stop), count[block])
            under = inner.by_start[
                np.repeat(low[block], count[block]) + ragged_arange(count[block])
            ]
            if not len(over):
                continue
            over = over if outer.owner is None else outer.owner[over]
            under = under if inner.owner is None else inner.owner[under]
            yield (over, under) if outer is first else (under, over)


def intersect_boxes(
    first: Boxes, second: Boxes, shape: Sequence[int]
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the numbers of all pairs of boxes that intersect, in blocks, in no particular order.

    The boxes are of a tensor of `shape`. If bands are used, a pair may occur more than once.

    >>> a = Boxes(np.array([[0, 1]]), np.array([[1, 4]]))
    >>> b = Boxes(np.array([[0, 2]]), np.array([[2, 4]]))
    >>> [(i.tolist(), j.tolist()) for i, j in intersect_boxes(a, b, (4,))]
    [([0, 1], [0, 1]), ([1], [0])]
    """
    if not first.count or not second.count:
        return
    line = _choose_intervals(first, second, shape)
    for i, j in intersect_intervals(*line):
        # Intersecting on the line is necessary; boxes intersect if they do in every dimension.
        intersects = np.ones(len(i), dtype=bool)
        for d in range(len(shape)):
            intersects &= first.start[d][i] < second.stop[d][j]
            intersects &= second.start[d][j] < first.stop[d][i]
        if not intersects.all():
            i, j = i[intersects], j[intersects]
        if len(i):
            yield i, j


def are_disjoint(start: IntArray, stop: IntArray) -> bool:
    """Return whether boxes `start:stop`, both of shape `(boxes, dims)`, share no element.

    No box may be empty.

    >>> left, right, both = ((0, 0), (2, 1)), ((0, 1), (2, 2)), ((1, 0), (2, 2))
    >>> [are_disjoint(*np.array(pair).swapaxes(0, 1)) for pair in ((left, right), (left, both))]
    [True, False]
    """
    if len(start) < 2:
        return True
    # Most boxes are apart along a single dimension: sorted along it, they do not overlap.
    for dimension in range(start.shape[1]):
        order = np.argsort(start[:, dimension], kind="stable")
        if (start[order[1:], dimension] >= stop[order[:-1], dimension]).all():
            return True
    # Dimensions in which all boxes have the same range do not separate them.
    differ = ((start != start[:1]) | (stop != stop[:1])).any(axis=0)
    if not differ.any():
        return False
    low, high = start[:, differ], stop[:, differ]
    edges = [distinct(np.concatenate(ends)) for ends in zip(low.T, high.T, strict=True)]
    if math.prod(len(edge) + 1 for edge in edges) > max(_MAX_GRID, len(low)):
        boxes = Boxes(np.ascontiguousarray(start.T), np.ascontiguousarray(stop.T))
        pairs = intersect_boxes(boxes, boxes, stop.max(axis=0).tolist())
        # Each box intersects itself.
        return not any((first != second).any() for first, second in pairs)
    # Add 1 at the first corner of a box and subtract it at its ends: the prefix sum counts boxes.
    count = np.zeros([len(edge) + 1 for edge in edges], dtype=np.int64)
    corners = [
        [np.searchsorted(edge, ends) for ends in pair]
        for edge, *pair in zip(edges, low.T, high.T, strict=True)
    ]
    for choice in np.ndindex(*(2,) * len(edges)):
        at = tuple(pair[side] for pair, side in zip(corners, choice, strict=True))
        np.add.at(count, at, (-1) ** sum(choice))
    for d in range(len(edges)):
        count = np.cumsum(count, axis=d)
    return bool((count <= 1).all())


_IntervalSides = tuple[Intervals, Intervals]


def _choose_intervals(first: Boxes, second: Boxes, shape: Sequence[int]) -> _IntervalSides:
    lines: list[_IntervalSides] = []
    # Row-major numbers beyond 64 bits are not supported.
    if math.prod(shape) < 2**62:
        lines.append((_number_row_major(first, shape), _number_row_major(second, shape)))
    dims = [
        (Intervals(first.start[d], first.stop[d]), Intervals(second.start[d], second.stop[d]))
        for d in range(len(shape))
    ]
    lines += dims
    counts = [_count_candidates(line) for line in lines]
    best = min(range(len(lines)), key=counts.__getitem__)
    # If no line separates the boxes well, the two best dimensions together may.
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
    """Return dimension `b`, of length `size`, once for each band of dimension `a`.

    Return None if that makes more than `most` intervals.
    """
    starts = np.sort(np.concatenate((first.start[a], second.start[a])))
    # About as many bands as the square root of the boxes; about as many boxes begin in each.
    edges = distinct(starts[:: math.isqrt(len(starts)) + 1])
    sides = []
    for boxes in (first, second):
        # Each box touches `count` bands, from band `low` on.
        low = np.searchsorted(edges, boxes.start[a], side="right") - 1
        count = np.searchsorted(edges, boxes.stop[a], side="left") - low
        sides.append((boxes, low, count))
    if sum(int(count.sum()) for _, _, count in sides) > most:
        return None
    line = []
    for boxes, low, count in sides:
        owner, band = ragged_numbers(low, count)
        # Band `k` is the section `k * size:(k + 1) * size` of the line, so bands do not intersect.
        base = band * size
        line.append(Intervals(base + boxes.start[b][owner], base + boxes.stop[b][owner], owner))
    return line[0], line[1]


BoolArray = NDArray[np.bool_]


class PartRuns(Record, eq=False):
    """Runs `start:stop` of parts: part `p` has the runs `row[begin[p]:begin[p + 1]]`."""

    begin: IntArray
    row: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, parts: int, part: IntArray, start: IntArray, stop: IntArray) -> PartRuns:
        """Build from columns of the runs, in any order."""
        row = np.argsort(part, kind="stable")
        return cls(np.searchsorted(part[row], np.arange(parts + 1)), row, start, stop)

    @property
    def counts(self) -> IntArray:
        """Number of runs of each part, shape `(parts,)`."""
        return np.diff(self.begin)

    def bounds(self) -> tuple[IntArray, IntArray]:
        """Return the first index of each part and the end of its last run; equal if it has none."""
        low, high = np.zeros((2, len(self.begin) - 1), dtype=np.int64)
        # Parts without runs are excluded: reduceat would return the value of another part.
        filled = np.flatnonzero(self.counts)
        if len(filled):
            low[filled] = np.minimum.reduceat(self.start[self.row], self.begin[filled])
            high[filled] = np.maximum.reduceat(self.stop[self.row], self.begin[filled])
        return low, high

    def has_twice(self, part: IntArray) -> bool:
        """Return whether any of the parts contains an index twice."""
        # A part of a single run cannot contain an index twice. Every run intersects itself.
        part = part[self.counts[part] > 1]
        _, left, right = intersect_runs(self, self, part, part)
        return bool((left != right).any())


def intersect_runs(
    first: PartRuns, second: PartRuns, a: IntArray, b: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the runs that share an index, for pairs of parts `a` of `first` and `b` of `second`.

    The result is columns of the number of the pair, the run of `a` and the run of `b`, in no
    particular order.

    >>> runs = PartRuns.of(2, *(np.array(c) for c in ([0, 1, 0], [0, 3, 5], [4, 6, 9])))
    >>> [column.tolist() for column in intersect_runs(runs, runs, np.array([0]), np.array([1]))]
    [[0, 0], [0, 2], [1, 1]]
    """
    pair = np.arange(len(a))
    of_a, at_a = ragged_ranges(first.begin[a], first.counts[a])
    of_b, at_b = ragged_ranges(second.begin[b], second.counts[b])
    run_a, run_b = first.row[at_a], second.row[at_b]
    if isinstance(of_a, slice) and isinstance(of_b, slice):
        # A single run each: row `i` is pair `i`.
        intersects = (first.start[run_a] < second.stop[run_b]) & (
            second.start[run_b] < first.stop[run_a]
        )
        return pair[intersects], run_a[intersects], run_b[intersects]
    pair_a, pair_b = pair[of_a], pair[of_b]
    # Pair `i` has the section from `i * width` on, so runs of different pairs do not intersect.
    width = max(int(first.stop.max(initial=0)), int(second.stop.max(initial=0)))
    blocks = list(
        intersect_intervals(
            Intervals(pair_a * width + first.start[run_a], pair_a * width + first.stop[run_a]),
            Intervals(pair_b * width + second.start[run_b], pair_b * width + second.stop[run_b]),
        )
    )
    if not blocks:
        return pair[:0], pair[:0], pair[:0]
    left, right = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return pair_a[left], run_a[left], run_b[right]


def share_an_index(first: PartRuns, second: PartRuns, a: IntArray, b: IntArray) -> BoolArray:
    """Return whether the parts of each pair share an index, for parts whose bounds intersect."""
    # Parts of a single run are equal to their bounds, which intersect.
    shares = np.ones(len(a), dtype=bool)
    several = np.flatnonzero((first.counts[a] > 1) | (second.counts[b] > 1))
    if len(several):
        parts = len(second.begin) - 1
        asked = a[several] * parts + b[several]
        # Compare each distinct pair of parts once.
        code = distinct(asked)
        shared = np.zeros(len(code), dtype=bool)
        shared[intersect_runs(first, second, code // parts, code % parts)[0]] = True
        shares[several] = shared[np.searchsorted(code, asked)]
    return shares


# A product of sets of intervals `(start, stop)`: a set for each dimension.
Product = Sequence[Sequence[tuple[int, int]]]


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals, rising, as intervals that neither overlap nor touch.

    >>> merge_intervals([(6, 9), (0, 2), (2, 4), (3, 5)])
    [(0, 5), (6, 9)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def find_edges(products: Iterable[Product]) -> list[IntArray]:
    """Return the ends of all intervals of products in each dimension, rising.

    They divide each dimension into intervals, so a product is a set of cells of a grid.

    >>> [edge.tolist() for edge in find_edges([[[(0, 2)], [(1, 4)]], [[(1, 3)], [(1, 2)]]])]
    [[0, 1, 2, 3], [1, 2, 4]]
    """
    return [
        distinct(np.array(list(itertools.chain.from_iterable(itertools.chain(*sets))), np.int64))
        for sets in zip(*products, strict=True)
    ]


def cover_grid(products: Iterable[Product], edges: Sequence[IntArray]) -> NDArray[np.bool_]:
    """Return which cells of the grid of `edges` are in a product, a dimension for each of theirs.

    >>> products = [[[(0, 2)], [(1, 4)]], [[(1, 3)], [(1, 2)]]]
    >>> cover_grid(products, find_edges(products)).tolist()
    [[True, True], [True, True], [True, False]]
    """
    covered = np.zeros([max(len(edge) - 1, 0) for edge in edges], dtype=bool)
    for product in products:
        cells = [
            concatenate(np.arange(*np.searchsorted(edge, ends)) for ends in intervals)
            for edge, intervals in zip(edges, product, strict=True)
        ]
        # Without dimensions, the grid is a single cell.
        covered[np.ix_(*cells) if cells else ()] = True
    return covered
