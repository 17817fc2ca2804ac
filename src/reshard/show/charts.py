"""Charts of pages, as SVG: traffic between ranks, traffic between hosts, memory over time.

`heat_map` has a row per sender and a column per receiver, and a darker square for more traffic. If
there are too many ranks, adjacent ranks are grouped, by the smallest power of two that suffices.
The `title` of each square describes it; with few ranks the amounts are written into the squares.

`host_flows` draws each host twice, as a sender on the left and a receiver on the right, with bands
between them as wide as their traffic; traffic inside a host is a paler band. With too many hosts it
is a heat map.

`memory_chart` has a bar per moment, in two parts: the memory held before, and above it the memory
for that moment only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reshard.errors import UsageError
from reshard.plans.traffic import Traffic
from reshard.runs import IntArray
from reshard.show.svg import element, escaped, rank_colours

MAX_GROUPS = 64
# Pixels: the side of the map, the largest square, a letter of the indices.
_SIDE, _MAX_SQUARE, _LETTER = 448.0, 54.0, 6.4
# Maximum number of groups with amounts in the squares, and the pixels of the scale of shades.
_MAX_WRITTEN, _SCALE = 12, 96.0


def heat_map(
    traffic: Traffic,
    amount_text: Callable[[int], str],
    *,
    noun: str = "rank",
    short_text: Callable[[int], str] | None = None,
    max_groups: int = MAX_GROUPS,
) -> str:
    """Return a heat map of the traffic as an `svg` element.

    Args:
        traffic: between ranks, or other things called `noun`.
        amount_text: formats an amount, with its unit.
        noun: for senders and receivers.
        short_text: formats an amount inside a square; `amount_text` if None.
        max_groups: maximum number of rows and columns.

    >>> import numpy as np
    >>> traffic = Traffic.gathered(2, np.array([0]), np.array([1]), np.array([7]))
    >>> "rank 0 to rank 1: 7 B" in heat_map(traffic, "{} B".format)
    True
    """
    # 1. Groups of ranks, and the size of a square.
    size = 1
    while -(-traffic.ranks // size) > max_groups:
        size *= 2
    grouped = traffic if size == 1 else traffic.taken_together(size)
    groups = grouped.ranks
    step = min(_SIDE / groups, _MAX_SQUARE)
    largest = int(grouped.amount.max(initial=0))
    side = step * groups
    x0, y0 = 10 + _LETTER * len(str((groups - 1) * size)), 36.0
    short_text = short_text or amount_text

    def name(group: int) -> str:
        last = min((group + 1) * size, traffic.ranks) - 1
        return f"{noun} {group}" if size == 1 else f"{noun}s {group * size}-{last}"

    # 2. A square for each pair with traffic; empty squares are the background.
    squares, amounts = [], []
    for a, b, amount in zip(
        grouped.sender.tolist(), grouped.receiver.tolist(), grouped.amount.tolist(), strict=True
    ):
        x, y = x0 + b * step, y0 + a * step
        description = f"{name(a)} to {name(b)}: {amount_text(amount)}"
        squares.append(
            element(
                "rect",
                element("title", escaped(description)),
                x=x,
                y=y,
                width=step,
                height=step,
                opacity=_strength(amount, largest),
            )
        )
        if groups <= _MAX_WRITTEN:
            amounts.append(_write_amount(short_text(amount), x, y, step, amount, largest))
    # 3. The caption, the scale and the total size.
    together = "" if size == 1 else f", {size} {noun}s a square"
    caption = f"sending {noun}s down, receiving {noun}s across{together}"
    scale = f"up to {amount_text(largest)}"
    width = max(x0 + side + 4, _LETTER * len(caption), x0 + _SCALE + _LETTER * len(scale) + 12)
    height = y0 + side + 32
    return element(
        "svg",
        element("title", escaped(f"{caption}: {groups} by {groups} squares, {scale} in one")),
        element("rect", x=x0, y=y0, width=side, height=side, class_="heat-back"),
        element("g", *squares, class_="heat"),
        _grid(x0, y0, step, groups),
        *amounts,
        *_ticks(x0, y0, step, groups, size),
        element("text", escaped(caption), x=0, y=11, class_="index"),
        *_scale(x0, y0 + side + 14, scale),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=round(width),
        height=round(height),
        role="img",
        class_="heat-map",
    )


def _strength(amount: int, largest: int) -> str:
    """Return the opacity of an amount, from faint to full; the smallest amount is still visible."""
    return f"{0.15 + 0.85 * amount / largest:.2f}"


def _write_amount(text: str, x: float, y: float, step: float, amount: int, largest: int) -> str:
    # An amount that does not fit into its square is omitted; the `title` still has it.
    if len(text) * 5.6 + 4 > step:
        return ""
    return element(
        "text",
        escaped(text),
        x=x + step / 2,
        y=y + step / 2 + 4,
        class_="amount strong" if 2 * amount > largest else "amount",
    )


def _grid(x0: float, y0: float, step: float, groups: int) -> str:
    """Return lines between squares, and the diagonal, on which no rank sends to itself."""
    side = step * groups
    parts = [f"M{x0:.1f} {y0 + i * step:.1f}h{side:.1f}" for i in range(groups + 1)]
    parts += [f"M{x0 + i * step:.1f} {y0:.1f}v{side:.1f}" for i in range(groups + 1)]
    diagonal = f"M{x0:.1f} {y0:.1f}L{x0 + side:.1f} {y0 + side:.1f}"
    return element("path", d="".join(parts), class_="heat-grid") + element(
        "path", d=diagonal, class_="heat-diagonal"
    )


def _ticks(x0: float, y0: float, step: float, groups: int, size: int) -> list[str]:
    """Return the first rank of every group that has space for it."""
    widest = _LETTER * len(str((groups - 1) * size)) + 8
    across, down = max(1, round(widest / step + 0.5)), max(1, round(13 / step + 0.5))
    middle = step / 2
    return [
        *(
            element(
                "text", str(i * size), x=x0 + i * step + middle, y=y0 - 5, class_="index across"
            )
            for i in range(0, groups, across)
        ),
        *(
            element(
                "text", str(i * size), x=x0 - 5, y=y0 + i * step + middle + 4, class_="index down"
            )
            for i in range(0, groups, down)
        ),
    ]


def _scale(x: float, y: float, text: str) -> list[str]:
    steps = 8
    width = _SCALE / steps
    squares = [
        element(
            "rect",
            x=x + i * width,
            y=y,
            width=width,
            height=10,
            opacity=_strength(i + 1, steps),
        )
        for i in range(steps)
    ]
    return [
        element("g", *squares, class_="heat"),
        element("text", escaped(text), x=x + _SCALE + 8, y=y + 9, class_="index"),
    ]


MAX_BANDED = 12
_BETWEEN, _BAR = 220.0, 12.0


def host_traffic(traffic: Traffic, ranks_per_host: int) -> Traffic:
    """Return the traffic between hosts, including traffic inside hosts.

    A host has `ranks_per_host` adjacent ranks.

    Raises:
        UsageError: `ranks_per_host` is below 1.

    >>> import numpy as np
    >>> ring = Traffic.gathered(4, np.arange(4), (np.arange(4) + 1) % 4, np.full(4, 7))
    >>> host_traffic(ring, 2).amount.tolist()
    [7, 7, 7, 7]
    """
    if ranks_per_host < 1:
        raise UsageError(f"{ranks_per_host} ranks per host; give at least 1")
    return traffic.taken_together(ranks_per_host)


def across_hosts(hosts: Traffic) -> int:
    """Return the traffic that leaves its host."""
    return int(hosts.amount[hosts.sender != hosts.receiver].sum())


def host_flows(hosts: Traffic, amount_text: Callable[[int], str]) -> str:
    """Return a flow chart of the traffic between hosts as an `svg` element.

    >>> import numpy as np
    >>> traffic = Traffic.gathered(2, np.array([0]), np.array([1]), np.array([7]))
    >>> "host 0 to host 1: 7 B" in host_flows(traffic, "{} B".format)
    True
    """
    if hosts.ranks > MAX_BANDED:
        return heat_map(hosts, amount_text, noun="host")
    room = max(160.0, 46.0 * hosts.ranks)
    gap = 16.0
    # Pixels a unit: the bars of a side and the gaps between them fill the room.
    scale = (room - gap * (hosts.ranks - 1)) / max(hosts.total, 1)
    left = _tops(hosts.sent, scale, gap)
    right = _tops(hosts.received, scale, gap)
    colours = rank_colours(range(hosts.ranks))
    longest = max(len(amount_text(int(amount))) for amount in (*hosts.sent, *hosts.received))
    margin = 16 + _LETTER * (longest + len("receives "))
    x0 = margin + _BAR
    x1 = x0 + _BETWEEN
    width = x1 + _BAR + margin
    # The start of the next band of each bar: the bands of a bar are stacked.
    from_y, to_y = left.copy(), right.copy()
    bands = []
    for a, b, amount in zip(
        hosts.sender.tolist(), hosts.receiver.tolist(), hosts.amount.tolist(), strict=True
    ):
        thick = amount * scale
        where = f"inside host {a}" if a == b else f"host {a} to host {b}"
        bands.append(
            element(
                "path",
                element("title", escaped(f"{where}: {amount_text(amount)}")),
                d=_band_path(x0, from_y[a], x1, to_y[b], thick),
                fill=colours[a],
                class_="band inside" if a == b else "band",
            )
        )
        from_y[a] += thick
        to_y[b] += thick
    # Sent amounts on the left, received amounts on the right.
    bars = []
    for host in range(hosts.ranks):
        for x, top, amounts, word, anchor, at in (
            (x0 - _BAR, left, hosts.sent, "sends", "end", x0 - _BAR - 8),
            (x1, right, hosts.received, "receives", "start", x1 + _BAR + 8),
        ):
            amount = int(amounts[host])
            # A bar is visible even without traffic.
            high = max(amount * scale, 1.5)
            lines = f"host {host}", f"{word} {amount_text(amount)}"
            bars += [
                element("rect", x=x, y=top[host], width=_BAR, height=high, fill=colours[host]),
                *_label_bar(lines, at, top[host] + high / 2, anchor),
            ]
    height = 24 + max(
        top[-1] + max(float(amounts[-1]) * scale, 14.0)
        for top, amounts in ((left, hosts.sent), (right, hosts.received))
    )
    return element(
        "svg",
        element("title", "what hosts send to each other"),
        *bands,
        *bars,
        viewBox=f"0 -12 {width:.0f} {height:.0f}",
        width=round(width),
        height=round(height),
        role="img",
        class_="flows",
    )


def _tops(amounts: IntArray, scale: float, gap: float) -> list[float]:
    """Return the top of each bar, from top to bottom, far enough apart for their texts."""
    tops, at = [], 0.0
    for amount in amounts.tolist():
        tops.append(at)
        at += max(amount * scale, 14.0) + gap
    return tops


def _band_path(x0: float, y0: float, x1: float, y1: float, thick: float) -> str:
    """Return the outline of a band: its upper edge as a curve, down at the receiver, and back."""
    middle, low0, low1 = (x0 + x1) / 2, y0 + thick, y1 + thick
    return (
        f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        f"v{thick:.1f}"
        f"C{middle:.1f} {low1:.1f} {middle:.1f} {low0:.1f} {x0:.1f} {low0:.1f}z"
    )


def _label_bar(lines: Sequence[str], x: float, middle: float, anchor: str) -> list[str]:
    """Return the name of a host and, below it, its amount, next to its bar."""
    return [
        element(
            "text",
            escaped(text),
            x=x,
            y=middle - 3 + 13 * line,
            text_anchor=anchor,
            class_="index" if line else "host",
        )
        for line, text in enumerate(lines)
    ]


_WIDTH, _HEIGHT, _MAX_BAR, _SMALL_LETTER = 760.0, 150.0, 36.0, 6.1
_MAX_NUMBERED = 32


def memory_chart(moments: Sequence[tuple[str, int, int]], amount_text: Callable[[int], str]) -> str:
    """Return a bar chart of memory as an `svg` element, with the maximum marked.

    Args:
        moments: in their order: the name of each, the amount held before, and the maximum during
            the moment.
        amount_text: formats an amount, with its unit.

    >>> "matmul: 7 B, 3 B before" in memory_chart([("matmul", 3, 7)], "{} B".format)
    True
    """
    largest = max((peak for _, _, peak in moments), default=0)
    step = min(_WIDTH / max(len(moments), 1), _MAX_BAR)
    # Pixels a byte: the highest bar fills the height.
    scale = _HEIGHT / max(largest, 1)
    top, floor = 20.0, 20.0 + _HEIGHT
    bars = []
    for place, (name, held, peak) in enumerate(moments):
        x, wide = place * step, step * 0.8
        parts = [
            element(
                "title",
                escaped(f"{name}: {amount_text(peak)}, {amount_text(held)} before"),
            ),
            # The paler bar is drawn first; the memory held before covers its lower end.
            _bar(x, floor, wide, peak * scale, 0.35),
            _bar(x, floor, wide, min(held, peak) * scale, 1.0),
        ]
        if len(moments) <= _MAX_NUMBERED:
            number = str(place + 1)
            parts.append(
                element(
                    "text",
                    number,
                    x=x + wide / 2,
                    y=floor + 14,
                    class_="small across",
                    text_anchor="middle",
                )
            )
        bars.append(element("g", *parts))
    caption = f"up to {amount_text(largest)}"
    width = max(step * len(moments), _SMALL_LETTER * len(caption) + 4)
    return element(
        "svg",
        element("title", escaped(f"memory at {len(moments)} operations, {caption}")),
        element("text", escaped(caption), x=0, y=12, class_="small"),
        element(
            "path",
            d=f"M0 {top - 0.5} H{width:.1f} M0 {floor + 0.5} H{width:.1f}",
            class_="heat-diagonal",
        ),
        *bars,
        viewBox=f"0 0 {width:.1f} {floor + 20:.0f}",
        width=width,
        height=floor + 20,
        role="img",
    )


def _bar(x: float, floor: float, wide: float, high: float, strength: float) -> str:
    return element(
        "rect", x=x, y=floor - high, width=wide, height=high, opacity=strength, class_="heat"
    )
