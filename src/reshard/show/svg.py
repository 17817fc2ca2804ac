"""Elements of SVG and HTML as text, and the colours of ranks.

Up to eight ranks have the colours of Okabe and Ito ("Color universal design", 2008), with a dark
grey in place of black, which remain distinct for colour-blind readers. More ranks share a scale
from dark blue to light yellow: lightness alone orders them, and neighbours look alike.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from reshard.text import printable

_DISTINCT = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#45475a",
)
_SCALE = ((38, 36, 104), (38, 92, 148), (28, 146, 140), (122, 190, 96), (246, 224, 94))


def escaped(text: object) -> str:
    """Escape text for the inside of an element or an attribute.

    >>> escaped('<w & "b">\\0')
    '&lt;w &amp; &quot;b&quot;&gt;\\\\x00'
    """
    return html.escape(printable(str(text), keep="\n"))


def element(tag: str, /, *content: str, **attributes: object) -> str:
    """Return an element with its content, which must be escaped already, and its attributes.

    `_` in the name of an attribute stands for `-`; a trailing `_` is for Python keywords.
    Attributes that are None are omitted.

    >>> element("rect", x=2.50, stroke_width=1, class_="box")
    '<rect x="2.5" stroke-width="1" class="box"/>'
    >>> element("p", escaped("a < b"), element("br"))
    '<p>a &lt; b<br/></p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not content:
        return f"<{tag}{written}/>"
    return f"<{tag}{written}>{''.join(content)}</{tag}>"


def _number(value: object) -> object:
    """Round lengths to a tenth."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def rank_colours(ranks: Iterable[int]) -> dict[int, str]:
    """Return a colour for each rank, by its position among the ranks.

    >>> rank_colours([7, 4])
    {4: '#0072b2', 7: '#e69f00'}
    >>> list(rank_colours(range(512)).values())[::511]
    ['#262468', '#f6e05e']
    """
    ordered = sorted(set(ranks))
    if len(ordered) <= len(_DISTINCT):
        return dict(zip(ordered, _DISTINCT, strict=False))
    return {rank: _on_scale(place, len(ordered) - 1) for place, rank in enumerate(ordered)}


def ink_on(colour: str) -> str:
    """Return black or white, whichever has more contrast with a colour.

    >>> ink_on("#262468"), ink_on("#f6e05e")
    ('#ffffff', '#000000')
    """
    # The relative luminance of WCAG 2.2; at 0.179 both contrasts are equal.
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _on_scale(place: int, last: int) -> str:
    """Return the colour at `place / last` of the scale."""
    steps = len(_SCALE) - 1
    step = min(place * steps // last, steps - 1)
    # Integer arithmetic, so that colours are the same on every machine.
    weight = place * steps - step * last
    mixed = (
        (low * (last - weight) + high * weight + last // 2) // last
        for low, high in zip(_SCALE[step], _SCALE[step + 1], strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
