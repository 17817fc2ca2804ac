"""Many thousand names of tensors in a short form, for JSON.

The names of a model's tensors differ by the numbers of layers and experts. They are sorted by what
they are without numbers, and written as that and a column for each number::

    ["layers.{}.experts.{}.up.weight", [[0, 0, 64, 1, 2]], [[0, 1, 64, 0, 2]]]

says 128 names, of 2 layers with 64 experts. Columns are those of layouts' documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from reshard.errors import NotationError
from reshard.plans.documents.number_columns import packed, unpacked

# Only numbers that are written as `str` writes them come back the same.
_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)")


def sort_names(names: Iterable[str]) -> list[str]:
    """The names, each once, in the order in which they are written.

    >>> sort_names(["a.10", "b", "a.9"])
    ['a.9', 'a.10', 'b']
    """
    return sorted(set(names), key=split_numbers)


def split_numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with `{}` for its numbers, and the numbers.

    >>> split_numbers("layers.3.w2.weight")
    ('layers.{}.w{}.weight', (3, 2))
    """
    # A brace of the name's own would be read as a number's place.
    if "{" in name or "}" in name:
        return name, ()
    return _NUMBER.sub("{}", name), tuple(map(int, _NUMBER.findall(name)))


def write_names(names: list[str]) -> list[Any]:
    """Names in the order of `sort_names`, as JSON; `read_names` gives them back."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        template, numbers = split_numbers(name)
        groups.setdefault(template, []).append(numbers)
    written: list[Any] = []
    for template, rows in groups.items():
        if len(rows) == 1:
            written.append(template.format(*rows[0]) if rows[0] else template)
        else:
            written.append([template, *(packed(column) for column in zip(*rows, strict=True))])
    return written


def read_names(written: object, where: str) -> list[str]:
    """The names that were written. Raises NotationError for anything else.

    >>> read_names(["a", ["b.{}.c", [[3, 1, 2]]]], "names")
    ['a', 'b.3.c', 'b.4.c']
    """
    if not isinstance(written, list):
        raise NotationError(f"{where}: {written!r} is not a list of names")
    names: list[str] = []
    for number, entry in enumerate(written):
        if isinstance(entry, str):
            names.append(entry)
            continue
        if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[0], str):
            raise NotationError(f"{where}[{number}]: {entry!r} is not a name with its numbers")
        template, *columns = entry
        numbers = [unpacked(column, f"{where}[{number}]").tolist() for column in columns]
        pieces = template.split("{}")
        if len(pieces) != len(columns) + 1 or len({len(column) for column in numbers}) != 1:
            raise NotationError(
                f"{where}[{number}]: {len(columns)} columns of {[len(c) for c in numbers]} numbers "
                f"for {template!r}"
            )
        # A format with %d is the quickest way to fill in numbers.
        fill = "%d".join(piece.replace("%", "%%") for piece in pieces)
        names += [fill % row for row in zip(*numbers, strict=True)]
    return names
