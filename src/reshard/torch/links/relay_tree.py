"""Relays: engines forward weights to each other, so that each byte leaves the trainer once.

::

    trainer ---> a ---> b ---> c        engines on separate hosts forward what they receive
       |
       +-------> d                      on the trainer's hosts: forwarding would save nothing

1. Engines whose ranks are all on the trainer's hosts receive from the trainer.
2. The others are ordered by host and kind. Each receives from the nearest earlier engine that has
   the tensors it needs: on its own host, or an engine that forwards to no other host yet. The first
   receives from the trainer, as does an engine that no other can serve.
3. Both ends of a forward order meet and prepare it. An engine with several orders prepares them in
   turns, which are unique for each of the two engines, so that engines never wait in a cycle.

A forward order is a refit from an engine's tensors to another's, in a group of the ranks of both.
It uses the buckets in which the weights arrive, in a separate thread that waits until the tensors
of each bucket are complete::

    received              |  0  |  1  |  2  |  3  |
    forwarded                   |  0  |  1  |  2  |  3  |

The last engine of a chain therefore finishes a bucket's time per engine after the first. Two
outgoing orders at once would halve the bandwidth of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from reshard.errors import RunError
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.timeline import span, start_thread
from reshard.torch.links.messages import ForwardOrder
from reshard.torch.refitting.refit import Refit


@dataclass(frozen=True, slots=True)
class RelayedEngine:
    """An engine that needs weights.

    Attributes:
        number: of the engine, in the link.
        hosts: of its ranks.
        kind: equal for engines whose ranks have the same tensors and shardings.
    """

    number: int
    hosts: frozenset[str]
    kind: str = ""


def plan_relays(
    trainer_hosts: Iterable[str],
    engines: Sequence[RelayedEngine],
    can_feed: Callable[[RelayedEngine, RelayedEngine], bool] = lambda source, target: True,
) -> dict[int, int | None]:
    """Return the engine from which each engine receives, or None for the trainer.

    Args:
        trainer_hosts: the hosts of its ranks.
        engines: all engines.
        can_feed: whether an engine may forward to another.

    >>> one, two = RelayedEngine(1, frozenset("a")), RelayedEngine(2, frozenset("b"))
    >>> plan_relays("t", [one, two]), plan_relays("b", [one, two])
    ({1: None, 2: 1}, {1: None, 2: None})
    """
    home = frozenset(trainer_hosts)
    feeds: dict[int, int | None] = {}
    ahead: list[RelayedEngine] = []
    busy: set[int] = set()
    for engine in sorted(
        engines, key=lambda candidate: (sorted(candidate.hosts), candidate.kind, candidate.number)
    ):
        source: RelayedEngine | None = None
        if not engine.hosts <= home:
            able = [candidate for candidate in ahead if can_feed(candidate, engine)]
            # Prefer the same host, then engines that do not forward yet, then the nearest.
            source = max(
                # `max` returns the first of equal candidates, so the nearest must come first.
                reversed(able),
                key=lambda candidate: (
                    candidate.hosts == engine.hosts,
                    candidate.number not in busy,
                ),
                default=None,
            )
            ahead.append(engine)
        feeds[engine.number] = None if source is None else source.number
        if source is not None and source.hosts != engine.hosts:
            busy.add(source.number)
    return feeds


def assign_turns(hand_ons: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return a turn for each `(source, target)`, unique for either engine.

    >>> assign_turns([(1, 2), (2, 3), (3, 4)])
    {(1, 2): 0, (2, 3): 1, (3, 4): 0}
    """
    taken: dict[int, set[int]] = {}
    turns = {}
    for pair in hand_ons:
        both = [taken.setdefault(engine, set()) for engine in pair]
        turn = next(n for n in range(len(both[0] | both[1]) + 1) if n not in both[0] | both[1])
        for engine in both:
            engine.add(turn)
        turns[pair] = turn
    return turns


class BucketGate:
    """The batches of a run that are complete on this rank, for threads that wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._complete = 0
        self._error: BaseException | None = None

    def end(self, number: int) -> None:
        """Record that a batch and those before it are complete."""
        with self._changed:
            self._complete = number + 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that no more batches will be complete."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until a batch is complete; raise RunError if it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete > number or self._error is not None)
            # Batches that were complete before the error may be forwarded.
            if self._complete <= number:
                raise RunError(f"the weights to hand on did not come: {self._error}")


@dataclass(frozen=True, slots=True)
class Relay:
    """An end of a forward order, prepared."""

    hand_on: ForwardOrder
    group: RankGroup
    refit: Refit


class RelayThread:
    """A thread that forwards weights while this engine is filled, and observes its own run."""

    def __init__(self, relay: Relay, ahead: Refit, gate: BucketGate) -> None:
        self.relay, self._gate = relay, gate
        self.error: BaseException | None = None
        last = max(ahead.batch_of.values(), default=-1)
        self._needs = [
            max((ahead.batch_of.get(name, last) for name in names), default=-1)
            for names in relay.refit.source_names
        ]
        self._thread = start_thread("reshard relay", self._run)

    def begin(self, number: int) -> None:
        """Wait for the batches of this engine that a batch to forward reads."""
        if self._needs[number] >= 0:
            with span("wait for what to hand on"):
                self._gate.wait(self._needs[number])

    def end(self, number: int) -> None:
        """Ignore the end of a batch."""

    def _run(self) -> None:
        try:
            # The gate decides when its source is usable, which it may not be when the run begins.
            self.relay.refit.run(self, checks_source=False)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
