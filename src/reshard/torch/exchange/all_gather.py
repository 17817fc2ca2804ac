"""All-gathers of shards within a process group, in little memory.

A collective takes dense memory, so pieces are packed and unpacked, a limited part of them at a
time. While a round is in flight the next round is packed, in the other half of the memory::

    round        0          1          2
    pack      |  a0  |   |  a1  |  |  a2  |
    travel           |-- a0 --|-- a1 --|-- a2 --|
    unpack                    |  b0  |  |  b1  |   |  b2  |

The data of a rank is partitioned into messages (`messages`), and the number of a message is its
round. Every rank derives the number and sizes of rounds from the change of the group's layouts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from reshard.geometry.layout_change import LayoutChange
from reshard.plans.schedule import limit_message_bytes, order_transfers
from reshard.torch.exchange.packing import messages

_ROUNDS_AHEAD = 2
# Newer releases of torch rename it.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A round in flight, and the pieces to be copied from its memory.
_Round = tuple[Any, list[tuple[messages.Piece, torch.Tensor]]]
_Shapes = tuple[tuple[int, ...], ...]


def is_all_gather(change: LayoutChange) -> bool:
    """Return whether every rank sends its whole shard to all others."""
    if change.source.contributions > 1:
        return False
    rows = change.transfers.moving
    # By sender and receiver, the boxes in the order in which they are sent.
    by_sender: dict[int, dict[int, list[Any]]] = {}
    for row in order_transfers(rows):
        to = by_sender.setdefault(int(rows.source_slot[row]), {})
        box = (rows.source_start[row].tolist(), rows.shape[row].tolist())
        to.setdefault(int(rows.target_slot[row]), []).append(box)
    receivers = set(rows.target_slot.tolist())
    for sender, to in by_sender.items():
        boxes = list(to.values())
        # Each rank sends the same boxes to every other rank that receives anything.
        if set(to) != receivers - {sender} or any(one != boxes[0] for one in boxes):
            return False
    return True


class AllGatherRounds:
    """The pieces of a tensor within a group of ranks, by an all-gather in each round.

    `extra_bytes` is the memory it packs into.

    Args:
        tensor: this rank's transfers; their change is that of the group (`is_all_gather`).
        rank: this rank.
        group: the process group of these ranks.
        dtype: of the tensor.
        device: of the memory to pack into.
        extra_bytes: the maximum size of that memory; the same on all ranks.

    Raises:
        UsageError: a limit too small for any message.
    """

    def __init__(
        self,
        tensor: messages.RankTransfers,
        rank: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        extra_bytes: int,
    ) -> None:
        self._group = group
        # In the order of the process group, which may differ from the mesh's.
        self._members = dist.get_process_group_ranks(group)
        # A part for each member, and another for the outgoing data.
        most_bytes = limit_message_bytes(extra_bytes, len(self._members))
        sent, received, local = messages.list_pieces([tensor], rank)
        self._local = local.get(0, [])
        # The same for every other rank.
        own = next(iter(sent.values()), messages.MessagePieces.of([]))
        self._sent = _list_rounds(own, rank, True, most_bytes)
        self._received = {
            sender: _list_rounds(of_sender, sender, False, most_bytes)
            for (_, sender), of_sender in received.items()
        }
        sizes = [
            _size_messages(shapes, dtype, most_bytes)
            for shapes in _find_shapes(tensor.change).values()
        ]
        rounds = max(map(len, sizes), default=0)
        # Ranks with a smaller shard send as many bytes as the others; the rest is ignored.
        self._sizes = [
            max(lengths[n] for lengths in sizes if n < len(lengths)) for n in range(rounds)
        ]
        part_bytes = max(self._sizes, default=0)
        self._half_bytes = (len(self._members) + 1) * part_bytes
        self.extra_bytes = self._half_bytes * min(rounds, _ROUNDS_AHEAD)
        self._memory = torch.empty(self.extra_bytes, dtype=torch.uint8, device=device)

    def run(self) -> None:
        """Run all rounds. All ranks of the group call this."""
        for copy in self._local:
            copy.target.copy_(copy.source)
        before: _Round | None = None
        for number, size_bytes in enumerate(self._sizes):
            # The next round is in flight before the last round is waited for and unpacked.
            following = self._post(number, size_bytes)
            if before is not None:
                _complete(before)
            before = following
        if before is not None:
            _complete(before)

    def _post(self, number: int, size_bytes: int) -> _Round:
        # Rounds take the two halves of the memory in turn: own part first, then all members'.
        begin = number % _ROUNDS_AHEAD * self._half_bytes
        memory = self._memory[begin : begin + (len(self._members) + 1) * size_bytes]
        out, into = memory[:size_bytes], memory[size_bytes:]
        for message in self._sent[number : number + 1]:
            for piece, part in _place_pieces(message, out):
                part.copy_(piece.view)
        work = _ALL_GATHER(into, out, self._group, async_op=True)
        arriving: list[tuple[messages.Piece, torch.Tensor]] = []
        for position, rank in enumerate(self._members):
            for message in self._received.get(rank, [])[number : number + 1]:
                arriving += _place_pieces(message, into[position * size_bytes :])
        return work, arriving


def _complete(begun: _Round) -> None:
    work, arriving = begun
    work.wait()
    for piece, part in arriving:
        piece.view.copy_(part)


def _list_rounds(
    pieces: messages.MessagePieces, peer: int, is_sent: bool, most_bytes: int
) -> list[messages.RankMessage]:
    """Return the messages to all other ranks, or from a rank, round by round."""
    return [
        messages.RankMessage((number,), 0, peer, is_sent, together)
        for number, together in enumerate(messages.pack_messages(pieces, most_bytes))
    ]


def _place_pieces(
    message: messages.RankMessage, memory: torch.Tensor
) -> list[tuple[messages.Piece, torch.Tensor]]:
    """Return each piece of a message with its part of the memory."""
    return list(zip(message.pieces, message.pieces.parts_of(memory), strict=True))


@lru_cache(maxsize=256)
def _find_shapes(change: LayoutChange) -> dict[tuple[int, int], _Shapes]:
    """Return the shapes of pieces in their order, by sender and receiver."""
    rows = change.transfers.moving
    shapes_by_pair: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row in order_transfers(rows):
        key = int(rows.source_slot[row]), int(rows.target_slot[row])
        shapes_by_pair.setdefault(key, []).append(tuple(rows.shape[row].tolist()))
    return {key: tuple(shapes) for key, shapes in shapes_by_pair.items()}


@lru_cache(maxsize=4096)
def _size_messages(shapes: _Shapes, dtype: torch.dtype, most_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each message with pieces of these shapes."""
    pieces = messages.MessagePieces.of(
        messages.Piece.of(torch.empty(shape, dtype=dtype, device="meta"), dtype) for shape in shapes
    )
    return tuple(message.offsets[-1] for message in _list_rounds(pieces, 0, True, most_bytes))
