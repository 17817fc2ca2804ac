"""Regions of a picture: the ranks that hold each rectangle of two dimensions of a tensor.

1. Along each drawn dimension, the starts and stops of all runs delimit intervals in which no run
   begins or ends. If there are very many, those in the middle are left out.
2. Every pair of parts (of the row dimension and of the column dimension) that cells take covers
   some intervals of each; the ranks of those cells hold these rectangles.
3. Adjacent intervals that are held alike throughout are merged.

::

    4 x 4, elements 0:6 on rank 0, 6:16 on rank 1

        0    2    4
      0   0    0        intervals of rows: 0:1, 1:2, 2:4 (both flat pieces end in row 1)
      1   0    1        intervals of columns: 0:2, 2:4
      2   1    1

The dimensions that are not drawn remain in a holding as a number, which is equal for ranks that
hold the same part of them. `origins` finds the ranks that send the elements of a region.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, HALO, PAD, IntArray, RunTable, distinct

# Pictures of more rows or columns are not readable on a screen or page.
MAX_INTERVALS = 64


class RankHolding(NamedTuple):
    """A rank that holds a rectangle: its part of the other dimensions, and its role."""

    hidden_part: int
    contribution: int
    is_halo: bool
    slot: int


class Interval(Record):
    """Indices `start:stop`; `left_out` is the number of original intervals that are not drawn, or
    0.
    """

    start: int
    stop: int
    left_out: int = 0


Holdings = frozenset[RankHolding]


class RegionGrid(Record):
    """Rectangles and their holders: `holdings[row][column]`.

    `row_dimension` and `column_dimension` are the drawn dimensions; None for a line of boxes or a
    single box. Intervals that are left out have no holdings.
    """

    row_dimension: int | None
    column_dimension: int | None
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    holdings: tuple[tuple[Holdings, ...], ...]

    def limited(self, rows: int, columns: int) -> RegionGrid:
        """Limit the number of drawn rows and columns, by leaving out the middle."""
        kept_rows, row_intervals = _leave_out_middle(self.rows, rows)
        kept_columns, column_intervals = _leave_out_middle(self.columns, columns)
        holdings = tuple(
            tuple(
                self.holdings[r][c] if r is not None and c is not None else frozenset()
                for c in kept_columns
            )
            for r in kept_rows
        )
        return RegionGrid(
            self.row_dimension, self.column_dimension, row_intervals, column_intervals, holdings
        )

    @property
    def leaves_out(self) -> bool:
        """Whether some intervals are not drawn."""
        return any(interval.left_out for interval in (*self.rows, *self.columns))


def drawn_dimensions(layout: Layout, *others: Layout) -> tuple[int | None, int | None]:
    """Return the row and the column dimension of a picture: those with the most intervals.

    Among equals, the longest dimensions are chosen. For several layouts of a tensor, the maximum
    over the layouts counts.

    >>> drawn_dimensions(Layout.replicated((2, 5, 4)))
    (1, 2)
    >>> drawn_dimensions(Layout.replicated((5,)))
    (None, 0)
    """
    pieces = [
        max(len(_edges(each, dimension)) for each in (layout, *others))
        for dimension in range(layout.ndim)
    ]
    order = sorted(range(layout.ndim), key=lambda d: (-pieces[d], -layout.shape[d], d))
    chosen = (None, None, *sorted(order[:2]))
    return chosen[-2], chosen[-1]


def region_grid(
    layout: Layout,
    row_dimension: int | None,
    column_dimension: int | None,
    max_intervals: int = MAX_INTERVALS,
) -> RegionGrid:
    """Return the rectangles of two dimensions of a layout and the ranks that hold them.

    If a dimension has more than `max_intervals` intervals, those in the middle are left out.

    >>> layout = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})
    >>> grid = region_grid(layout, 0, 1)
    >>> [[sorted(h.slot for h in place) for place in row] for row in grid.holdings]
    [[[0], [0]], [[0], [1]], [[1], [1]]]
    """
    rows, row_cover = _cover(layout, row_dimension, max_intervals)
    columns, column_cover = _cover(layout, column_dimension, max_intervals)
    places: list[list[set[RankHolding]]] = [[set() for _ in columns] for _ in rows]
    for (row_part, column_part), holdings in _holdings(
        layout, row_dimension, column_dimension
    ).items():
        for row, row_is_halo in row_cover[row_part].items():
            for column, column_is_halo in column_cover[column_part].items():
                if row_is_halo or column_is_halo:
                    places[row][column].update(h._replace(is_halo=True) for h in holdings)
                else:
                    places[row][column].update(holdings)
    lines = [[_without_own_halos(place) for place in line] for line in places]
    rows, lines = _merge_alike(rows, lines)
    # The columns of the merged rows are merged in the same way, in the transpose.
    turned = [list(line) for line in zip(*lines, strict=True)]
    columns, turned = _merge_alike(columns, turned)
    return RegionGrid(
        row_dimension,
        column_dimension,
        tuple(rows),
        tuple(columns),
        tuple(zip(*turned, strict=True)),
    )


def _without_own_halos(place: set[RankHolding]) -> Holdings:
    """Return the holders without halo copies of ranks that own the rectangle as well."""
    return frozenset(h for h in place if not h.is_halo or h._replace(is_halo=False) not in place)


def _find_used_parts(layout: Layout, dimension: int) -> IntArray:
    return distinct(layout.cell_part[:, dimension])


def _edges(layout: Layout, dimension: int) -> IntArray:
    """Return the bounds of runs in use along a dimension, and its ends; 0, 0 if it is empty."""
    table = layout.tables[dimension]
    runs = table.single_runs()
    runs = runs.take((runs.role != PAD) & np.isin(runs.part, _find_used_parts(layout, dimension)))
    ends = np.array([0, table.dimension_length])
    edges: IntArray = distinct(np.concatenate((ends, runs.start, runs.stop)))
    return edges if len(edges) > 1 else ends


def _cover(
    layout: Layout, dimension: int | None, max_intervals: int
) -> tuple[list[Interval], dict[int, dict[int, bool]]]:
    """Return the intervals of a dimension, and those that each part covers, True for halos."""
    if dimension is None:
        return [Interval(0, 1)], {0: {0: False}}
    edges = _edges(layout, dimension).tolist()
    intervals = [Interval(a, b) for a, b in itertools.pairwise(edges)]
    _, shown = _leave_out_middle(intervals, max_intervals)
    table = layout.tables[dimension]
    starts = np.array([interval.start for interval in shown])
    stops = np.array([interval.stop for interval in shown])
    drawn = np.array([not interval.left_out for interval in shown])
    covers = {
        part: _find_covered(table, part, starts, stops, drawn)
        for part in _find_used_parts(layout, dimension).tolist()
    }
    return list(shown), covers


def _find_covered(
    table: RunTable, part: int, starts: IntArray, stops: IntArray, drawn: NDArray[np.bool_]
) -> dict[int, bool]:
    if table.dimension_length == 0:
        return {0: False}
    runs = table.single_runs()
    # Runs are sorted by part, so the runs of a part are a slice.
    low, high = np.searchsorted(runs.part, (part, part + 1))
    mine = runs.take(slice(int(low), int(high)))
    # Shape (runs, intervals): an interval is inside a run or disjoint, never across its end.
    inside = (mine.start[:, None] <= starts) & (stops <= mine.stop[:, None])
    inside &= (mine.role != PAD)[:, None]
    is_halo = (mine.role == HALO) | (mine.role == FRESH_HALO)
    # An index that the part also owns does not count as a halo.
    owned = (inside & ~is_halo[:, None]).any(axis=0)
    covered = np.flatnonzero(inside.any(axis=0) & drawn)
    return dict(zip(covered.tolist(), (~owned[covered]).tolist(), strict=True))


def _holdings(
    layout: Layout, row_dimension: int | None, column_dimension: int | None
) -> dict[tuple[int, int], set[RankHolding]]:
    """Return the ranks of each pair of parts; cells without elements are left out."""
    drawn = (row_dimension, column_dimension)
    hidden = [d for d in range(layout.ndim) if d not in drawn]
    contents: list[list[object]] = [
        [tuple(layout.tables[d].runs_of(part)) for part in range(layout.tables[d].parts)]
        for d in hidden
    ]
    numbers: dict[tuple[object, ...], int] = {}
    has_elements = 0 not in layout.shape
    holdings: dict[tuple[int, int], set[RankHolding]] = {}
    elements = layout.cell_elements.tolist()
    for cell, parts in enumerate(layout.cell_part.tolist()):
        if has_elements and not elements[cell]:
            continue
        # Parts of the hidden dimensions that have the same runs share a number.
        key = tuple(contents[i][parts[d]] for i, d in enumerate(hidden))
        holding = RankHolding(
            numbers.setdefault(key, len(numbers)),
            int(layout.cell_contribution[cell]),
            False,
            int(layout.cell_slot[cell]),
        )
        row_part, column_part = (0 if d is None else parts[d] for d in drawn)
        holdings.setdefault((row_part, column_part), set()).add(holding)
    return holdings


def _merge_alike(
    intervals: list[Interval], lines: list[list[Holdings]]
) -> tuple[list[Interval], list[list[Holdings]]]:
    merged: list[Interval] = []
    rows: list[list[Holdings]] = []
    for interval, line in zip(intervals, lines, strict=True):
        drawn = merged and not merged[-1].left_out and not interval.left_out
        if drawn and rows[-1] == line:
            merged[-1] = Interval(merged[-1].start, interval.stop)
        else:
            merged.append(interval)
            rows.append(line)
    return merged, rows


def _leave_out_middle(
    intervals: Sequence[Interval], limit: int
) -> tuple[list[int | None], tuple[Interval, ...]]:
    """Return at most `limit` drawn intervals: their positions (None for the gap) and
    the intervals.
    """
    drawn = sum(not interval.left_out for interval in intervals)
    if drawn <= limit:
        positions: list[int | None] = [
            None if interval.left_out else i for i, interval in enumerate(intervals)
        ]
        return positions, tuple(intervals)
    head = (limit + 1) // 2
    tail = len(intervals) - (limit - head)
    for i, interval in enumerate(intervals):
        if interval.left_out:  # The gap grows; there is never a second.
            head, tail = min(head, i), max(tail, i + 1)
    gap = intervals[head:tail]
    count = sum(interval.left_out or 1 for interval in gap)
    shown = (*intervals[:head], Interval(gap[0].start, gap[-1].stop, count), *intervals[tail:])
    return [*range(head), None, *range(tail, len(intervals))], shown


MAX_BOXES = 4096

Place = tuple[int, int]
Origins = Callable[[RegionGrid, Sequence[Place]], list[int]]


def origins(transfers: Transfers) -> Origins | None:
    """Return a function that finds the ranks that send into a region; None if there are too many
    boxes.

    >>> from reshard.layout import Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> from reshard.show.regions import region_grid
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> whole = Layout.replicated((6,), 1)
    >>> origins(LayoutChange(half, whole).transfers)(region_grid(whole, None, 0), [(0, 0)])
    [1]
    """
    moving = transfers.moving
    if len(moving) > MAX_BOXES:
        return None
    stop = moving.start + moving.shape
    # Several sizes of a picture are tried, each with the same rectangles.
    cache: dict[tuple[object, ...], list[int]] = {}

    def into(*sides: tuple[int | None, Interval]) -> list[int]:
        """Return the ranks that send into a rectangle. The receiver of its elements holds it."""
        if sides not in cache:
            # Shape (moving boxes,): those that overlap the rectangle in both drawn dimensions.
            overlaps = np.ones(len(moving), dtype=bool)
            for dimension, interval in sides:
                if dimension is not None:
                    overlaps &= moving.start[:, dimension] < interval.stop
                    overlaps &= stop[:, dimension] > interval.start
            cache[sides] = distinct(moving.source_slot[overlaps]).tolist()
        return cache[sides]

    def senders(grid: RegionGrid, places: Sequence[Place]) -> list[int]:
        ranks: set[int] = set()
        for row, column in places:
            ranks.update(
                into(
                    (grid.row_dimension, grid.rows[row]),
                    (grid.column_dimension, grid.columns[column]),
                )
            )
        return sorted(ranks)

    return senders
