"""A chart of what passes from host to host.

Hosts stand twice, as senders on the left and receivers on the right, with bands between them as
wide as what passes; what stays inside a host is a paler band. Too many hosts for that become a
heat map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reshard.errors import UsageError
from reshard.plans.traffic import Traffic
from reshard.runs import IntArray
from reshard.show.pages.heat_map import heat_map
from reshard.show.svg import element, escaped, rank_colours

MOST_BANDED = 12
_BETWEEN, _BAR, _LETTER = 220.0, 12.0, 6.4


def host_traffic(traffic: Traffic, ranks_per_host: int) -> Traffic:
    """The traffic between hosts of so many neighbouring ranks, that inside a host included.

    Raises:
        UsageError: less than one rank a host.

    >>> import numpy as np
    >>> ring = Traffic.gathered(4, np.arange(4), (np.arange(4) + 1) % 4, np.full(4, 7))
    >>> host_traffic(ring, 2).amount.tolist()
    [7, 7, 7, 7]
    """
    if ranks_per_host < 1:
        raise UsageError(f"{ranks_per_host} ranks a host; give at least 1")
    return traffic.taken_together(ranks_per_host)


def across_hosts(hosts: Traffic) -> int:
    """How much leaves its host."""
    return int(hosts.amount[hosts.sender != hosts.receiver].sum())


def host_flows(hosts: Traffic, amount_text: Callable[[int], str]) -> str:
    """The traffic between hosts as an `svg` element.

    >>> import numpy as np
    >>> one = Traffic.gathered(2, np.array([0]), np.array([1]), np.array([7]))
    >>> "host 0 to host 1: 7 B" in host_flows(one, "{} B".format)
    True
    """
    if hosts.ranks > MOST_BANDED:
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
    # Where the next band of each bar begins: the bands of a bar are stacked.
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
    # On the left what hosts send, on the right what they receive.
    bars = []
    for host in range(hosts.ranks):
        for x, top, amounts, word, anchor, at in (
            (x0 - _BAR, left, hosts.sent, "sends", "end", x0 - _BAR - 8),
            (x1, right, hosts.received, "receives", "start", x1 + _BAR + 8),
        ):
            amount = int(amounts[host])
            # A host that sends or receives nothing has a visible bar too.
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
    """Where each bar begins, one below the other; none so near that texts would overlap."""
    tops, at = [], 0.0
    for amount in amounts.tolist():
        tops.append(at)
        at += max(amount * scale, 14.0) + gap
    return tops


def _band_path(x0: float, y0: float, x1: float, y1: float, thick: float) -> str:
    """The outline of a band: its upper edge as a curve, down at the receiver, and back."""
    middle, low0, low1 = (x0 + x1) / 2, y0 + thick, y1 + thick
    return (
        f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        f"v{thick:.1f}"
        f"C{middle:.1f} {low1:.1f} {middle:.1f} {low0:.1f} {x0:.1f} {low0:.1f}z"
    )


def _label_bar(lines: Sequence[str], x: float, middle: float, anchor: str) -> list[str]:
    """The name of a host and its amount, one below the other, beside the middle of its bar."""
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
