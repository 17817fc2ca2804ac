"""An engine's part of a weight sync: what fills it, and what it hands on.

An order says who fills this engine and to whom it hands on. Hand-ons that are new are met and
prepared in their turns, those that are gone are closed. A hand-on that cannot be made, or ends,
is told to the trainer; this engine then has its weights from the trainer itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.errors import (
    InterruptedRunError,
    LinkError,
    PlanError,
    ReshardError,
    RunError,
    ShardError,
    UsageError,
)
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.timeline import span
from reshard.torch.links.bucket_events import (
    BucketCounter,
    BucketEvent,
    FilledBuckets,
    RunOptions,
)
from reshard.torch.links.orders import BROKE, MISFIT, UNREACHABLE, HandOn, Order, RunOutcome
from reshard.torch.links.relay import BucketGate, Relay, RelayThread
from reshard.torch.links.sync import SyncReport, WeightSync
from reshard.torch.refitting.refit import Refit


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """What an engine's end of a link does for its syncs.

    Attributes:
        label: what people call this process.
        turn: of the link, held by the one run that is under way.
        number: of the engine.
        meet: meets the other engine of a hand-on; the group of both, the source's ranks first.
        prepare: makes the refit of a hand-on; with the batch of each tensor where this engine is
            the source.
    """

    label: str
    turn: threading.Lock
    number: int
    meet: Callable[[HandOn], RankGroup]
    prepare: Callable[[RankGroup, bool, Mapping[str, int]], Refit]


class _FillObserver:
    """Is told of the batches that fill an engine."""

    def __init__(self, sync: EngineSync, filled: FilledBuckets, gate: BucketGate) -> None:
        self._sync, self._filled, self._gate = sync, filled, gate

    def begin(self, number: int) -> None:
        self._filled.begin(number)
        self._sync._begin_writing()

    def end(self, number: int) -> None:
        self._gate.end(number)
        self._filled.end(number)


class EngineSync(WeightSync):
    """An engine's part: its refits, with all ranks of the trainer, and of other engines."""

    def __init__(self, end: EngineEnd, number: int, refit: Refit, group: RankGroup) -> None:
        super().__init__(end.label, number, end.turn)
        self.refit = refit
        self._end, self._group = end, group
        self._relays: dict[str, Relay] = {}
        self._is_mixed = False

    @property
    def is_usable(self) -> bool:
        """Whether the engine's weights are of one version; not while they are written."""
        return not self._is_mixed

    def close(self, error: ReshardError) -> None:
        """Leave all hand-ons."""
        for relay in self._relays.values():
            relay.group.break_off(error)
        self._relays.clear()

    def _check_version(self, version: int | None) -> int:
        if version is not None:
            raise UsageError(f"version={version!r} on an engine; the trainer says it")
        return 0

    def _list_buckets(self) -> tuple[BucketEvent, ...]:
        refit = self.refit
        return tuple(
            BucketEvent(names, refit.target_bytes(names)) for names in refit.complete_names if names
        )

    def _run(self, version: int, options: RunOptions) -> SyncReport:
        counter = BucketCounter(options)
        if counter.is_stopped():
            raise InterruptedRunError("stopped before the trainer's weights came")
        counter.expect(sum(event.size_bytes for event in self.buckets))
        try:
            return self._follow_orders(options, counter)
        except BaseException as error:
            for event in self.buckets:
                event._fail(error)
            if counter.is_stopped() and isinstance(error, LinkError):
                raise InterruptedRunError(f"stopped: {error}") from error
            raise

    def _follow_orders(self, options: RunOptions, counter: BucketCounter) -> SyncReport:
        has = "no weights of the trainer's" if self.version is None else f"version {self.version}"
        begun_s, outcome, order = 0.0, RunOutcome(), None
        sent_bytes = received_bytes = 0
        while order is None or outcome.lacks:
            try:
                order = self._hear_order()
                begun_s = begun_s or time.perf_counter()
                own, filled, sent = self._fill(order, options, counter)
                sent_bytes, received_bytes = sent_bytes + sent, received_bytes + filled
                if not own.lacks:
                    self.version, has = order.version, f"version {order.version}"
                outcome = RunOutcome.read(gather(own.write(), self._group).values.values())
            except ReshardError as error:
                if self.is_usable:
                    raise LinkError(f"the engine still has {has}: {error}") from error
                self.version = None
                coming = "another" if order is None else f"version {order.version}"
                raise LinkError(
                    f"the engine has parts of {coming} and of what it had ({has}): {error}"
                ) from error
        spent_s = time.perf_counter() - begun_s
        return SyncReport(
            order.version, seconds=spent_s, sent_bytes=sent_bytes, received_bytes=received_bytes
        )

    def _hear_order(self) -> Order:
        first = self._group.ranks[0]
        with span("wait for the trainer"), self._group.expecting_all():
            told = gather(b"", self._group, otherwise="the trainer does not answer")
        try:
            return Order.read(told.values[first], self._number)
        except PlanError as error:
            # The trainer waits for this process in the run of the other model.
            self._group.break_off(error)
            raise

    def _fill(
        self, order: Order, options: RunOptions, counter: BucketCounter
    ) -> tuple[RunOutcome, int, int]:
        """Get the weights and hand them on: what is to be told of it, bytes received and sent."""
        ended = self._keep_hand_ons(order)
        feed = order.feed_of(self._end.number)
        ahead = self.refit
        if feed is not None and feed.meeting in self._relays:
            ahead = self._relays[feed.meeting].refit
        gate, lacks = BucketGate(), ""
        filled = FilledBuckets(options, counter, self.buckets, self._find_needs(ahead))
        threads = [
            RelayThread(relay, ahead, gate)
            for relay in self._relays.values()
            if relay.hand_on.source == self._end.number
        ]
        try:
            if feed is not None and feed.meeting not in self._relays:
                raise RunError(ended[feed.meeting][1])
            ahead.run(_FillObserver(self, filled, gate))
            self._is_mixed = False
        except BaseException as error:
            gate.fail(error)
            self._is_mixed |= not ahead.is_usable
            if feed is None or not isinstance(error, ReshardError):
                raise
            # The trainer is there, and can send what the other engine could not.
            lacks = str(error)
            if feed.meeting in self._relays:
                ended[feed.meeting] = BROKE, str(error)
        finally:
            filled.close()
            for thread in threads:
                thread.join()
        sent_bytes = 0
        for thread in threads:
            if thread.error is None:
                sent_bytes += thread.relay.refit.sent_bytes
            else:
                ended[thread.relay.hand_on.meeting] = BROKE, str(thread.error)
        for meeting in ended:
            self._leave(meeting, "the hand-on failed")
        return RunOutcome(lacks, ended), 0 if lacks else ahead.received_bytes, sent_bytes

    def _begin_writing(self) -> None:
        """From here on the engine has parts of two versions, until a run has come to its end."""
        self._is_mixed, self.version = True, None

    def _find_needs(self, ahead: Refit) -> list[int]:
        """The batch of a refit that completes each of the buckets."""
        last = max(ahead.batch_of.values(), default=0)
        return [
            max(ahead.batch_of.get(name, last) for name in event.names) for event in self.buckets
        ]

    def _keep_hand_ons(self, order: Order) -> dict[str, tuple[str, str]]:
        """Prepare the hand-ons that are new, and leave those that are gone; which end, and why."""
        wanted = {one.meeting: one for one in order.hand_ons}
        ended: dict[str, tuple[str, str]] = {}
        for meeting in set(self._relays) - wanted.keys():
            why = "the trainer ended the hand-on"
            self._leave(meeting, why)
            ended[meeting] = BROKE, why
        for hand_on in sorted(order.hand_ons, key=lambda one: one.turn):
            if hand_on.meeting in self._relays:
                continue
            try:
                with span("meet another engine"):
                    group = self._end.meet(hand_on)
            except ReshardError as error:
                ended[hand_on.meeting] = UNREACHABLE, str(error)
                continue
            try:
                is_source = hand_on.source == self._end.number
                # In the order of the trainer's buckets, which all engines have much alike.
                with span("prepare a hand-on"):
                    refit = self._end.prepare(group, is_source, self.refit.batch_of)
            except BaseException as error:
                group.break_off(error)
                if not isinstance(error, ReshardError):
                    raise
                kind = MISFIT if isinstance(error, ShardError | PlanError) else UNREACHABLE
                ended[hand_on.meeting] = kind, str(error)
                continue
            self._relays[hand_on.meeting] = Relay(hand_on, group, refit)
        return ended

    def _leave(self, meeting: str, why: str) -> None:
        relay = self._relays.pop(meeting, None)
        if relay is not None:
            relay.group.break_off(LinkError(why))

    def _verify(self) -> None:
        self.refit.verify()
