"""Marks: which dimensions of a rule's spec are cut by a name, and by which.

A rule cuts a dimension, or each block of a fused one, by a cut that the recipe names::

    tp@{heads.query} / fsdp, -                              dimension 0: heads.query
    -, tp@{feed_forward}@blocks[{size},{size}]              dimension 1: feed_forward in each block
    -, tp@{feed_forward}@groups2                            dimension 1: feed_forward, by pairs
    tp@joined[{q}@{heads.query},{k}@{heads.key_value}]      dimension 0: one name a block

Tensors that are cut by one name in one layer are computed with together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.block_rules import Blocks, Grouped, Joined
from reshard.cut_rules import CutRule, Heads
from reshard.rule_text import split_outside_brackets

_BRACES = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"<(\d+)>(?:@blocks\[.*\]|@groups(?:\d+|<\d+>))?")
_JOINED = re.compile(r"joined\[(.*)\]")


class CutName(NamedTuple):
    """A cut of the recipe: one of its own, or that of a member of a coupling."""

    name: str
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> CutName:
        """The cut that `feed_forward` or `heads.query` names."""
        name, _, member = text.partition(".")
        return cls(name, member or None)

    def __str__(self) -> str:
        return self.name if self.member is None else f"{self.name}.{self.member}"


class CutBlock(NamedTuple):
    """Indices `start:stop` of a dimension that are cut by a name, in units of `unit` indices."""

    name: CutName
    start: int
    stop: int
    unit: int


@dataclass(frozen=True, slots=True)
class CutMark:
    """The names by which a dimension of a spec is cut at one of its levels.

    Args:
        item: of the spec; counted from the end, as negative numbers, behind `...`.
        level: of the dimension's, in order.
        names: of each block, or one for all blocks; None where a block is cut by no name.
    """

    item: int
    level: int
    names: tuple[CutName | None, ...]

    def blocks(self, rule: CutRule, length: int) -> list[CutBlock]:
        """The blocks of a dimension that are cut by a name, for the rule that cuts it.

        >>> mark = CutMark(0, 0, (CutName("heads", "query"),))
        >>> mark.blocks(Blocks((4, 4), Heads(2)), 8)[1]
        CutBlock(name=CutName(name='heads', member='query'), start=4, stop=8, unit=2)
        """
        sizes: Sequence[int] = rule.sizes if isinstance(rule, Blocks | Joined) else (length,)
        rules = rule.rules if isinstance(rule, Joined) else None
        inner = rule.rule if isinstance(rule, Blocks) else rule
        names = self.names * len(sizes) if len(self.names) == 1 else self.names
        found, start = [], 0
        for number, (size, name) in enumerate(zip(sizes, names, strict=True)):
            by = inner if rules is None else rules[number]
            group = by.size if isinstance(by, Grouped) else 1
            by = by.rule if isinstance(by, Grouped) else by
            # Of a cut that is no coupling's, every index is a unit, or every group of them.
            if isinstance(by, Heads) and name is not None and name.member is not None:
                group = max(size // by.count, 1)
            if name is not None:
                found.append(CutBlock(name, start, start + size, group))
            start += size
        return found


def marks_of(spec: str, known: Collection[str]) -> tuple[CutMark, ...]:
    """The marks of a rule's spec, with its braces.

    Args:
        spec: as the rule has it.
        known: the names that braces may hold, such as `feed_forward` and `heads.query`.

    >>> for mark in marks_of("ep / fsdp, ..., tp@{heads.query} / fsdp", {"heads.query"}):
    ...     print(mark.item, mark.level, *mark.names)
    -1 0 heads.query
    """
    texts = [braces[1].strip() for braces in _BRACES.finditer(spec)]
    if not any(text in known for text in texts):
        return ()
    numbers = iter(range(len(texts)))
    # Without braces, whose `|`, `,` and `//` are not the spec's.
    plain = _BRACES.sub(lambda _: f"<{next(numbers)}>", spec).partition("|")[0]
    items = [item.strip() for item in split_outside_brackets(plain, ",")]
    behind = items.index("...") if "..." in items else len(items)
    found = []
    for number, item in enumerate(items):
        for level, text in enumerate(split_outside_brackets(item, "/")):
            _, _, rule = text.partition("@")
            names = _read_names(rule.strip(), texts, known)
            if any(name is not None for name in names):
                at = number if number < behind else number - len(items)
                found.append(CutMark(at, level, names))
    return tuple(found)


def _read_names(
    rule: str, texts: Sequence[str], known: Collection[str]
) -> tuple[CutName | None, ...]:
    """The name of each block of a rule, whose braces are numbered; or one for all."""
    joined = _JOINED.match(rule)
    if joined is not None:
        blocks = split_outside_brackets(joined[1], ",")
        return tuple(
            _read_names(block.partition("@")[2].strip(), texts, known)[0] for block in blocks
        )
    # Opens a dimension to propagation, or says its priority: behind the rule.
    match = _NAME.fullmatch(re.sub(r"\s+\?*(!\d+)?$", "", rule))
    text = texts[int(match[1])] if match else None
    return (CutName.parse(text) if text is not None and text in known else None,)
