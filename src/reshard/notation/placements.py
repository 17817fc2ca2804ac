"""What does one mesh axis do to a tensor?

PyTorch's DTensor describes a tensor by one *placement* for each mesh axis. Here they are plain
values, so that they can be read and written without torch::

    Shard(dim=0)                              cut dimension 0 by ceil
    _StridedShard(dim=0, split_factor=2)      2 blocks by ceil, each cut over the axis
    PartitionedShard(0, 4, (4, 6, 4, 2))      blocks of these sizes, each cut or dealt whole
    Replicate()                               copies
    Partial(sum)                              contributions

A list of them is read in any of the ways in which torch prints it: `[Shard(dim=0), Replicate()]`,
`(Shard(0), R)`, `S(0)R`, and with the order in which axes cut one dimension, `S(0)[1]S(0)[0]`.

1. The text is read as calls: a name, its arguments, an order behind it.
2. A call, or an object of torch, is made a placement by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from reshard.errors import NotationError
from reshard.notation.partitioned import PartitionedShard, Splits

REDUCTION_OF_OPERATION = {
    "sum": "sum",
    "avg": "mean",
    "max": "max",
    "min": "min",
    "product": "product",
}
OPERATION_OF_REDUCTION = {name: operation for operation, name in REDUCTION_OF_OPERATION.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """The dimension `dim`, cut by ceil as `torch.chunk` does; a negative `dim` counts from the end.

    >>> print(Shard(0))
    Shard(0)
    """

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """`split_factor` blocks of the dimension `dim` by ceil, each cut by ceil; torch's
    `_StridedShard`.

    >>> print(StridedShard(0, 2))
    _StridedShard(0, split_factor=2)
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise NotationError(
                f"_StridedShard with split_factor {self.split_factor}; it must be at least 1"
            )

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copies along the axis.

    >>> print(Replicate())
    Replicate()
    """

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Contributions along the axis, still to be reduced by torch's `operation`.

    >>> print(Partial("avg"), Partial("avg").reduction)
    Partial(avg) mean
    """

    operation: str = "sum"

    def __post_init__(self) -> None:
        if self.operation not in REDUCTION_OF_OPERATION:
            raise NotationError(
                f"Partial({self.operation}): the reductions are "
                f"{', '.join(REDUCTION_OF_OPERATION)}; redistribute the tensor first"
            )

    @property
    def reduction(self) -> str:
        """The reduction by reshard's name."""
        return REDUCTION_OF_OPERATION[self.operation]

    def __str__(self) -> str:
        return f"Partial({self.operation})"


Placement = Shard | StridedShard | PartitionedShard | Replicate | Partial
Argument = int | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Call:
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
_SPEC = re.compile(r"Spec\(\w+(?:\[[^\]]*\])?\((.*)\)\)", re.DOTALL)
_DEEPEST = 3


def read_calls(text: str) -> list[Call]:
    """The placements that `text` writes, one for each mesh axis, as calls.

    Raises:
        NotationError: text that is no list of placements.

    >>> [call.name for call in read_calls("[Shard(dim=0), Replicate()]")]
    ['Shard', 'Replicate']
    >>> read_calls("S(0)[1]S(0)[0]")[0]
    Call(name='Shard', arguments=(0,), named=(), order=1)
    """
    body = text.strip()
    wrapped = _SPEC.fullmatch(body)
    body = wrapped[1].strip() if wrapped else body
    if body[:1] + body[-1:] in ("[]", "()"):
        body = body[1:-1]
    calls: list[Call] = []
    at = _end(_BETWEEN, body, 0)
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
        calls.append(Call(_NAMES[name[1]], tuple(arguments), tuple(named), number))
        at = _end(_BETWEEN, body, at)
    return calls


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _read_arguments(
    body: str, at: int, text: str
) -> tuple[list[Argument], list[tuple[str, Argument]], int]:
    arguments: list[Argument] = []
    named: list[tuple[str, Argument]] = []
    while True:
        token, after = _token(body, at, text)
        if token == ")":
            return arguments, named, after
        follows, behind = _token(body, after, text)
        if follows == "=":
            value, at = _read_value(body, behind, text, 0)
            named.append((token, value))
        else:
            value, at = _read_value(body, at, text, 0)
            arguments.append(value)
        follows, after = _token(body, at, text)
        if follows == ",":
            at = after
        elif follows != ")":
            raise _unreadable(follows, text)


