"""Pictures of layouts in colour, as SVG: which rank holds which part of a tensor.

1. The regions are the same as in text pictures (`regions`, `sketch`): boxes held alike are merged.
2. Rows and columns are to scale; if there are few, none is too small to see.
3. A box has the colours of all its holders, in slanting stripes that no split resembles, and its
   label where it fits. If the boxes of a line are too thin, a label covers several.
4. A labelled gap replaces intervals in the middle, if there are too many.

The `title` of a box, which a browser shows under the pointer, has its indices and its holders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from reshard.layout import Layout
from reshard.show.labels import holders_text, label_lines, shorter_texts
from reshard.show.regions import Holdings, Interval, Origins, Place, RegionGrid, region_grid
from reshard.show.sketch import SketchRegion, sketch
from reshard.show.svg import element, escaped, ink_on
from reshard.text import count_text, rank_text

# Pixels of the gap for omitted intervals, enough for its label, and of the smallest box.
_GAP, _MIN_BOX = 82.0, 5.0


def interval_edges(intervals: Sequence[Interval], room: float, begin: float) -> list[float]:
    """Return the edges of intervals on the page: to scale, but none too small to see.

    >>> interval_edges([Interval(0, 30), Interval(30, 100)], 110.0, 0.0)
    [0.0, 35.0, 110.0]
    """
    lengths = [0 if interval.left_out else interval.stop - interval.start for interval in intervals]
    gaps = sum(1 for interval in intervals if interval.left_out)
    # The gap is visible, however many intervals there are; boxes shrink if there are very many.
    gap = min(_GAP, room / 5)
    least = min(_MIN_BOX, room / len(intervals) / 2)
    # The space beyond the minimum of each interval is shared by length.
    free = room - gaps * gap - least * (len(intervals) - gaps)
    # A dimension of length 0 is an interval that is still drawn.
    total = sum(lengths)
    shares = [length / total for length in lengths] if total else [1.0]
    sizes = [
        gap if interval.left_out else least + free * share
        for interval, share in zip(intervals, shares, strict=True)
    ]
    return [begin, *(begin + size for size in itertools.accumulate(sizes))]


def spaced_indices(
    edges: Sequence[float], intervals: Sequence[Interval], room: Callable[[str], float]
) -> list[tuple[float, str]]:
    """Return indices at edges: the first, the last, and every second, fourth... as space permits.

    `room` returns the space that a text needs, in the unit of the edges.

    >>> quarters = [Interval(start, start + 1) for start in range(4)]
    >>> spaced_indices([0.0, 10.0, 20.0, 30.0, 40.0], quarters, lambda text: 15)
    [(0.0, '0'), (20.0, '2'), (40.0, '4')]
    """
    texts = [
        f"{bound:,}" for bound in (intervals[0].start, *(interval.stop for interval in intervals))
    ]
    last = len(edges) - 1

    def is_apart(a: int, b: int) -> bool:
        return edges[b] - edges[a] >= (room(texts[a]) + room(texts[b])) / 2

    stride = 1
    while stride < last:
        shown = [at for at in range(0, last, stride) if at == 0 or is_apart(at, last)]
        if all(is_apart(a, b) for a, b in itertools.pairwise(shown)):
            return [(edges[at], texts[at]) for at in (*shown, last)]
        stride *= 2
    return [(edges[at], texts[at]) for at in (0, last)]


# Pixels of a picture, and of the row of a one-dimensional tensor.
_WIDTH, _MIN_HEIGHT, _MAX_HEIGHT, _LINE_HEIGHT = 440.0, 130.0, 400.0, 72.0
_MAX_INTERVALS, _MAX_BOXES = 512, 4096
# Pixels of a letter of a label, of a letter of its further lines, and of a line of text.
_LETTER, _SMALL_LETTER, _LINE = 7.3, 6.1, 15.0
# Maximum number of stripes of a box, and the pixels of a stripe along the edge of a large box.
_MAX_STRIPES, _STRIPE = 16, 18.0
# Number of labels of a row of thin boxes, the pixels below which boxes are thin, and below which
# they are thin if no label fits.
_PARTS, _THIN, _NARROW = 6, 8.0, 24.0


def svg_picture(
    layout: Layout,
    colours: Mapping[int, str],
    name: str,
    *,
    dimensions: tuple[int | None, int | None],
    origins: Origins | None = None,
) -> tuple[str, RegionGrid, bool]:
    """Return a picture of a layout in the colours of its ranks.

    Return an `svg` element, its grid, and whether some boxes have stripes.

    Args:
        layout: the layout to draw.
        colours: of every rank that holds cells.
        name: of the picture, for the identifiers inside it and, up to its first `-`, for its text
            alternative; letters, digits and `-`, distinct for each picture of a page.
        dimensions: the row and the column dimension, see `regions.drawn_dimensions`.
        origins: of the plan that leads to this layout.

    >>> svg, _, _ = svg_picture(Layout.replicated((2, 3), 2), {0: "#0072b2", 1: "#e69f00"}, "after",
    ...     dimensions=(0, 1))
    >>> svg.count("<path"), "ranks 0,1 hold [0:2, 0:3]" in svg
    (2, True)
    """
    return _Drawing(layout, colours, name, dimensions, origins).picture()


class _Drawing:
    """The geometry of a picture."""

    def __init__(
        self,
        layout: Layout,
        colours: Mapping[int, str],
        name: str,
        dimensions: tuple[int | None, int | None],
        origins: Origins | None,
    ) -> None:
        self.layout, self.colours, self.name, self.origins = layout, colours, name, origins
        self.word = name.partition("-")[0]
        self.grid = _limit_boxes(region_grid(layout, *dimensions, _MAX_INTERVALS))
        rows, columns = self.grid.rows, self.grid.columns
        self.left = 12.0
        if self.grid.row_dimension is not None:
            self.left = 10 + _SMALL_LETTER * max(len(f"{row.stop:,}") for row in rows)
        self.top = 0.0 if self.grid.column_dimension is None else 18.0
        self.x = interval_edges(columns, _WIDTH, self.left)
        self.y = interval_edges(rows, self._height(), self.top)
        # The period of the stripes of boxes that several ranks hold.
        self.periods: dict[tuple[int, ...], float] = {}

    def _height(self) -> float:
        """Return the height in proportion to the tensor's shape, within the limits of a page."""
        row, column = self.grid.row_dimension, self.grid.column_dimension
        if row is None or column is None:
            return _LINE_HEIGHT
        across = max(self.layout.shape[column], 1)
        proportional = _WIDTH * self.layout.shape[row] / across
        return min(max(proportional, _MIN_HEIGHT), _MAX_HEIGHT)

    def picture(self) -> tuple[str, RegionGrid, bool]:
        # Labels are of any width here: `_labels` shortens or omits those that do not fit.
        drawn = sketch(self.grid, self._label, 10**6, 1, "…")
        boxes = [self._box(region) for region in drawn.regions]
        labels = self._labels(drawn.regions)
        width = self.x[-1] + 4
        if self.grid.column_dimension is not None:
            width += _SMALL_LETTER * len(f"{self.grid.columns[-1].stop:,}") / 2
        height = self.y[-1] + 6
        shape = "x".join(map(str, self.layout.shape)) or "no dimension"
        title = f"{count_text(len(boxes), 'box', 'boxes')} of a tensor of {shape}, {self.word}"
        svg = element(
            "svg",
            element("title", escaped(title)),
            element("defs", *(self._gradient(*item) for item in self.periods.items())),
            *boxes,
            self._borders(drawn.regions),
            *labels,
            *self._indices(),
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            width=round(width),
            height=round(height),
            role="img",
            class_="picture",
        )
        return svg, self.grid, bool(self.periods)

    def _label(self, places: Sequence[Place], width: int) -> list[str]:
        """Return the holders of a region, and the origins of its elements, on a line each."""
        row, column = places[0]
        holdings = self.grid.holdings[row][column]
        lines = label_lines(holdings, (), width)
        senders = self.origins(self.grid, places) if self.origins and holdings else []
        return [*lines, *([f"← {rank_text(senders)}"] if senders else [])]

    def _box(self, region: SketchRegion) -> str:
        row, column = region.places[0]
        holdings = self.grid.holdings[row][column]
        left_out = self._is_left_out(region)
        kind = "left-out" if left_out else "box" if holdings else "empty"
        return element(
            "path",
            element("title", escaped(self._title(region, holdings, left_out))),
            d=self._outline(region.places),
            class_=kind,
            fill=None if kind != "box" else self._fill(region, holdings),
        )

    def _title(self, region: SketchRegion, holdings: Holdings, is_left_out: bool) -> str:
        if is_left_out:
            return f"not drawn: {region.lines[0]}"
        where = f"[{self._span(region.places)}]"
        # A region may have any form, so the rectangle around it may contain others.
        if len(region.places) != len({r for r, _ in region.places}) * len(
            {c for _, c in region.places}
        ):
            where = f"parts of {where}"
        if not holdings:
            return f"nobody holds {where}"
        ranks = {holding.slot for holding in holdings}
        subject = "rank {} holds" if len(ranks) == 1 else "ranks {} hold"
        come = f", {region.lines[1]}" if len(region.lines) > 1 else ""
        return f"{subject.format(holders_text(holdings))} {where}{come}"

    def _span(self, places: Sequence[Place]) -> str:
        spans = []
        for axis, (dimension, intervals) in enumerate(
            (
                (self.grid.row_dimension, self.grid.rows),
                (self.grid.column_dimension, self.grid.columns),
            )
        ):
            if dimension is not None:
                used = [place[axis] for place in places]
                spans.append(f"{intervals[min(used)].start}:{intervals[max(used)].stop}")
        return ", ".join(spans)

    def _outline(self, places: Sequence[Place]) -> str:
        """Return the path of rectangles; adjacent rectangles of a row are joined."""
        parts = []
        for row, of_row in itertools.groupby(sorted(places), lambda place: place[0]):
            columns = [column for _, column in of_row]
            for first, last in _stretches(columns):
                # Both ends are rounded as they are written, so that no gaps appear.
                x, y = round(self.x[first], 1), round(self.y[row], 1)
                across, down = round(self.x[last + 1], 1) - x, round(self.y[row + 1], 1) - y
                parts.append(f"M{_n(x)} {_n(y)}h{_n(across)}v{_n(down)}h{_n(-across)}z")
        return "".join(parts)

    def _fill(self, region: SketchRegion, holdings: Holdings) -> str:
        # Halo copies are not coloured if the box has an owner.
        owners = {h.slot for h in holdings if not h.is_halo} or {h.slot for h in holdings}
        ranks = _pick_stripes(sorted(owners))
        if len(ranks) == 1:
            return self.colours[ranks[0]]
        # All stripes fit into the smallest of the boxes that these ranks hold.
        across, down = self._sides(region)
        period = min(self.periods.get(ranks, len(ranks) * _STRIPE), (across + down) / 2)
        self.periods[ranks] = period
        return f"url(#{self._gradient_name(ranks)})"

    def _gradient_name(self, ranks: tuple[int, ...]) -> str:
        return f"{self.name}-{'-'.join(map(str, ranks))}"

    def _gradient(self, ranks: tuple[int, ...], period: float) -> str:
        """Return slanting stripes of equal width, one for each rank's colour."""
        stops = []
        for place, rank in enumerate(ranks):
            for edge in (place, place + 1):
                offset = f"{100 * edge / len(ranks):.2f}%"
                stops.append(element("stop", offset=offset, stop_color=self.colours[rank]))
        return element(
            "linearGradient",
            *stops,
            id=self._gradient_name(ranks),
            gradientUnits="userSpaceOnUse",
            spreadMethod="repeat",
            x1=0,
            y1=0,
            x2=_n(period),
            y2=_n(period),
        )

    def _borders(self, regions: Sequence[SketchRegion]) -> str:
        """Return lines between regions that are large enough for lines."""
        owner = {place: i for i, region in enumerate(regions) for place in region.places}
        parts = []
        for r, y in enumerate(self.y):
            apart = [
                c
                for c in range(len(self.x) - 1)
                if owner.get((r, c)) != owner.get((r - 1, c)) and self._has_room(self.y, r)
            ]
            for first, last in _stretches(apart):
                across = self.x[last + 1] - self.x[first]
                parts.append(f"M{_n(self.x[first])} {_n(y)}h{_n(across)}")
        for c, x in enumerate(self.x):
            apart = [
                r
                for r in range(len(self.y) - 1)
                if owner.get((r, c)) != owner.get((r, c - 1)) and self._has_room(self.x, c)
            ]
            for first, last in _stretches(apart):
                down = self.y[last + 1] - self.y[first]
                parts.append(f"M{_n(x)} {_n(self.y[first])}v{_n(down)}")
        return element("path", d="".join(parts), class_="border")

    @staticmethod
    def _has_room(edges: Sequence[float], at: int) -> bool:
        near = edges[max(at - 1, 0) : at + 2]
        return at in (0, len(edges) - 1) or min(b - a for a, b in itertools.pairwise(near)) >= 4

    def _labels(self, regions: Sequence[SketchRegion]) -> list[str]:
        """Return the labels that fit, without those of boxes smaller than an unlabelled box."""
        thin = min(
            (self.x[-1] - self.x[0]) / (len(self.x) - 1),
            (self.y[-1] - self.y[0]) / (len(self.y) - 1),
        )
        is_line = 2 in (len(self.x), len(self.y))
        if thin < _THIN and is_line:
            return self._labels_of_several(regions)
        labels = [(self._region_label(region), self._area(region)) for region in regions]
        if is_line and thin < _NARROW and not any(label for label, _ in labels):
            return self._labels_of_several(regions)
        # A label next to a larger box without a label would mislead. Equal areas may differ by
        # rounding, hence the factor.
        unnamed = max((area for label, area in labels if not label), default=0.0)
        return [label for label, area in labels if label and area > 1.01 * unnamed]

    def _sides(self, region: SketchRegion) -> tuple[float, float]:
        """Return the pixels of the block for a region's label, across and down."""
        across = self.x[region.columns.stop] - self.x[region.columns.start]
        return across, self.y[region.rows.stop] - self.y[region.rows.start]

    def _area(self, region: SketchRegion) -> float:
        across, down = self._sides(region)
        return across * down

    def _region_label(self, region: SketchRegion) -> str:
        left, right = self.x[region.columns.start], self.x[region.columns.stop]
        above, below = self.y[region.rows.start], self.y[region.rows.stop]
        row, column = region.places[0]
        holdings = self.grid.holdings[row][column]
        first, *rest = region.lines
        if holdings:
            many = count_text(len({holding.slot for holding in holdings}), "rank")
            names = [*shorter_texts(holders_text(holdings), "…"), many]
        else:
            names = [first, "…"]
        # From the most to the least detailed: ranks and origins, ranks, some of them, their number.
        for lines in ([first, *rest], *([name] for name in names), [names[-1], *rest]):
            if self._fits(lines, right - left, below - above):
                ranks = {holding.slot for holding in holdings}
                colour = self.colours[min(ranks)] if len(ranks) == 1 else None
                return self._text(lines, (left + right) / 2, (above + below) / 2, colour)
        return ""

    @staticmethod
    def _fits(lines: Sequence[str], width: float, height: float) -> bool:
        # The letters of the first line are larger.
        widths = (len(line) * (_SMALL_LETTER if i else _LETTER) for i, line in enumerate(lines))
        return max(widths) + 6 <= width and len(lines) * _LINE + 2 <= height

    def _text(self, lines: Sequence[str], x: float, y: float, colour: str | None) -> str:
        """Return lines centred on a point; on stripes of several colours, with a background."""
        top = y - len(lines) * _LINE / 2
        back = ""
        if colour is None:
            width = 8 + max(
                len(line) * (_SMALL_LETTER if i else _LETTER) for i, line in enumerate(lines)
            )
            height = len(lines) * _LINE
            back = element(
                "rect", x=x - width / 2, y=top, width=width, height=height, rx=4, class_="plate"
            )
        texts = [
            element(
                "text",
                escaped(line),
                x=x,
                y=top + (i + 1) * _LINE - 4,
                class_="label small" if i else "label",
                style=None if colour is None else f"fill:{ink_on(colour)}",
            )
            for i, line in enumerate(lines)
        ]
        return back + "".join(texts)

    def _labels_of_several(self, regions: Sequence[SketchRegion]) -> list[str]:
        """Return labels for a line of thin boxes: the ranks of all boxes in each of a few equal
        parts.
        """
        is_across = len(self.y) == 2
        edges = self.x if is_across else self.y
        places = [(0, i) if is_across else (i, 0) for i in range(len(edges) - 1)]
        gaps = [region for region in regions if self._is_left_out(region)]
        labels = [self._region_label(region) for region in gaps]
        of_gaps = [(edges[i], edges[i + 1]) for i in self._along(gaps, is_across)]
        step = (edges[-1] - edges[0]) / _PARTS
        for part in range(_PARTS):
            low = edges[0] + part * step
            # A part that overlaps the gap has the remaining space.
            high = low + step
            for first, last in of_gaps:
                if low < last and first < high:
                    low, high = (low, first) if first - low > high - last else (last, high)
            ranks = {
                holding.slot
                for (r, c), (a, b) in zip(places, itertools.pairwise(edges), strict=True)
                if low <= (a + b) / 2 < high
                for holding in self.grid.holdings[r][c]
            }
            x, y = (low + high) / 2, (self.y[0] + self.y[-1]) / 2
            room = (high - low, self.y[-1] - self.y[0])
            if not is_across:
                x, y = (self.x[0] + self.x[-1]) / 2, x
                room = (self.x[-1] - self.x[0], high - low)
            for text in (rank_text(ranks), count_text(len(ranks), "rank")):
                if ranks and self._fits([text], *room):
                    labels.append(self._text([text], x, y, None))
                    break
        return labels

    def _is_left_out(self, region: SketchRegion) -> bool:
        row, column = region.places[0]
        return bool(self.grid.rows[row].left_out or self.grid.columns[column].left_out)

    @staticmethod
    def _along(regions: Sequence[SketchRegion], is_across: bool) -> list[int]:
        """Return the places of regions along a line."""
        return [place[is_across] for region in regions for place in region.places]

    def _indices(self) -> list[str]:
        texts = []
        if self.grid.column_dimension is not None:
            for x, text in spaced_indices(
                self.x, self.grid.columns, lambda t: _SMALL_LETTER * len(t) + 8
            ):
                texts.append(element("text", text, x=x, y=self.top - 6, class_="index across"))
        if self.grid.row_dimension is not None:
            for y, text in spaced_indices(self.y, self.grid.rows, lambda _: 13):
                texts.append(element("text", text, x=self.left - 6, y=y + 4, class_="index down"))
        return texts


