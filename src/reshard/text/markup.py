"""Elements of HTML and SVG as text, and text that is safe inside them."""

from __future__ import annotations

import html


def printable(text: str, keep: str = "") -> str:
    """`text` with unprintable characters as escapes, except those in `keep`.

    >>> printable("wte\\x1b[2J"), printable("層")
    ('wte\\\\x1b[2J', '層')
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def escaped(text: object) -> str:
    """Text for the inside of an element or an attribute, whatever is in it.

    >>> escaped('<w & "b">\\0')
    '&lt;w &amp; &quot;b&quot;&gt;\\\\x00'
    """
    return html.escape(printable(str(text), keep="\n"))


def element(tag: str, /, *content: str, **attributes: object) -> str:
    """An element with its content, which must be escaped already, and its attributes.

    `_` in the name of an attribute stands for `-`; one behind it is for words of Python's.
    Attributes that are None are left out.

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
    """Lengths are written to a tenth, which is less than anyone sees."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
