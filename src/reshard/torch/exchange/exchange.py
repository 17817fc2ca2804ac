"""The exchange of messages between the ranks of a process group, in little memory.

All tensors that move between ranks use it (`transfer`), and so does each step of a program of
collectives. Each rank has its own messages (`messages`), in an
order that is the same on all ranks; staged messages take turns in a few slots of memory::

    sends      s0  s1  s2  s3  s4 ...     posted ahead while slots are free
    receives   r0  r1  r2  r3  r4 ...
    slots      A   B   -   A   B          - is dense: sent or received in its tensor

Ranks that share memory (`carrier`) have slots for sends only, from which receivers unpack.

1. When an exchange is prepared, messages are listed and slots assigned; a message depends on the
   previous messages in its slot: those that were sent from it, or arrived in it. With two slots,
   message 2 follows message 0. The same bytes for several ranks are packed once, in a slot.
2. `start` posts what depends on nothing: receives, and sends after they are packed. Then it copies
   what stays on the rank.
3. `finish` posts the rest. If no message can be posted, it waits for the slot of the first message,
   in the order of all, that is not posted. Its dependencies precede it, so that some rank can
   always make progress.
4. In a staged plan (`packing.messages`), a send may depend on an earlier receive of the same part.
   It is posted as soon as that receive completes, while later parts are still in flight.
5. A message that has arrived is unpacked, or combined after all that precede it, which include the
   contributions of lower order. Means are scaled at the end. A message in a sender's slot occupies
   it until it is unpacked, so such messages are unpacked in the order of all, before any later
   message is waited for.

So packing, sending and unpacking overlap, and the staging memory stays within a limit whatever the
size of the tensors. A prepared exchange keeps its views and slots, and can run any number of times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reshard.errors import RunError
from reshard.plans import schedule
from reshard.runs import IntArray
from reshard.torch.exchange.agreement import Group
from reshard.torch.exchange.carrier import Carrier
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.exchange.one_host.shared_memory import NearMessage, SharedMemory
from reshard.torch.exchange.packing.copies import (
    combine,
    copiers,
    empty_bytes,
    finish_contributions,
    rows_of,
)
from reshard.torch.exchange.packing.messages import (
    FIRST_PLACE,
    LocalCombination,
    LocalCopy,
    Place,
    RankMessage,
    RankTransfers,
    cells_of,
    list_messages,
    list_spans,
)
from reshard.torch.exchange.timeline import Details, current_timeline, span


@dataclass(slots=True, eq=False)
class StagedMessage:
    """A message with its bytes, and the copies that pack or unpack its pieces if it is staged."""

    message: RankMessage
    buffer: torch.Tensor
    copies: list[Callable[[], object]]
    # A received message in its sender's memory, and its address when `copies` were created.
    near: NearMessage | None = None
    place: tuple[int, int] | None = None
    # Its location in this rank's tensors, if it is copied directly.
    spans: IntArray | None = None

    def stage(self, buffer: torch.Tensor) -> None:
        """Assign the message's bytes."""
        self.buffer = buffer
        self.copies = _list_copies(self.message, buffer)

    def unpack(self) -> None:
        """Copy or combine the received pieces into their targets."""
        near = self.near
        if near is not None and near.is_readable:
            self._read(near)
            return
        if near is not None and self.place != near.place:
            # Usually the address is the same as in the previous run.
            self.stage(near.bytes_there)
            self.place = near.place
        for copy in self.copies:
            copy()

    def _read(self, near: NearMessage) -> None:
        """Copy a message from the tensors of its sender."""
        message = self.message
        if message.is_plain:
            if self.spans is None:
                self.spans = message.list_spans()
            near.read(self.spans)
            return
        # Its elements are cast or combined on arrival.
        buffer = torch.empty(message.offsets[-1], dtype=torch.uint8)
        packed = message.pieces.parts_of(buffer)
        near.read(list_spans(packed))
        for copy in _list_copies(message, buffer):
            copy()

    def leave(self) -> None:
        """Release a received message in its sender's memory."""
        self.near = None
        if self.place is not None:
            self.buffer, self.copies, self.place = self.buffer.new_empty(0), [], None


