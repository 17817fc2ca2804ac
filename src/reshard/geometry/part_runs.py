"""Runs of the parts of one dimension, and those of two parts that share an index.

Parts are asked about in pairs that are given, so that the work grows with the pairs that matter
and not with all there are.

1. Where both parts of every pair have one run, those are compared.
2. Otherwise each pair has a line of its own, one behind another, on which both parts' runs lie;
   runs that meet on it are of one pair (`box_intersections`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.box_intersections import Intervals, intersecting_intervals
from reshard.runs import IntArray, distinct, ragged_ranges

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PartRuns:
    """Runs `start:stop` of parts: part `p` has the runs `row[begin[p]:begin[p + 1]]`."""

    begin: IntArray
    row: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, parts: int, part: IntArray, start: IntArray, stop: IntArray) -> PartRuns:
        """From columns of the runs, in any order."""
        row = np.argsort(part, kind="stable")
        return cls(np.searchsorted(part[row], np.arange(parts + 1)), row, start, stop)

    @property
    def counts(self) -> IntArray:
        """How many runs each part has: shape `(parts,)`."""
        return np.diff(self.begin)

    def hulls(self) -> tuple[IntArray, IntArray]:
        """The first index of each part, and the one behind its last; equal where it has none."""
        low, high = np.zeros((2, len(self.begin) - 1), dtype=np.int64)
        # Parts without runs are left out: reduceat would give them the value of another part.
        some = np.flatnonzero(self.counts)
        if len(some):
            low[some] = np.minimum.reduceat(self.start[self.row], self.begin[some])
            high[some] = np.maximum.reduceat(self.stop[self.row], self.begin[some])
        return low, high

    def has_twice(self, part: IntArray) -> bool:
        """Whether one of the parts has an index twice."""
        part = part[self.counts[part] > 1]
        _, left, right = shared_runs(self, self, part, part)
        return bool((left != right).any())


def shared_runs(
    first: PartRuns, second: PartRuns, a: IntArray, b: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """For pairs of parts, `a` of the first and `b` of the second, the runs that share an index.

    Columns of the number of the pair, the run of `a` and the run of `b`, in no given order.

    >>> runs = PartRuns.of(2, *(np.array(c) for c in ([0, 1, 0], [0, 3, 5], [4, 6, 9])))
    >>> [column.tolist() for column in shared_runs(runs, runs, np.array([0]), np.array([1]))]
    [[0, 0], [0, 2], [1, 1]]
    """
    pair = np.arange(len(a))
    of_a, at_a = ragged_ranges(first.begin[a], first.counts[a])
    of_b, at_b = ragged_ranges(second.begin[b], second.counts[b])
    run_a, run_b = first.row[at_a], second.row[at_b]
    if isinstance(of_a, slice) and isinstance(of_b, slice):
        # One run each: row `i` is pair `i`.
        meet = (first.start[run_a] < second.stop[run_b]) & (second.start[run_b] < first.stop[run_a])
        return pair[meet], run_a[meet], run_b[meet]
    pair_a, pair_b = pair[of_a], pair[of_b]
    # Pair `i` has the stretch from `i * width` on, so runs of different pairs never meet.
    width = max(int(first.stop.max(initial=0)), int(second.stop.max(initial=0)))
    blocks = list(
        intersecting_intervals(
            Intervals(pair_a * width + first.start[run_a], pair_a * width + first.stop[run_a]),
            Intervals(pair_b * width + second.start[run_b], pair_b * width + second.stop[run_b]),
        )
    )
    if not blocks:
        return pair[:0], pair[:0], pair[:0]
    left, right = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return pair_a[left], run_a[left], run_b[right]


def share_an_index(first: PartRuns, second: PartRuns, a: IntArray, b: IntArray) -> BoolArray:
    """Of pairs of parts whose hulls meet, whether the parts share an index."""
    # Parts of one run each are their hulls, and those meet.
    found = np.ones(len(a), dtype=bool)
    many = np.flatnonzero((first.counts[a] > 1) | (second.counts[b] > 1))
    if len(many):
        parts = len(second.begin) - 1
        asked = a[many] * parts + b[many]
        code = distinct(asked)
        shared = np.zeros(len(code), dtype=bool)
        shared[shared_runs(first, second, code // parts, code % parts)[0]] = True
        found[many] = shared[np.searchsorted(code, asked)]
    return found
