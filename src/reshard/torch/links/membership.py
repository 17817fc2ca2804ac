"""Membership of a link: the sides that are there, and the groups in which this process meets them.

A trainer has a group with each engine, and engines that forward weights to each other meet in
further groups. Engines come between runs, and may leave at any time::

    admit     the first rank reads at the store who came and who left, for all of its side
    give up   an engine failed: its group is closed, and the reason is kept for the run's report
    settle    the ranks of the trainer combine what each has seen of a run

Every wait for another process ends as soon as that process has ended, or its host is unreachable
(`heartbeat`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from reshard.errors import LinkError, ReshardError
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.rendezvous import Watch, leave_note, meet_at
from reshard.torch.links import handshake, heartbeat
from reshard.torch.links.messages import ForwardOrder, read_message, write_message
from reshard.torch.links.sealed_store import LinkAddress, SealedStore

# Timeouts are staggered so that the failing peer is reported by whoever waits on it directly:
# engine-to-engine first, then trainer-to-engine, then engine-to-trainer. These are their parts of
# the link's timeout.
_TRAINER_SHARE, _HAND_ON_SHARE = 1 / 2, 1 / 4
# The seconds in which processes that are all present must connect.
_CONNECT_S = 60.0
_LINGER_S = 1.0
_SUMMARY = "account of a run"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run, as observed by ranks of a trainer.

    An engine may leave once it has the weights, before all of the trainer's ranks know: it counts
    as served if any rank knows, and is dropped if any rank does not.

    Attributes:
        engines: by name, the seconds until it had the weights, and the sender.
        lost: reasons why engines were given up, by name.
        given_up: their numbers, if they were present when the run began.
        trainer_bytes: the bytes sent by all ranks of the trainer.

    >>> seen = RunSummary({"a": (0.5, "trainer")}), RunSummary({}, {"a": "it left"}, (3,))
    >>> found = RunSummary.merge(seen)
    >>> found.engines, found.lost, found.given_up
    ({'a': (0.5, 'trainer')}, {'a': 'it left'}, (3,))
    """

    engines: Mapping[str, tuple[float, str]]
    lost: Mapping[str, str] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()
    trainer_bytes: int = 0

    @classmethod
    def merge(cls, accounts: Sequence[RunSummary]) -> RunSummary:
        """Return the summary of all ranks; if they differ, the first counts."""
        # In reverse, since later entries replace earlier ones.
        reversed_order = accounts[::-1]
        return cls(
            {
                name: served
                for account in reversed_order
                for name, served in account.engines.items()
            },
            {name: why for account in reversed_order for name, why in account.lost.items()},
            tuple(sorted({number for account in reversed_order for number in account.given_up})),
            # Every rank counts the bytes of all, so that their maximum is not lost with a rank that
            # failed.
            max(account.trainer_bytes for account in reversed_order),
        )


class EngineFollower(Protocol):
    """A sync of a trainer, which is notified of the engines that come and go."""

    def prepare_for(self, number: int, name: str, group: RankGroup, /) -> None:
        """Prepare for an engine that came. It is given up if this raises a `ReshardError`."""

    def forget(self, number: int, /) -> None:
        """Remove an engine that left."""


