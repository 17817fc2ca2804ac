"""Messages of trainer and engines as JSON: orders, outcomes and options.

A run, between the trainer and each engine::

    trainer                              engine
    order: version, forward orders   --->
    [weights, unless another engine forwards them]
                                     <---  outcome: empty on success
    [if it lacks weights: another order, and the weights from the trainer]

Before the first run, a trainer sends the options of a refit, and an engine the buckets of its
weights. Nothing is unpickled: a message is a dataclass, and what arrives is compared with the types
of its fields (`read_message`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from reshard.errors import LinkError, PlanError, UsageError

Message = TypeVar("Message")


def write_message(message: Any) -> bytes:
    """Return a message, a dataclass, as JSON."""
    return json.dumps(asdict(message)).encode()


def read_message(kind: type[Message], text: str | bytes, what: str) -> Message:
    """Return the message in a text. Raise LinkError for anything else, which is not `what`.

    Numbers are at least 0. Fields that `kind` lacks are ignored: other protocols may have more.
    They may lack `OPTIONAL` fields.

    >>> read_message(dict[str, int], '{"layers.0.up": 3}', "table of buckets")
    {'layers.0.up': 3}
    """
    try:
        return _convert(kind, json.loads(text))  # type: ignore[no-any-return]
    except (TypeError, ValueError, KeyError) as error:
        raise LinkError(f"{text[:80]!r} is no {what}; give both sides one release") from error


# The metadata of fields that a message may lack.
OPTIONAL = {"optional": True}
_hints_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


# What JSON has in place of a type.
_IN_JSON: dict[Any, Any] = {tuple: list, Mapping: dict, float: (int, float)}


def _convert(kind: Any, value: Any) -> Any:
    """Return a JSON value as an object of a type; raise TypeError, ValueError or KeyError."""
    if kind is object:
        return value
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    is_message = is_dataclass(kind)
    expected: Any = dict if is_message else _IN_JSON.get(origin, origin)
    # In Python, true and false are integers, too.
    if not isinstance(value, expected) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a {kind}")
    if is_message:
        names = [
            item.name for item in fields(kind) if item.metadata != OPTIONAL or item.name in value
        ]
        hints = _hints_of(kind)
        return kind(**{name: _convert(hints[name], value[name]) for name in names})
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(
            _convert(item_kind, item) for item_kind, item in zip(kinds, value, strict=True)
        )
    if expected is dict:
        return {key: _convert(arguments[1], item) for key, item in value.items()}
    if kind is int and value < 0:
        raise ValueError(f"{value!r} is below 0")
    return kind(value)


# Why forwarding ended: models do not match; engines cannot connect; anything else.
MISFIT, UNREACHABLE, BROKE = "misfit", "unreachable", "broke"


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """An order to forward weights from an engine to another.

    Attributes:
        meeting: a unique name under which both engines meet at the store.
        turn: when they prepare it, relative to other orders of either.
        source, target: the engines' numbers.
        source_ranks, target_ranks: their numbers of ranks.
    """

    meeting: str
    turn: int
    source: int
    target: int
    source_ranks: int
    target_ranks: int


@dataclass(frozen=True, slots=True)
class Order:
    """An engine's part in a run.

    Attributes:
        sync: the number of the trainer's sync, among those of the link.
        version: of the weights to receive.
        hand_ons: the forward orders that involve the engine.

    >>> Order.read(write_message(Order(0, 3)), 0)
    Order(sync=0, version=3, hand_ons=())
    """

    sync: int
    version: int
    hand_ons: tuple[ForwardOrder, ...] = ()

    @classmethod
    def read(cls, text: bytes, sync: int) -> Order:
        """Return the order in a text, for a run of the sync of this number.

        Raises:
            LinkError: an invalid order.
            PlanError: an order of another sync.
        """
        order = read_message(cls, text, "order of a trainer")
        if order.sync != sync:
            raise PlanError(
                f"the trainer's first rank runs model {order.sync} of the link, and this process "
                f"model {sync}, in the order in which they were prepared; run the models of a link "
                "in one order on all processes"
            )
        return order

    def feed_of(self, number: int) -> ForwardOrder | None:
        """Return the forward order that fills an engine, or None if the trainer does."""
        return next((order for order in self.hand_ons if order.target == number), None)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run on an engine.

    Attributes:
        lacks: why a rank lacks weights of the version; empty if all ranks have them.
        ended: forward orders that cannot be used again, by meeting, with the kind of reason and the
            reason.

    >>> RunOutcome().write(), RunOutcome.read([b"", RunOutcome("no").write()])
    (b'', RunOutcome(lacks='no', ended={}))
    """

    lacks: str = ""
    ended: dict[str, tuple[str, str]] = field(default_factory=dict)

    def write(self) -> bytes:
        """Return the outcome as JSON, empty on success."""
        return write_message(self) if self.lacks or self.ended else b""

    @classmethod
    def read(cls, texts: Iterable[bytes]) -> RunOutcome:
        """Combine the outcomes of an engine's ranks; raise LinkError for invalid messages."""
        lacks, ended = "", dict[str, tuple[str, str]]()
        for text in filter(None, texts):
            of_rank = read_message(cls, text, "outcome of an engine")
            lacks = lacks or of_rank.lacks
            for meeting, (kind, why) in of_rank.ended.items():
                # A mismatch of models counts before failures that it caused on other ranks.
                if ended.get(meeting, (BROKE, ""))[0] == BROKE:
                    ended[meeting] = (kind, why)
        return cls(lacks, ended)


# Options of a refit that the trainer sends, with their JSON types.
OPTIONS: dict[str, tuple[type, ...]] = {
    "ties": (dict,),
    "stacks": (dict,),
    "num_experts": (int,),
    "cast": (bool, str, dict),
    "strict": (bool,),
    "method": (str,),
    "extra_bytes": (int,),
    "buckets": (int, str),
    "changed_only": (bool, str),
    "quantize": (str,),
}
# Options that also apply to forwarding; both engines have equal dtypes.
RELAYED = ("extra_bytes", "changed_only")


def write_options(options: Mapping[str, Any]) -> bytes:
    """Return options as JSON; raise UsageError for other types."""
    present = {name: value for name, value in options.items() if value is not None}
    for name, value in present.items():
        if not _is_option(name, value):
            types = " or ".join(kind.__name__ for kind in OPTIONS[name])
            raise UsageError(f"{name}={value!r}, a {type(value).__name__}; give a {types}")
    try:
        return json.dumps(present).encode()
    except TypeError as error:
        raise UsageError(f"options {present!r}: {error}; give numbers, texts and tables") from error


def _is_option(name: str, value: Any) -> bool:
    return isinstance(value, OPTIONS.get(name, ()))


def read_options(text: bytes) -> dict[str, Any]:
    """Parse a trainer's options; raise LinkError if invalid."""
    what = "table of a trainer's options"
    options = read_message(dict[str, object], text, what)
    if not all(_is_option(name, value) for name, value in options.items()):
        raise LinkError(f"{text[:80]!r} is no {what}; give both sides one release")
    return options
