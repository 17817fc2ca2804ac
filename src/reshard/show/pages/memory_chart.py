"""A chart of the memory held at each of many moments, as bars side by side.

Each bar has two parts: what is held before, and above it what comes for that moment only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from reshard.show.svg import element, escaped

_WIDTH, _HEIGHT, _MOST_WIDE, _LETTER = 760.0, 150.0, 36.0, 6.1
_MOST_NUMBERED = 32


class Moment(NamedTuple):
    """A bar: its name, what is held before and at most meanwhile."""

    name: str
    held: int
    most: int


def memory_chart(moments: Sequence[Moment], amount_text: Callable[[int], str]) -> str:
    """The bars as an `svg` element, the greatest amount marked.

    Args:
        moments: in their order.
        amount_text: writes an amount, with its unit.

    >>> "matmul: 7 B, 3 B before" in memory_chart([Moment("matmul", 3, 7)], "{} B".format)
    True
    """
    most = max((moment.most for moment in moments), default=0)
    step = min(_WIDTH / max(len(moments), 1), _MOST_WIDE)
    # Pixels a byte: the highest bar fills the height.
    scale = _HEIGHT / max(most, 1)
    top, floor = 20.0, 20.0 + _HEIGHT
    bars = []
    for place, moment in enumerate(moments):
        x, wide = place * step, step * 0.8
        parts = [
            element(
                "title",
                escaped(
                    f"{moment.name}: {amount_text(moment.most)}, {amount_text(moment.held)} before"
                ),
            ),
            # The paler bar is drawn first; what is held before covers its lower end.
            _bar(x, floor, wide, moment.most * scale, 0.35),
            _bar(x, floor, wide, min(moment.held, moment.most) * scale, 1.0),
        ]
        if len(moments) <= _MOST_NUMBERED:
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
    caption = f"up to {amount_text(most)}"
    width = max(step * len(moments), _LETTER * len(caption) + 4)
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
