"""Along one dimension, what does each target part take from each set of source holders?

Both sides are sorted lists of intervals, so their overlap is a merge::

    source   |  A  |  A  |     B     |   C   |
    target   |   0   |    1    |    2        |
    pieces   | 0A  |0A|1A| 1B  |2B |   2C    |   (pieces that continue one another are joined)

1. For each target run, find the stretches of the source that overlap it.
2. Cut both to their common interval: a piece, with where it begins in the target part.
3. Sort the pieces by target part and holder set; each such pair is one unit of the plan,
   and the plan of a whole tensor is the product of its dimensions' pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.planning.holders import DimensionHolders
from reshard.runs import PAD, IntArray, RunTable, ragged_arange


@dataclass(frozen=True)
class Overlap:
    """The pairs (target part, holder set) of one dimension, and their pieces.

    Pairs are sorted by target part, so the pairs of part `p` are
    `part_begin[p]:part_begin[p + 1]`. The pieces of pair `i` are
    `piece_begin[i]:piece_begin[i + 1]`, in the target part's local order.
    """

    holders: DimensionHolders
    pair_part: IntArray
    pair_set: IntArray
    part_begin: IntArray
    piece_begin: IntArray
    start: IntArray
    length: IntArray
    target_local: IntArray
    stretch: IntArray

    @cached_property
    def pair_length(self) -> IntArray:
        """How many indices each pair has: shape `(pairs,)`."""
        total = np.concatenate(([0], np.cumsum(self.length)))
        return total[self.piece_begin[1:]] - total[self.piece_begin[:-1]]


def find_overlap(holders: DimensionHolders, target: RunTable) -> Overlap:
    """What each part of `target` takes from each holder set."""
    runs = target.single_runs()
    runs = runs.take(runs.role != PAD)
    # Stretches may overlap and nest, so the first that can reach a run is found by the
    # furthest stop so far, and what does not reach it after all is dropped.
    reach = np.maximum.accumulate(holders.stop) if len(holders.stop) else holders.stop
    low = np.searchsorted(reach, runs.start, side="right")
    count = np.maximum(np.searchsorted(holders.start, runs.stop, side="left") - low, 0)
    run = np.repeat(np.arange(len(count)), count)
    stretch = np.repeat(low, count) + ragged_arange(count)
    start = np.maximum(holders.start[stretch], runs.start[run])
    length = np.minimum(holders.stop[stretch], runs.stop[run]) - start
    real = length > 0
    run, stretch, start, length = run[real], stretch[real], start[real], length[real]
    part, holder_set = runs.part[run], holders.holder_set[stretch]
    target_local = runs.local_start[run] + start - runs.start[run]
    order = np.lexsort((target_local, holder_set, part))
    part, holder_set = part[order], holder_set[order]
    new = np.append(True, (np.diff(part) != 0) | (np.diff(holder_set) != 0))[: len(part)]
    first = np.flatnonzero(new)
    return Overlap(
        holders,
        part[first],
        holder_set[first],
        np.searchsorted(part[first], np.arange(target.parts + 1)),
        np.append(first, len(part)),
        start[order],
        length[order],
        target_local[order],
        stretch[order],
    )
