"""An engine's side of a weight sync: receive weights, and forward them.

An order specifies who fills this engine and to whom it forwards. New forward orders are met and
prepared in their turns, missing ones are closed. If forwarding cannot be prepared or fails, the
engine reports it to the trainer, and receives its weights from the trainer itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

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
from reshard.torch.links import sync
from reshard.torch.links.membership import LinkMembers
from reshard.torch.links.messages import BROKE, MISFIT, UNREACHABLE, Order, RunOutcome
from reshard.torch.links.relay_tree import BucketGate, Relay, RelayThread
from reshard.torch.refitting.refit import Refit


class FilledBuckets:
    """Observes the batches of a refit that fills an engine: a `BatchObserver`.

    It updates events and progress, and lets `gate` pass what is there.

    Args:
        control: of the run; its progress continues if a second refit has to fill the engine.
        events: of all buckets.
        needs: for each event, the batch of the refit that completes it.
        gate: of the threads that forward the weights.
        when_written: called before a batch is written.
    """

    def __init__(
        self,
        control: sync.RunControl,
        events: Sequence[sync.BucketEvent],
        needs: Sequence[int],
        gate: BucketGate,
        when_written: Callable[[], None],
    ) -> None:
        self._control, self._events, self._needs = control, events, needs
        self._gate, self._when_written = gate, when_written
        self._held = ExitStack()

    def begin(self, number: int) -> None:
        """Wait until a batch may be written."""
        self._control.check()
        if self._control.guard is not None:
            self._held.enter_context(self._control.guard)
        self._when_written()

    def end(self, number: int) -> None:
        """Mark the events that a batch completes."""
        self._gate.end(number)
        # Before the events are set, so that those who wait for them can take the guard.
        self._held.close()
        for event, need in zip(self._events, self._needs, strict=True):
            if need == number and not event.is_done:
                event._set()
                self._control.add(event.size_bytes, event.names[-1])

    def close(self) -> None:
        """Release the guard at the end of the run."""
        self._held.close()


class EngineSync(sync.WeightSync):
    """An engine's side: its refits with all ranks of the trainer, and of other engines.

    Args:
        members: of the link.
        number: of the sync, among those of the link.
        turn: the lock of the link, held during a run.
        refit: with the ranks of the trainer.
        group: of these ranks and the engine's.
        prepare: prepare the refit of a forward order, with the batch of each tensor if this is
            the source.
    """

    def __init__(
        self,
        members: LinkMembers,
        number: int,
        turn: threading.Lock,
        *,
        refit: Refit,
        group: RankGroup,
        prepare: Callable[[RankGroup, bool, Mapping[str, int]], Refit],
    ) -> None:
        super().__init__(members, number, turn)
        self.refit = refit
        self._engine, self._group, self._prepare = members.own.number, group, prepare
        self._relays: dict[str, Relay] = {}
        self._is_mixed = False

    @property
    def is_usable(self) -> bool:
        """Whether the engine's weights are of one version; False during a run."""
        return not self._is_mixed

    def _check_version(self, version: int | None) -> int:
        if version is not None:
            raise UsageError(f"version={version!r} on an engine; the trainer says it")
        return 0

    def _list_buckets(self) -> tuple[sync.BucketEvent, ...]:
        refit = self.refit
        return tuple(
            sync.BucketEvent(names, refit.target_bytes(names))
            for names in refit.complete_names
            if names
        )

    def _run(self, version: int, control: sync.RunControl) -> sync.SyncReport:
        if control.is_stopped():
            raise InterruptedRunError("stopped before the trainer's weights came")
        control.expect(sum(event.size_bytes for event in self.buckets))
        try:
            return self._follow_orders(control)
        except BaseException as error:
            for event in self.buckets:
                event._fail(error)
            if control.is_stopped() and isinstance(error, LinkError):
                raise InterruptedRunError(f"stopped: {error}") from error
            raise

    def _follow_orders(self, control: sync.RunControl) -> sync.SyncReport:
        has = "no weights of the trainer's" if self.version is None else f"version {self.version}"
        begun_s, outcome, order = 0.0, RunOutcome(), None
        sent_bytes = received_bytes = 0
        while order is None or outcome.lacks:
            try:
                order = self._hear_order()
                begun_s = begun_s or time.perf_counter()
                own, filled, sent = self._fill(order, control)
                sent_bytes, received_bytes = sent_bytes + sent, received_bytes + filled
                if not own.lacks:
                    self.version, has = order.version, f"version {order.version}"
                outcome = RunOutcome.read(gather(own.write(), self._group).values())
            except ReshardError as error:
                if self.is_usable:
                    raise LinkError(f"the engine still has {has}: {error}") from error
                self.version = None
                coming = "another" if order is None else f"version {order.version}"
                raise LinkError(
                    f"the engine has parts of {coming} and of what it had ({has}): {error}"
                ) from error
        spent_s = time.perf_counter() - begun_s
        return sync.SyncReport(
            order.version, seconds=spent_s, sent_bytes=sent_bytes, received_bytes=received_bytes
        )

    def _hear_order(self) -> Order:
        first = self._group.ranks[0]
        with span("wait for the trainer"), self._group.expecting_all():
            messages = gather(b"", self._group, otherwise="the trainer does not answer")
        try:
            return Order.read(messages[first], self._number)
        except PlanError as error:
            # The trainer waits for this process in the run of the other model.
            self._group.break_off(error)
            raise

    def _fill(self, order: Order, control: sync.RunControl) -> tuple[RunOutcome, int, int]:
        """Receive the weights and forward them; return outcome, received and sent bytes."""
        ended = self._keep_hand_ons(order)
        feed = order.feed_of(self._engine)
        ahead = self.refit
        if feed is not None and feed.meeting in self._relays:
            ahead = self._relays[feed.meeting].refit
        gate, lacks = BucketGate(), ""

        def mark_mixed() -> None:
            # Until the run ends, the engine has parts of two versions.
            self._is_mixed, self.version = True, None

        filled = FilledBuckets(control, self.buckets, self._find_needs(ahead), gate, mark_mixed)
        threads = [
            RelayThread(relay, ahead, gate)
            for relay in self._relays.values()
            if relay.hand_on.source == self._engine
        ]
        try:
            if feed is not None and feed.meeting not in self._relays:
                raise RunError(ended[feed.meeting][1])
            ahead.run(filled)
            self._is_mixed = False
        except BaseException as error:
            gate.fail(error)
            # A run that failed before its first write leaves the weights as they were.
            self._is_mixed |= not ahead.is_usable
            if feed is None or not isinstance(error, ReshardError):
                raise
            # The trainer can send the missing weights itself.
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

    def _find_needs(self, ahead: Refit) -> list[int]:
        """Return the batch of a refit that completes each bucket."""
        # A tensor without a batch counts as complete at the end.
        last = max(ahead.batch_of.values(), default=0)
        return [
            max(ahead.batch_of.get(name, last) for name in event.names) for event in self.buckets
        ]

    def _keep_hand_ons(self, order: Order) -> dict[str, tuple[str, str]]:
        """Prepare new forward orders, leave missing ones; return ended ones with reasons."""
        ordered = {order_item.meeting: order_item for order_item in order.hand_ons}
        ended: dict[str, tuple[str, str]] = {}
        for meeting in set(self._relays) - ordered.keys():
            why = "the trainer ended the hand-on"
            self._leave(meeting, why)
            ended[meeting] = BROKE, why
        # Turns are unique for each engine, so that engines never wait for each other in a cycle.
        for hand_on in sorted(order.hand_ons, key=lambda order_item: order_item.turn):
            if hand_on.meeting in self._relays:
                continue
            try:
                with span("meet another engine"):
                    group = self._members.meet_engine(hand_on)
            except ReshardError as error:
                ended[hand_on.meeting] = UNREACHABLE, str(error)
                continue
            try:
                is_source = hand_on.source == self._engine
                # In the order of the trainer's buckets, which are similar on all engines.
                with span("prepare a hand-on"):
                    refit = self._prepare(group, is_source, self.refit.batch_of)
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
