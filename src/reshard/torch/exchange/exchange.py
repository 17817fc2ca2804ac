"""The exchange of messages between the ranks of a process group, in little memory.

All tensors that move between ranks move by it: those of a redistribution, of a refit, of
partitions, and each step of a program of collectives. Each rank knows its own messages
(`messages`), in an order that all ranks share; those that are staged take turns in a few slots of
memory::

    sends      s0  s1  s2  s3  s4 ...     posted ahead while their slots are free
    receives   r0  r1  r2  r3  r4 ...
    slots      A   B   -   A   B          - is dense: sent or received where it lies

1. Once, messages are listed and slots are given out; a message follows those that have its slot
   before. Several ranks that are sent the same are sent it from one slot, packed once.
2. `start` posts what follows nothing: receives, and sends once they are packed. Then it copies
   what stays.
3. `finish` posts the others. Where nothing can be posted, the first message in the order of all
   that is not posted yet says whose slot to wait for: what it follows comes before it, so some
   rank can always go on.
4. A message that has arrived is unpacked, or combined once all that comes before it is: then all
   contributions of lower order are. At the end means are scaled.

Packing, sending and unpacking so overlap, and the staging memory stays within a limit whatever
the size of the tensors. A prepared exchange can run again and again: it keeps its views and its
slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.errors import RunError
from reshard.plans.schedule.messages import ALIGNMENT_BYTES, align, limit_message_bytes
from reshard.torch.exchange.agreement import Group
from reshard.torch.exchange.copies import combine, copier, empty_bytes, finish_contributions
from reshard.torch.exchange.groups import rank_group
from reshard.torch.exchange.messages import (
    LocalCopy,
    Piece,
    RankMessage,
    RankMessages,
    RankTransfers,
    cells_of,
    list_messages,
)

DEFAULT_EXTRA_BYTES = 64 << 20
# How many are under way in each direction. Fewer are packed ahead: then they are still in a cache.
_MESSAGES_AHEAD = 4
_PACKED_AHEAD = 2
# As many go to one rank before others do: threads that wait for messages wake up less often. They
# are still packed when the next rank's turn comes, which may be sent the same.
_IN_A_TURN = _PACKED_AHEAD


@dataclass(slots=True, eq=False)
class _StagedMessage:
    """A message with its bytes, and what packs or unpacks its pieces where they are staged."""

    message: RankMessage
    buffer: torch.Tensor
    copies: list[Callable[[], object]]


@dataclass(slots=True, eq=False)
class _ExchangeStep:
    """What is posted at once, and what is combined once it is done.

    `key` is its place in the order of all, `order` that of the contributions in it; `follows` are
    the steps whose slots it takes over.
    """

    key: tuple[int, ...]
    order: int
    messages: list[_StagedMessage] = field(default_factory=list)
    copies: Sequence[LocalCopy] = ()
    follows: list[_ExchangeStep] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    is_done: bool = False

    @property
    def only_sends(self) -> bool:
        """Whether nothing arrives, or is combined, by it."""
        return not self.copies and all(one.message.is_sent for one in self.messages)

    @property
    def waits(self) -> bool:
        """Whether a slot of it is not free yet."""
        return not all(before.is_done for before in self.follows)


class MessageExchange:
    """The messages of one rank, prepared to run any number of times.

    Args:
        tensors: this rank's transfers of each, in the same order on every rank.
        rank: this process's, among the slots of the layouts.
        group: of all ranks that have a part.
        device: where the staging memory is.
        extra_bytes: the most staging memory; the same on every rank.
        is_grouped: whether the messages of all pairs are posted together, step by step, as NCCL
            needs it; by default where that is what carries the device's tensors.
        by_region: whether all contributions to a region travel before the next region does; for one
            tensor whose contributions are cut alike (`are_cut_alike`), likewise on every rank.
        memory: bytes to stage in, `extra_bytes` of them, that exchanges share which run one after
            the other; its own when None.

    Raises:
        UsageError: a limit too small for any message.
    """

    def __init__(
        self,
        tensors: Sequence[RankTransfers],
        rank: int,
        group: Group,
        device: torch.device,
        extra_bytes: int = DEFAULT_EXTRA_BYTES,
        is_grouped: bool | None = None,
        by_region: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        self._group = among = rank_group(group)
        self._device = device
        is_nccl = among.backend_of(device) == "nccl"
        self._is_grouped = is_nccl if is_grouped is None else is_grouped
        # Grouped messages to and from all ranks are in memory at once.
        peers = len(among.ranks) - 1 if self._is_grouped else 1
        message_bytes = limit_message_bytes(extra_bytes, peers)
        found = list_messages(
            tensors,
            rank,
            among.slots,
            message_bytes,
            1 if self._is_grouped else _IN_A_TURN,
            by_region,
        )
        self._rank = rank
        self._partial = [one for one in tensors if _is_partial(one)]
        self._copies = [copier(one.target, one.source) for one in found.copies]
        self.sent_bytes = sum(m.size_bytes for m in found.messages if m.is_sent)
        self.received_bytes = sum(m.size_bytes for m in found.messages if not m.is_sent)
        self._steps = self._list_steps(found)
        # Half of the memory is for what arrives: a rank that sends must not starve its receives.
        most_bytes = extra_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        halves = (None, None) if memory is None else memory[: 2 * most_bytes].chunk(2)
        slots = [
            _Slots(
                [m for m in found.messages if m.is_sent is is_sent],
                is_sent and not self._is_grouped,
                peers * (_PACKED_AHEAD if is_sent and not self._is_grouped else _MESSAGES_AHEAD),
                most_bytes,
                device,
                half,
            )
            for is_sent, half in zip((False, True), halves, strict=True)
        ]
        for step in self._steps:
            for message in step.messages:
                slots[message.message.is_sent].give(message, step)
        self.extra_bytes = sum(one.size_bytes for one in slots)
        # What is grouped is posted in one order on all ranks; else sends and receives go apart.
        self._lanes: tuple[list[_ExchangeStep], list[_ExchangeStep]] = ([], [])
        for step in self._steps:
            self._lanes[step.only_sends and not self._is_grouped].append(step)
        # How many steps of each lane are posted, and of the first one are completed in order.
        self._posted = [0, 0]
        self._completed = 0
        self._is_running = False
        self.has_failed = False
        # Of all its messages; exchanges that are under way at once have tags of their own.
        self.tag = 0

    def _list_steps(self, found: RankMessages) -> list[_ExchangeStep]:
        """Steps in the order of all messages."""
        nothing = torch.empty(0, dtype=torch.uint8)
        # What a rank has itself is combined in its turn, as if it arrived.
        steps = [_ExchangeStep(one.key, one.order, copies=one.copies) for one in found.combinations]
        # Grouped messages are posted with all others of their turn; else each by itself.
        digits = 2 if self._is_grouped else None
        for key, group in itertools.groupby(found.messages, lambda message: message.key[:digits]):
            prepared = [_StagedMessage(message, nothing, []) for message in group]
            steps.append(_ExchangeStep(key, prepared[0].message.order, prepared))
        return sorted(steps, key=lambda step: step.key)

    @property
    def can_leave_its_thread(self) -> bool:
        """Whether another thread may run it: not where streams belong to threads."""
        return not self._is_grouped and self._device.type == "cpu"

    def run(self) -> None:
        """`start` and `finish`."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Begin. Sources must not change, nor targets be used, until `finish` has returned.

        Raises RunError where the process group cannot send, or an earlier run failed.
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
        self._group.running.add(self)
        with _Failure(self, "a message could not be sent"):
            self._post_what_can_be()
            # Copies run while the first messages travel.
            for copy in self._copies:
                copy()

    def finish(self) -> None:
        """Wait for what has begun, and do the rest.

        Raises RunError where a message does not come, and ShardError for a contribution that
        cannot be filled; the targets are not usable then.
        """
        if not self._is_running:
            raise RunError("this exchange has not started")
        with _Failure(self, "a message did not arrive"):
            # Some messages wait for memory: complete the steps that have it, the earliest first.
            while waiting := self._post_what_can_be():
                for before in min(waiting, key=lambda step: step.key).follows:
                    self._complete(before)
            for step in self._steps:
                self._complete(step)
        self._is_running = False
        try:
            for tensor in self._partial:
                cells = cells_of(tensor.change.target, self._rank, tensor.target)
                finish_contributions(tensor.change, cells)
        except BaseException as error:
            self.fail()
            self._group.break_off(error)
            raise

    def fail(self) -> None:
        """Give up all messages: while they are under way they keep their connections."""
        self.has_failed = True
        for step in self._steps:
            step.works.clear()

    def _post_what_can_be(self) -> list[_ExchangeStep]:
        """The first step of each direction that still has to wait for a slot."""
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

    def _post(self, step: _ExchangeStep) -> None:
        for one in step.messages:
            if one.message.is_sent:
                for pack in one.copies:
                    pack()
        try:
            if self._is_grouped:
                together = [(m.message.is_sent, m.buffer, m.message.peer) for m in step.messages]
                step.works = self._group.post_together(together)
                return
            for one in step.messages:
                begin = self._group.send if one.message.is_sent else self._group.receive
                step.works.append(begin(one.buffer, one.message.peer, self.tag))
        except RuntimeError as error:
            raise _LostMessageError(str(error)) from error

    def _complete(self, step: _ExchangeStep) -> None:
        if step.order and not step.only_sends:
            # What it is combined with comes before it on its lane, and is posted.
            while not step.is_done:
                self._complete_alone(self._lanes[0][self._completed])
                self._completed += 1
        else:
            self._complete_alone(step)

    def _complete_alone(self, step: _ExchangeStep) -> None:
        if step.is_done:
            return
        try:
            while step.works:
                # In place: an error must not keep what it has seen, see `_fail`.
                step.works[0].wait()
                step.works.pop(0)
        except RuntimeError as error:
            raise _LostMessageError(str(error)) from error
        for one in step.messages:
            if not one.message.is_sent:
                for unpack in one.copies:
                    unpack()
        for copy in step.copies:
            copy_or_combine(copy.target, copy.source, copy.reduction)
        step.is_done = True


