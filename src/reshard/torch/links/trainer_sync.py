"""The trainer's side of a weight sync: all engines at once, each in a separate thread.

1. The first rank decides who forwards to whom (`relay_tree`), among the present engines. Prepared
   forward orders are kept.
2. Each engine receives its order, the weights if the trainer sends them, and returns its outcome.
   An engine that lacks weights because forwarding failed then receives them from the trainer.
3. Outcomes determine the next run: models that do not match, and engines that cannot connect, are
   not tried again.
4. All ranks of the trainer combine their observations of engines, so that they report the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import InterruptedRunError, LinkError, ReshardError, RunError, UsageError
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.timeline import start_thread
from reshard.torch.links.membership import LinkMembers, RunSummary
from reshard.torch.links.messages import (
    BROKE,
    MISFIT,
    ForwardOrder,
    Order,
    RunOutcome,
    write_message,
)
from reshard.torch.links.relay_tree import RelayedEngine, assign_turns, plan_relays
from reshard.torch.links.sync import RunControl, SyncReport, WeightSync
from reshard.torch.refitting.refit import Refit


@dataclass(frozen=True, slots=True)
class _PreparedEngine:
    """The trainer's state of an engine, the same on all its ranks.

    `sent_bytes` are sent by all ranks of the trainer if it sends the weights itself.
    """

    name: str
    refit: Refit
    kind: str
    sent_bytes: int


class _EngineRun:
    """An engine in a run, served in a separate thread."""

    def __init__(
        self,
        number: int,
        name: str,
        group: RankGroup,
        prepared: _PreparedEngine,
        order: Order,
        control: RunControl,
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
        self._control = control
        self._begun_s = time.perf_counter()
        self._thread = start_thread(f"reshard engine {name}", self._run)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            if self.outcome.lacks and not self.is_direct:
                # Forwarding failed: the trainer sends the weights.
                ended = self.outcome.ended
                # Without forward orders, so that the trainer sends directly, and engines leave
                # their groups.
                self.order = replace(self.order, hand_ons=())
                self._serve()
                self.outcome = RunOutcome(self.outcome.lacks, ended | self.outcome.ended)
            if self.outcome.lacks:
                raise RunError(self.outcome.lacks)
        except BaseException as error:
            self.error = error
            # Other ranks of the group cannot detect local failures, such as a lack of memory.
            self._group.break_off(error)
            self._when_lost(self.number)
        self.seconds = time.perf_counter() - self._begun_s

    def _serve(self) -> None:
        first = self._group.ranks[0]
        # Only the first rank's order counts.
        message = write_message(self.order) if self._group.rank == first else b""
        order = gather(message, self._group)[first]
        self.order = Order.read(order, self.order.sync)
        self.is_direct = self.order.feed_of(self.number) is None
        if self.is_direct:
            refit = self.prepared.refit
            names = [of_batch[-1] if of_batch else "" for of_batch in refit.source_names]
            refit.run(SentBatches(self._control, refit.batch_sent_bytes, names), computes=True)
            self.sent_bytes = refit.sent_bytes
        self.outcome = RunOutcome.read(gather(b"", self._group).values())


class SentBatches:
    """The batches that a rank of the trainer sends to an engine, counted as its run ends them."""

    def __init__(
        self, control: RunControl, sent_bytes: Sequence[int], names: Sequence[str]
    ) -> None:
        self._control, self._sent_bytes, self._names = control, sent_bytes, names
        control.expect(sum(sent_bytes))

    def begin(self, number: int) -> None:
        """Raise StoppedError if the caller wants the run to end."""
        self._control.check()

    def end(self, number: int) -> None:
        """Count the bytes of a batch."""
        if self._sent_bytes[number]:
            self._control.add(self._sent_bytes[number], self._names[number])


class TrainerSync(WeightSync):
    """The trainer's side of a weight sync.

    Args:
        members: of the link.
        number: of the sync, among those of the link.
        turn: the lock of the link, held during a run.
        relays: whether engines forward weights.
        needs_alike: whether only engines of the same kind may forward to each other.
        prepare: prepare a refit with the ranks of an engine.
    """

    def __init__(
        self,
        members: LinkMembers,
        number: int,
        turn: threading.Lock,
        *,
        relays: bool,
        needs_alike: bool,
        prepare: Callable[[RankGroup], Refit],
    ) -> None:
        super().__init__(members, number, turn)
        self._ranks = members.own.ranks
        self._relays, self._needs_alike, self._prepare = relays, needs_alike, prepare
        self._engines: dict[int, _PreparedEngine] = {}
        # Used by the first rank, which decides.
        self._hand_ons: dict[tuple[int, int], ForwardOrder] = {}
        self._barred: set[tuple[int | str, int | str]] = set()
        self._meetings = 0

    @property
    def is_usable(self) -> bool:
        """True, since a trainer's weights are not written."""
        return True

    def prepare_for(self, number: int, name: str, group: RankGroup) -> None:
        """Prepare the refit of an engine; raise the errors of `Refit.prepare`."""
        refit = self._prepare(group)
        messages = gather(str(refit.sent_bytes).encode(), group)
        sent_bytes = sum(int(messages[rank]) for rank in group.ranks[: self._ranks])
        kind = b" ".join(messages[rank] for rank in group.ranks[self._ranks :]).decode(
            errors="replace"
        )
        self._engines[number] = _PreparedEngine(name, refit, kind, sent_bytes)

    def forget(self, number: int) -> None:
        """Remove an engine that has left."""
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

    def _run(self, version: int, control: RunControl) -> SyncReport:
        if control.guard is not None:
            raise UsageError("guard= on a trainer, whose weights are not written; give it engines")
        if control.is_stopped():
            raise InterruptedRunError(f"stopped before version {version} was sent")
        begun_s = time.perf_counter()
        place, engines = self._members.begin_run()
        names = {number: name for number, name, _ in engines}
        orders = self._make_orders(version, [(number, group) for number, _, group in engines])
        services = [
            _EngineRun(
                number,
                name,
                group,
                self._engines[number],
                orders[number],
                control,
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
                # The other engines continue, and this engine may reconnect.
                self._members.give_up(service.number, str(service.error))
            else:
                failed = failed or service.error
        for service in served:
            self._note_ended(service.outcome.ended)
        own = RunSummary(
            {
                service.name: (service.seconds, self._name_feed(service, names))
                for service in served
            },
            self._members.take_lost(),
            tuple(service.number for service in services if service.error is not None),
            sum(service.prepared.sent_bytes for service in served if service.is_direct),
        )
        if failed is not None:
            # The other ranks need not wait for this rank.
            with contextlib.suppress(LinkError):
                self._members.settle(place, own)
            raise failed
        account = self._members.settle(place, own)
        for service in served:
            if service.number in account.given_up:
                self._members.give_up(service.number, account.lost.get(service.name, "it is lost"))
                # The account of this run has it: the next must not report it again.
                self._members.take_lost()
        if not account.engines:
            reasons = "; ".join(f"{name}: {why}" for name, why in account.lost.items())
            if control.is_stopped():
                raise InterruptedRunError(f"stopped; no engine has version {version}: {reasons}")
            raise LinkError(
                f"no engine has version {version}: {reasons or 'none is there'}; run again once "
                "one is"
            )
        self.version = version
        return SyncReport(
            version,
            {name: seconds for name, (seconds, _) in account.engines.items()},
            account.lost,
            time.perf_counter() - begun_s,
            sum(service.sent_bytes for service in served),
            fed_by={name: feed for name, (_, feed) in account.engines.items()},
            trainer_bytes=account.trainer_bytes,
        )

    def _name_feed(self, service: _EngineRun, names: Mapping[int, str]) -> str:
        feed = service.order.feed_of(service.number)
        return "trainer" if feed is None else names[feed.source]

    def _make_orders(self, version: int, engines: list[tuple[int, RankGroup]]) -> dict[int, Order]:
        """Return the order of each engine; only the first rank's are sent."""
        relayed = [
            RelayedEngine(number, frozenset(group.hosts[self._ranks :]), self._engines[number].kind)
            for number, group in engines
        ]
        ranks = {number: len(group.ranks) - self._ranks for number, group in engines}
        hosts = {host for _, group in engines for host in group.hosts[: self._ranks]}
        feeds = plan_relays(hosts, relayed, self._can_feed)
        pairs = [(source, number) for number, source in feeds.items() if source is not None]
        orders_by_pair: dict[tuple[int, int], ForwardOrder] = {}
        for pair, turn in assign_turns(pairs).items():
            before = self._hand_ons.get(pair)
            if before is None:
                # A meeting has a key at the store, which is never used twice.
                self._meetings += 1
                meeting = f"{self._number}/{self._meetings}"
            else:
                meeting = before.meeting
            orders_by_pair[pair] = ForwardOrder(
                meeting, turn, *pair, *(ranks[number] for number in pair)
            )
        self._hand_ons = orders_by_pair
        return {
            number: Order(
                self._number,
                version,
                tuple(order for pair, order in orders_by_pair.items() if number in pair),
            )
            for number, _ in engines
        }

    def _can_feed(self, source: RelayedEngine, target: RelayedEngine) -> bool:
        if not self._relays or (self._needs_alike and source.kind != target.kind):
            return False
        pairs = (source.number, target.number), (source.kind, target.kind)
        return not any(pair in self._barred for pair in pairs)

    def _release_waiting(self, number: int) -> None:
        """End the waiting of engines for a lost engine."""
        for hand_on in list(self._hand_ons.values()):
            if number in (hand_on.source, hand_on.target):
                self._members.interrupt(hand_on, number)

    def _note_ended(self, ended: Mapping[str, tuple[str, str]]) -> None:
        """Record ended forward orders; those of a lost engine are forgotten already."""
        for pair, hand_on in list(self._hand_ons.items()):
            if hand_on.meeting not in ended:
                continue
            del self._hand_ons[pair]
            kind, _ = ended[hand_on.meeting]
            if kind == MISFIT:
                self._barred.add((self._engines[pair[0]].kind, self._engines[pair[1]].kind))
            # A forward order that broke may work in the next run, unlike a pair that cannot
            # connect.
            elif kind != BROKE:
                self._barred.add(pair)

    def _verify(self) -> None:
        if not self._engines:
            raise LinkError("no engine is there to be compared; run first")
        # In threads, since an engine that hangs must not delay the others, which would time out on
        # this trainer.
        errors: dict[str, BaseException] = {}

        def compare(engine: _PreparedEngine) -> None:
            try:
                engine.refit.verify()
            except BaseException as error:
                errors[engine.name] = error

        threads = [
            start_thread(f"reshard engine {engine.name}", compare, engine)
            for engine in self._engines.values()
        ]
        for thread in threads:
            thread.join()
        for error in errors.values():
            if not isinstance(error, RunError):
                raise error
        if errors:
            raise RunError("; ".join(f"engine {name}: {error}" for name, error in errors.items()))
