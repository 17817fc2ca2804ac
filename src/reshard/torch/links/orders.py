"""Orders of a trainer to its engines, and what engines say of their end, as JSON.

One run, between the trainer and each engine::

    trainer                          engine
    order: version, hand-ons   --->
    [weights, unless another engine hands them on]
                               <---  outcome: empty where all is well
    [where it lacks weights: another order, and the weights from the trainer]

Before the first run a trainer says the options of a refit, and an engine in how many buckets its
weights come. Nothing that arrives is unpickled; what is none of these is a LinkError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard.errors import LinkError, PlanError, UsageError

# Why a hand-on ended: models that do not fit; engines that cannot reach each other; anything else.
MISFIT, UNREACHABLE, BROKE = "misfit", "unreachable", "broke"


@dataclass(frozen=True, slots=True)
class HandOn:
    """Weights that go from one engine to another.

    Attributes:
        meeting: a name that no other hand-on has, under which both meet at the store.
        turn: when they prepare it, among those of either.
        source, target: the engines' numbers.
        source_ranks, target_ranks: how many ranks they have.
    """

    meeting: str
    turn: int
    source: int
    target: int
    source_ranks: int
    target_ranks: int


@dataclass(frozen=True, slots=True)
class Order:
    """What an engine does in a run.

    Attributes:
        sync: the number of what the trainer runs, among the syncs of the link.
        version: of the weights that come.
        hand_ons: those that the engine has a part in.

    >>> Order.read(Order(0, 3).write(), 0)
    Order(sync=0, version=3, hand_ons=())
    """

    sync: int
    version: int
    hand_ons: tuple[HandOn, ...] = ()

    def write(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: bytes, sync: int) -> Order:
        """The order of a text, in a run of the sync of this number.

        Raises:
            LinkError: what is no order.
            PlanError: an order of another sync.
        """
        try:
            found = json.loads(text)
            hand_ons = tuple(HandOn(**one) for one in found["hand_ons"])
            order = cls(found["sync"], found["version"], hand_ons)
        except (TypeError, ValueError, KeyError) as error:
            raise _refuse(text, "order of a trainer") from error
        numbers = [order.sync, order.version]
        for one in order.hand_ons:
            given = asdict(one)
            if not isinstance(given.pop("meeting"), str):
                raise _refuse(text, "order of a trainer")
            numbers += given.values()
        if not all(type(one) is int and one >= 0 for one in numbers):
            raise _refuse(text, "order of a trainer")
        if order.sync != sync:
            raise PlanError(
                f"the trainer's first rank runs model {order.sync} of the link, and this process "
                f"model {sync}, in the order in which they were prepared; run the models of a link "
                "in one order on all processes"
            )
        return order

    def feed_of(self, number: int) -> HandOn | None:
        """The hand-on by which an engine gets its weights; None where the trainer sends them."""
        return next((one for one in self.hand_ons if one.target == number), None)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended on an engine.

    Attributes:
        lacks: why a rank has not all weights of the version; empty where all have.
        ended: hand-ons that cannot be used again, by meeting: the kind of the reason, and it.

    >>> RunOutcome().write(), RunOutcome.read([b"", RunOutcome("no").write()])
    (b'', RunOutcome(lacks='no', ended={}))
    """

    lacks: str = ""
    ended: dict[str, tuple[str, str]] = field(default_factory=dict)

    def write(self) -> bytes:
        """As JSON; nothing where there is nothing to say."""
        return json.dumps(asdict(self)).encode() if self.lacks or self.ended else b""

    @classmethod
    def read(cls, texts: Iterable[bytes]) -> RunOutcome:
        """What all ranks of an engine say. Raises LinkError for what is no outcome."""
        lacks, ended = "", dict[str, tuple[str, str]]()
        for text in texts:
            if not text:
                continue
            try:
                found = json.loads(text)
                one, reasons = found["lacks"], dict(found["ended"])
            except (TypeError, ValueError, KeyError) as error:
                raise _refuse(text, "outcome of an engine") from error
            if not isinstance(one, str) or not all(map(_is_reason, reasons.values())):
                raise _refuse(text, "outcome of an engine")
            lacks = lacks or one
            for meeting, (kind, why) in reasons.items():
                # What a rank knows of the models counts before what broke by it on others.
                if ended.get(meeting, (BROKE, ""))[0] == BROKE:
                    ended[meeting] = (kind, why)
        return cls(lacks, ended)


def _is_reason(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(s, str) for s in found)


def _refuse(text: bytes, what: str) -> LinkError:
    return LinkError(f"{text[:80]!r} is no {what}; give both sides one release")


# What the trainer says of a refit, and an engine learns: the JSON types of each.
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
# Those of them that a hand-on takes too. Its two engines have equal types.
RELAYED = ("extra_bytes", "changed_only")


def write_options(options: Mapping[str, Any]) -> bytes:
    """Raises UsageError for options of other types, or that JSON has no words for."""
    said = {name: value for name, value in options.items() if value is not None}
    for name, value in said.items():
        if not _is_option(name, value):
            types = " or ".join(kind.__name__ for kind in OPTIONS[name])
            raise UsageError(f"{name}={value!r}, a {type(value).__name__}; give a {types}")
    try:
        return json.dumps(said).encode()
    except TypeError as error:
        raise UsageError(f"options {said!r}: {error}; give numbers, texts and tables") from error


def _is_option(name: str, value: Any) -> bool:
    return isinstance(value, OPTIONS.get(name, ()))


def read_buckets(said: bytes) -> dict[str, int]:
    """Raises LinkError for what says no numbers of buckets."""
    try:
        found = json.loads(said)
    except ValueError as error:
        raise LinkError(f"{said[:80]!r} are no buckets of an engine") from error
    if not isinstance(found, dict) or not all(type(one) is int for one in found.values()):
        raise LinkError(f"{said[:80]!r} are no buckets of an engine")
    return found


def read_options(said: bytes) -> dict[str, Any]:
    """Raises LinkError for what is no trainer's word."""
    try:
        found = json.loads(said)
    except ValueError as error:
        raise LinkError(f"{said[:80]!r} are no options of a trainer") from error
    if not isinstance(found, dict) or not all(
        _is_option(name, value) for name, value in found.items()
    ):
        raise LinkError(f"{said[:80]!r} are no options of a trainer")
    return found
