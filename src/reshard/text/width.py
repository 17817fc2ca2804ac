"""Columns that a text takes on a terminal, and padding to a number of them."""

from __future__ import annotations

import unicodedata


def display_width(text: str) -> int:
    """Columns a line of text takes: wide East Asian characters two, combining marks none.

    >>> display_width("rank"), display_width("層"), display_width("e\\u0301")
    (4, 2, 1)
    """
    return sum(
        # W and F are the wide and full-width classes of Unicode's annex 11.
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def padded(text: str, width: int, align: str = "left") -> str:
    """`text` filled with spaces to `width` columns; a longer text is left as it is.

    >>> padded("ab", 5, "right"), padded("ab", 5, "center"), padded("abc", 2)
    ('   ab', ' ab  ', 'abc')
    """
    missing = max(0, width - display_width(text))
    before = {"left": 0, "right": missing, "center": missing // 2}[align]
    return " " * before + text + " " * (missing - before)


def shortened(text: str, width: int, mark: str = "…") -> str:
    """`text`, or as much of its beginning as fits into `width` columns with `mark` behind it.

    >>> shortened("model.embeddings", 8)
    'model.e…'
    """
    if display_width(text) <= width:
        return text
    kept = text
    while kept and display_width(kept) + len(mark) > width:
        kept = kept[:-1]
    return (kept + mark)[:width]


def cut_in_the_middle(text: str, width: int, mark: str = "…") -> str:
    """`text`, or its beginning and its end with `mark` between them, in `width` columns at most.

    Names in a model begin alike and differ at their ends too.

    >>> cut_in_the_middle("model.layers.17.mlp.up_proj.weight", 24)
    'model.layers…proj.weight'
    """
    if display_width(text) <= width:
        return text
    # Both ends keep half of the room.
    room = max(0, width - len(mark))
    begin, end = text[: room - room // 2], text[max(0, len(text) - room // 2) :]
    while display_width(begin) > room - room // 2:
        begin = begin[:-1]
    while display_width(end) > room // 2:
        end = end[1:]
    return (begin + mark + end)[:width]
