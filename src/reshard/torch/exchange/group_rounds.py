"""How does a group of ranks exchange its pieces by collectives, in little memory?

A collective takes dense memory, so pieces are packed and unpacked, a limited part of them at a
time. While one round travels the next one is packed, in the other half of the memory::

    round        0          1          2
    pack      |  a0  |   |  a1  |  |  a2  |
    travel           |-- a0 --|-- a1 --|-- a2 --|
    unpack                    |  b0  |  |  b1  |   |  b2  |

1. What goes from one rank to another is cut into messages (`reshard.torch.exchange.messages`), and
   the number of a message among those of its two ranks is its round. The group's plan tells every
   rank how many rounds there are.
2. Contributions to one region arrive in one round, and are combined there in their order. So the
   bits are those of the direct plan. Where ranks hold unlike regions, the contributions of one
   order travel before those of the next.
3. A round is one all-to-all; where every rank sends the same to all others, one all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from reshard.geometry.layout_change import LayoutChange
from reshard.torch.exchange.exchange import message_bytes_of, put
from reshard.torch.exchange.messages import (
    Kept,
    Listing,
    Message,
    Movement,
    Piece,
    in_order,
    packed,
)

_ROUNDS_AHEAD = 2
# Newer releases of torch have it by another name.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_Shapes = tuple[tuple[int, ...], ...]
# Something to copy or combine, with the order of its contribution.
_Ordered = tuple[int, Kept]


@dataclass(slots=True, eq=False)
class _Round:
    """What one rank sends and receives, by rank, and keeps; `travels` where any rank sends."""

    travels: bool
    sent: dict[int, Message] = field(default_factory=dict)
    received: dict[int, Message] = field(default_factory=dict)
    kept: list[_Ordered] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Packing:
    """Messages in dense memory: where each of their pieces is there, and the bytes of each."""

    memory: torch.Tensor
    staged: list[tuple[Message, Piece, torch.Tensor]]
    sizes: dict[int, int]

    @classmethod
    def of(cls, messages: Mapping[int, Message], memory: torch.Tensor) -> _Packing:
        """One behind the other; where there is but one, and it is dense, where it lies."""
        if len(messages) == 1:
            ((rank, message),) = messages.items()
            direct = message.direct
            if direct is not None:
                return cls(direct, [], {rank: len(direct)})
        staged: list[tuple[Message, Piece, torch.Tensor]] = []
        sizes, begin = {}, 0
        for rank, message in messages.items():
            staged += _staged(message, memory[begin:])
            sizes[rank] = message.offsets[-1]
            begin += sizes[rank]
        return cls(memory[:begin], staged, sizes)

    def pack(self) -> None:
        """Copy the pieces into the memory."""
        for _, piece, part in self.staged:
            part.copy_(piece.view)


@dataclass(slots=True, eq=False)
class _Travelling:
    """A round under way, and what is to be copied or combined once it is there."""

    works: list[Any]
    arriving: list[_Ordered]

    def complete(self) -> None:
        """Wait for it, and put all into its place, lower contributions first."""
        for work in self.works:
            work.wait()
        for _, one in sorted(self.arriving, key=lambda pair: pair[0]):
            put(one.target, one.source, one.reduction)


class GroupRounds:
    """The pieces of one plan within a group of ranks, by one all-to-all a round.

    `extra_bytes` is the memory it packs into.

    Args:
        movement: of this rank. Its plan is that of the group.
        rank: this one.
        ranks: that the plan is of, two or more.
        group: the process group of these ranks.
        dtype: of the tensor.
        device: where the memory to pack into is.
        extra_bytes: the most of that memory; the same on all ranks.
        by_messages: whether a round is the messages that an all-to-all is made of. Then the process
            group may have other ranks too, and dense pieces travel from where they lie.

    Raises:
        UsageError: a limit too small for any message.
    """

    def __init__(
        self,
        movement: Movement,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        extra_bytes: int,
        by_messages: bool,
    ) -> None:
        self._group = group
        self._by_messages = by_messages
        # In the order of the process group, which is not the mesh's.
        self._members = sorted(ranks)
        most_bytes = message_bytes_of(extra_bytes, len(self._members) - 1)
        self._rounds = _rounds_of(movement, rank, dtype, most_bytes)
        sides = [[r.sent for r in self._rounds], [r.received for r in self._rounds]]
        self._side_bytes = [max(map(_bytes_of, side), default=0) for side in sides]
        at_once = min(len(self._rounds), _ROUNDS_AHEAD)
        self.extra_bytes = sum(self._side_bytes) * at_once
        self._memory = torch.empty(self.extra_bytes, dtype=torch.uint8, device=device)

    def run(self) -> None:
        """Carry all rounds out. All ranks of the group call this."""
        _run_ahead(self._posted(one, number) for number, one in enumerate(self._rounds))

    def _posted(self, one: _Round, number: int) -> _Travelling:
        if not one.travels:
            return _Travelling([], one.kept)
        begin = number % _ROUNDS_AHEAD * sum(self._side_bytes)
        halves = self._memory[begin : begin + sum(self._side_bytes)].split(self._side_bytes)
        sides = (
            {rank: side[rank] for rank in self._members if rank in side}
            for side in (one.sent, one.received)
        )
        if self._by_messages:
            return self._posted_messages(one, *sides, *halves)
        out, into = (_Packing.of(side, half) for side, half in zip(sides, halves, strict=True))
        out.pack()
        work = dist.all_to_all_single(
            into.memory,
            out.memory,
            [into.sizes.get(rank, 0) for rank in self._members],
            [out.sizes.get(rank, 0) for rank in self._members],
            self._group,
            async_op=True,
        )
        return _Travelling([work], [*_arrived(into.staged), *one.kept])

    def _posted_messages(
        self,
        one: _Round,
        sent: Mapping[int, Message],
        received: Mapping[int, Message],
        packing: torch.Tensor,
        arriving: torch.Tensor,
    ) -> _Travelling:
        found = list(one.kept)
        operations = []
        # Receives first: what comes early needs no memory in between.
        for side, memory, kind in ((received, arriving, dist.irecv), (sent, packing, dist.isend)):
            begin = 0
            for peer, message in side.items():
                place = _Packing.of({peer: message}, memory[begin:])
                begin += place.sizes[peer] if place.staged else 0
                if message.is_sent:
                    place.pack()
                else:
                    found += _arrived(place.staged)
                operations.append(dist.P2POp(kind, place.memory, peer, self._group))
        return _Travelling(dist.batch_isend_irecv(operations) if operations else [], found)


class GatherRounds:
    """The same for a plan in which every rank sends its shard to all others, by all-gathers.

    See `GroupRounds` for what it takes and raises.
    """

    def __init__(
        self,
        movement: Movement,
        rank: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        extra_bytes: int,
    ) -> None:
        self._group = group
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        # One part more than others, for what this rank sends.
        most_bytes = message_bytes_of(extra_bytes, len(self._members))
        listing = Listing()
        listing.add(movement, rank)
        self._kept = listing.kept.get(0, [])
        # The same for every other rank.
        own = next(iter(listing.sent.items()), None)
        self._sent = [] if own is None else _messages(*own, True, most_bytes)
        self._received = {
            at[1]: _messages(at, pieces, False, most_bytes)
            for at, pieces in listing.received.items()
        }
        sizes = [
            _message_sizes(shapes, dtype, most_bytes)
            for shapes in _pair_shapes(movement.plan).values()
        ]
        rounds = max(map(len, sizes), default=0)
        # Ranks whose shard is smaller than others' send as much, of which the rest is nothing.
        self._sizes = [max(of[n] for of in sizes if n < len(of)) for n in range(rounds)]
        self._part_bytes = max(self._sizes, default=0)
        self._half_bytes = (len(self._members) + 1) * self._part_bytes
        self.extra_bytes = self._half_bytes * min(rounds, _ROUNDS_AHEAD)
        self._memory = torch.empty(self.extra_bytes, dtype=torch.uint8, device=device)

    def run(self) -> None:
        """Carry all rounds out. All ranks of the group call this."""
        for one in self._kept:
            one.target.copy_(one.source)
        _run_ahead(self._posted(number, size) for number, size in enumerate(self._sizes))

    def _posted(self, number: int, size_bytes: int) -> _Travelling:
        begin = number % _ROUNDS_AHEAD * self._half_bytes
        memory = self._memory[begin : begin + (len(self._members) + 1) * size_bytes]
        out, into = memory[:size_bytes], memory[size_bytes:]
        for message in self._sent[number : number + 1]:
            for _, piece, part in _staged(message, out):
                part.copy_(piece.view)
        work = _ALL_GATHER(into, out, self._group, async_op=True)
        arriving: list[_Ordered] = []
        for place, rank in enumerate(self._members):
            for message in self._received.get(rank, [])[number : number + 1]:
                arriving += _arrived(_staged(message, into[place * size_bytes :]))
        return _Travelling([work], arriving)


def is_gather(plan: LayoutChange) -> bool:
    """Whether every rank of a plan sends its shard, whole, to all others alike."""
    if plan.source.contributions > 1:
        return False
    rows = plan.transfers.moving
    by_sender: dict[int, dict[int, list[Any]]] = {}
    for row in in_order(rows):
        to = by_sender.setdefault(int(rows.source_slot[row]), {})
        box = (rows.source_start[row].tolist(), rows.shape[row].tolist())
        to.setdefault(int(rows.target_slot[row]), []).append(box)
    receivers = set(rows.target_slot.tolist())
    for sender, to in by_sender.items():
        boxes = list(to.values())
        if set(to) != receivers - {sender} or any(one != boxes[0] for one in boxes):
            return False
    return True


def _run_ahead(rounds: Iterable[_Travelling]) -> None:
    """Each round is posted before the one ahead of it is completed."""
    before = None
    for one in rounds:
        if before is not None:
            before.complete()
        before = one
    if before is not None:
        before.complete()


def _staged(message: Message, memory: torch.Tensor) -> list[tuple[Message, Piece, torch.Tensor]]:
    """Each piece of a message with its part of the memory."""
    found = []
    for piece, low in zip(message.pieces, message.offsets, strict=False):
        part = memory[low : low + piece.size_bytes]
        found.append((message, piece, part.view(piece.dtype).view(piece.view.shape)))
    return found


def _arrived(staged: Iterable[tuple[Message, Piece, torch.Tensor]]) -> list[_Ordered]:
    return [
        (message.key[0], Kept(piece.view, part, piece.reduction)) for message, piece, part in staged
    ]


def _bytes_of(messages: Mapping[int, Message]) -> int:
    """Bytes of the memory that messages are packed into."""
    if len(messages) == 1 and next(iter(messages.values())).direct is not None:
        return 0
    return sum(message.offsets[-1] for message in messages.values())


def _messages(
    at: tuple[int, int], pieces: Sequence[Piece], is_sent: bool, most_bytes: int
) -> list[Message]:
    """What goes to, or comes from, a rank, of contributions of one order; `at` has both."""
    order, peer = at
    return [
        Message((order, number, 0, peer), peer, is_sent, tuple(together))
        for number, together in enumerate(packed(pieces, most_bytes))
    ]


def _rounds_of(movement: Movement, rank: int, dtype: torch.dtype, most_bytes: int) -> list[_Round]:
    listing = Listing()
    listing.add(movement, rank)
    rounds: list[_Round] = []
    for orders in _batches(movement.plan):
        count = max(
            (
                len(_message_sizes(shapes, dtype, most_bytes))
                for (order, *_), shapes in _pair_shapes(movement.plan).items()
                if order in orders
            ),
            default=0,
        )
        batch = [_Round(True) for _ in range(count)] or [_Round(False)]
        for order in orders:
            for is_sent, by_peer in ((True, listing.sent), (False, listing.received)):
                for at, pieces in by_peer.items():
                    if at[0] == order:
                        for one in _messages(at, pieces, is_sent, most_bytes):
                            side = batch[one.key[1]].sent if is_sent else batch[one.key[1]].received
                            side[one.peer] = one
            for number, part in _kept_parts(listing.kept.get(order, []), most_bytes):
                # What is combined with what arrives does so in one round with it.
                place = min(number, len(batch) - 1) if len(orders) > 1 else 0
                batch[place].kept.append((order, part))
        rounds += batch
    return rounds


def _kept_parts(kept: Sequence[Kept], most_bytes: int) -> Iterator[tuple[int, Kept]]:
    """What stays, cut as if it travelled, each part with the number of its message."""
    sides = ([one.target for one in kept], [one.source for one in kept])
    targets, sources = (packed([Piece(v, v.dtype) for v in views], most_bytes) for views in sides)
    reduction = kept[0].reduction if kept else None
    for number, (into, out) in enumerate(zip(targets, sources, strict=True)):
        for target, source in zip(into, out, strict=True):
            yield number, Kept(target.view, source.view, reduction)


@lru_cache(maxsize=256)
def _pair_shapes(plan: LayoutChange) -> dict[tuple[int, int, int], _Shapes]:
    """By order of contributions, sender and receiver: the shapes of the pieces in their order."""
    rows = plan.transfers.moving
    found: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
    for row in in_order(rows):
        key = int(rows.order[row]), int(rows.source_slot[row]), int(rows.target_slot[row])
        found.setdefault(key, []).append(tuple(rows.shape[row].tolist()))
    return {key: tuple(shapes) for key, shapes in found.items()}


@lru_cache(maxsize=4096)
def _message_sizes(shapes: _Shapes, dtype: torch.dtype, most_bytes: int) -> tuple[int, ...]:
    """The bytes of each message that pieces of these shapes travel in."""
    pieces = [Piece(torch.empty(shape, dtype=dtype, device="meta"), dtype) for shape in shapes]
    return tuple(
        Message((0, 0, 0, 0), 0, True, tuple(together)).offsets[-1]
        for together in packed(pieces, most_bytes)
    )


@lru_cache(maxsize=256)
def _batches(plan: LayoutChange) -> tuple[tuple[int, ...], ...]:
    """The orders of contributions that travel together.

    All do where each receiver gets the same boxes of every order, from one rank each.
    """
    rows = plan.transfers
    boxes: dict[int, dict[int, list[Any]]] = {}
    senders: set[tuple[int, int, int]] = set()
    for row in in_order(rows):
        order, receiver = int(rows.order[row]), int(rows.target_slot[row])
        box = (int(rows.target_cell[row]), rows.start[row].tolist(), rows.shape[row].tolist())
        boxes.setdefault(receiver, {}).setdefault(order, []).append(box)
        senders.add((receiver, order, int(rows.source_slot[row])))
    orders = tuple(sorted(set(rows.order.tolist())))
    is_alike = all(list(of.values()) == [of[min(of)]] * len(orders) for of in boxes.values())
    by_order = {(receiver, order) for receiver, order, _ in senders}
    by_sender = {(receiver, sender) for receiver, _, sender in senders}
    if is_alike and len(by_order) == len(by_sender) == len(senders):
        return (orders,)
    return tuple((order,) for order in orders)
