"""Labels of boxes, and notes below a picture.

A label names the holders of a box::

    0,4      ranks 0 and 4 hold the same elements
    0 (1)    rank 0 owns them, rank 1 has a halo copy
    0+4      ranks 0 and 4 hold contributions to them
    0/1      ranks 0 and 1 hold different parts of the dimensions that are not drawn
    -        nobody holds them
    0/8/…/56 the same for eight ranks, abbreviated to the first two and the last
    8 ranks  too many to list

With the ranks that the elements come from: `0 ← 2,3`; if these are too many, `0 ← 7 ranks` or
`0 ← …`.

Notes describe properties of a layout that a drawing cannot show: the dimensions that are not drawn,
contributions, padding, halos, ranks that hold nothing.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from reshard.layout import Layout
from reshard.runs import PAD
from reshard.show.regions import Holdings, RankHolding, RegionGrid, region_grid
from reshard.text import count_text, display_width, rank_text, short_rank_text, shortened

SlotLabel = Callable[[int], str]


def label_lines(
    holdings: Holdings,
    senders: Sequence[int],
    width: int,
    slot_label: SlotLabel | None = None,
    ascii: bool = False,
) -> list[str]:
    """Return the lines of the label of a box, none wider than `width` columns.

    The holders are written by number, or by a text of the caller for each rank, `slot_label`.

    >>> held = frozenset(RankHolding(0, 0, False, slot) for slot in (0, 4))
    >>> label_lines(held, (), 20), label_lines(held, (), 20, "device {}\\nof 8".format)
    (['0,4'], ['device 0', 'of 8', 'device 4', 'of 8'])
    """
    if not holdings:
        return ["-"]
    mark = "..." if ascii else "…"
    if slot_label is not None:
        # Ranks with equal texts share them: a dict keeps each once, in order.
        texts = dict.fromkeys(slot_label(slot) for slot in sorted(h.slot for h in holdings))
        joined = ",".join(texts)
        if "\n" not in joined and display_width(joined) <= width:
            return [joined]
        lines = itertools.chain.from_iterable(text.split("\n") for text in texts)
        return [shortened(line, width, mark) for line in lines]
    count = count_text(len({h.slot for h in holdings}), "rank")
    written = (*shorter_texts(holders_text(holdings), mark), count)
    text = next((text for text in written if display_width(text) <= width), count)
    if senders:
        arrow = "<-" if ascii else "←"
        # The senders in full, or their number, or a mark.
        for origin in (rank_text(senders), count_text(len(senders), "rank"), mark):
            if display_width(f"{text} {arrow} {origin}") <= width:
                return [f"{text} {arrow} {origin}"]
    return [shortened(text, width, mark)]


def shorter_texts(text: str, mark: str) -> Iterator[str]:
    """Yield a text of `holders_text`, and shorter texts with its first and last parts.

    >>> list(shorter_texts("0/8/16/24/32", "…"))
    ['0/8/16/24/32', '0/8/…/32', '0/…/32']
    """
    yield text
    sign = "/" if "/" in text else "+"
    first, *middle, last = text.split(sign) if sign in text else (text, text)
    if len(middle) > 1:
        yield sign.join((first, middle[0], mark, last))
        yield sign.join((first, mark, last))


def holders_text(holdings: Iterable[RankHolding]) -> str:
    """Return the holders of a box in full; see the module's docstring.

    >>> holders_text([RankHolding(0, c, False, 4 * c + i) for c in (0, 1) for i in (0, 1)])
    '0,1+4,5'
    >>> holders_text([RankHolding(part, 0, False, slot) for part, slot in [(0, 0), (1, 0), (2, 1)]])
    '0/1'
    """
    everything = sorted(holdings)
    parts_of_slot: dict[int, list[int]] = {}
    for holding in everything:
        parts_of_slot.setdefault(holding.slot, []).append(holding.hidden_part)
    # A rank may hold several of the parts that are not drawn; it is listed once, with all.
    by_parts: dict[tuple[int, ...], set[RankHolding]] = {}
    for holding in everything:
        key = tuple(parts_of_slot[holding.slot])
        by_parts.setdefault(key, set()).add(holding._replace(hidden_part=0))
    parts = []
    for members in by_parts.values():
        contributions = []
        for _, group in itertools.groupby(sorted(members), lambda h: h.contribution):
            alike = list(group)
            owners = [h.slot for h in alike if not h.is_halo]
            halos = [h.slot for h in alike if h.is_halo]
            words = [rank_text(owners)] if owners else []
            words += [f"({rank_text(halos)})"] if halos else []
            contributions.append(" ".join(words))
        parts.append("+".join(contributions))
    return "/".join(parts)


MAX_RANK_LETTERS = 60
# Lengths of padding in a dimension that have a line each.
MAX_PADDINGS = 3


def notes(layout: Layout, grid: RegionGrid, width: int) -> list[str]:
    """Return lines of at most `width` columns on properties that `grid`, drawn from `layout`,
    lacks.

    >>> layout = Layout.flat_ranges((4,), {0: (0, 4), 1: (4, 4)})
    >>> notes(layout, region_grid(layout, None, 0), 80)
    ['Holding nothing: 1.']
    """
    lines = []
    drawn = [d for d in (grid.row_dimension, grid.column_dimension) if d is not None]
    if layout.ndim > 2:
        lines.append(f"Drawn: dimensions {drawn[0]} (down) and {drawn[1]} (across).")
        lines += _describe_hidden_dimensions(
            layout, [d for d in range(layout.ndim) if d not in drawn]
        )
    if 0 in layout.shape:
        lines.append(f"No elements: dimension {layout.shape.index(0)} has length 0.")
    empty = set(layout.holders) - {int(slot) for slot in layout.cell_slot[layout.cell_elements > 0]}
    if empty and 0 not in layout.shape:
        lines.append(f"Holding nothing: {_short(sorted(empty))}.")
    if layout.reduction is not None:
        lines.append(f"Partial: {layout.contributions} contributions (+), {layout.reduction}.")
    for d in range(layout.ndim):
        padding: dict[int, list[int]] = {}
        runs = layout.tables[d].single_runs()
        pads = runs.role == PAD
        # Shape (parts,): the number of padded positions of each part along the dimension.
        lengths = np.bincount(runs.part[pads], runs.length[pads], layout.tables[d].parts)
        for slot, part in zip(
            layout.cell_slot.tolist(), layout.cell_part[:, d].tolist(), strict=True
        ):
            if lengths[part]:
                padding.setdefault(int(lengths[part]), []).append(slot)
        if len(padding) > MAX_PADDINGS:
            padded_slots = sorted(itertools.chain(*padding.values()))
            padded = f"{min(padding)} to {max(padding)}"
            lines.append(f"Padding of {padded} in dimension {d}: {_short(padded_slots)}.")
        else:
            for length, slots in sorted(padding.items()):
                lines.append(f"Padding of {length} in dimension {d}: {_short(sorted(slots))}.")
    if any(h.is_halo for row in grid.holdings for place in row for h in place):
        lines.append("In brackets: halo copies.")
    return [line for note in lines for line in textwrap.wrap(note, width)]


def _short(slots: list[int]) -> str:
    return short_rank_text(slots, MAX_RANK_LETTERS)


def _describe_hidden_dimensions(layout: Layout, dimensions: Sequence[int]) -> list[str]:
    """Describe the divisions of each dimension; undivided dimensions share a line."""
    lines, whole = [], []
    for d in dimensions:
        grid = region_grid(layout, d, None)
        bounds = [interval.start for interval in grid.rows[1:]]
        if not bounds:
            whole.append(d)
            continue
        shown = ", ".join(map(str, bounds[:8])) + (", ..." if len(bounds) > 8 else "")
        cut = f"cut at {shown} (/ between its parts)"
        lines.append(f"Not drawn: dimension {d}, of {layout.shape[d]}, {cut}.")
    if whole:
        noun = "dimension" if len(whole) == 1 else "dimensions"
        lengths = _enumerate([layout.shape[d] for d in whole])
        lines.append(f"Not drawn: {noun} {_enumerate(whole)}, of {lengths}, not cut.")
    return lines


def _enumerate(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
