"""Sketches: the drawing of a picture in characters.

1. Adjacent rectangles with the same holders are a region of any form; its label is written into the
   largest block of rectangles inside it.
2. Each column is at least as wide as the indices above it and the labels in it require, each row as
   high as its labels. Longer intervals get a multiple of the space of the shortest, if there is
   space.
3. The remaining space is shared in proportion to the lengths, so that the picture is to scale as
   far as letters allow and nothing becomes invisible.

Sizes are *shares*: the characters of an interval and of the line before it.

Lines are stored as strokes from the middle of a character to its four sides, so that crossings and
corners come out right however the lines meet (`Canvas`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from reshard._records import Record
from reshard.show.regions import Interval, Place, RegionGrid
from reshard.text import display_width

# The strokes of a character are the sum of these, its index in the alphabets below.
_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_UNICODE = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
_ASCII = " ||||+++-+++-+++"


class Canvas:
    """A drawing of `width` x `height` characters; everything drawn must be inside.

    >>> canvas = Canvas(7, 3)
    >>> for y in (0, 2):
    ...     canvas.horizontal(y, 0, 6)
    >>> for x in (0, 3, 6):
    ...     canvas.vertical(x, 0, 2)
    >>> canvas.write(1, 1, "a")
    >>> print("\\n".join(canvas.lines(ascii=True)))
    +--+--+
    |a |  |
    +--+--+
    """

    def __init__(self, width: int, height: int) -> None:
        self._strokes = [[0] * width for _ in range(height)]
        # A wide character occupies two cells; the second is empty.
        self._text = [[" "] * width for _ in range(height)]

    def horizontal(self, y: int, left: int, right: int) -> None:
        """Draw a line from `left` to `right`, both included."""
        for x in range(left, right + 1):
            self._strokes[y][x] |= (_LEFT if x > left else 0) | (_RIGHT if x < right else 0)

    def vertical(self, x: int, top: int, bottom: int) -> None:
        """Draw a line from `top` to `bottom`, both included."""
        for y in range(top, bottom + 1):
            self._strokes[y][x] |= (_UP if y > top else 0) | (_DOWN if y < bottom else 0)

    def write(self, y: int, x: int, text: str) -> None:
        """Write text on a line, from column `x` on."""
        for character in text:
            columns = display_width(character)
            # A combining mark belongs to the character before it.
            if columns == 0:
                self._text[y][x - 1] += character
                continue
            self._text[y][x] = character
            for blank in range(x + 1, x + columns):
                self._text[y][blank] = ""
            x += columns

    def lines(self, ascii: bool = False) -> list[str]:
        """Return the drawing, top to bottom, in lines of equal display width."""
        alphabet = _ASCII if ascii else _UNICODE
        return [
            "".join(alphabet[s] if s else t for s, t in zip(strokes, text, strict=True))
            for strokes, text in zip(self._strokes, self._text, strict=True)
        ]


RegionLabel = Callable[[Sequence[Place], int], list[str]]


class SketchRegion(Record):
    """Rectangles held alike: their places, and the block `rows` x `columns` for the label."""

    places: tuple[Place, ...]
    rows: range
    columns: range
    lines: tuple[str, ...]


class Sketch(Record):
    """A grid with its regions and the minimum sizes of rows and columns, ready to be drawn."""

    grid: RegionGrid
    regions: tuple[SketchRegion, ...]
    row_shares: tuple[int, ...]
    column_shares: tuple[int, ...]
    gutter: int
    overhang: int

    @property
    def min_width(self) -> int:
        """The minimum number of columns."""
        return self.gutter + sum(self.column_shares) + 1 + self.overhang

    @property
    def min_height(self) -> int:
        """The minimum number of lines of the boxes."""
        return sum(self.row_shares) + 1

    @property
    def top(self) -> int:
        """Lines above the boxes, for indices."""
        return 0 if self.grid.column_dimension is None else 1

    def draw(self, width: int, height: int, ascii: bool) -> list[str]:
        """Draw it `width` columns wide, with boxes `height` lines high; both at least
        the minimum.
        """
        room = width - 1 - self.gutter - self.overhang
        columns = _positions(self.column_shares, self.grid.columns, room)
        rows = _positions(self.row_shares, self.grid.rows, height - 1)
        top = self.top
        canvas = Canvas(width, height + top)
        x = [self.gutter + position for position in columns]
        y = [top + position for position in rows]
        self._draw_lines(canvas, x, y)
        self._write_indices(canvas, x, y)
        for region in self.regions:
            above, below = y[region.rows.start], y[region.rows.stop]
            left, right = x[region.columns.start], x[region.columns.stop]
            first = above + 1 + (below - above - 1 - len(region.lines)) // 2
            for line, text in enumerate(region.lines):
                free = right - left - 1 - display_width(text)
                canvas.write(first + line, left + 1 + free // 2, text)
        return canvas.lines(ascii)

    def _draw_lines(self, canvas: Canvas, x: list[int], y: list[int]) -> None:
        # Draw a line between places of different regions. Places beyond the edges have no region.
        owner = {place: i for i, region in enumerate(self.regions) for place in region.places}
        for r in range(len(y)):
            for c in range(len(x)):
                here, above, left = (owner.get(p) for p in ((r, c), (r - 1, c), (r, c - 1)))
                if c + 1 < len(x) and here != above:
                    canvas.horizontal(y[r], x[c], x[c + 1])
                if r + 1 < len(y) and here != left:
                    canvas.vertical(x[c], y[r], y[r + 1])

    def _write_indices(self, canvas: Canvas, x: list[int], y: list[int]) -> None:
        if self.grid.row_dimension is not None:
            # Aligned to the right in the gutter, followed by a blank.
            for position, index in zip(y, _bounds(self.grid.rows), strict=True):
                canvas.write(position, self.gutter - 1 - len(str(index)), str(index))
        if self.grid.column_dimension is not None:
            for position, index in zip(x, _bounds(self.grid.columns), strict=True):
                canvas.write(0, position - (len(str(index)) - 1) // 2, str(index))


def sketch(
    grid: RegionGrid, label: RegionLabel, max_label_columns: int, times: int, ellipsis: str
) -> Sketch:
    """Find the regions of a grid, write their labels, and compute the minimum sizes.

    Args:
        grid: the grid to draw.
        label: returns the lines of a label, given the places of a region and a width.
        max_label_columns: the maximum width of a label.
        times: the maximum size of an interval, relative to the shortest.
        ellipsis: the mark for omitted intervals.
    """
    # 1. Regions and their labels.
    regions = [
        SketchRegion(tuple(places), *_largest_block(places), lines=tuple(lines))
        for places, lines in _place_labels(grid, label, max_label_columns, ellipsis)
    ]
    # 2. The minimum size of each row and column: by its length, by the indices at its edges, ...
    column_shares = [_min_share(interval, grid.columns, 4, times) for interval in grid.columns]
    if grid.column_dimension is not None:
        bounds = [len(str(index)) for index in _bounds(grid.columns)]
        for i, (left, right) in enumerate(itertools.pairwise(bounds)):
            # Indices are centred on lines: half of each and a blank must fit between two lines.
            needed = left - (left - 1) // 2 + (right - 1) // 2 + 1
            column_shares[i] = max(column_shares[i], needed)
    row_shares = [_min_share(interval, grid.rows, 2, times) for interval in grid.rows]
    # ... and by the labels; narrow regions first, since their size counts for wider regions too.
    for region in sorted(regions, key=lambda region: len(region.columns)):
        widest = max(map(display_width, region.lines))
        _grow(column_shares, region.columns, widest + 3)
    for region in sorted(regions, key=lambda region: len(region.rows)):
        _grow(row_shares, region.rows, len(region.lines) + 1)
    # 3. The gutter for the indices to the left of the boxes.
    gutter = 0
    if grid.row_dimension is not None:
        gutter = 1 + max(len(str(index)) for index in _bounds(grid.rows))
    last = "" if grid.column_dimension is None else str(grid.columns[-1].stop)
    return Sketch(
        grid, tuple(regions), tuple(row_shares), tuple(column_shares), gutter, len(last) // 2
    )


def _bounds(intervals: Sequence[Interval]) -> list[int]:
    return [intervals[0].start, *(interval.stop for interval in intervals)]


def _min_share(interval: Interval, intervals: Sequence[Interval], unit: int, max_times: int) -> int:
    if interval.left_out:
        return unit
    shortest = min((i.stop - i.start for i in intervals if not i.left_out), default=0)
    if shortest == 0:
        return unit
    times = round((interval.stop - interval.start) / shortest)
    return unit * min(max(times, 1), max_times)


def _place_labels(
    grid: RegionGrid, label: RegionLabel, max_label_columns: int, ellipsis: str
) -> list[tuple[list[Place], list[str]]]:
    """Return the places of each region, and its label."""

    def kind(place: Place) -> object:
        row, column = place
        if grid.rows[row].left_out:
            return ("row", row)
        if grid.columns[column].left_out:
            return ("column", column)
        return grid.holdings[row][column]

    rest = {(r, c) for r in range(len(grid.rows)) for c in range(len(grid.columns))}
    labelled = []
    for first in sorted(rest):
        if first not in rest:
            continue
        rest.remove(first)
        places, waiting = [first], [first]
        # A flood fill: adjacent places held alike belong to the region of the first.
        while waiting:
            row, column = waiting.pop()
            for near in (
                (row - 1, column),
                (row + 1, column),
                (row, column - 1),
                (row, column + 1),
            ):
                if near in rest and kind(near) == kind(first):
                    rest.remove(near)
                    places.append(near)
                    waiting.append(near)
        left_out = grid.rows[first[0]].left_out or grid.columns[first[1]].left_out
        lines = [f"{ellipsis} {left_out:,} more"] if left_out else label(places, max_label_columns)
        labelled.append((places, lines))
    return labelled


def _largest_block(places: Sequence[Place]) -> tuple[range, range]:
    """Return rows and columns of a largest rectangle of places; the widest of several.

    >>> _largest_block([(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)])
    (range(2, 4), range(0, 2))
    """
    inside = set(places)
    best = (range(0), range(0))
    for row, column in sorted(places):
        right = column
        bottom = row
        while (row, right) in inside:
            right += 1
        # Try the longest row that begins here, then shorter rows, each as high as possible.
        while right > column:
            while all((bottom, c) in inside for c in range(column, right)):
                bottom += 1
            block = (range(row, bottom), range(column, right))
            best = max(best, block, key=lambda b: (len(b[0]) * len(b[1]), len(b[1])))
            right -= 1
    return best


def _grow(shares: list[int], span: range, needed: int) -> None:
    """Increase the shares of a span to `needed` in total, the increase spread evenly."""
    missing = needed - sum(shares[i] for i in span)
    for done, i in enumerate(span):
        if missing > 0:
            # Round up the share of the remaining intervals, so that increases differ by at most 1.
            more = -(-missing // (len(span) - done))
            shares[i] += more
            missing -= more


def _positions(shares: Sequence[int], intervals: Sequence[Interval], room: int) -> list[int]:
    """Return the positions of the lines between intervals, sharing `room` characters by length.

    >>> _positions([2, 2, 2], [Interval(0, 10), Interval(10, 20), Interval(20, 21)], 12)
    [0, 5, 10, 12]
    """
    lengths = [0 if interval.left_out else interval.stop - interval.start for interval in intervals]
    # Intervals whose proportional share is below their minimum get the minimum, and the others
    # share the rest, until none is below.
    fixed: set[int] = {i for i, length in enumerate(lengths) if length == 0}
    while True:
        free = room - sum(shares[i] for i in fixed)
        total = sum(length for i, length in enumerate(lengths) if i not in fixed)
        short = {
            i
            for i, length in enumerate(lengths)
            if i not in fixed and free * length < shares[i] * total
        }
        if not short:
            break
        fixed |= short
    sizes = [0] * len(shares)
    passed = 0
    for i, share in enumerate(shares):
        if i in fixed:
            sizes[i] = share
        else:
            # Differences of rounded prefix sums: they add up to `free` without drifting.
            before = free * passed // total
            passed += lengths[i]
            sizes[i] = max(share, free * passed // total - before)
    # The largest interval absorbs the rest, where it is least visible.
    sizes[sizes.index(max(sizes))] += room - sum(sizes)
    positions = [0]
    for size in sizes:
        positions.append(positions[-1] + size)
    return positions
