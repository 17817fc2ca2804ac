"""Pictures of layouts as text: which rank holds which part of a tensor.

1. The two dimensions with the most intervals are drawn (`regions.drawn_dimensions`). A
   one-dimensional tensor is drawn as a line of boxes if it fits, and as a column otherwise.
2. Adjacent rectangles held alike become a box (`regions`), with its ranks in it (`labels`), to
   scale as far as letters allow (`sketch`).
3. If there are too many rows or columns, those in the middle are left out and counted.
4. Notes below the drawing describe properties that it cannot show (`labels.notes`).

The indices at the edges are global: a box between 7631 and 15262 holds 7631:15262.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from functools import partial

from reshard._validation import check_int, check_type
from reshard.errors import UsageError
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.plan import Plan
from reshard.show.labels import SlotLabel, label_lines, notes
from reshard.show.regions import (
    MAX_BOXES,
    Origins,
    Place,
    RegionGrid,
    drawn_dimensions,
    region_grid,
)
from reshard.show.regions import origins as find_origins
from reshard.show.sketch import Sketch, sketch
from reshard.text import bytes_text, count_text, display_width, padded, rank_text, shortened

MIN_WIDTH = 40
MIN_HEIGHT = 9


def picture(
    layout: Layout,
    width: int = 80,
    labels: str | SlotLabel = "ranks",
    *,
    height: int = 40,
    ascii: bool = False,
) -> str:
    """Return a picture of which ranks hold which part of a tensor.

    Args:
        layout: the layout to draw.
        width: maximum number of columns, at least 40.
        labels: "ranks", or a function that returns the text of a rank for its boxes, of a line
            or several.
        height: maximum number of lines of boxes, at least 9.
        ascii: draw with plain ASCII instead of box-drawing characters.

    Raises:
        UsageError: a width or height that is too small, or unknown labels.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(dp=2, tp=2)
    >>> print(picture(reshard.spec(mesh, "tp, -").layout((5, 8)), ascii=True))
      0                       8
    0 +-----------------------+
      |                       |
      |          0,2          |
      |                       |
    3 +-----------------------+
      |          1,3          |
    5 +-----------------------+
    """
    _check(layout, width, height)
    drawn = _fit_sketch(layout, width, height, _labels(labels, ascii), None)
    body = drawn.draw(_natural_width(drawn, width), drawn.min_height, ascii)
    return _join_lines([*body, *notes(layout, drawn.grid, width)])


def change_picture(
    source: Layout,
    target: Layout,
    width: int = 80,
    labels: str | SlotLabel = "ranks",
    *,
    titles: tuple[str, str] | None = None,
    plan: Plan | None = None,
    transfers: Transfers | None = None,
    height: int = 40,
    stacked_height: int | None = None,
    ascii: bool = False,
) -> str:
    """Return a picture of two layouts of a tensor, before and after, and of the movement between
    them.

    They are side by side if both fit, and stacked otherwise. With a plan, each box of
    the target shows the ranks that its elements come from (`0 ← 2,3`; elements that a rank holds
    already have no origin), and a line below the amount that moves.

    Args:
        source, target: the layouts, of the same shape.
        width: maximum number of columns, at least 40.
        labels: as for `picture`.
        titles: for the two pictures, such as their shardings; the ranks that hold cells if None.
        plan: from `source` to `target`.
        transfers: the movement to show, if a job chose other senders; the plan's if None.
        height: maximum number of lines of boxes of each, at least 9.
        stacked_height: maximum number of lines of boxes of both together, at least 18, if they
            are stacked; twice `height` if None.
        ascii: draw with plain ASCII instead of box-drawing characters.

    Raises:
        UsageError: a width or height that is too small, unknown labels, layouts of two shapes,
            or a plan between other layouts.

    >>> import reshard
    >>> four, two = (reshard.DeviceMesh.of(tp=n) for n in (4, 2))
    >>> source = reshard.spec(four, "tp, -").layout((8, 3))
    >>> target = reshard.spec(two, "tp, -").layout((8, 3))
    >>> plan = reshard.plan(source, target, dtype="float32")
    >>> print(change_picture(source, target, 60, plan=plan, ascii=True))
    ranks 0-3                          ranks 0,1
      0                     3            0                     3
    0 +---------------------+          0 +---------------------+
      |          0          |            |                     |
    2 +---------------------+            |       0 <- 1        |
      |          1          |            |                     |
    4 +---------------------+  ----->  4 +---------------------+
      |          2          |            |                     |
    6 +---------------------+            |      1 <- 2,3       |
      |          3          |            |                     |
    8 +---------------------+          8 +---------------------+
    72 B of 96 B move (18 of 24 elements), 24 B stay.
    """
    for layout in (source, target):
        _check(layout, width, height)
    if plan is not None:
        check_type(plan, Plan, "plan", "give reshard.plan(source, target)")
    if source.shape != target.shape:
        raise UsageError(
            f"a source of shape {list(source.shape)} and a target of shape {list(target.shape)}; "
            "a change is drawn for two layouts of one tensor"
        )
    if plan is not None and (plan.source is not source or plan.target is not target):
        raise UsageError(
            f"{plan!r} is not the plan between the layouts to draw; give "
            "reshard.plan(source, target)"
        )
    stacked_height = 2 * height if stacked_height is None else stacked_height
    if check_int(stacked_height, "stacked_height") < 2 * MIN_HEIGHT:
        raise UsageError(
            f"stacked_height {stacked_height}: two pictures need at least {2 * MIN_HEIGHT} lines"
        )
    written = _labels(labels, ascii)
    origins = None
    if plan is not None and labels == "ranks" and len(plan.change.routes.target_cell) <= MAX_BOXES:
        origins = find_origins(plan.transfers if transfers is None else transfers)
    names = titles or tuple(_holders_title(layout) for layout in (source, target))
    layouts = (source, target)

    def fit(heights: Sequence[int]) -> list[Sketch]:
        return [
            _fit_sketch(layout, width, limit, written, coming)
            for layout, limit, coming in zip(layouts, heights, (None, origins), strict=True)
        ]

    sketches = fit((height, height))
    is_beside = sum(_min_widths(sketches, names)) <= width - display_width(_arrow(ascii))
    needed = [drawn.min_height for drawn in sketches]
    if not is_beside and sum(needed) > stacked_height:
        sketches = fit(_share_height(needed, stacked_height))
    lines = _draw_both(sketches, layouts, names, width, height, is_beside, ascii)
    if plan is not None:
        lines += textwrap.wrap(movement_text(plan), width)
    return _join_lines(lines)


def movement_text(plan: Plan) -> str:
    """Return a sentence on how much a plan moves, in bytes if it has a dtype.

    >>> import reshard
    >>> whole, half = Layout.replicated((6,)), Layout.flat_ranges((6,), {0: (0, 3), 1: (3, 6)})
    >>> movement_text(reshard.plan(whole, half, dtype="bfloat16"))
    '6 B of 12 B move (3 of 6 elements), 6 B stay.'
    >>> movement_text(reshard.plan(half, half))
    'Nothing moves: 6 elements stay.'
    """
    staying, moving = plan.change.staying_elements, plan.moved_elements
    total = moving + staying

    def size(elements: int) -> str:
        if plan.dtype is None:
            return count_text(elements, "element")
        return bytes_text(elements * plan.dtype.itemsize_bytes)

    if not moving:
        verb = "stays" if plan.dtype is None and staying == 1 else "stay"
        return f"Nothing moves: {size(staying)} {verb}."
    if plan.dtype is None:
        return f"{moving:,} of {count_text(total, 'element')} move, {staying:,} stay."
    elements = f"{moving:,} of {count_text(total, 'element')}"
    return f"{size(moving)} of {size(total)} move ({elements}), {size(staying)} stay."


def _check(layout: object, width: int, height: int) -> None:
    check_type(layout, Layout, "layout", "give a spec a shape: spec.layout((6, 4))")
    width, height = check_int(width, "width"), check_int(height, "height")
    if width < MIN_WIDTH:
        raise UsageError(f"width {width}: a picture needs at least {MIN_WIDTH} columns")
    if height < MIN_HEIGHT:
        raise UsageError(f"height {height}: a picture needs at least {MIN_HEIGHT} lines")


Labels = tuple[SlotLabel | None, bool]
"""The text of each rank, or None for its number, and whether a picture is plain ASCII."""


def _labels(labels: str | SlotLabel, ascii: bool) -> Labels:
    if labels == "ranks":
        return None, ascii
    if isinstance(labels, str) or not callable(labels):
        raise UsageError(f"labels {labels!r}; give 'ranks', or a function from a rank to a text")
    return labels, ascii


def _join_lines(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def _fit_sketch(
    layout: Layout, width: int, height: int, labels: Labels, origins: Origins | None
) -> Sketch:
    """Return the sketch that shows the most in `width` x `height`."""
    row_dimension, column_dimension = drawn_dimensions(layout)
    full = _largest_fit(
        region_grid(layout, row_dimension, column_dimension), width, height, labels, origins
    )
    # If a line of boxes leaves some out, a column may have space for more of them.
    if layout.ndim == 1 and (full is None or full.grid.leaves_out):
        column = _largest_fit(region_grid(layout, 0, None), width, height, labels, origins)
        if full is None or (column and _boxes(column) > _boxes(full)):
            full = column
    if full is None:
        raise UsageError(
            f"width {width} has no room for the indices of shape {list(layout.shape)}; give more"
        )
    return full


def _boxes(drawn: Sketch) -> int:
    return len(drawn.regions)


def _largest_fit(
    full: RegionGrid, width: int, height: int, labels: Labels, origins: Origins | None
) -> Sketch | None:
    # A row needs at least two lines, its border and its label.
    rows = min(len(full.rows), (height - 1) // 2)
    columns = len(full.columns)
    times = 2
    while columns >= 0 and rows >= 0:
        grid = full.limited(rows, columns)
        label = partial(_label, grid, labels, origins)
        limit = max(9, (width - 8) // min(len(grid.columns), 4) - 3)
        drawn = sketch(grid, label, limit, times, "..." if labels[1] else "…")
        # First give up proportions, then columns, then rows.
        if times > 1 and (drawn.min_width > width or drawn.min_height > height):
            times -= 1
        elif drawn.min_width > width:
            columns -= 1
        elif drawn.min_height > height:
            rows -= 1
        else:
            return drawn
    return None


def _label(
    grid: RegionGrid,
    labels: Labels,
    origins: Origins | None,
    places: Sequence[Place],
    max_columns: int,
) -> list[str]:
    row, column = places[0]
    senders = origins(grid, places) if origins else []
    return label_lines(grid.holdings[row][column], senders, max_columns, *labels)


def _natural_width(drawn: Sketch, limit: int) -> int:
    """Return a comfortable width, with some space in the boxes."""
    air = max(24, 10 * len(drawn.column_shares))
    natural = drawn.gutter + max(air, sum(drawn.column_shares)) + 1 + drawn.overhang
    return min(natural, limit)


def _holders_title(layout: Layout) -> str:
    ranks = layout.holders
    return f"rank{'' if len(ranks) == 1 else 's'} {rank_text(ranks) or '-'}"


def _arrow(ascii: bool) -> str:
    return "  ----->  " if ascii else "  ─────▶  "


def _min_widths(sketches: Sequence[Sketch], titles: Sequence[str]) -> list[int]:
    """Return the columns that each picture needs, including its title."""
    return [
        max(drawn.min_width, display_width(title))
        for drawn, title in zip(sketches, titles, strict=True)
    ]


def _share_height(needed: Sequence[int], total: int) -> tuple[int, int]:
    """Return heights for two pictures that need more than `total`: the smaller gets half at most.

    >>> _share_height((25, 25), 26), _share_height((25, 11), 26)
    ((13, 13), (15, 11))
    """
    smaller = min(*needed, total // 2)
    larger = total - smaller
    # A picture that needs less than the minimum height is drawn in the height that it needs.
    first, second = (smaller, larger) if needed[0] <= needed[1] else (larger, smaller)
    return max(first, MIN_HEIGHT), max(second, MIN_HEIGHT)


def _draw_both(
    sketches: Sequence[Sketch],
    layouts: Sequence[Layout],
    titles: Sequence[str],
    width: int,
    height: int,
    is_beside: bool,
    ascii: bool,
) -> list[str]:
    """Draw both pictures with an arrow, side by side or stacked."""
    arrow = _arrow(ascii)
    # 1. The natural widths of both, reduced to the available width.
    room = width - display_width(arrow)
    least = _min_widths(sketches, titles)
    widths = [_natural_width(drawing, width) for drawing in sketches]
    widest = max(widths)
    while is_beside and sum(map(max, least, widths)) > room:
        # The wider picture shrinks first, so that equal needs get equal widths.
        widest -= 1
        widths = [min(columns, widest) for columns in widths]
    if is_beside:
        widths = list(map(max, least, widths))
    # 2. Draw both, with equal heights if they are side by side.
    lines = _common_height(sketches, height)
    blocks: list[list[str]] = []
    for drawing, layout, title, columns in zip(sketches, layouts, titles, widths, strict=True):
        drawn = drawing.draw(
            min(_natural_width(drawing, width), columns),
            lines if is_beside else drawing.min_height,
            ascii,
        )
        # If only one picture has a line of indices above its boxes, add an empty line to the other.
        missing = [""] * (is_beside and any(other.top > drawing.top for other in sketches))
        heading = shortened(title, columns if is_beside else width, "..." if ascii else "…")
        blocks.append(
            [
                heading,
                *missing,
                *drawn,
                *notes(layout, drawing.grid, columns if is_beside else width),
            ]
        )
    if not is_beside:
        down = " " * (sketches[0].gutter + 11) + ("v" if ascii else "▼")
        return [*blocks[0], down, *blocks[1]]
    # 3. Join them line by line, with the arrow at half the height of the boxes.
    left, right = blocks
    middle = 1 + max(drawing.top for drawing in sketches) + lines // 2
    column = max(map(display_width, left))
    return [
        padded(before, column) + (arrow if i == middle else " " * display_width(arrow)) + after
        for i, (before, after) in enumerate(itertools.zip_longest(left, right, fillvalue=""))
    ]


def _common_height(sketches: Sequence[Sketch], limit: int) -> int:
    """Return a height for both at which most lines are aligned: a multiple of both row counts."""
    least = max(drawn.min_height for drawn in sketches) - 1
    # The lines between rows of both are aligned if both row counts divide the height.
    step = math.lcm(*(len(drawn.row_shares) for drawn in sketches))
    even = -(-least // step) * step
    return 1 + (even if even < min(limit, 2 * least) else least)
