"""Fan-out: which engine hands on weights to which, so that each byte leaves the trainer once.

::

    trainer ---> a ---> b ---> c        engines on hosts of their own hand on what they got
       |
       +-------> d                      on the trainer's hosts: nothing would be saved

1. Engines whose ranks are all on the trainer's hosts are served by it.
2. The others are put in an order in which those of one host, and of one kind, follow one another.
   Each gets its weights from the nearest ahead that has what it needs: of its own host, else from
   one that hands on to nobody yet. The first gets them from the trainer, and so does one that no
   other can serve.
3. Both ends of a hand-on meet and prepare it together, one after another where an engine has
   several: each has a turn, which no other of its two engines has. Engines that keep to the order
   of their turns never wait for each other in a ring.

Weights go through a chain in buckets, so the last engine has them one bucket's time for each engine
ahead after the first. Two engines that have hands full at once would halve what each gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FedEngine:
    """An engine that needs weights.

    Attributes:
        number: of the engine, in the link.
        hosts: of its ranks.
        kind: equal for engines whose ranks have the same tensors, cut alike.
    """

    number: int
    hosts: frozenset[str]
    kind: str = ""


def plan_feeds(
    trainer_hosts: Iterable[str],
    engines: Sequence[FedEngine],
    can_feed: Callable[[FedEngine, FedEngine], bool] = lambda source, target: True,
) -> dict[int, int | None]:
    """For each engine the one that it gets its weights from; None where that is the trainer.

    Args:
        trainer_hosts: of its ranks.
        engines: all that are to have weights.
        can_feed: whether one engine may hand on to another.

    >>> one, two = FedEngine(1, frozenset("a")), FedEngine(2, frozenset("b"))
    >>> plan_feeds("t", [one, two]), plan_feeds("b", [one, two])
    ({1: None, 2: 1}, {1: None, 2: None})
    """
    home = frozenset(trainer_hosts)
    found: dict[int, int | None] = {}
    ahead: list[FedEngine] = []
    busy: set[int] = set()
    for engine in sorted(engines, key=lambda one: (sorted(one.hosts), one.kind, one.number)):
        source: FedEngine | None = None
        if not engine.hosts <= home:
            able = [one for one in ahead if can_feed(one, engine)]
            # Of its own host first, then with nothing to hand on yet; of these the nearest ahead.
            source = max(
                reversed(able),
                key=lambda one: (one.hosts == engine.hosts, one.number not in busy),
                default=None,
            )
            ahead.append(engine)
        found[engine.number] = None if source is None else source.number
        if source is not None and source.hosts != engine.hosts:
            busy.add(source.number)
    return found


def assign_turns(hand_ons: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A turn for each hand-on `(source, target)`, which no other of either engine has.

    >>> assign_turns([(1, 2), (2, 3), (3, 4)])
    {(1, 2): 0, (2, 3): 1, (3, 4): 0}
    """
    taken: dict[int, set[int]] = {}
    found = {}
    for pair in hand_ons:
        both = [taken.setdefault(one, set()) for one in pair]
        turn = next(n for n in range(len(both[0] | both[1]) + 1) if n not in both[0] | both[1])
        for one in both:
            one.add(turn)
        found[pair] = turn
    return found