@dataclass(slots=True, eq=False)
class ExchangeStep:
    """Messages that are posted at once, and the combinations to compute after them.

    `key` is its position in the order of all steps, `order` that of its contributions; `follows`
    are the steps whose slots it reuses, or that receive the data that it sends.
    """

    key: tuple[int, ...]
    order: int
    messages: list[StagedMessage] = field(default_factory=list)
    copies: Sequence[LocalCopy] = ()
    follows: list[ExchangeStep] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    is_done: bool = False
    traced: list[tuple[str, int]] = field(default_factory=list)

    @property
    def place(self) -> Place:
        """Its step and its stage in a pipeline."""
        step, stage, *_ = self.key
        return step, stage

    @property
    def only_sends(self) -> bool:
        """Whether it neither receives nor combines anything."""
        return not self.copies and all(staged.message.is_sent for staged in self.messages)

    def describe(self) -> dict[str, Any]:
        """Return its messages for a timeline."""
        return {
            f"{'to' if staged.message.is_sent else 'from'} rank {staged.message.peer}, bytes": (
                staged.message.size_bytes
            )
            for staged in self.messages
        }

    def begin_tracing(self) -> None:
        """Record that its messages are in flight, if a timeline is recorded."""
        if (timeline := current_timeline()) is not None:
            for staged in self.messages:
                message = staged.message
                name = f"message {'to' if message.is_sent else 'from'} rank {message.peer}"
                details: Details = functools.partial(dict, bytes=message.size_bytes)
                self.traced.append((name, timeline.begin_message(name, details)))

    def end_tracing(self) -> None:
        """Record that its messages have arrived, or are sent."""
        if (timeline := current_timeline()) is not None:
            for name, number in self.traced:
                timeline.end_message(name, number)
        self.traced.clear()

    @property
    def waits(self) -> bool:
        """Whether any of its slots is in use, or data to send is still in flight."""
        return not all(before.is_done for before in self.follows)


