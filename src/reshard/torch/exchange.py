"""How do the pieces of a plan travel between the ranks of a process group, in little memory?

Each rank knows its own part of the plan (`messages`). Its messages stand in one queue, in an
order that all ranks share, and a staged one has one of a few slots of memory::

    queue     m0  m1  m2  m3  m4  m5  m6 ...      posted ahead while their slots are free
              |--------------|                    done, from the front
    slots     A   B   -   A   B   -   A           - is dense: sent or received where it lies

1. Once, messages are listed and slots are given out; a message waits for the one that had its
   slot before.
2. `start` posts what needs no waiting: receives, and sends once they are packed. Then it copies
   what stays.
3. `finish` goes on from the front: wait, unpack or combine, post what the slot lets follow.

Packing, sending and unpacking so overlap, and the staging memory stays within a limit whatever
the size of the tensors. A prepared exchange can run again and again: it keeps its views and its
slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import RunError, UsageError
from reshard.planning.plan import Plan
from reshard.torch.messages import (
    ALIGNMENT_BYTES,
    Kept,
    Message,
    Movement,
    aligned,
    cells_of,
    messages_of,
)
from reshard.torch.reductions import combine, complete

DEFAULT_EXTRA_BYTES = 64 << 20
# The most bytes of a message. It is packed, sent and unpacked while it is in the cache.
MESSAGE_BYTES = 1 << 22
# Packing, sending, receiving and unpacking, each with a message of its own.
_LEAST_MESSAGES = 4


@dataclass(slots=True, eq=False)
class _Prepared:
    """A message with its bytes, and each piece's part of them where they are staged."""

    message: Message
    buffer: torch.Tensor
    staged: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, eq=False)
class _Step:
    """What is posted at once, and what is combined once it is done.

    `waits_for` is the number of steps that must be done before it is posted.
    """

    messages: list[_Prepared] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    waits_for: int = 0
    works: list[Any] = field(default_factory=list)


def message_bytes_of(extra_bytes: int, peers: int = 1) -> int:
    """The most bytes of a message, so that enough of them for `peers` fit in a limit.

    Raises:
        UsageError: a limit that has no room for the smallest messages.

    >>> message_bytes_of(64 << 20) == MESSAGE_BYTES
    True
    >>> message_bytes_of(100)
    16
    """
    each = extra_bytes // (_LEAST_MESSAGES * max(peers, 1)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if each < ALIGNMENT_BYTES:
        least = _LEAST_MESSAGES * max(peers, 1) * ALIGNMENT_BYTES
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little to send and receive with; give at least {least}"
        )
    return min(each, MESSAGE_BYTES)