def _limit_boxes(grid: RegionGrid) -> RegionGrid:
    """Limit the grid to `_MAX_BOXES` rectangles; a dimension with few leaves space to the other."""
    rows, columns = len(grid.rows), len(grid.columns)
    # The maximum minus 1, since the gap is drawn as an interval too.
    side = int(_MAX_BOXES**0.5)
    if rows * columns <= _MAX_BOXES:
        return grid
    if rows <= side:
        return grid.limited(rows, _MAX_BOXES // rows - 1)
    if columns <= side:
        return grid.limited(_MAX_BOXES // columns - 1, columns)
    return grid.limited(side - 1, side - 1)


def _stretches(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last of each sequence of consecutive numbers.

    >>> _stretches([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    sequences: list[tuple[int, int]] = []
    for number in numbers:
        if sequences and sequences[-1][1] == number - 1:
            sequences[-1] = (sequences[-1][0], number)
        else:
            sequences.append((number, number))
    return sequences


def _pick_stripes(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return as many ranks as there can be distinct stripes, evenly spaced, including the ends."""
    last = len(ranks) - 1
    if last < _MAX_STRIPES:
        return tuple(ranks)
    return tuple(ranks[last * stripe // (_MAX_STRIPES - 1)] for stripe in range(_MAX_STRIPES))


def _n(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")
