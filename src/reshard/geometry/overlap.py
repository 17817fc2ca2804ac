"""Overlap of source and target, per dimension and, for layouts that are not a grid, per cell.

*Along a dimension*, both sides are sorted lists of intervals, so their overlap is a merge::

    source   |  A  |  A  |     B     |   C   |
    target   |   0   |    1    |    2        |
    pieces   | 0A  |0A|1A| 1B  |2B |   2C    |   (consecutive pieces are joined)

1. For each target run, find the stretches of the source that overlap it.
2. Intersect both: a piece, and its offset in the target part.
3. Sort the pieces by target part and holder set. Each such pair is a unit of the plan, and the plan
   of a tensor is the product of the pairs of its dimensions.

*Cells that form a grid* overlap as this product specifies. For other sources the cells are compared
(`find_key_intersections`):

1. Target cells that are replicas of each other overlap the same keys, so only the first is
   compared.
2. The bounding box of a cell extends from its first to its last index in each dimension, with its
   contribution as a further dimension. Cells can overlap only if their bounding boxes intersect.
3. The runs are compared only for the parts of cells whose bounding boxes intersect. Cells overlap
   if their parts share an index in every dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from reshard._records import Record
from reshard.geometry.boxes import PartRuns, intersect_boxes, intersect_runs
from reshard.geometry.holders import (
    DimensionHolders,
    bounding_boxes,
    find_holders,
    find_in,
    find_replicas,
)
from reshard.layout import Layout
from reshard.runs import (
    PAD,
    IntArray,
    RunTable,
    SingleRuns,
    distinct,
    find_distinct,
    ragged_arange,
    ragged_numbers,
    ragged_rows,
)


class RoutePieces(Record, eq=False):
    """The pieces of routes along a dimension.

    Route `i` has the pieces `begin[i]:begin[i] + count[i]`.
    """

    begin: IntArray
    count: IntArray
    start: IntArray
    length: IntArray
    source_local: IntArray
    target_local: IntArray

    def rows(self, route: int) -> slice:
        """Return the slice of the columns with the pieces of a route."""
        begin = int(self.begin[route])
        return slice(begin, begin + int(self.count[route]))

    def of(self, unit: IntArray) -> RoutePieces:
        """Return the pieces of other routes: route `i` has the pieces of route `unit[i]`."""
        return RoutePieces(
            self.begin[unit],
            self.count[unit],
            self.start,
            self.length,
            self.source_local,
            self.target_local,
        )


class SharedPieces(Record, eq=False):
    """The pieces of every pair, divided equally for all of its holders.

    Pieces that are consecutive for all holders are joined. Pair `i` has the pieces
    `begin[i]:begin[i + 1]`; `entry` is the offset of each in the columns of the overlap.
    """

    begin: IntArray
    start: IntArray
    length: IntArray
    target_local: IntArray
    entry: IntArray


class Overlap(Record):
    """The pairs (target part, holder set) of a dimension, and their pieces.

    Pairs are sorted by target part, so the pairs of part `p` are `part_begin[p]:part_begin[p + 1]`.
    The pieces of pair `i` are `piece_begin[i]:piece_begin[i + 1]`, in the local order of the target
    part.
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
        """Number of indices of each pair, shape `(pairs,)`."""
        total = np.concatenate(([0], np.cumsum(self.length)))
        return total[self.piece_begin[1:]] - total[self.piece_begin[:-1]]

    def pieces(self, pair: IntArray, source_part: IntArray) -> RoutePieces:
        """Return the pieces of pairs taken from chosen source parts.

        Route `i` has the pieces of `pair[i]` in `source_part[i]`. Consecutive pieces are joined.
        """
        if self.holders.is_single:
            return self._pieces_of_pairs.of(pair)
        parts = self.holders.parts
        # Routes with the same pair and source part share their pieces.
        units, _, of_route = find_distinct(pair * parts + source_part)
        pieces = self._join_pieces(units // parts, units % parts)
        return pieces.of(of_route)

    @cached_property
    def _pieces_of_pairs(self) -> RoutePieces:
        """The pieces of every pair, if each holder set is a single part."""
        return self._join_pieces(np.arange(len(self.pair_set)), self.pair_set)

    @cached_property
    def shared_pieces(self) -> SharedPieces:
        """The pieces of every pair, for any of its holders."""
        pairs = np.arange(len(self.pair_set))
        begin = self.piece_begin
        pair = np.repeat(pairs, np.diff(begin))
        # Each piece with each part that holds it; the rows of the next piece follow in the same
        # order.
        count = np.diff(self.holders.set_begin)[self.pair_set[pair]]
        piece, member = ragged_rows(self.holders.set_begin, self.pair_set[pair])
        part = self.holders.set_part[member]
        local = self.source_local(piece, part)
        row = np.flatnonzero(np.append(np.diff(pair) == 0, False)[piece])
        following = row + count[piece[row]]
        # Pieces are joined only if they are adjacent in the memory of every holder.
        breaks = local[row] + self.length[piece[row]] != local[following]
        follows = (
            (np.diff(pair) == 0)
            & (self.start[:-1] + self.length[:-1] == self.start[1:])
            & (self.target_local[:-1] + self.length[:-1] == self.target_local[1:])
        )
        follows[piece[row[breaks]]] = False
        entry = np.flatnonzero(np.append(True, ~follows)[: len(pair)])
        total = np.append(0, np.cumsum(self.length))
        length = np.diff(total[np.append(entry, len(pair))])
        return SharedPieces(
            np.searchsorted(entry, begin),
            self.start[entry],
            length,
            self.target_local[entry],
            entry,
        )

    def source_local(self, entry: IntArray, source_part: IntArray) -> IntArray:
        """Return the offset of the piece of each entry in the local order of a part
        that holds it.
        """
        stretch = self.stretch[entry]
        inside = self.start[entry] - self.holders.start[stretch]
        return self.holders.local_start(stretch, source_part) + inside

    def _join_pieces(self, pair: IntArray, source_part: IntArray) -> RoutePieces:
        # A row for each piece of each given pair: the numbers of the pair and of the piece.
        unit, piece = ragged_rows(self.piece_begin, pair)
        start, length = self.start[piece], self.length[piece]
        target_local, stretch = self.target_local[piece], self.stretch[piece]
        source_local = self.holders.local_start(stretch, source_part[unit])
        source_local = source_local + start - self.holders.start[stretch]
        # Joined if they are adjacent in the tensor and in both local arrays.
        follows = (
            (np.diff(unit) == 0)
            & (start[:-1] + length[:-1] == start[1:])
            & (target_local[:-1] + length[:-1] == target_local[1:])
            & (source_local[:-1] + length[:-1] == source_local[1:])
        )
        if follows.any():
            first = np.flatnonzero(np.append(True, ~follows))
            length = np.add.reduceat(length, first)
            unit, start = unit[first], start[first]
            source_local, target_local = source_local[first], target_local[first]
        begin = np.searchsorted(unit, np.arange(len(pair) + 1))
        return RoutePieces(begin[:-1], np.diff(begin), start, length, source_local, target_local)


# The tensors of all layers are sharded alike, wherever the layers are.
@lru_cache(maxsize=128)
def find_overlap(holders: DimensionHolders, target: RunTable) -> Overlap:
    """Return the overlap of the parts of `target` and the holder sets of a source."""
    runs = _find_runs(target)
    # Stretches may overlap and nest. The first candidate for a run is found by the furthest stop
    # so far; candidates that do not reach the run are dropped later.
    reach = np.maximum.accumulate(holders.stop) if len(holders.stop) else holders.stop
    low = np.searchsorted(reach, runs.start, side="right")
    count = np.maximum(np.searchsorted(holders.start, runs.stop, side="left") - low, 0)
    run, stretch = ragged_numbers(low, count)
    return _build_overlap(holders, target.parts, runs, run, stretch)


def overlap_of_pairs(
    holders: DimensionHolders, target: RunTable, part: IntArray, source_part: IntArray
) -> Overlap:
    """Return the overlap of given pairs of a target part and a source part.

    The pairs may be in any order and repeated. Each holder set must be a single part.
    """
    pair = distinct(part * holders.parts + source_part)
    part, source_part = pair // holders.parts, pair % holders.parts
    runs = _find_runs(target)
    _, run, stretch = intersect_runs(wanted_runs(target), holders.part_runs, part, source_part)
    return _build_overlap(holders, target.parts, runs, run, stretch)


def wanted_runs(target: RunTable) -> PartRuns:
    """Return the runs of each part of a target, without padding."""
    runs = _find_runs(target)
    return PartRuns.of(target.parts, runs.part, runs.start, runs.stop)


def _find_runs(target: RunTable) -> SingleRuns:
    runs = target.single_runs()
    return runs.take(runs.role != PAD)


def _build_overlap(
    holders: DimensionHolders, parts: int, runs: SingleRuns, run: IntArray, stretch: IntArray
) -> Overlap:
    """Return the overlap of `parts` target parts, from candidate pairs of runs and stretches."""
    start = np.maximum(holders.start[stretch], runs.start[run])
    length = np.minimum(holders.stop[stretch], runs.stop[run]) - start
    real = length > 0
    run, stretch, start, length = run[real], stretch[real], start[real], length[real]
    part, holder_set = runs.part[run], holders.holder_set[stretch]
    target_local = runs.local_start[run] + start - runs.start[run]
    # By target part, then holder set, then local offset (the last key of lexsort is primary):
    # the pieces of a pair are contiguous and in order.
    order = np.lexsort((target_local, holder_set, part))
    part, holder_set = part[order], holder_set[order]
    new = np.append(True, (np.diff(part) != 0) | (np.diff(holder_set) != 0))[: len(part)]
    first = np.flatnonzero(new)
    return Overlap(
        holders,
        part[first],
        holder_set[first],
        np.searchsorted(part[first], np.arange(parts + 1)),
        np.append(first, len(part)),
        start[order],
        length[order],
        target_local[order],
        stretch[order],
    )


def list_combined(
    combines: Sequence[Sequence[int]], carried: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """List the source contributions that target cells combine, a row for each.

    Args:
        combines: for each target contribution, the source contributions it combines.
        carried: the contribution of each target cell, shape `(cells,)`.

    Returns:
        Columns: the position of the cell in `carried`, the position of the source contribution
        among those combined, and the source contribution.

    >>> [column.tolist() for column in list_combined(((0, 2), (1,)), np.array([1, 0]))]
    [[0, 1, 1], [0, 0, 1], [1, 0, 2]]
    """
    counts = np.array([len(sources) for sources in combines], dtype=np.int64)
    first = np.cumsum(counts) - counts
    flat = np.array([source for sources in combines for source in sources], dtype=np.int64)
    row = np.repeat(np.arange(len(carried)), counts[carried])
    order = ragged_arange(counts[carried])
    return row, order, flat[first[carried][row] + order]


@lru_cache(maxsize=128)
def find_key_intersections(
    source: Layout, target: Layout, combines: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Overlap, ...], IntArray, IntArray, IntArray, IntArray, tuple[IntArray, ...]]:
    """Return the keys that the cells of `target` overlap.

    No element of the source may have two keys. `combines[c]` are the source contributions that
    target contribution `c` combines.

    Returns:
        The overlaps, `of_cell`, `begin`, and columns of the order, the contribution, and the pair
        in each dimension of each key. Cell `c` has the rows
        `begin[of_cell[c]]:begin[of_cell[c] + 1]`, in the order of contributions and source keys.
    """
    holders = find_holders(source)
    copies = find_replicas(target.placement, apart=True)
    of_cell = np.empty(target.cells, dtype=np.int64)
    of_cell[copies.cells] = np.repeat(np.arange(copies.keys), np.diff(copies.begin))
    # A row for each contribution that a target key combines.
    target_key, order, contribution = list_combined(
        combines, target.cell_contribution[copies.first]
    )
    source_part = source.cell_part[holders.copies.first]
    target_part = target.cell_part[copies.first]
    held_boxes, held_key = bounding_boxes(
        source,
        source.cell_contribution[holders.copies.first],
        source_part,
        [dimension.part_runs for dimension in holders.dimensions],
    )
    needed_boxes, needed_row = bounding_boxes(
        target, contribution, target_part[target_key], [wanted_runs(t) for t in target.tables]
    )
    shape = (source.contributions, *source.shape)
    # Every pair once, by row and key.
    code = [i * held_boxes.count + j for i, j in intersect_boxes(needed_boxes, held_boxes, shape)]
    code_met = distinct(np.concatenate(code)) if code else order[:0]
    row, key = needed_row[code_met // held_boxes.count], held_key[code_met % held_boxes.count]
    overlaps: list[Overlap] = []
    pairs: list[IntArray] = []
    for d, (dimension, table) in enumerate(zip(holders.dimensions, target.tables, strict=True)):
        part, held = target_part[target_key[row], d], source_part[key, d]
        overlap = overlap_of_pairs(dimension, table, part, held)
        # Bounding boxes may intersect although the parts share no index: such rows are dropped.
        pair_codes = overlap.pair_part * dimension.sets + overlap.pair_set
        pair, is_present = find_in(pair_codes, part * dimension.sets + held)
        if not is_present.all():
            row, key, pair = row[is_present], key[is_present], pair[is_present]
            pairs = [column[is_present] for column in pairs]
        overlaps.append(overlap)
        pairs.append(pair)
    begin = np.searchsorted(target_key[row], np.arange(copies.keys + 1))
    return tuple(overlaps), of_cell, begin, order[row], contribution[row], tuple(pairs)
