"""The trainer's part of a weight sync: all engines at once, each by a thread of its own.

1. The first rank decides who hands on to whom (`fan_out`), of the engines that are there. Hand-ons
   that were prepared before are kept.
2. Each engine gets its order, the weights if the trainer is to send them, and says how it ended.
   One that lacks weights, since who was to hand them on failed, gets them from the trainer then.
3. What an engine says of its hand-ons decides the next run: models that do not fit, and engines
   that do not reach each other, are not tried again.
4. What one rank of the trainer saw of an engine counts for all: they report the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from reshard.errors import InterruptedRunError, LinkError, ReshardError, RunError, UsageError
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.links.admission import Announcement, wait_for_words
from reshard.torch.links.bucket_events import BucketCounter, RunOptions, SentBuckets
from reshard.torch.links.fan_out import FedEngine, assign_turns, plan_feeds
from reshard.torch.links.orders import BROKE, MISFIT, HandOn, Order, RunOutcome
from reshard.torch.links.presence import Presence
from reshard.torch.links.sealed_store import SealedStore
from reshard.torch.links.sync import SyncReport, WeightSync
from reshard.torch.refitting.refit import Refit


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """What the trainer's end of a link does for its syncs.

    Attributes:
        label: what people call this process.
        turn: of the link, held by the one run that is under way.
        prepare: makes a refit with the ranks of an engine.
        begin: finds the engines of a run, prepares those that are new, and gives the run's place
            at the store, and number, name and group of each engine.
        give_up: leaves out an engine that failed, for a reason.
        take_lost: the engines that were left out since the last call, and why.
        interrupt: ends the waiting at a meeting, on behalf of a rank that cannot come.
        settle: what a run came to, as all ranks of the trainer saw it, from its place at the
            store and what this rank saw.
    """

    label: str
    turn: threading.Lock
    prepare: Callable[[RankGroup], Refit]
    begin: Callable[[], tuple[str, list[tuple[int, str, RankGroup]]]]
    give_up: Callable[[int, str], None]
    take_lost: Callable[[], dict[str, str]]
    interrupt: Callable[[HandOn, int], None]
    settle: Callable[[str, RunAccount], RunAccount]


@dataclass(frozen=True, slots=True)
class RunAccount:
    """What a run came to, as ranks of a trainer saw it.

    An engine may leave once it has the weights, before each of the trainer's ranks has heard that
    it has them: it counts as served where one rank has, and is given up where one rank has not.

    Attributes:
        engines: by name, seconds until it had the weights, and who gave them.
        lost: why engines were given up, by name.
        given_up: their numbers, where they were there as the run began.
        trainer_bytes: that left all ranks of the trainer.

    >>> seen = RunAccount({"a": (0.5, "trainer")}), RunAccount({}, {"a": "it left"}, (3,))
    >>> found = RunAccount.merge(seen)
    >>> found.engines, found.lost, found.given_up
    ({'a': (0.5, 'trainer')}, {'a': 'it left'}, (3,))
    """

    engines: Mapping[str, tuple[float, str]]
    lost: Mapping[str, str] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()
    trainer_bytes: int = 0

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> RunAccount:
        """Raises LinkError for what is no account."""
        try:
            found = json.loads(text)
            engines = {name: (float(one[0]), str(one[1])) for name, one in found["engines"].items()}
            given_up = tuple(map(int, found["given_up"]))
            return cls(engines, dict(found["lost"]), given_up, int(found["trainer_bytes"]))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise LinkError(
                f"{text[:80]!r} is no account of a run; give all ranks one release"
            ) from error

    @classmethod
    def merge(cls, accounts: Sequence[RunAccount]) -> RunAccount:
        """The account of all ranks; where they differ, the first counts."""
        told = accounts[::-1]
        return cls(
            {name: one for account in told for name, one in account.engines.items()},
            {name: why for account in told for name, why in account.lost.items()},
            tuple(sorted({number for account in told for number in account.given_up})),
            max(account.trainer_bytes for account in told),
        )


def settle(
    store: SealedStore,
    place: str,
    own: RunAccount,
    trainer: Announcement,
    rank: int,
    timeout_s: float,
    presence: Presence,
) -> RunAccount:
    """The account of a run, the same on all ranks of a trainer. All of them call this.

    The first rank makes it of what each says, and returns once all have read it: the store is in
    its process, which may end then. Nothing is left at the store.

    Args:
        place: at the store, of this run only; what stands there, all have read.
        own: what this rank saw.
        rank: of this process among the trainer's.
        timeout_s: how long this rank waits for others.

    Raises:
        LinkError: a rank does not say what it saw.
    """
    if trainer.ranks == 1:
        store.delete_key(place)
        return own
    found_at = f"{place}/account"
    said_at, read_at = (
        {one: f"{place}/{what}/{one}" for one in range(1, trainer.ranks)}
        for what in ("said", "read")
    )
    if rank:
        store.set(said_at[rank], own.write())
        wait_for_words(store, {0: found_at}, timeout_s, trainer, presence)
        found = RunAccount.read(store.get(found_at))
        store.set(read_at[rank], "")
        return found
    wait_for_words(store, said_at, timeout_s, trainer, presence)
    told = [RunAccount.read(store.get(key)) for key in said_at.values()]
    found = RunAccount.merge([own, *told])
    store.set(found_at, found.write())
    # Who ends before it has read it needs it no longer, and the next run raises.
    with contextlib.suppress(LinkError):
        wait_for_words(store, read_at, timeout_s, trainer, presence)
        for key in (place, found_at, *said_at.values(), *read_at.values()):
            store.delete_key(key)
    return found


@dataclass(frozen=True, slots=True)
class _PreparedEngine:
    """What the trainer knows of an engine, the same on all its ranks.

    `sent_bytes` are those that leave all ranks of the trainer where it sends the weights.
    """

    name: str
    refit: Refit
    kind: str
    sent_bytes: int


class _Service:
    """One engine in one run, served in a thread of its own."""

    def __init__(
        self,
        number: int,
        name: str,
        group: RankGroup,
        prepared: _PreparedEngine,
        order: Order,
        counter: BucketCounter,
        when_lost: Callable[[int], None],
    ) -> None:
        self.number, self.name, self.prepared = number, name, prepared
        self.error: BaseException | None = None
        self.order = order
        self.outcome = RunOutcome()
        self.seconds = 0.0
        self.sent_bytes = 0
        self.is_direct = False
        self._group, self._when_lost = group, when_lost
        self._counter = counter
        self._begun_s = time.perf_counter()
        self._thread = _begin_thread(name, self._run)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            if self.outcome.lacks and not self.is_direct:
                # Who was to hand on the weights failed: the trainer sends them.
                ended = self.outcome.ended
                self.order = replace(self.order, hand_ons=())
                self._serve()
                self.outcome = RunOutcome(self.outcome.lacks, ended | self.outcome.ended)
            if self.outcome.lacks:
                raise RunError(self.outcome.lacks)
        except BaseException as error:
            self.error = error
            # What fails here, such as memory, the other ranks of the group cannot know.
            self._group.break_off(error)
            self._when_lost(self.number)
        self.seconds = time.perf_counter() - self._begun_s

    def _serve(self) -> None:
        first = self._group.ranks[0]
        # Only the first rank's order counts.
        said = self.order.write() if self._group.rank == first else b""
        told = gather(said, self._group).values[first]
        self.order = Order.read(told, self.order.sync)
        self.is_direct = self.order.feed_of(self.number) is None
        if self.is_direct:
            refit = self.prepared.refit
            names = [of_batch[-1] if of_batch else "" for of_batch in refit.source_names]
            observer = SentBuckets(self._counter, refit.batch_sent_bytes, names)
            refit.run(observer, computes=True)
            self.sent_bytes = refit.sent_bytes
        self.outcome = RunOutcome.read(gather(b"", self._group).values.values())


class _Comparison:
    """One engine whose weights are compared, in a thread of its own."""

    def __init__(self, engine: _PreparedEngine) -> None:
        self.name, self._refit = engine.name, engine.refit
        self.error: BaseException | None = None
        self._thread = _begin_thread(self.name, self._run)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._refit.verify()
        except BaseException as error:
            self.error = error


def _begin_thread(engine: str, target: Callable[[], None]) -> threading.Thread:
    # With its context: what records this thread records that one.
    call, name = contextvars.copy_context().run, f"reshard engine {engine}"
    thread = threading.Thread(target=call, args=(target,), name=name, daemon=True)
    thread.start()
    return thread


class TrainerSync(WeightSync):
    """The trainer's part.

    Args:
        end: what the link does for it.
        number: of the sync, among those of the link.
        ranks: of the trainer.
        relays: whether engines hand on weights.
        needs_alike: whether only engines of one kind may hand on to each other.
    """

    def __init__(
        self, end: TrainerEnd, number: int, ranks: int, relays: bool, needs_alike: bool
    ) -> None:
        super().__init__(end.label, number, end.turn)
        self._end, self._ranks = end, ranks
        self._relays, self._needs_alike = relays, needs_alike
        self._engines: dict[int, _PreparedEngine] = {}
        # Of the first rank only: it says what comes to pass.
        self._hand_ons: dict[tuple[int, int], HandOn] = {}
        self._barred: set[tuple[int | str, int | str]] = set()
        self._meetings = 0

    @property
    def is_usable(self) -> bool:
        """A trainer's own weights are never written."""
        return True

    def prepare_for(self, number: int, name: str, group: RankGroup) -> None:
        """Prepare the refit of one engine. Raises what `Refit.prepare` does."""
        refit = self._end.prepare(group)
        told = gather(str(refit.sent_bytes).encode(), group).values
        sent_bytes = sum(int(told[rank]) for rank in group.ranks[: self._ranks])
        kind = b" ".join(told[rank] for rank in group.ranks[self._ranks :]).decode(errors="replace")
        self._engines[number] = _PreparedEngine(name, refit, kind, sent_bytes)

    def forget(self, number: int) -> None:
        """An engine is there no longer."""
        self._engines.pop(number, None)
        for pair in [pair for pair in self._hand_ons if number in pair]:
            del self._hand_ons[pair]

    def _free_gathered(self) -> None:
        for engine in self._engines.values():
            engine.refit.free_gathered()

    def _check_version(self, version: int | None) -> int:
        last = -1 if self.version is None else self.version
        if version is None:
            return last + 1
        if isinstance(version, bool) or not isinstance(version, int) or version < max(last, 0):
            raise UsageError(
                f"version={version!r}; give a whole number, not below the last one ({last})"
            )
        return version

    def _run(self, version: int, options: RunOptions) -> SyncReport:
        if options.guard is not None:
            raise UsageError("guard= on a trainer, whose weights are not written; give it engines")
        counter = BucketCounter(options)
        if counter.is_stopped():
            raise InterruptedRunError(f"stopped before version {version} was sent")
        begun_s = time.perf_counter()
        place, engines = self._end.begin()
        names = {number: name for number, name, _ in engines}
        orders = self._make_orders(version, [(number, group) for number, _, group in engines])
        services = [
            _Service(
                number,
                name,
                group,
                self._engines[number],
                orders[number],
                counter,
                self._release_waiting,
            )
            for number, name, group in engines
        ]
        for service in services:
            service.join()
        served = [service for service in services if service.error is None]
        failed: BaseException | None = None
        for service in services:
            if isinstance(service.error, ReshardError):
                # The other engines go on, and this one may come again.
                self._end.give_up(service.number, str(service.error))
            else:
                failed = failed or service.error
        for service in served:
            self._note_ended(service.outcome.ended)
        own = RunAccount(
            {one.name: (one.seconds, self._name_feed(one, names)) for one in served},
            self._end.take_lost(),
            tuple(one.number for one in services if one.error is not None),
            sum(one.prepared.sent_bytes for one in served if one.is_direct),
        )
        if failed is not None:
            # The other ranks are not kept waiting by it.
            with contextlib.suppress(LinkError):
                self._end.settle(place, own)
            raise failed
        account = self._end.settle(place, own)
        for service in served:
            if service.number in account.given_up:
                self._end.give_up(service.number, account.lost.get(service.name, "it is lost"))
                self._end.take_lost()
        if not account.engines:
            told = "; ".join(f"{name}: {why}" for name, why in account.lost.items())
            if counter.is_stopped():
                raise InterruptedRunError(f"stopped; no engine has version {version}: {told}")
            raise LinkError(
                f"no engine has version {version}: {told or 'none is there'}; run again once one is"
            )
        self.version = version
        return SyncReport(
            version,
            {name: seconds for name, (seconds, _) in account.engines.items()},
            account.lost,
            time.perf_counter() - begun_s,
            sum(one.sent_bytes for one in served),
            fed_by={name: feed for name, (_, feed) in account.engines.items()},
            trainer_bytes=account.trainer_bytes,
        )

    def _name_feed(self, service: _Service, names: Mapping[int, str]) -> str:
        feed = service.order.feed_of(service.number)
        return "trainer" if feed is None else names[feed.source]

    def _make_orders(self, version: int, engines: list[tuple[int, RankGroup]]) -> dict[int, Order]:
        """What each engine is to be told; only the first rank's count."""
        of = [
            FedEngine(number, frozenset(group.hosts[self._ranks :]), self._engines[number].kind)
            for number, group in engines
        ]
        ranks = {number: len(group.ranks) - self._ranks for number, group in engines}
        hosts = {host for _, group in engines for host in group.hosts[: self._ranks]}
        feeds = plan_feeds(hosts, of, self._can_feed)
        pairs = [(source, number) for number, source in feeds.items() if source is not None]
        found: dict[tuple[int, int], HandOn] = {}
        for pair, turn in assign_turns(pairs).items():
            before = self._hand_ons.get(pair)
            if before is None:
                self._meetings += 1
                meeting = f"{self._number}/{self._meetings}"
            else:
                meeting = before.meeting
            found[pair] = HandOn(meeting, turn, *pair, *(ranks[number] for number in pair))
        self._hand_ons = found
        return {
            number: Order(
                self._number, version, tuple(one for pair, one in found.items() if number in pair)
            )
            for number, _ in engines
        }

    def _can_feed(self, source: FedEngine, target: FedEngine) -> bool:
        if not self._relays or (self._needs_alike and source.kind != target.kind):
            return False
        pairs = (source.number, target.number), (source.kind, target.kind)
        return not any(pair in self._barred for pair in pairs)

    def _release_waiting(self, number: int) -> None:
        """Engines that are to meet one that is lost wait for it no longer."""
        for hand_on in list(self._hand_ons.values()):
            if number in (hand_on.source, hand_on.target):
                self._end.interrupt(hand_on, number)

    def _note_ended(self, ended: Mapping[str, tuple[str, str]]) -> None:
        """What engines say of hand-ons. One that an engine is lost with is forgotten already."""
        for pair, hand_on in list(self._hand_ons.items()):
            if hand_on.meeting not in ended:
                continue
            del self._hand_ons[pair]
            kind, _ = ended[hand_on.meeting]
            if kind == MISFIT:
                self._barred.add((self._engines[pair[0]].kind, self._engines[pair[1]].kind))
            elif kind != BROKE:
                self._barred.add(pair)

    def _verify(self) -> None:
        if not self._engines:
            raise LinkError("no engine is there to be compared; run first")
        # An engine that hangs keeps no other waiting, which would take this trainer for lost.
        comparisons = [_Comparison(one) for one in self._engines.values()]
        for one in comparisons:
            one.join()
        problems = []
        for one in comparisons:
            if isinstance(one.error, RunError):
                problems.append(f"engine {one.name}: {one.error}")
            elif one.error is not None:
                raise one.error
        if problems:
            raise RunError("; ".join(problems))