class LinkMembers:
    """The sides of a link, as a process sees them.

    Attributes:
        own, trainer: this process's side, and the trainer's.
        rank: of this process in its side.
        address: of the store.
        groups: the groups with the other side, by number of the engine, with the other side's name.
        followers: of the engines, on a trainer.
        is_closed: whether this process has left.
    """

    def __init__(
        self,
        own: handshake.Announcement,
        trainer: handshake.Announcement,
        rank: int,
        address: LinkAddress,
        store: SealedStore,
        presence: heartbeat.Heartbeat,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        self.own, self.trainer, self.rank, self.address = own, trainer, rank, address
        self._store, self._presence = store, presence
        store.check_others = self._check_first
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self.groups: dict[int, tuple[str, RankGroup]] = {}
        self.followers: list[EngineFollower] = []
        self.is_closed = False
        # The groups with other engines, of all syncs.
        self._relays: weakref.WeakSet[RankGroup] = weakref.WeakSet()
        self._seen: set[int] = set()
        self._lost: dict[str, str] = {}
        self._steps = 0
        # The start time of the last run.
        self._begun_s = 0.0

    @property
    def is_trainer(self) -> bool:
        """Whether this process belongs to the trainer."""
        return self.own == self.trainer

    def join(self, engines: int) -> None:
        """Meet the other side: on a trainer, at least so many engines."""
        if not self.is_trainer:
            self.groups[self.own.number] = (
                handshake.TRAINER,
                self._meet(self.own, self._timeout_s),
            )
            return
        self._admit(engines)
        if engines and not self.groups:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.take_lost().items())
            raise LinkError(f"no engine could be linked: {reasons}")

    def check_open(self) -> None:
        """Raise LinkError if this process has left the link."""
        if self.is_closed:
            raise LinkError("this end of the link is closed; connect again")

    def begin_run(self) -> tuple[str, list[tuple[int, str, RankGroup]]]:
        """Admit new engines of a trainer, and drop those that left.

        Returns:
            The key of the run at the store; number, name and group of each present engine.
        """
        self.check_open()
        place = self._admit(0)
        self._begun_s = time.monotonic()
        return place, [(number, *both) for number, both in self.groups.items()]

    def _admit(self, fewest: int) -> str:
        """Receive from the first rank which engines come and go, and meet new engines."""
        key = f"step/{self._steps}"
        self._steps += 1
        with self._store_errors():
            if self.rank == 0:
                came = handshake.wait_for_engines(
                    self._store, self._seen, fewest, self._timeout_s, self.own, self._presence
                )
                left = [n for n in self.groups if handshake.has_left(self._store, n)]
                numbers = [announcement.number for announcement in came]
                self._store.set(key, json.dumps({"came": numbers, "left": left}))
            step = json.loads(self._store.get(key))
            came = [handshake.read_announcement(self._store, number) for number in step["came"]]
        for number in step["left"]:
            self.give_up(number, "it left")
        for announcement in came:
            self._seen.add(announcement.number)
            # A returning engine replaces the earlier engine.
            for number, (name, _) in list(self.groups.items()):
                if name == announcement.name:
                    self._drop(number, "it came again")
            try:
                # Present engines wait meanwhile, so the limit is below their timeout.
                group = self._meet(announcement, self._timeout_s * _TRAINER_SHARE)
                self.groups[announcement.number] = (announcement.name, group)
                for follower in self.followers:
                    follower.prepare_for(announcement.number, announcement.name, group)
            except ReshardError as error:
                self.give_up(announcement.number, str(error), announcement.name)
        return key

    def settle(self, place: str, own: RunSummary) -> RunSummary:
        """Return the summary of a run, equal on all ranks of a trainer. All of them call this.

        The first rank combines the summaries of all, and returns once all have read the result: the
        store is in its process, which may end then. Nothing is left at the store.

        Args:
            place: the key of the run, from `begin_run`.
            own: this rank's summary.

        Raises:
            LinkError: a rank does not report its summary.
        """
        store, rank, ranks = self._store, self.rank, self.trainer.ranks
        limit_s = self._timeout_s * _TRAINER_SHARE
        if rank:
            # The first rank may wait this long for a hanging engine, and then for other ranks.
            limit_s = max(limit_s, self._begun_s + self._timeout_s - time.monotonic())

        def wait_for(keys: Mapping[int, str]) -> None:
            handshake.wait_for_keys(store, keys, limit_s, self.trainer, self._presence)

        with self._store_errors():
            if ranks == 1:
                store.delete_key(place)
                return own
            found_at = f"{place}/account"
            said_at, read_at = (
                {other: f"{place}/{what}/{other}" for other in range(1, ranks)}
                for what in ("said", "read")
            )
            if rank:
                store.set(said_at[rank], write_message(own))
                wait_for({0: found_at})
                combined = read_message(RunSummary, store.get(found_at), _SUMMARY)
                store.set(read_at[rank], "")
                return combined
            wait_for(said_at)
            others = [
                read_message(RunSummary, store.get(key), _SUMMARY) for key in said_at.values()
            ]
            combined = RunSummary.merge([own, *others])
            store.set(found_at, write_message(combined))
            # A rank that ends before it reads this does not need it, and the next run raises.
            with contextlib.suppress(LinkError):
                wait_for(read_at)
                for key in (place, found_at, *said_at.values(), *read_at.values()):
                    store.delete_key(key)
            return combined

    def leave(self, reason: str) -> None:
        """Leave the link; `reason` continues "closed the link" in the errors of others."""
        self.is_closed = True
        with contextlib.suppress(RuntimeError, ReshardError):
            handshake.leave(self._store, self.own, self.rank, reason)
        groups = [group for _, group in self.groups.values()]
        self.groups.clear()
        closed = LinkError(f"{self.own.name} closed the link{reason}")
        for group in (*groups, *self._relays):
            group.break_off(closed)
        self._presence.close()
        if self.is_trainer and self.rank == 0:
            # The store ends with this process: others can read the reason until then.
            time.sleep(_LINGER_S if groups else 0)
        else:
            # The server's connection is needed as long as the first rank's process has it.
            self._store.close()

    def _meet(self, engine: handshake.Announcement, limit_s: float) -> RankGroup:
        """Return the group of the trainer's ranks and an engine's."""
        ahead = 0 if self.is_trainer else self.trainer.ranks
        ranks = self.trainer.ranks + engine.ranks
        sides = (self.trainer, engine)
        return self._meet_at(handshake.rendezvous_key(engine.number), ahead, ranks, sides, limit_s)

    def meet_engine(self, hand_on: ForwardOrder) -> RankGroup:
        """Return the group of an engine's ranks and those of the engine that it forwards to."""
        ahead = 0 if hand_on.source == self.own.number else hand_on.source_ranks
        ranks = hand_on.source_ranks + hand_on.target_ranks
        with self._store_errors():
            # The trainer ends the waiting for an engine that it lost; other ranks of that engine
            # are not detected if they are held here.
            pair = (hand_on.source, hand_on.target)
            sides = (
                self.trainer,
                *(handshake.read_announcement(self._store, number) for number in pair),
            )
            limit_s = self._timeout_s * _HAND_ON_SHARE
            group = self._meet_at(f"relay/{hand_on.meeting}", ahead, ranks, sides, limit_s)
        self._relays.add(group)
        return group

    def interrupt(self, hand_on: ForwardOrder, number: int) -> None:
        """End the waiting for a lost engine."""
        # One note at the store suffices.
        if self.rank:
            return
        position = 0 if number == hand_on.source else hand_on.source_ranks
        with contextlib.suppress(RuntimeError):
            store = dist.PrefixStore(f"relay/{hand_on.meeting}", self._store)
            leave_note(store, 0, position, "the trainer lost this engine")

    def _meet_at(
        self,
        place: str,
        ahead: int,
        ranks: int,
        sides: tuple[handshake.Announcement, ...],
        limit_s: float,
    ) -> RankGroup:
        """Return the group of the ranks that meet at a key, `ahead` of them before this side's.

        `limit_s` shortens the wait if other processes wait for this process meanwhile.
        """
        meeting = meet_at(
            dist.PrefixStore(place, self._store),
            ahead + self.rank,
            ranks,
            datetime.timedelta(seconds=limit_s),
            watch=Watch(
                lambda: self._find_lost(sides),
                lambda: self._find_silent(sides),
                lambda: self._presence.seems_disconnected,
                min(limit_s, _CONNECT_S),
                lambda: heartbeat.user_timeout_for_new_connections(self._silence_s),
            ),
            job=f"{self.own.name}/{self.own.number}",
            home_rank=self.rank,
            # A host's name may resolve to an address of another network.
            address=self.address.own_address(),
        )
        # Calls of a link have the same order on all ends, but their threads have different names.
        group = RankGroup(meeting, None, compares_threads=False)
        handshake.prove_secret(group, self._store.key)
        return group

    def _check_first(self) -> None:
        """Raise LinkError if the trainer's first rank is gone, with its reason."""
        try:
            self._presence.check()
        except LinkError as error:
            if self._presence.is_disconnected:
                # The store is unreachable as well.
                raise
            reason = handshake.explain_departure(self._store, self.trainer, self.trainer.tokens[0])
            raise LinkError(reason) from error

    def _find_lost(self, sides: tuple[handshake.Announcement, ...]) -> str:
        """Return which process of the sides has ended, or an empty text."""
        try:
            self._check_first()
        except LinkError as error:
            return str(error)
        for side in sides:
            token = self._presence.find_departed(side.tokens)
            if token:
                return handshake.explain_departure(self._store, side, token)
        return ""

    def _find_silent(self, sides: tuple[handshake.Announcement, ...]) -> str:
        """Return whose host is unreachable, or an empty text."""
        if self._presence.is_disconnected:
            return "the host of the trainer's first rank gives no sign of life"
        for side in sides:
            token = self._presence.find_departed(side.tokens, is_silent=True)
            if token:
                rank = side.tokens.index(token)
                return f"the host of {side.name_rank(rank)} gives no sign of life"
        return ""

    def give_up(self, number: int, why: str, name: str = "") -> None:
        """Drop an engine that failed, and keep the reason; `name` if it lacks a group still."""
        entry = self.groups.get(number)
        with contextlib.suppress(RuntimeError):
            # Its connections close before the store has its note.
            if handshake.has_left(self._store, number):
                why = f"it left; {why}"
        self._lost[name or (entry[0] if entry else str(number))] = why
        self._drop(number, why)

    def _drop(self, number: int, why: str) -> None:
        entry = self.groups.pop(number, None)
        for follower in self.followers:
            follower.forget(number)
        if entry is not None and not entry[1].has_failed:
            entry[1].break_off(LinkError(f"the trainer gave the engine up: {why}"))

    def take_lost(self) -> dict[str, str]:
        """Return the engines given up since the last call, with reasons."""
        lost, self._lost = self._lost, {}
        return lost

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise LinkError(f"the store at {self.address} does not answer: {line}") from error
