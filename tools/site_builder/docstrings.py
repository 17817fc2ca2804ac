"""Docstrings as the generator shows them.

- Doctests are blocks of code.
- Literal blocks, which `::` begins, need no second colon.
- Arguments that a docstring describes together, `source, target:`, are described one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_LITERAL = re.compile(r"::$", re.MULTILINE)
_TOGETHER = re.compile(r"(?P<indent> +)(?P<names>\w+(?:,\s+\w+)+): (?P<text>.*)", re.DOTALL)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before its sections are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_fences(one_by_one(obj.docstring.value))


def with_fences(text: str) -> str:
    r"""A docstring with its doctests as blocks of code.

    >>> print(with_fences("Adds::\n\n>>> 1 + 1\n2\n\nMore."))
    Adds:
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    """
    lines: list[str] = []
    indent: str | None = None
    for line in _LITERAL.sub(":", text).splitlines():
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    if indent is not None:
        lines.append(f"{indent}```")
    return "\n".join(lines)


def one_by_one(text: str) -> str:
    r"""A docstring in which each argument has an item of its own.

    >>> print(one_by_one("Move.\n\nArgs:\n    a, b: both\n        sides.\n    c: more."))
    Move.
    <BLANKLINE>
    Args:
        a: both
            sides.
        b: both
            sides.
        c: more.
    """
    head, title, rest = text.partition("\nArgs:\n")
    arguments, blank, tail = rest.partition("\n\n")
    items = "\n".join(_separated(arguments)) if title else ""
    return head + title + items + blank + tail


def _separated(arguments: str) -> Iterator[str]:
    # An item goes on where lines are indented deeper.
    for item in re.split(r"\n(?= {4}\S)", arguments):
        match = _TOGETHER.fullmatch(item)
        if match is None:
            yield item
        else:
            for name in re.split(r",\s+", match["names"]):
                yield f"{match['indent']}{name}: {match['text']}"