class _LostMessageError(Exception):
    """A message that cannot be sent, or does not come."""


class _Failure:
    """Whatever interrupts an exchange leaves it failed; what torch raises becomes a RunError."""

    def __init__(self, exchange: MessageExchange, what: str) -> None:
        self._exchange = exchange
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        self._exchange.fail()
        group = self._exchange._group
        if isinstance(error, _LostMessageError):
            group.lose(self._what, error)
        group.break_off(error)
        if isinstance(error, RuntimeError):
            raise RunError(f"{self._what}: {error}") from error


class _Slots:
    """Equal places of memory, that the staged messages of one direction have in turn.

    Where they are shared, what has been packed for one rank is sent from there to others too.
    """

    def __init__(
        self,
        messages: Sequence[RankMessage],
        are_shared: bool,
        most: int,
        most_bytes: int,
        device: torch.device,
        memory: torch.Tensor | None,
    ) -> None:
        # Messages that are sent from, and received in, their tensor need no place here.
        staged = [align(m.offsets[-1]) for m in messages if m.direct is None]
        self._slot_bytes = max(staged, default=0)
        # As many places as fit, but no more than messages, or than may be on their way at once.
        room = most_bytes // self._slot_bytes if staged else 0
        self._count = min(len(staged), room, most)
        self.size_bytes = self._slot_bytes * self._count
        if memory is None:
            memory = empty_bytes(self.size_bytes, device)
        self._memory = memory
        self._are_shared = are_shared
        self._users: list[list[_ExchangeStep]] = []
        self._buffers: list[tuple[list[Any], torch.Tensor]] = []

    def give(self, prepared: _StagedMessage, step: _ExchangeStep) -> None:
        """Give a message of a step its bytes, and let the step follow the one that has them."""
        direct = prepared.message.direct
        if direct is not None:
            prepared.buffer = direct
            return
        # Message `turn` takes the memory of message `turn - count`, whose steps must end before.
        turn = len(self._users)
        contents = prepared.message.contents if self._are_shared else []
        # The same contents, for another rank, are packed once while they are in memory.
        for number in range(max(turn - self._count, 0), turn) if self._are_shared else ():
            if self._buffers[number][0] == contents:
                prepared.buffer = self._buffers[number][1]
                self._users[number].append(step)
                return
        self._users.append([step])
        begin = turn % self._count * self._slot_bytes
        offsets = prepared.message.offsets
        prepared.buffer = buffer = self._memory[begin : begin + offsets[-1]]
        self._buffers.append((contents, buffer))
        for piece, low in zip(prepared.message.pieces, offsets, strict=False):
            view = piece.view
            part = buffer[low : low + piece.size_bytes].view(piece.dtype).view(view.shape)
            prepared.copies.append(_make_copy(prepared.message, piece, part))
        if turn >= self._count:
            step.follows += self._users[turn - self._count]


def _make_copy(message: RankMessage, piece: Piece, part: torch.Tensor) -> Callable[[], object]:
    """What packs a piece into its part of a message, or unpacks it."""
    if message.is_sent:
        return copier(part, piece.view)
    if piece.reduction is None:
        return copier(piece.view, part)
    return functools.partial(combine, piece.reduction, piece.view, part)


def copy_or_combine(target: torch.Tensor, source: torch.Tensor, reduction: str | None) -> None:
    """Copy what has arrived into its place, or combine it with what is there."""
    if reduction is None:
        target.copy_(source)
    else:
        combine(reduction, target, source)


def _is_partial(tensor: RankTransfers) -> bool:
    """Whether a side of a tensor is made of contributions."""
    return max(tensor.change.source.contributions, tensor.change.target.contributions) > 1
