"""A heat map of who sends how much to whom.

Senders are rows, receivers columns, and a square is the darker the more there is. Where there are
too many ranks, neighbouring ones are taken together, as many as make the least power of two that
is enough. Each square says in its `title` what it stands for; with few ranks the amounts are
written in the squares.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard.plans.traffic import Traffic
from reshard.show.svg import element, escaped

MOST_GROUPS = 64
# Pixels: the side of the map, the largest square, a letter of the indices.
_SIDE, _LARGEST, _LETTER = 448.0, 54.0, 6.4
# Groups up to which amounts stand in the squares, and the pixels of the scale of shades.
_MOST_WRITTEN, _SCALE = 12, 96.0


def heat_map(
    traffic: Traffic,
    amount_text: Callable[[int], str],
    *,
    noun: str = "rank",
    short_text: Callable[[int], str] | None = None,
    most_groups: int = MOST_GROUPS,
) -> str:
    """The traffic as an `svg` element.

    Args:
        traffic: between ranks, or what else is called `noun`.
        amount_text: writes an amount, with its unit.
        noun: what sends and receives.
        short_text: writes an amount inside a square; `amount_text` when None.
        most_groups: the most rows and columns.

    >>> import numpy as np
    >>> one = Traffic.gathered(2, np.array([0]), np.array([1]), np.array([7]))
    >>> "rank 0 to rank 1: 7 B" in heat_map(one, "{} B".format)
    True
    """
    # 1. Groups of ranks, and the size of a square.
    size = 1
    while -(-traffic.ranks // size) > most_groups:
        size *= 2
    grouped = traffic if size == 1 else traffic.taken_together(size)
    groups = grouped.ranks
    step = min(_SIDE / groups, _LARGEST)
    most = int(grouped.amount.max(initial=0))
    side = step * groups
    x0, y0 = 10 + _LETTER * len(str((groups - 1) * size)), 36.0
    short_text = short_text or amount_text

    def name(group: int) -> str:
        last = min((group + 1) * size, traffic.ranks) - 1
        return f"{noun} {group}" if size == 1 else f"{noun}s {group * size}-{last}"

    # 2. A square for each pair that sends something; empty ones are the background.
    squares, amounts = [], []
    for a, b, amount in zip(
        grouped.sender.tolist(), grouped.receiver.tolist(), grouped.amount.tolist(), strict=True
    ):
        x, y = x0 + b * step, y0 + a * step
        said = f"{name(a)} to {name(b)}: {amount_text(amount)}"
        squares.append(
            element(
                "rect",
                element("title", escaped(said)),
                x=x,
                y=y,
                width=step,
                height=step,
                opacity=_strength(amount, most),
            )
        )
        if groups <= _MOST_WRITTEN:
            amounts.append(_write_amount(short_text(amount), x, y, step, amount, most))
    # 3. The caption, the scale and the size of the whole.
    together = "" if size == 1 else f", {size} {noun}s a square"
    caption = f"sending {noun}s down, receiving {noun}s across{together}"
    scale = f"up to {amount_text(most)}"
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


def _strength(amount: int, most: int) -> str:
    """The opacity of an amount, from faint to full; the least amount is still visible."""
    return f"{0.15 + 0.85 * amount / most:.2f}"


def _write_amount(text: str, x: float, y: float, step: float, amount: int, most: int) -> str:
    if len(text) * 5.6 + 4 > step:
        return ""
    return element(
        "text",
        escaped(text),
        x=x + step / 2,
        y=y + step / 2 + 4,
        class_="amount strong" if 2 * amount > most else "amount",
    )


def _grid(x0: float, y0: float, step: float, groups: int) -> str:
    """Lines between squares, and the diagonal: what a rank has, it does not send to itself."""
    side = step * groups
    parts = [f"M{x0:.1f} {y0 + i * step:.1f}h{side:.1f}" for i in range(groups + 1)]
    parts += [f"M{x0 + i * step:.1f} {y0:.1f}v{side:.1f}" for i in range(groups + 1)]
    diagonal = f"M{x0:.1f} {y0:.1f}L{x0 + side:.1f} {y0 + side:.1f}"
    return element("path", d="".join(parts), class_="heat-grid") + element(
        "path", d=diagonal, class_="heat-diagonal"
    )


def _ticks(x0: float, y0: float, step: float, groups: int, size: int) -> list[str]:
    """The first rank of a group, at every group that has room for it."""
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
