"""Lexing of placements: names, arguments and steps of calls such as `Shard(dim=0)`.

A placement is written as a call, `Shard(dim=0)`, in any of the ways in which torch prints one:
by its long or its short name, with or without commas, and with the step in which its axis cuts
where several cut one dimension: `S(0)[1]S(0)[0]`. Arguments are numbers, words and lists::

    [PartitionedShard(0, 2, splits=(4, 6)), P(sum)]

    name              arguments  named                 step
    PartitionedShard  0, 2       splits = (4, 6)
    Partial           sum

`reshard.notation.dtensor.placements` says what the calls mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeGuard

from reshard.errors import NotationError

Argument = int | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class PlacementCall:
    """A placement as it is written: a name, arguments, and `[order]` where it is given."""

    name: str
    arguments: tuple[Argument, ...] = ()
    named: tuple[tuple[str, Argument], ...] = ()
    order: int | None = None

    def bound(self, *parameters: str, **other_names: str) -> dict[str, Argument]:
        """The arguments by parameter; `other_names` gives further names of parameters.

        Raises:
            NotationError: too many arguments, or one that is unknown or given twice.
        """
        found = dict(zip(parameters, self.arguments, strict=False))
        surplus = [str(argument) for argument in self.arguments[len(parameters) :]]
        for name, value in self.named:
            parameter = other_names.get(name, name)
            if parameter in found or parameter not in parameters:
                surplus.append(f"{name}={value}")
            else:
                found[parameter] = value
        if surplus:
            raise NotationError(
                f"{self.name} does not take {', '.join(surplus)}; write "
                f"{self.name}({', '.join(parameters)})"
            )
        return found


# Long names first: `RaggedShard` begins with torch's short name of `Replicate`.
_NAMES = {
    "_StridedRaggedShard": "_StridedRaggedShard",
    "PartitionedShard": "PartitionedShard",
    "RaggedShard": "RaggedShard",
    "_StridedShard": "_StridedShard",
    "Replicate": "Replicate",
    "Partial": "Partial",
    "Shard": "Shard",
    "_S": "_StridedShard",
    "S": "Shard",
    "R": "Replicate",
    "P": "Partial",
}
_NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*(" + "|".join(_NAMES) + r")(?![a-z])")
_TOKEN = re.compile(r"\s*(-?\d+|[A-Za-z_]\w*|'[^']*'|\"[^\"]*\"|[()\[\],=])\s*")
_ORDER = re.compile(r"\s*\[(\d+)\]")
_BETWEEN = re.compile(r"[\s,]*")
# What torch prints of a spec, around its placements: `Spec(f32[8, 4](S(0)R))`.
_SPEC = re.compile(r"Spec\(\w+(?:\[[^\]]*\])?\((.*)\)\)", re.DOTALL)
# Lists nest no deeper in any placement; a limit keeps hostile text from deep recursion.
_DEEPEST = 3


def read_calls(text: str) -> list[PlacementCall]:
    """The placements that `text` writes, one for each mesh axis, as calls.

    Raises:
        NotationError: text that is no list of placements.

    >>> [call.name for call in read_calls("[Shard(dim=0), Replicate()]")]
    ['Shard', 'Replicate']
    >>> read_calls("S(0)[1]S(0)[0]")[0]
    PlacementCall(name='Shard', arguments=(0,), named=(), order=1)
    """
    body = text.strip()
    wrapped = _SPEC.fullmatch(body)
    body = wrapped[1].strip() if wrapped else body
    # The list's own brackets, where it has any: `S(0)R` has none.
    if body[:1] + body[-1:] in ("[]", "()"):
        body = body[1:-1]
    calls: list[PlacementCall] = []
    at = _skip(_BETWEEN, body, 0)
    while at < len(body):
        name = _NAME.match(body, at)
        if not name:
            raise NotationError(
                f"cannot read {body[at : at + 40]!r} in the placements `{text}`; a placement is "
                "Shard(0), _StridedShard(0, split_factor=2), Replicate(), Partial(sum), "
                "PartitionedShard(0, 2, (4, 6)) or RaggedShard((0,), (1, 2))"
            )
        at = name.end()
        arguments: list[Argument] = []
        named: list[tuple[str, Argument]] = []
        if body[at : at + 1] == "(":
            arguments, named, at = _read_arguments(body, at + 1, text)
        order = _ORDER.match(body, at)
        at = order.end() if order else at
        number = int(order[1]) if order else None
        calls.append(PlacementCall(_NAMES[name[1]], tuple(arguments), tuple(named), number))
        at = _skip(_BETWEEN, body, at)
    return calls


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _read_arguments(
    body: str, at: int, text: str
) -> tuple[list[Argument], list[tuple[str, Argument]], int]:
    arguments: list[Argument] = []
    named: list[tuple[str, Argument]] = []
    while True:
        token, after = _read_token(body, at, text)
        if token == ")":
            return arguments, named, after
        # One token ahead tells `name=value` from a value.
        follows, behind = _read_token(body, after, text)
        if follows == "=":
            value, at = _read_value(body, behind, text, 0)
            named.append((token, value))
        else:
            value, at = _read_value(body, at, text, 0)
            arguments.append(value)
        follows, after = _read_token(body, at, text)
        if follows == ",":
            at = after
        elif follows != ")":
            raise _make_error(follows, text)


def _read_value(body: str, at: int, text: str, depth: int) -> tuple[Argument, int]:
    token, at = _read_token(body, at, text)
    if token in ("(", "["):
        closing = ")" if token == "(" else "]"
        items: list[Argument] = []
        while True:
            following, after = _read_token(body, at, text)
            if following == closing:
                return tuple(items), after
            if depth == _DEEPEST:
                raise _make_error(following, text)
            item, at = _read_value(body, at, text, depth + 1)
            items.append(item)
            following, after = _read_token(body, at, text)
            if following == ",":
                at = after
            elif following != closing:
                raise _make_error(following, text)
    if token in (")", "]", ",", "="):
        raise _make_error(token, text)
    if token[0] in "'\"":
        return token[1:-1], at
    return (_read_number(token, text) if token.lstrip("-")[0].isdigit() else token), at


def _read_number(token: str, text: str) -> int:
    # Python refuses to read more digits than this by itself, with an error of its own.
    if len(token) > 20:
        raise _make_error(token, text)
    return int(token)


def _read_token(body: str, at: int, text: str) -> tuple[str, int]:
    match = _TOKEN.match(body, at)
    if not match:
        raise _make_error(body[at:], text)
    return match[1], match.end()


def _make_error(what: str, text: str) -> NotationError:
    where = f"at {what[:40]!r} " if what else "at its end "
    return NotationError(
        f"cannot read the placements `{text}` {where}; arguments are numbers, words and lists of "
        "numbers, in brackets that close"
    )


def is_numbers(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether an argument is a list of numbers."""
    return isinstance(value, tuple) and all(isinstance(item, int) for item in value)
