"""The text of a cut rule, read back: `parse_rule(rule.text) == rule`.

A rule is a word with a number or a bracket behind it. Rules that wrap another one (`blocks`,
`groups`, `halo`) take the rule written before them: `balanced@halo[1,1]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reshard.block_rules import (
    BlockCyclic,
    Blocks,
    Grouped,
    Joined,
    Pieces,
    Strided,
    WholeBlocks,
    Zigzag,
)
from reshard.cut_rules import (
    Balanced,
    Ceil,
    CutRule,
    Halo,
    Heads,
    Padded,
    Sizes,
    Windows,
)
from reshard.errors import NotationError

_SHAPES = {
    "ceil": "ceil",
    "unit": "unit64",
    "balanced": "balanced",
    "sizes": "sizes[3,1]",
    "windows": "windows[0:4,2:6]",
    "heads": "heads8",
    "stride": "stride2",
    "blocks": "blocks[16,8,4]",
    "joined": "joined[6@heads3,2]",
    "groups": "groups2",
    "pieces": "pieces[4:2,6:4]",
    "whole": "whole[4,6,4] or whole[4,6,4;1,2]",
    "cyclic": "cyclic16 or cyclic16+1",
    "zigzag": "zigzag",
    "pad": "pad or pad128",
    "halo": "halo[1,1], halo[1,1,fresh] or halo[1,1,padded]",
}
_RULE = re.compile(r"([a-z]+)(\d*)((?:\+\d+)?)(?:\[(.*)\])?")


def parse_rule(text: str) -> CutRule:
    """The cut rule that `text` writes.

    Raises:
        NotationError: a word that is no rule, or numbers of the wrong form.

    >>> parse_rule("stride2"), parse_rule("")
    (Strided(stride=2, local_lengths=None), Ceil(unit=1))
    >>> parse_rule("balanced@halo[1,1,fresh]").text
    'balanced@halo[1,1,fresh]'
    """
    rule: CutRule = Ceil()
    for word in split_outside_brackets(text, "@") if text else ():
        rule = _parse_word(word.strip(), rule, text)
    return rule


def _parse_word(word: str, inner: CutRule, text: str) -> CutRule:
    match = _RULE.fullmatch(word)
    name = match[1] if match else ""
    if match is None or name not in _SHAPES:
        raise NotationError(
            f"unknown cut rule {word!r} in {text!r}; the rules are {', '.join(_SHAPES)}"
        )
    if not inner.is_default and name not in ("blocks", "groups", "halo"):
        raise NotationError(
            f"{word!r} in {text!r} cannot wrap another rule; only `blocks`, `groups` and `halo` can"
        )
    try:
        rule = _build(name, match[2], match[3], match[4], inner)
    except ValueError as error:
        if isinstance(error, NotationError) or type(error) is not ValueError:
            raise
        rule = None
    if rule is None:
        raise NotationError(f"cannot read the cut rule {word!r}; write {_SHAPES[name]}")
    return rule


def _build(
    name: str, number: str, plus: str, bracket: str | None, inner: CutRule
) -> CutRule | None:
    """The rule, or None (or a ValueError) where the numbers do not have its form."""
    if bracket is None:
        if plus and name != "cyclic":
            return None
        # Words without brackets: `ceil`, `pad4`, `cyclic16+2`.
        plain: dict[str, CutRule] = {"ceil": Ceil(), "balanced": Balanced(), "zigzag": Zigzag()}
        if name in plain:
            return None if number else plain[name]
        if name == "groups":
            return Grouped(int(number), inner)
        if name == "pad":
            return Padded(int(number or 1))
        one_number: dict[str, Callable[[int], CutRule]] = {
            "unit": Ceil,
            "heads": Heads,
            "stride": Strided,
        }
        if name in one_number:
            return one_number[name](int(number))
        return BlockCyclic(int(number), int(plus or 0)) if name == "cyclic" else None
    if plus:
        return None
    # With brackets only `stride` has a number too, such as `stride2[4,4]`.
    if name == "stride":
        return Strided(int(number), _numbers(bracket))
    if number:
        return None
    if name == "sizes":
        return Sizes(_numbers(bracket))
    if name == "blocks":
        return Blocks(_numbers(bracket), inner)
    if name == "joined":
        return _parse_joined(bracket)
    if name == "windows":
        return Windows(tuple((start, stop) for start, stop in _groups(bracket)))
    if name == "pieces":
        return Pieces(_groups(bracket))
    if name == "whole":
        sizes, _, counts = bracket.partition(";")
        return WholeBlocks(_numbers(sizes), _numbers(counts) if counts else None)
    if name == "halo":
        before, after, *flags = (word.strip() for word in bracket.split(","))
        if len(set(flags)) != len(flags) or not set(flags) <= {"fresh", "padded"}:
            return None
        return Halo(int(before), int(after), "fresh" in flags, "padded" in flags, inner)
    return None


def _parse_joined(text: str) -> CutRule:
    blocks = split_outside_brackets(text, ",") if text.strip() else []
    pairs = [block.partition("@") for block in blocks]
    # `6@` has no rule, which is not the same as the default one.
    if any(at and not rule.strip() for _, at, rule in pairs):
        raise ValueError
    return Joined(
        tuple(int(size) for size, _, _ in pairs), tuple(parse_rule(rule) for _, _, rule in pairs)
    )


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """The pieces of a text between separators of one letter that no square brackets enclose.

    >>> split_outside_brackets("tp@joined[6@heads3,2], -", ",")
    ['tp@joined[6@heads3,2]', ' -']
    """
    pieces, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == separator and depth <= 0:
            pieces.append(text[start:at])
            start = at + 1
    return [*pieces, text[start:]]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text.strip() else ()


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Numbers joined by `:`, in items separated by commas."""
    items = text.split(",") if text.strip() else ()
    return tuple(tuple(int(number) for number in item.split(":")) for item in items)
