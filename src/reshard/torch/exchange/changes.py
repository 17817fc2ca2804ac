"""Exchanges that send only the changes since the previous run.

A trainer changes few of its engines' elements: of weights in bfloat16, a step of
reinforcement learning changes 1 %. So a sender keeps the data that it sent, compares, and sends the
differences, in the encoding of a delta of checkpoints (`reshard.checkpoint.deltas.encoding`)::

    sender      pack -> compare with what was sent    --- how much comes: 24 bytes ---->
                          which elements, their values --- payload, often empty -------->   write

1. *Kept data.* By elements: a copy of all sent elements; a changed element of two bytes costs
   three bytes. By blocks: a digest of 16 bytes for each block of 4 KiB, 0.4 % of the memory. Whole
   blocks are sent, which is efficient if changes are adjacent, as in the experts that were used,
   but not if an element in a hundred changes, since then nearly every block has changes.
2. *Positions.* Gaps between changes, a bit for each element, runs, or the whole message, whichever
   is shortest: a message that changed everywhere costs 24 bytes more than in any other exchange.
3. *Whole runs.* The first run sends everything, and so does a run before which a rank's target was
   changed: the caller passes this, equally on all ranks.

4. *Ranks that share memory* (`one_host`) receive all elements with `changed_only=True`: copying
   them takes less time than comparing them.

5. *Stages.* Bytes that are sent whole enter each host once (`packing.messages`); changes are sent
   directly to each rank that needs them. So if hosts have replicas, runs that send all elements
   have a second set of messages. All ranks make the same decision before a run, by samples
   (`seems_changed`)::

       first run, or most changed    source -> one rank of a host -> the others     in stages
       any other run                 source -> each rank, only changes

Messages have the order of `messages`, and both ends process them in this order, so no two ranks
wait for each other. Bytes that several ranks receive are kept, packed and compared once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.checkpoint.blocks.grid import DIGEST_BYTES, block_digest
from reshard.checkpoint.deltas.encoding import Coding, encode_words, list_positions, read_changes
from reshard.errors import FormatError, RunError, UsageError
from reshard.layout import Layout
from reshard.plans.schedule import align, limit_message_bytes
from reshard.torch.exchange.exchange import LostMessageError, MessageExchange, fail_on_all
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.copies import WORDS, copier, empty_bytes
from reshard.torch.exchange.packing.messages import RankMessage, RankTransfers, list_messages
from reshard.torch.exchange.timeline import span

ChangeUnit: TypeAlias = Literal["elements", "blocks"]
ChangedOnly: TypeAlias = bool | ChangeUnit
#: Values of `changed_only=`. True is the first, except between ranks that share memory.
UNITS: tuple[ChangeUnit, ...] = get_args(ChangeUnit)
BLOCK_BYTES = 4096

_HEAD_TAG, _PAYLOAD_TAG = 1, 0
_HEAD_WORDS = 3
_NOTHING = -1
# The maximum number of sent and received messages in flight, each in its own slot.
_SLOTS = 2
# Messages have half of the usual size, since a comparison uses as much memory.
_SHARE = 2
_HEADS_AHEAD = 16
# Samples that show whether most elements have changed: the number of messages, and their bytes.
_SAMPLES, _SAMPLE_BYTES = 16, 16 * BLOCK_BYTES


def can_be_compared(source: Layout, target: Layout, dtype: torch.dtype) -> bool:
    """Return whether single elements of a tensor sent as `dtype` can be kept and changed.

    The result is the same on both ends. False for combined contributions, which cannot be compared.
    """
    is_whole = max(source.contributions, target.contributions) == 1
    return is_whole and not dtype.is_complex and dtype.itemsize in WORDS


@dataclass(slots=True, eq=False)
class _Sent:
    """A message from this rank to others, and its kept copy or digests.

    `copies` pack it into its slot; empty if it is dense in its tensor. `users` is the number of
    messages that carry it, and `left` the number of those not yet sent in a run that found
    `coding`, `words` and `payload`.
    """

    data: NDArray[Any]
    copies: list[Any]
    slot: int | None
    kept: NDArray[Any]
    users: int = 0
    left: int = 0
    coding: int = _NOTHING
    words: int = 0
    payload: NDArray[np.uint8] | None = None


@dataclass(slots=True, eq=False)
class _Received:
    """A message from another rank: its pieces as words, and the first word of each."""

    message: RankMessage
    label: str
    itemsize: int
    begins: NDArray[np.int64]
    words: list[NDArray[Any]]
    direct: torch.Tensor | None
    buffer: torch.Tensor | None = None
    head: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_HEAD_WORDS, np.int64))

    @property
    def total(self) -> int:
        """The number of its words."""
        return int(self.begins[-1])


class ChangeExchange:
    """The messages of a rank, of which each run sends the changes.

    `sent_bytes` and `received_bytes` are of the last run, and before any run of a whole run;
    `kept_bytes` is the size of a sender's copies or digests. A run sends all elements if `is_whole`
    is set before, equally on all ranks.

    Args:
        tensors: this rank's transfers of each with the dtype as sent, in the same order on
            every rank; all `can_be_compared`.
        group: of all ranks that have a part.
        device: of the tensors; only the CPU is supported.
        unit: the unit in which changes are found.
        extra_bytes: the maximum memory besides what is kept; the same on every rank.
        memory: for staging; allocated when None.
        near: sends the rest of the same tensors, to ranks that share memory; None without any.
        staged: sends all of both in stages; None if no tensor is staged.

    Raises:
        UsageError: another device, or a limit too small for any message.
    """

    def __init__(
        self,
        tensors: Sequence[RankTransfers],
        group: RankGroup,
        device: torch.device,
        unit: ChangeUnit,
        extra_bytes: int,
        memory: torch.Tensor | None = None,
        near: MessageExchange | None = None,
        staged: MessageExchange | None = None,
    ) -> None:
        self._near, self._staged = near, staged
        if device.type != "cpu":
            raise UsageError(
                f"changed_only={unit!r} with tensors on {device.type}; only those on the CPU are "
                "compared, send others whole"
            )
        self._group, self._unit = group, unit
        message_bytes = limit_message_bytes(extra_bytes // _SHARE)
        of_size: dict[int, list[RankTransfers]] = {}
        for tensor in tensors:
            if tensor.dtype is not None:
                of_size.setdefault(tensor.dtype.itemsize, []).append(tensor)
        self._copies = []
        listed: list[tuple[int, RankMessage]] = []
        # All words of a message have the same size.
        for itemsize in sorted(of_size):
            messages, copies, _ = list_messages(
                of_size[itemsize], group.rank, group.slots, message_bytes
            )
            self._copies += [copier(copy.target, copy.source) for copy in copies]
            listed += [(itemsize, message) for message in messages]
        largest = max((align(message.size_bytes) for _, message in listed), default=0)
        own_bytes = 2 * _SLOTS * largest
        others = [exchange.extra_bytes for exchange in (near, staged) if exchange is not None]
        self.extra_bytes = max(own_bytes, *others, 0)
        if memory is None:
            memory = empty_bytes(own_bytes, device)
        self._slots = [memory[i * largest : (i + 1) * largest] for i in range(2 * _SLOTS)]
        self._messages: list[tuple[int, _Sent | _Received]] = []
        known_sends: dict[Any, _Sent] = {}
        for itemsize, message in listed:
            part: _Sent | _Received
            if message.is_sent:
                key = tuple(message.contents)
                if key not in known_sends:
                    known_sends[key] = self._prepare_sent(
                        itemsize, message, len(known_sends) % _SLOTS
                    )
                part = known_sends[key]
                part.users += 1
            else:
                part = _prepare_received(itemsize, message)
            self._messages.append((message.peer, part))
        self._sent_once = list(known_sends.values())
        self.kept_bytes = sum(sent.kept.nbytes for sent in known_sends.values())
        heads = 8 * _HEAD_WORDS
        self.sent_bytes = sum(m.size_bytes + heads for _, m in listed if m.is_sent)
        self.received_bytes = sum(m.size_bytes + heads for _, m in listed if not m.is_sent)
        self._count_bytes(near if staged is None else staged, is_all=staged is not None)
        # Sends in the order in which they began, with the slot that each reads.
        self._sends: deque[tuple[Any, int | None, Any]] = deque()
        self._heads: deque[Any] = deque()
        self._arriving: deque[tuple[Any, _Received]] = deque()
        self._arrivals = 0
        self.has_failed = False
        self.is_whole = True

    def _prepare_sent(self, itemsize: int, message: RankMessage, slot: int) -> _Sent:
        direct, copies = message.direct, []
        data = self._slots[slot][: message.size_bytes] if direct is None else direct
        if direct is None:
            for piece, part in zip(message.pieces, _cut_packed(message, data), strict=True):
                copies.append(copier(part, piece.view))
        words = data.numpy().view(f"u{itemsize}")
        if self._unit == "elements":
            kept: NDArray[Any] = np.empty_like(words)
        else:
            kept = np.empty(-(-words.nbytes // BLOCK_BYTES), dtype=f"V{DIGEST_BYTES}")
        return _Sent(words, copies, None if direct is not None else slot, kept)

    def _count_bytes(self, other: MessageExchange | None, *, is_all: bool = False) -> None:
        """Count the bytes that another exchange moves in a run, as all of it or in addition."""
        if is_all:
            self.sent_bytes = self.received_bytes = 0
        if other is not None:
            self.sent_bytes += other.sent_bytes
            self.received_bytes += other.received_bytes

    def run(self) -> None:
        """Send the changes, or all elements.

        Raises RunError if a message does not arrive; the targets are then not usable.
        """
        with span("send changes"):
            if self.is_whole and self._staged is not None:
                self._staged.run()
                self._remember()
                self._count_bytes(self._staged, is_all=True)
                return
            self._run_changes()
            if self._near is not None:
                self._near.run()
                self._count_bytes(self._near)

    def _run_changes(self) -> None:
        if self.has_failed:
            raise RunError("this exchange failed before; prepare another")
        # If another thread finds that a rank is lost, it drops the messages of this exchange too.
        self._group.running.add(self)
        self.sent_bytes = self.received_bytes = 0
        try:
            try:
                self._move()
            except RuntimeError as error:
                raise LostMessageError(str(error)) from error
        except BaseException as error:
            fail_on_all(self, self._group, "a message did not arrive", error)
            raise

    def _remember(self) -> None:
        """Keep the sent elements, after all of them were sent in stages."""
        for sent in self._sent_once:
            self._pack(sent)
            self._compare(sent)

    def seems_changed(self) -> bool:
        """Return whether all of what this rank sends is better sent in stages.

        This is the case if at least half of it changed since the last run, by a sample. True if
        this rank sends nothing; False without stages.
        """
        if self._staged is None:
            return not self._sent_once
        changed = looked = 0
        for sent in self._sent_once[:: len(self._sent_once) // _SAMPLES + 1]:
            self._pack(sent)
            sample = sent.data[: _SAMPLE_BYTES // sent.data.itemsize]
            kept = sent.kept[: len(sample)]
            if self._unit == "blocks":
                kept = sent.kept[: -(-sample.nbytes // BLOCK_BYTES)]
                changed_words = find_digests(sample) != kept
            else:
                changed_words = sample != kept
            looked += len(changed_words)
            changed += int(np.count_nonzero(changed_words))
        return 2 * changed >= looked

    def fail(self) -> None:
        """Drop all messages: messages in flight keep their connections open."""
        self.has_failed = True
        for works in (self._sends, self._heads, self._arriving):
            works.clear()

    def _move(self) -> None:
        for copy in self._copies:
            copy()
        for sent in self._sent_once:
            sent.left = sent.users
            sent.payload = None
        incoming = [(peer, part) for peer, part in self._messages if isinstance(part, _Received)]
        asked = turn = 0
        for peer, part in self._messages:
            if isinstance(part, _Sent):
                self._send(peer, part)
                continue
            # Heads are small: wait for some of them ahead, in the order of the messages.
            while asked < min(len(incoming), turn + _HEADS_AHEAD):
                sender, ahead = incoming[asked]
                head = torch.from_numpy(ahead.head)
                self._heads.append(self._group.receive(head, sender, _HEAD_TAG))
                asked += 1
            self._heads[0].wait()
            self._heads.popleft()
            self._receive(peer, part)
            turn += 1
        while self._arriving:
            self._complete_arrival()
        while self._sends:
            self._complete_send()

    def _send(self, peer: int, sent: _Sent) -> None:
        if sent.left == sent.users:
            self._find_changes(sent)
        elif sent.coding == Coding.WHOLE and self._unit == "blocks":
            # Pack again, since another message may have used the slot.
            self._pack(sent)
        sent.left -= 1
        data, slot = sent.data.view(np.uint8), sent.slot
        if sent.payload is not None:
            data, slot = sent.payload, None
        elif self._unit == "elements":
            # Send the kept copy, which has the same elements, so that the slot is free again.
            data, slot = sent.kept.view(np.uint8), None
        size_bytes = 0 if sent.coding == _NOTHING else len(data)
        head = np.array([sent.coding, sent.words, size_bytes], np.int64)
        # Keep works only in the queue: an error's frames would keep their connections open.
        for part, tag in ((head, _HEAD_TAG), (data, _PAYLOAD_TAG)):
            if part is head or size_bytes:
                sending = self._group.send(torch.from_numpy(part.view(np.uint8)), peer, tag)
                self._sends.append((sending, slot, part))
                del sending
        self.sent_bytes += head.nbytes + size_bytes
        if not sent.left:
            sent.payload = None
        while len(self._sends) > 2 * _SLOTS:
            self._complete_send()

    def _pack(self, sent: _Sent) -> None:
        """Pack into its slot, after the previous send from the slot is complete."""
        if sent.slot is None:
            return
        while any(slot == sent.slot for _, slot, _ in self._sends):
            self._complete_send()
        for copy in sent.copies:
            copy()

    def _find_changes(self, sent: _Sent) -> None:
        self._pack(sent)
        sent.coding, sent.words, sent.payload = Coding.WHOLE, len(sent.data), None
        changed = self._compare(sent)
        if changed is None:
            return
        encoded = encode_words(changed, sent.data, None, compressed=False)
        if encoded is None:
            sent.coding, sent.words = _NOTHING, 0
        elif encoded.coding is not Coding.WHOLE:
            sent.coding, sent.words = encoded.coding, encoded.words
            # Torch requires writable memory.
            sent.payload = np.frombuffer(bytearray(encoded.payload), np.uint8)

    def _compare(self, sent: _Sent) -> NDArray[np.bool_] | None:
        """Return which packed words differ from those kept, and replace these; None for all.

        Shape `(words,)`.
        """
        if self._unit == "elements":
            changed = None if self.is_whole else sent.data != sent.kept
            if changed is None or changed.any():
                sent.kept[:] = sent.data
            return changed
        digests = find_digests(sent.data)
        changed = None if self.is_whole else digests != sent.kept
        sent.kept[:] = digests
        if changed is None:
            return None
        return np.repeat(changed, BLOCK_BYTES // sent.data.itemsize)[: len(sent.data)]

    def _receive(self, peer: int, received: _Received) -> None:
        """Begin to receive a message whose head has arrived."""
        coding, _, size_bytes = received.head.tolist()
        whole_bytes = received.message.size_bytes
        is_whole = coding == Coding.WHOLE
        is_right = {_NOTHING: size_bytes == 0, Coding.WHOLE: size_bytes == whole_bytes}
        if not is_right.get(coding, coding in [*Coding] and 0 < size_bytes <= whole_bytes):
            raise RunError(
                f"{received.label}: {size_bytes} bytes of coding {coding} for a message of "
                f"{whole_bytes}; both ends need the same release of reshard"
            )
        self.received_bytes += received.head.nbytes + size_bytes
        if coding == _NOTHING:
            return
        while len(self._arriving) >= _SLOTS:
            self._complete_arrival()
        into = received.direct if is_whole else None
        if into is None:
            # Received messages use the slots in turn.
            into = self._slots[_SLOTS + self._arrivals % _SLOTS][:size_bytes]
        self._arrivals += 1
        received.buffer = into
        self._arriving.append((self._group.receive(into, peer, _PAYLOAD_TAG), received))

    def _complete_send(self) -> None:
        self._sends[0][0].wait()
        self._sends.popleft()

    def _complete_arrival(self) -> None:
        self._arriving[0][0].wait()
        received = self._arriving.popleft()[1]
        coding, words, _ = received.head.tolist()
        buffer, received.buffer = received.buffer, None
        if buffer is None or buffer is received.direct:
            return
        if coding == Coding.WHOLE:
            for piece, part in zip(
                received.message.pieces, _cut_packed(received.message, buffer), strict=True
            ):
                copier(piece.view, part)()
            return
        try:
            chosen, values = read_changes(
                buffer.numpy(), coding, words, received.total, received.itemsize, received.label
            )
        except FormatError as error:
            raise RunError(str(error)) from error
        if chosen is not None:
            _write_words(received, chosen, np.frombuffer(values.tobytes(), f"u{received.itemsize}"))


def find_digests(words: NDArray[Any]) -> NDArray[Any]:
    """Return the digest of each block of words; the last block may be shorter.

    >>> found = find_digests(np.zeros(3 * BLOCK_BYTES // 4 + 1, np.uint32))
    >>> (found == found[0]).tolist()
    [True, True, True, False]
    """
    data = words.view(np.uint8).data
    parts = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return np.frombuffer(b"".join(map(block_digest, parts)), dtype=f"V{DIGEST_BYTES}")


def _cut_packed(message: RankMessage, packed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the part of each piece in the packed message."""
    begin = 0
    for piece in message.pieces:
        part = packed[begin : begin + piece.size_bytes]
        yield part.view(piece.dtype).view(piece.view.shape)
        begin += piece.size_bytes


def _prepare_received(itemsize: int, message: RankMessage) -> _Received:
    views = [piece.view.detach() for piece in message.pieces]
    begins = np.cumsum([0, *(view.numel() for view in views)], dtype=np.int64)
    words = [view.view(WORDS[view.element_size()]).numpy() for view in views]
    label = f"a message of rank {message.peer}"
    return _Received(message, label, itemsize, begins, words, message.direct)


def _write_words(received: _Received, chosen: NDArray[Any], values: NDArray[Any]) -> None:
    """Write words, selected by positions or a mask, into the pieces that contain them."""
    parts = list_positions(chosen) if chosen.dtype == bool else [(slice(0, None), chosen)]
    at = 0
    for part, places in parts:
        here = places + part.start
        edges = np.searchsorted(here, received.begins)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            low, high = edges[number], edges[number + 1]
            piece, words = received.message.pieces[number], received.words[number]
            new = values[at + low : at + high]
            if piece.view.dtype is not piece.dtype:
                travelled = torch.from_numpy(new.view(f"i{received.itemsize}").copy())
                cast = travelled.view(piece.dtype).to(piece.view.dtype)
                new = cast.view(WORDS[cast.element_size()]).numpy()
            within = here[low:high] - received.begins[number]
            if words.flags.c_contiguous:
                words.reshape(-1)[within] = new
            else:
                words[np.unravel_index(within, words.shape)] = new
        at += len(here)