class Exchange:
    """The messages of one rank, prepared to run any number of times.

    Args:
        movements: of all tensors, in the same order on every rank, with this rank's transfers.
        rank: this process's, among the slots of the layouts.
        group: of all ranks that have a part.
        device: where the staging memory is.
        extra_bytes: the most staging memory; the same on every rank.
        is_grouped: whether the messages of all pairs are posted together, step by step, as NCCL
            needs it; by default where the group is one of NCCL.
        memory: bytes to stage in, `extra_bytes` of them, that exchanges share which run one after
            the other; its own when None.

    Raises:
        UsageError: a limit too small for any message.
    """

    def __init__(
        self,
        movements: Iterable[Movement],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        extra_bytes: int = DEFAULT_EXTRA_BYTES,
        is_grouped: bool | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        self._group = group
        self._is_grouped = dist.get_backend(group) == "nccl" if is_grouped is None else is_grouped
        peers = dist.get_world_size(group) - 1 if self._is_grouped else 1
        message_bytes = message_bytes_of(extra_bytes, peers)
        found = messages_of(movements, rank, dist.get_world_size(), message_bytes)
        self._copies = found.kept.pop(0, [])
        self.sent_bytes = sum(m.size_bytes for m in found.messages if m.is_sent)
        self.received_bytes = sum(m.size_bytes for m in found.messages if not m.is_sent)
        self._steps = self._listed(found.messages, found.kept)
        most_bytes = extra_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        halves = (None, None) if memory is None else memory[: 2 * most_bytes].chunk(2)
        slots = [
            _Slots([m for m in found.messages if m.is_sent is is_sent], most_bytes, device, half)
            for is_sent, half in zip((False, True), halves, strict=True)
        ]
        for number, step in enumerate(self._steps):
            for message in step.messages:
                before = slots[message.message.is_sent].give(message, number)
                step.waits_for = max(step.waits_for, before + 1)
        self.extra_bytes = sum(one.size_bytes for one in slots)
        self._posted = self._done = 0
        self._is_running = False
        self.has_failed = False

    def _listed(self, messages: Sequence[Message], kept: dict[int, list[Kept]]) -> list[_Step]:
        """Steps in the order of all messages; what stays and is combined comes before them."""
        nothing = torch.empty(0, dtype=torch.uint8)
        keyed: list[tuple[tuple[int, ...], _Step]] = []
        digits = 2 if self._is_grouped else 4
        for key, together in itertools.groupby(messages, lambda message: message.key[:digits]):
            prepared = [_Prepared(message, nothing, []) for message in together]
            # Receives stand ready while sends are packed.
            prepared.sort(key=lambda one: one.message.is_sent)
            keyed.append((key, _Step(prepared)))
        keyed += [((order, -1), _Step(kept=parts)) for order, parts in kept.items()]
        return [step for _, step in sorted(keyed, key=lambda pair: pair[0])]

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
                "this exchange failed before, and its process group may still carry messages of "
                "it; begin anew with a new group"
            )
        if self._is_running:
            raise RunError("this exchange runs already; finish it before it starts again")
        self._posted = self._done = 0
        self._is_running = True
        with _Failure(self, "a message could not be sent"):
            self._post_what_can_be()
            for one in self._copies:
                one.target.copy_(one.source)

    def finish(self) -> None:
        """Wait for what has begun, and do the rest.

        Raises RunError where a message does not come; the targets are not usable then.
        """
        if not self._is_running:
            raise RunError("this exchange has not started")
        with _Failure(self, "a message did not arrive"):
            while self._done < len(self._steps):
                self._complete(self._steps[self._done])
                self._done += 1
                self._post_what_can_be()
        self._is_running = False

    def _post_what_can_be(self) -> None:
        steps = self._steps
        while self._posted < len(steps) and steps[self._posted].waits_for <= self._done:
            self._post(steps[self._posted])
            self._posted += 1

    def _post(self, step: _Step) -> None:
        operations = []
        for one in step.messages:
            if one.message.is_sent:
                for view, piece in one.staged:
                    piece.copy_(view)
            kind = dist.isend if one.message.is_sent else dist.irecv
            if self._is_grouped:
                operations.append(dist.P2POp(kind, one.buffer, one.message.peer, self._group))
            else:
                step.works.append(kind(one.buffer, one.message.peer, self._group))
        if operations:
            step.works = dist.batch_isend_irecv(operations)

    def _complete(self, step: _Step) -> None:
        works, step.works = step.works, []
        for work in works:
            work.wait()
        for one in step.messages:
            if not one.message.is_sent:
                for (view, part), piece in zip(one.staged, one.message.pieces, strict=False):
                    _put(view, part, piece.reduction)
        for kept in step.kept:
            _put(kept.target, kept.source, kept.reduction)


class _Failure:
    """Whatever interrupts an exchange leaves it failed; what torch raises becomes a RunError."""

    def __init__(self, exchange: Exchange, what: str) -> None:
        self._exchange = exchange
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        self._exchange.has_failed = True
        if isinstance(error, RuntimeError):
            raise RunError(f"{self._what}: {error}") from error


class _Slots:
    """Equal places of memory, that the staged messages of one direction have in turn."""

    def __init__(
        self,
        messages: Sequence[Message],
        most_bytes: int,
        device: torch.device,
        memory: torch.Tensor | None,
    ) -> None:
        staged = [aligned(m.offsets[-1]) for m in messages if m.direct is None]
        self._slot_bytes = max(staged, default=0)
        self._count = min(len(staged), most_bytes // self._slot_bytes) if staged else 0
        self.size_bytes = self._slot_bytes * self._count
        if memory is None:
            memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self._memory = memory
        self._users: list[int] = []

    def give(self, prepared: _Prepared, number: int) -> int:
        """Give a message of step `number` its bytes; the step that had them before, or -1."""
        direct = prepared.message.direct
        if direct is not None:
            prepared.buffer = direct
            return -1
        turn = len(self._users)
        self._users.append(number)
        begin = turn % self._count * self._slot_bytes
        offsets = prepared.message.offsets
        prepared.buffer = buffer = self._memory[begin : begin + offsets[-1]]
        for piece, low in zip(prepared.message.pieces, offsets, strict=False):
            view = piece.view
            part = buffer[low : low + piece.size_bytes].view(piece.dtype).view(view.shape)
            prepared.staged.append((view, part))
        return self._users[turn - self._count] if turn >= self._count else -1


def _put(target: torch.Tensor, source: torch.Tensor, reduction: str | None) -> None:
    if reduction is None:
        target.copy_(source)
    else:
        combine(reduction, target, source)


def complete_contributions(plan: Plan, rank: int, target: torch.Tensor | None) -> None:
    """Scale means, and fill contributions that combine nothing, once all else is in place."""
    complete(plan, cells_of(plan.target, rank, target))