class MessageSlots:
    """Equal slots of memory, used in turn by the staged messages of a direction.

    If the memory is shared, a message packed for one rank is also sent from there to others.

    Args:
        messages: all messages that will be given a slot.
        most: the maximum number of slots.
        most_bytes: of all slots.
        allocate: returns as many bytes as are requested.
    """

    def __init__(
        self,
        messages: Sequence[RankMessage],
        are_shared: bool,
        most: int,
        most_bytes: int,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        staged = [schedule.align(m.offsets[-1]) for m in messages]
        self._slot_bytes = max(staged, default=0)
        # As many slots as fit, but no more than messages, or than may be in flight at once.
        room = most_bytes // self._slot_bytes if staged else 0
        self._count = min(len(staged), room, most)
        self.size_bytes = self._slot_bytes * self._count
        self.memory = allocate(self.size_bytes)
        self._are_shared = are_shared
        self._users: list[list[ExchangeStep]] = []
        self._staged: list[StagedMessage] = []

    def give(self, prepared: StagedMessage, step: ExchangeStep) -> None:
        """Assign a slot to a message of a step; the step then follows the slot's previous step."""
        # Message `turn` takes the memory of message `turn - count`, whose steps must end before.
        turn = len(self._users)
        # The same contents for another rank are packed once while they are in memory.
        for number in range(max(turn - self._count, 0), turn) if self._are_shared else ():
            if self._staged[number].message.carries_like(prepared.message):
                prepared.buffer = self._staged[number].buffer
                self._users[number].append(step)
                return
        self._users.append([step])
        begin = turn % self._count * self._slot_bytes
        offsets = prepared.message.offsets
        place = self.memory.narrow(0, begin, offsets[-1])
        # It may be packed already, by another exchange in the same memory.
        if not prepared.copies or prepared.buffer.data_ptr() != place.data_ptr():
            prepared.stage(place)
        self._staged.append(prepared)
        if turn >= self._count:
            step.follows += self._users[turn - self._count]


def _list_copies(message: RankMessage, buffer: torch.Tensor) -> list[Callable[[], object]]:
    """Return the functions that pack the pieces of a message into its bytes, or unpack them."""
    views = message.pieces.views
    # A part of a large piece: without the tensors below, which take longer than small parts.
    if len(views) == 1 and message.is_plain and buffer.device.type == "cpu":
        rows = rows_of(views[0])
        if rows is not None:
            packed = buffer.numpy()[: rows.nbytes].view(rows.dtype).reshape(rows.shape)
            ends = (packed, rows) if message.is_sent else (rows, packed)
            return [functools.partial(np.copyto, *ends)]
    parts = message.pieces.parts_of(buffer)
    if message.is_sent:
        return copiers(zip(parts, views, strict=True))
    reductions = [form.reduction for form in message.pieces.forms]
    if not any(reductions):
        return copiers(zip(views, parts, strict=True))
    placed = list(zip(views, parts, reductions, strict=True))
    return [
        *copiers((view, part) for view, part, reduction in placed if reduction is None),
        *(
            functools.partial(combine, reduction, view, part)
            for view, part, reduction in placed
            if reduction is not None
        ),
    ]


DEFAULT_EXTRA_BYTES = 64 << 20
# The messages in flight in each direction. Fewer are packed ahead, so that they stay in a cache.
_MESSAGES_AHEAD = 4
_PACKED_AHEAD = 2
# In a pipeline, messages wait for others to arrive, while later messages are in flight.
_PIPELINE_AHEAD = 16
# Messages below these limits, or with more pieces or shorter rows, are packed.
_MIN_SPANNED_BYTES, _MAX_SPANNED_PIECES, _MIN_SPAN_BYTES = 1 << 16, 64, 1 << 10
# Consecutive messages to a rank before those to the next: waiting threads wake up less often.
# Packed messages remain until the next rank's turn, since it may receive the same bytes.
_IN_A_TURN = _PACKED_AHEAD


def find_partitioning(
    group: RankGroup,
    device: torch.device,
    extra_bytes: int,
    is_grouped: bool | None = None,
) -> tuple[int, int, bool, int]:
    """Return the values that determine, besides the transfers, the partitioning into messages.

    Returns:
        The rank, the slots of the group, whether messages are grouped, and their largest size.

    Raises UsageError for a limit too small.
    """
    if is_grouped is None:
        is_grouped = group.backend_of(device) == "nccl"
    # Grouped messages to and from all ranks are in memory at once.
    peers = len(group.ranks) - 1 if is_grouped else 1
    message_bytes = schedule.limit_message_bytes(extra_bytes, peers)
    return group.rank, group.slots, is_grouped, message_bytes


def _find_shared(
    group: RankGroup, device: torch.device, is_grouped: bool, is_hosted: bool
) -> SharedMemory | None:
    """Return the shared memory for messages, or None if it is not used."""
    on_host = is_hosted or device.type == "cpu"
    return group.shared_memory if on_host and not is_grouped else None


class MessageExchange:
    """The messages of a rank, prepared to run any number of times.

    Args:
        tensors: this rank's transfers of each, in the same order on every rank.
        group: of all ranks that have a part.
        device: of the tensors, and of the staging memory unless `is_hosted`.
        extra_bytes: the maximum staging memory; the same on every rank.
        is_grouped: whether the messages of all pairs are posted together, step by step, as NCCL
            requires; by default if the device's tensors are sent by such a backend.
        by_region: whether all contributions to a region are sent before the next region's; for a
            single tensor with equally sharded contributions (`are_cut_alike`). Equal on all ranks.
        is_hosted: whether messages are staged in the host's memory; by default if gloo, which
            requires it, sends a device's tensors.
        memory: `extra_bytes` bytes of staging memory (`RankGroup.staging_memory`), shared by
            exchanges that run sequentially; allocated when None.
        like: another exchange of the same transfers and sources, with the same `find_partitioning`.
            Its messages to send are used again, with their memory if the group is the same, since
            exchanges of a group run one at a time. `tensors` may omit tensors that are only sent.

    Raises:
        UsageError: a limit too small for any message, or for the number of messages.
    """

    def __init__(
        self,
        tensors: Sequence[RankTransfers],
        group: Group,
        device: torch.device,
        extra_bytes: int = DEFAULT_EXTRA_BYTES,
        is_grouped: bool | None = None,
        by_region: bool = False,
        is_hosted: bool | None = None,
        memory: torch.Tensor | None = None,
        like: MessageExchange | None = None,
    ) -> None:
        self._group = among = rank_group(group)
        self._device = device
        self._is_hosted = among.is_hosted(device) if is_hosted is None else is_hosted
        _, _, self._is_grouped, message_bytes = find_partitioning(
            among, device, extra_bytes, is_grouped
        )
        peers = len(among.ranks) - 1 if self._is_grouped else 1
        if like is None:
            # With `like`, the limit has been checked for the same messages.
            limit_messages(tensors, extra_bytes, peers)
        self._shared = _find_shared(among, device, self._is_grouped, self._is_hosted)
        if self._shared is not None and self._shared.serves(device):
            # All ranks share memory of devices, and no data passes through the host.
            self._is_hosted = False
        messages, copies, combinations = list_messages(
            tensors,
            among.rank,
            among.slots,
            message_bytes,
            1 if self._is_grouped else _IN_A_TURN,
            by_region,
            None if like is None else [staged.message for staged in like.list_sent()],
        )
        self._partial = [
            tensor
            for tensor in tensors
            if max(tensor.change.source.contributions, tensor.change.target.contributions) > 1
        ]
        self._copies = copiers((copy.target, copy.source) for copy in copies)
        self.sent_bytes = sum(m.size_bytes for m in messages if m.is_sent)
        self.received_bytes = sum(m.size_bytes for m in messages if not m.is_sent)
        # Exchanges of a group run one at a time, so that they can share memory to send.
        before = like if like is not None and like._group is among else None
        sent = before.list_sent() if before is not None else ()
        self._steps = self._list_steps(messages, combinations, sent)
        self._choose_spans()
        self._is_pipeline = any(tensor.place != FIRST_PLACE for tensor in tensors)
        # Half of the memory is for what arrives: a rank that sends must not starve its receives.
        most_bytes = extra_bytes // 2 // schedule.ALIGNMENT_BYTES * schedule.ALIGNMENT_BYTES
        self._slots = [
            self._make_slots(is_sent, peers, most_bytes, memory, before)
            for is_sent in (False, True)
        ]
        for step in self._steps:
            for message in step.messages:
                if self._is_staged(message):
                    self._slots[message.message.is_sent].give(message, step)
                elif not self._find_carrier(message.message).lends:
                    message.buffer = message.message.direct
        if self._is_pipeline:
            _follow_arrivals(self._steps)
        self.extra_bytes = sum(slots.size_bytes for slots in self._slots)
        # Grouped messages are posted in the same order on all ranks; otherwise sends and receives
        # are independent.
        self._lanes: tuple[list[ExchangeStep], list[ExchangeStep]] = ([], [])
        for step in self._steps:
            self._lanes[step.only_sends and not self._is_grouped].append(step)
        # The number of posted steps in each lane, and of the steps completed in order in the first.
        self._posted = [0, 0]
        self._completed = 0
        self._is_running = False
        self.has_failed = False
        # The tag of its messages; exchanges in progress at the same time have different tags.
        self.tag = 0

    def list_sent(self) -> list[StagedMessage]:
        """Return the messages that this rank sends."""
        return [
            staged for step in self._steps for staged in step.messages if staged.message.is_sent
        ]

    def _find_carrier(self, message: RankMessage) -> Carrier:
        near = self._shared
        return near if near is not None and message.peer in near.ranks else self._group

    def _choose_spans(self) -> None:
        """Choose the messages that carriers take from the tensors of this rank, without packing."""
        near = self._shared
        if near is None or not near.takes_spans or self._device.type != "cpu":
            return
        by_contents: dict[Any, list[StagedMessage]] = {}
        for sent in self.list_sent():
            message = sent.message
            # Combining reads a slot that is still in a cache.
            if message.order or len(message.pieces) > _MAX_SPANNED_PIECES:
                continue
            if message.size_bytes >= _MIN_SPANNED_BYTES and message.is_plain:
                by_contents.setdefault(tuple(message.contents), []).append(sent)
        for alike in by_contents.values():
            message = alike[0].message
            row_bytes = message.mean_row_bytes
            # Very short rows would make a table larger than the message.
            if row_bytes < _MIN_SPAN_BYTES:
                continue
            address, spans = message.pieces.views[0].data_ptr(), None
            for sent in alike:
                carrier = self._find_carrier(sent.message)
                if carrier.takes_memory(address, row_bytes, len(alike)):
                    spans = sent.spans = message.list_spans() if spans is None else spans

    def _is_staged(self, prepared: StagedMessage) -> bool:
        """Return whether a message needs a slot, as it is not sent or received in place."""
        message = prepared.message
        if self._find_carrier(message).lends:
            return message.is_sent and prepared.spans is None
        return self._is_hosted or message.direct is None

    def _make_slots(
        self,
        is_sent: bool,
        peers: int,
        most_bytes: int,
        memory: torch.Tensor | None,
        before: MessageExchange | None,
    ) -> MessageSlots:
        """Allocate the slots of a direction, in half of the memory."""
        messages = [
            staged.message
            for step in self._steps
            for staged in step.messages
            if staged.message.is_sent is is_sent and self._is_staged(staged)
        ]
        are_shared = is_sent and not self._is_grouped
        is_lent = is_sent and any(self._find_carrier(message).lends for message in messages)
        ahead = _PACKED_AHEAD if are_shared else _MESSAGES_AHEAD
        if self._is_pipeline:
            ahead = _PIPELINE_AHEAD
        half = None if memory is None else memory[is_sent * most_bytes :]
        # Its packed messages are used again where they are.
        if before is not None and is_sent:
            half = before._slots[is_sent].memory
        if (
            is_lent
            and self._shared is not None
            and not (half is not None and self._shared.has(half))
        ):
            staging = functools.partial(self._shared.staging_memory, device=self._device)
            return MessageSlots(messages, True, ahead, most_bytes, staging)

        def allocate(size_bytes: int) -> torch.Tensor:
            if half is not None:
                return half[:size_bytes]
            return empty_bytes(size_bytes, self._device, self._is_hosted)

        return MessageSlots(messages, are_shared, peers * ahead, most_bytes, allocate)

    def _list_steps(
        self,
        messages: Iterable[RankMessage],
        combinations: Iterable[LocalCombination],
        sent: Iterable[StagedMessage],
    ) -> list[ExchangeStep]:
        """Return steps in the order of all messages; `sent` are messages prepared elsewhere."""
        nothing = torch.empty(0, dtype=torch.uint8)
        prepared = {id(staged.message): staged for staged in sent}
        # This rank's own contribution is combined in its turn, as if it had arrived.
        steps = [ExchangeStep(key, order, copies=copies) for key, order, copies in combinations]
        # Grouped messages are posted with all others of their turn, other messages separately.
        digits = 4 if self._is_grouped else None
        for key, group in itertools.groupby(messages, lambda message: message.key[:digits]):
            of_step = [
                prepared.get(id(message)) or StagedMessage(message, nothing, [])
                for message in group
            ]
            steps.append(ExchangeStep(key, of_step[0].message.order, of_step))
        return sorted(steps, key=lambda step: step.key)

    @property
    def can_leave_its_thread(self) -> bool:
        """Return whether another thread may run it: not if streams belong to threads."""
        return not self._is_grouped and self._device.type == "cpu"

    def run(self) -> None:
        """Run `start` and `finish`."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Start the messages. Sources must not change, nor targets be used, until `finish` returns.

        Raises RunError if the process group cannot send, or an earlier run failed.
        """
        if self.has_failed:
            raise RunError(
                "this exchange failed before, and the connections of its ranks are closed; prepare "
                "another"
            )
        if self._is_running:
            raise RunError("this exchange runs already; finish it before it starts again")
        self._posted = [0, 0]
        self._completed = 0
        for step in self._steps:
            step.is_done = False
        self._is_running = True
        # If another thread finds that a rank is lost, it drops the messages of this exchange too.
        self._group.running.add(self)
        try:
            self._post_what_can_be()
            # Copies run while the first messages are in flight.
            with span("copy what stays"):
                for copy in self._copies:
                    copy()
        except BaseException as error:
            fail_on_all(self, self._group, "a message could not be sent", error)
            raise

    def finish(self) -> None:
        """Wait for the posted messages, and process the rest.

        Raises RunError if a message does not arrive, and ShardError for a contribution that cannot
        be filled. The targets are then not usable.
        """
        if not self._is_running:
            raise RunError("this exchange has not started")
        try:
            # Some messages wait for memory: complete the steps that occupy it, the earliest first.
            while waiting := self._post_what_can_be():
                for before in min(waiting, key=lambda step: step.key).follows:
                    self._complete(before)
            for step in self._steps:
                self._complete(step)
        except BaseException as error:
            fail_on_all(self, self._group, "a message did not arrive", error)
            raise
        self._is_running = False
        try:
            for tensor in self._partial:
                for target in tensor.targets:
                    cells = cells_of(tensor.change.target, self._group.rank, target)
                    finish_contributions(tensor.change, cells)
        except BaseException as error:
            self.fail()
            self._group.break_off(error)
            raise

    def fail(self) -> None:
        """Drop all messages: messages in flight keep their connections open."""
        self.has_failed = True
        for step in self._steps:
            step.works.clear()
            for staged in step.messages:
                staged.leave()

    def _post_what_can_be(self) -> list[ExchangeStep]:
        """Post steps; return the first step of each direction that has to wait for a slot."""
        waiting = []
        for direction, lane in enumerate(self._lanes):
            # In order, since both ends match messages by the order in which they are posted.
            posted = self._posted[direction]
            while posted < len(lane) and not lane[posted].waits:
                self._post(lane[posted])
                posted += 1
            self._posted[direction] = posted
            waiting += lane[posted : posted + 1]
        return waiting

    def _post(self, step: ExchangeStep) -> None:
        with span("pack", step.describe):
            for staged in step.messages:
                if staged.message.is_sent:
                    for pack in staged.copies:
                        pack()
        step.begin_tracing()
        try:
            if self._is_grouped:
                together = [(m.message.is_sent, m.buffer, m.message.peer) for m in step.messages]
                step.works = self._group.post_together(together)
                return
            for staged in step.messages:
                step.works.append(self._begin(staged))
        except RuntimeError as error:
            raise LostMessageError(str(error)) from error

    def _begin(self, prepared: StagedMessage) -> Any:
        message, carrier = prepared.message, self._find_carrier(prepared.message)
        if message.is_sent:
            data = prepared.buffer if prepared.spans is None else prepared.spans
            return carrier.send(data, message.peer, self.tag)
        if not carrier.lends:
            return carrier.receive(prepared.buffer, message.peer, self.tag)
        prepared.near = carrier.receive(message.offsets[-1], message.peer, self.tag)
        return prepared.near

    def _complete(self, step: ExchangeStep) -> None:
        if self._shared is not None:
            # Senders wait until this rank has read their slots, so read in the common order first.
            arriving = self._lanes[0]
            while self._completed < self._posted[0] and arriving[self._completed].key < step.key:
                self._complete_alone(arriving[self._completed])
                self._completed += 1
        # Contributions are combined in their order, so that every run gives the same bits.
        if step.order and not step.only_sends:
            # The contributions to combine it with precede it in its lane, and are posted.
            while not step.is_done:
                self._complete_alone(self._lanes[0][self._completed])
                self._completed += 1
        else:
            self._complete_alone(step)

    def _complete_alone(self, step: ExchangeStep) -> None:
        if step.is_done:
            return
        try:
            with span("wait", step.describe):
                while step.works:
                    # In place: an error must not keep the objects of its frames alive, see `fail`.
                    step.works[0].wait()
                    step.works.pop(0)
        except RuntimeError as error:
            raise LostMessageError(str(error)) from error
        if self.has_failed:
            # Set by another thread, which found that a rank is lost.
            raise LostMessageError("a rank of this group failed")
        step.end_tracing()
        with span("unpack", step.describe):
            for staged in step.messages:
                if not staged.message.is_sent:
                    try:
                        staged.unpack()
                    except ProcessLookupError as error:
                        raise LostMessageError(str(error)) from error
                    if staged.near is not None:
                        self._give_back(staged.near)
                        staged.near = None
            for target, source, reduction in step.copies:
                if reduction is None:
                    target.copy_(source)
                else:
                    combine(reduction, target, source)
        step.is_done = True

    def _give_back(self, near: NearMessage) -> None:
        try:
            near.give_back()
        except RuntimeError as error:
            raise LostMessageError(str(error)) from error


def _follow_arrivals(steps: Sequence[ExchangeStep]) -> None:
    """Let forwarded messages depend on those of earlier stages with the same part of a pipeline."""
    arriving: dict[Place, list[ExchangeStep]] = {}
    for step in steps:
        if not step.only_sends:
            arriving.setdefault(step.place, []).append(step)
    for step in steps:
        turn, stage = step.place
        if any(staged.message.is_sent for staged in step.messages):
            for earlier in range(stage):
                step.follows += arriving.get(
                    (turn - schedule.STEPS_BETWEEN_STAGES * (stage - earlier), earlier), ()
                )


class LostMessageError(Exception):
    """A message that cannot be sent, or does not arrive."""


def fail_on_all(exchange: Any, group: RankGroup, problem: str, error: BaseException) -> None:
    """Leave an exchange failed on all ranks. Raise a RunError for torch's errors.

    The caller raises other errors itself: a frame here that raised them would be kept by the error
    that it has.
    """
    exchange.fail()
    if isinstance(error, LostMessageError):
        group.lose(problem, error)
    group.break_off(error)
    if isinstance(error, RuntimeError):
        raise RunError(f"{problem}: {error}") from error


def limit_messages(tensors: Iterable[RankTransfers], extra_bytes: int, peers: int = 1) -> int:
    """Return the maximum bytes of a message of a rank's tensors: `limit_message_bytes`."""
    message_bytes = schedule.limit_message_bytes(extra_bytes, peers)
    # The sizes of transfers only matter if messages are small.
    if message_bytes < schedule.SMALL_MESSAGE_BYTES:
        moved = [0, 0]
        for tensor in tensors:
            local = tensor.targets[0] if tensor.sources[0] is None else tensor.sources[0]
            if (dtype := tensor.dtype or (None if local is None else local.dtype)) is not None:
                for way, rows in enumerate((tensor.sent, tensor.received)):
                    elements = int(rows.moving.elements.sum()) * len(tensor.sources)
                    moved[way] += elements * dtype.itemsize
        schedule.limit_message_bytes(extra_bytes, peers, max(moved))
    return message_bytes
