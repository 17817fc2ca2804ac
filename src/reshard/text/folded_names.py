"""Names that differ in numbers only, folded into one text: `layers.{0-31}.up_proj.weight`.

Numbers are whole words between dots, as those of layers and experts. Sets of several numbers are
folded where they are products: `layers.{0-3}.experts.{0-7}.w1`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reshard.text.rank_sets import rank_text

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")
_MAX_SET_LETTERS = 40
_Sets = tuple[frozenset[int], ...]


class FoldedName(NamedTuple):
    """A text for `number` names of one kind."""

    text: str
    kind: int
    number: int


def fold_names(names: Iterable[str], kinds: Iterable[int]) -> list[FoldedName]:
    """Fold names of the same kind that differ in numbers only, in the order of the first of each.

    Args:
        names: separated by dots.
        kinds: a number for each name; only names of one kind are folded.

    >>> names = ["embed", *(f"layers.{n}.{what}" for n in range(4) for what in ("up", "down"))]
    >>> [one.text for one in fold_names(names, [0, *[1] * 8])]
    ['embed', 'layers.{0-3}.up', 'layers.{0-3}.down']
    >>> fold_names(["a.0.x", "a.1.x", "a.2.x"], [0, 0, 5])[0]
    FoldedName(text='a.{0,1}.x', kind=0, number=2)
    """
    groups: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, kind in zip(names, kinds, strict=True):
        numbers = tuple(map(int, _NUMBER.findall(name)))
        template = _NUMBER.sub("\0", name) if numbers else name
        groups.setdefault((template, kind), []).append(numbers)
    folded = []
    for (template, kind), rows in groups.items():
        words = template.split("\0") if rows[0] else [template]
        for sets in _find_products(rows):
            texts = [*map(_set_text, sets), ""]
            text = "".join(f"{word}{one}" for word, one in zip(words, texts, strict=True))
            folded.append(FoldedName(text, kind, math.prod(map(len, sets))))
    return folded


def _find_products(numbers: Sequence[tuple[int, ...]]) -> list[_Sets]:
    """Return products of sets that have all tuples, each once."""
    found: list[_Sets] = [tuple(frozenset((one,)) for one in row) for row in numbers]
    for position in reversed(range(len(numbers[0]))):
        merged: dict[tuple[_Sets, _Sets], set[int]] = {}
        for sets in found:
            others = sets[:position], sets[position + 1 :]
            merged.setdefault(others, set()).update(sets[position])
        found = [(*before, frozenset(own), *after) for (before, after), own in merged.items()]
    return found


def _set_text(numbers: frozenset[int]) -> str:
    """Return a number, or a set in braces."""
    if len(numbers) == 1:
        return str(next(iter(numbers)))
    text = rank_text(numbers)
    if len(text) > _MAX_SET_LETTERS:
        text = f"{min(numbers)}..{max(numbers)}: {len(numbers):,} numbers"
    return f"{{{text}}}"
