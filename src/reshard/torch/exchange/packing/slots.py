"""Slots of memory that messages of an exchange use in turn, and steps that wait for them.

A packed or unpacked message has a slot. The next message in the slot depends on all messages that
were sent from it, or arrived in it::

    message   0  1  2  3  4  5          three slots: 3 follows 0, 4 follows 1, 5 follows 2
    slot      A  B  C  A  B  C
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.plans.schedule import align
from reshard.runs import IntArray
from reshard.torch.exchange.one_host.shared_memory import NearMessage
from reshard.torch.exchange.packing.copies import combine, copiers
from reshard.torch.exchange.packing.messages import LocalCopy, Place, RankMessage
from reshard.torch.exchange.packing.pieces import list_spans
from reshard.torch.exchange.timeline import Details, current_timeline


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
        return not self.copies and all(one.message.is_sent for one in self.messages)

    def describe(self) -> dict[str, Any]:
        """Return its messages for a timeline."""
        return {
            f"{'to' if one.message.is_sent else 'from'} rank {one.message.peer}, bytes": (
                one.message.size_bytes
            )
            for one in self.messages
        }

    def begin_tracing(self) -> None:
        """Record that its messages are in flight, if a timeline is recorded."""
        if (timeline := current_timeline()) is not None:
            for one in self.messages:
                name = f"message {'to' if one.message.is_sent else 'from'} rank {one.message.peer}"
                details: Details = functools.partial(dict, bytes=one.message.size_bytes)
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
        staged = [align(m.offsets[-1]) for m in messages]
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
    views, parts = message.pieces.views, message.pieces.parts_of(buffer)
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
