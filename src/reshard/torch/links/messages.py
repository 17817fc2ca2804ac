"""Messages of trainer and engines as JSON: orders, outcomes and options.

A run, between the trainer and each engine::

    trainer                              engine
    order: version, forward orders   --->
    [weights, unless another engine forwards them]
                                     <---  outcome: empty on success
    [if it lacks weights: another order, and the weights from the trainer]

Before the first run, a trainer sends the options of a refit, and an engine the buckets of its
weights. Nothing is unpickled; invalid messages raise LinkError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard.errors import LinkError, PlanError, UsageError

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

    >>> Order.read(Order(0, 3).write(), 0)
    Order(sync=0, version=3, hand_ons=())
    """

    sync: int
    version: int
    hand_ons: tuple[ForwardOrder, ...] = ()

    def write(self) -> bytes:
        """Return the order as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes, sync: int) -> Order:
        """Return the order in a text, for a run of the sync of this number.

        Raises:
            LinkError: an invalid order.
            PlanError: an order of another sync.
        """
        try:
            content = json.loads(text)
            hand_ons = tuple(ForwardOrder(**each) for each in content["hand_ons"])
            order = cls(content["sync"], content["version"], hand_ons)
        except (TypeError, ValueError, KeyError) as error:
            raise _refuse(text, "order of a trainer") from error
        numbers = [order.sync, order.version]
        for each in order.hand_ons:
            given = asdict(each)
            if not isinstance(given.pop("meeting"), str):
                raise _refuse(text, "order of a trainer")
            numbers += given.values()
        if not all(type(each) is int and each >= 0 for each in numbers):
            raise _refuse(text, "order of a trainer")
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
        return json.dumps(asdict(self)).encode() if self.lacks or self.ended else b""

    @classmethod
    def read(cls, texts: Iterable[bytes]) -> RunOutcome:
        """Combine the outcomes of an engine's ranks; raise LinkError for invalid messages."""
        lacks, ended = "", dict[str, tuple[str, str]]()
        for text in texts:
            if not text:
                continue
            try:
                content = json.loads(text)
                reason_lacking, reasons = content["lacks"], dict(content["ended"])
            except (TypeError, ValueError, KeyError) as error:
                raise _refuse(text, "outcome of an engine") from error
            if not isinstance(reason_lacking, str) or not all(map(_is_reason, reasons.values())):
                raise _refuse(text, "outcome of an engine")
            lacks = lacks or reason_lacking
            for meeting, (kind, why) in reasons.items():
                # A mismatch of models counts before failures that it caused on other ranks.
                if ended.get(meeting, (BROKE, ""))[0] == BROKE:
                    ended[meeting] = (kind, why)
        return cls(lacks, ended)


def _is_reason(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(s, str) for s in value)


def _refuse(text: bytes, what: str) -> LinkError:
    return LinkError(f"{text[:80]!r} is no {what}; give both sides one release")


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
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if not _is_option(name, value):
            types = " or ".join(kind.__name__ for kind in OPTIONS[name])
            raise UsageError(f"{name}={value!r}, a {type(value).__name__}; give a {types}")
    try:
        return json.dumps(given).encode()
    except TypeError as error:
        raise UsageError(f"options {given!r}: {error}; give numbers, texts and tables") from error


def _is_option(name: str, value: Any) -> bool:
    return isinstance(value, OPTIONS.get(name, ()))


def read_buckets(text: bytes) -> dict[str, int]:
    """Parse an engine's buckets; raise LinkError if invalid."""
    try:
        buckets = json.loads(text)
    except ValueError as error:
        raise LinkError(f"{text[:80]!r} are no buckets of an engine") from error
    if not isinstance(buckets, dict) or not all(type(value) is int for value in buckets.values()):
        raise LinkError(f"{text[:80]!r} are no buckets of an engine")
    return buckets


def read_options(text: bytes) -> dict[str, Any]:
    """Parse a trainer's options; raise LinkError if invalid."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise LinkError(f"{text[:80]!r} are no options of a trainer") from error
    if not isinstance(options, dict) or not all(
        _is_option(name, value) for name, value in options.items()
    ):
        raise LinkError(f"{text[:80]!r} are no options of a trainer")
    return options