def _read_value(body: str, at: int, text: str, depth: int) -> tuple[Argument, int]:
    token, at = _token(body, at, text)
    if token in ("(", "["):
        closing = ")" if token == "(" else "]"
        items: list[Argument] = []
        while True:
            following, after = _token(body, at, text)
            if following == closing:
                return tuple(items), after
            if depth == _DEEPEST:
                raise _unreadable(following, text)
            item, at = _read_value(body, at, text, depth + 1)
            items.append(item)
            following, after = _token(body, at, text)
            if following == ",":
                at = after
            elif following != closing:
                raise _unreadable(following, text)
    if token in (")", "]", ",", "="):
        raise _unreadable(token, text)
    if token[0] in "'\"":
        return token[1:-1], at
    return (_number(token, text) if token.lstrip("-")[0].isdigit() else token), at


def _number(token: str, text: str) -> int:
    # Python refuses to read more digits than this by itself, with an error of its own.
    if len(token) > 20:
        raise _unreadable(token, text)
    return int(token)


def _token(body: str, at: int, text: str) -> tuple[str, int]:
    match = _TOKEN.match(body, at)
    if not match:
        raise _unreadable(body[at:], text)
    return match[1], match.end()


def _unreadable(what: str, text: str) -> NotationError:
    where = f"at {what[:40]!r} " if what else "at its end "
    return NotationError(
        f"cannot read the placements `{text}` {where}; arguments are numbers, words and lists of "
        "numbers, in brackets that close"
    )


def placement_of_call(call: Call) -> Placement:
    """The placement that a call means.

    Raises:
        NotationError: a name that is no placement of DTensor, or arguments of another form.

    >>> print(placement_of_call(Call("_StridedShard", (0,), (("sf", 2),))))
    _StridedShard(0, split_factor=2)
    """
    match call.name:
        case "Shard":
            return Shard(_integer(call, call.bound("dim"), "dim"))
        case "_StridedShard":
            bound = call.bound("dim", "split_factor", sf="split_factor")
            return StridedShard(
                _integer(call, bound, "dim"), _integer(call, bound, "split_factor", 1)
            )
        case "Replicate":
            call.bound()
            return Replicate()
        case "Partial":
            return Partial(str(call.bound("reduce_op").get("reduce_op", "sum")))
        case "PartitionedShard":
            bound = call.bound("dim", "num_partitions", "splits", "aligned")
            return PartitionedShard(
                _integer(call, bound, "dim"),
                _integer(call, bound, "num_partitions"),
                _splits(call, bound.get("splits")),
                _truth(call, bound.get("aligned", "False")),
            )
    raise NotationError(
        f"{call.name} cuts several dimensions as one, which a sharding cannot say; read it with "
        "`reshard.notation.ragged`, which answers with a layout"
    )


def _integer(
    call: Call, bound: Mapping[str, Argument], name: str, default: int | None = None
) -> int:
    value = bound.get(name, default)
    if not isinstance(value, int):
        raise NotationError(f"{call.name} needs a number for {name}, got {value!r}")
    return value


def _splits(call: Call, value: Argument | None) -> Splits:
    if is_numbers(value) or (isinstance(value, tuple) and all(map(is_numbers, value))):
        return cast(Splits, value)
    raise NotationError(
        f"{call.name} needs splits such as (4, 6, 4, 2), or a row of them for each rank, "
        f"got {value!r}"
    )


def is_numbers(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether an argument is a list of numbers."""
    return isinstance(value, tuple) and all(isinstance(item, int) for item in value)


def _truth(call: Call, value: Argument) -> bool:
    if value not in ("True", "False"):
        raise NotationError(f"{call.name} needs True or False for aligned, got {value!r}")
    return value == "True"


def as_placement(item: object) -> Placement:
    """A placement from a placement, or from an object of torch, which is not imported.

    Raises:
        NotationError: anything else, and torch's placements that reshard has no word for.

    >>> as_placement(Replicate())
    Replicate()
    """
    if isinstance(item, Placement):
        return item
    names = [kind.__name__ for kind in type(item).__mro__ if kind.__module__.startswith("torch")]
    # A subclass may mean more than its base, as a masked partial does, so only the class counts.
    live: Any = item
    match names[0] if names and type(item).__name__ == names[0] else "":
        case "Shard":
            return Shard(int(live.dim))
        case "_StridedShard":
            return StridedShard(int(live.dim), int(live.split_factor))
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(live.reduce_op))
    raise NotationError(
        f"placement {item!s} of type {type(item).__name__} is not known; known are Shard, "
        "_StridedShard, Replicate, Partial and PartitionedShard"
    )


def placements_text(placements: Sequence[Placement]) -> str:
    """The list as torch would be given it: `[Shard(0), Replicate()]`."""
    return f"[{', '.join(map(str, placements))}]"
