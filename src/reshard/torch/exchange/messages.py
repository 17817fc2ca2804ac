"""Which messages does a rank send and receive, and in which order does it treat them?

Both ends of a message list its pieces in the same way, so nothing but elements is sent::

    rank 0   pack |p q r| ---- one message for small pieces ---->  | unpack   rank 1
                  | P.. | ---- a large piece, part by part ------> | in place where it is
                                                                   dense in the target

1. The pieces between two ranks are taken in the order of their place in the tensor.
2. A piece larger than a message is cut along its leading dimensions, so that each part is dense
   wherever the piece is. Small pieces are packed together, each at an aligned place.
3. All messages of the exchange have one order, which both ends of each know: contributions by
   their order of combination, then the first few of all pairs before the next of any, then those
   to the next rank before those to the one behind it. Ranks that treat theirs in this order,
   with room for one at least, never wait for each other in a ring.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.local_copies import SMALL_PIECE_BYTES
from reshard.plans.plan import Plan

# Every piece in a packed message begins where any dtype may.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """One tensor's part of an exchange on one rank.

    `received` are the transfers into this rank, those that stay included, `sent` those to
    others. `source` and `target` are the local tensors, None where the rank holds nothing.
    `dtype` is that of the elements that travel, None for the local tensors' own.
    """

    plan: LayoutChange
    received: Transfers
    sent: Transfers
    source: torch.Tensor | None
    target: torch.Tensor | None
    dtype: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        plan: LayoutChange,
        transfers: Transfers,
        rank: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Movement:
        """The movement of a rank's transfers, as `job.for_rank(rank)` gives them."""
        into = transfers.target_slot == rank
        return cls(plan, transfers.take(into), transfers.take(~into), source, target, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A view of a local tensor. What arrives there is combined by `reduction`, or replaces it.

    Its elements travel as `dtype`: they are cast while they are packed and unpacked.
    """

    view: torch.Tensor
    dtype: torch.dtype
    reduction: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements as they travel."""
        return int(self.view.numel() * self.dtype.itemsize)

    def parts(self, most_bytes: int) -> Iterator[Piece]:
        """The piece in parts of at most `most_bytes`, in row major order."""
        for view in cut(self.view, most_bytes, itemsize=self.dtype.itemsize):
            yield Piece(view, self.dtype, self.reduction)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Pieces that travel together. `key` is its place in the order of all messages.

    It is the order of its contributions, its turn among its pair's, how far its receiver is
    behind its sender, its number among its pair's, and its sender.
    """

    key: tuple[int, ...]
    peer: int
    is_sent: bool
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its pieces' elements."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def offsets(self) -> list[int]:
        """Where each piece begins, and last where the message ends, in bytes."""
        sizes = [piece.size_bytes for piece in self.pieces]
        begins = list(itertools.accumulate(map(aligned, sizes[:-1]), initial=0))
        return [*begins, begins[-1] + sizes[-1]]

    @property
    def contents(self) -> list[Any]:
        """Which memory it carries, and as what: messages with equal contents carry the same."""
        return [
            (one.view.data_ptr(), one.view.shape, one.view.stride(), one.view.dtype, one.dtype)
            for one in self.pieces
        ]

    @property
    def direct(self) -> torch.Tensor | None:
        """The bytes of its only piece where they lie dense in the local tensor."""
        (first, *others) = self.pieces
        is_cast = first.dtype is not first.view.dtype
        if others or is_cast or first.reduction is not None or not first.view.is_contiguous():
            return None
        # One element alone may have any stride, and is dense.
        return first.view.as_strided((first.view.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a rank has already: `source` is copied, or combined by `reduction`, into `target`."""

    target: torch.Tensor
    source: torch.Tensor
    reduction: str | None


@dataclass(frozen=True, slots=True, eq=False)
class RankMessages:
    """All that one rank has to do: messages in their order, and by order what stays."""

    messages: tuple[Message, ...]
    kept: dict[int, list[Kept]]


@dataclass(slots=True, eq=False)
class Listing:
    """What a rank sends and receives, in pieces, by the order of contributions and by peer."""

    sent: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    received: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    kept: dict[int, list[Kept]] = field(default_factory=dict)

    def add(self, movement: Movement, rank: int) -> None:
        """List the pieces of one tensor."""
        plan, rows = movement.plan, movement.received
        sources = cells_of(plan.source, rank, movement.source)
        targets = cells_of(plan.target, rank, movement.target)
        for row in in_order(rows):
            order = int(rows.order[row])
            reduction = (plan.source.reduction or "sum") if order else None
            shape = rows.shape[row]
            view = _view(targets, rows.target_cell[row], rows.target_start[row], shape)
            if rows.stays[row]:
                own = _view(sources, rows.source_cell[row], rows.source_start[row], shape)
                self.kept.setdefault(order, []).append(Kept(view, own, reduction))
            else:
                at = (order, int(rows.source_slot[row]))
                travels = movement.dtype or view.dtype
                self.received.setdefault(at, []).append(Piece(view, travels, reduction))
        rows = movement.sent
        for row in in_order(rows):
            view = _view(sources, rows.source_cell[row], rows.source_start[row], rows.shape[row])
            at = (int(rows.order[row]), int(rows.target_slot[row]))
            travels = movement.dtype or view.dtype
            self.sent.setdefault(at, []).append(Piece(view, travels))


def messages_of(
    movements: Iterable[Movement], rank: int, ranks: int, message_bytes: int, in_a_turn: int = 1
) -> RankMessages:
    """What one rank has to do for movements that every rank lists in the same order.

    Args:
        movements: with this rank's transfers and local tensors.
        rank: this rank, among `ranks`.
        message_bytes: the most bytes of a message, the same on every rank; a multiple of 16.
        in_a_turn: how many messages go to one rank before those to another, likewise the same.
    """
    listing = Listing()
    for movement in movements:
        listing.add(movement, rank)
    messages = []
    for is_sent, by_peer in ((True, listing.sent), (False, listing.received)):
        for (order, peer), pieces in by_peer.items():
            sender, receiver = (rank, peer) if is_sent else (peer, rank)
            for number, together in enumerate(packed(pieces, message_bytes)):
                shift = (receiver - sender) % ranks
                key = (order, number // in_a_turn, shift, number, sender)
                messages.append(Message(key, peer, is_sent, tuple(together)))
    messages.sort(key=lambda message: message.key)
    kept = {
        order: [part for one in listing.kept[order] for part in _parts(one, message_bytes)]
        for order in sorted(listing.kept)
    }
    return RankMessages(tuple(messages), kept)


def packed(pieces: Sequence[Piece], message_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of each message between two ranks; it follows from their shapes alone."""
    large_bytes = min(SMALL_PIECE_BYTES, message_bytes)
    together: list[Piece] = []
    filled_bytes = 0
    for piece in pieces:
        size_bytes = piece.size_bytes
        if size_bytes >= large_bytes:
            continue
        if filled_bytes + size_bytes > message_bytes:
            yield together
            together, filled_bytes = [], 0
        together.append(piece)
        filled_bytes += aligned(size_bytes)
    if together:
        yield together
    for piece in pieces:
        if piece.size_bytes >= large_bytes:
            for part in piece.parts(message_bytes):
                yield [part]


def cut(
    view: torch.Tensor, most_bytes: int, dimension: int = 0, itemsize: int | None = None
) -> Iterator[torch.Tensor]:
    """A tensor in parts of at most `most_bytes`, cut along its leading dimensions.

    `most_bytes` is at least an element's, of `itemsize` bytes where it is not the tensor's own.

    >>> [tuple(part.shape) for part in cut(torch.zeros(5, 2, 4), 64)]
    [(2, 2, 4), (2, 2, 4), (1, 2, 4)]
    >>> [tuple(part.shape) for part in cut(torch.zeros(1, 2, 4), 16)]
    [(1, 1, 4), (1, 1, 4)]
    """
    size_bytes = view.numel() * (itemsize or view.element_size())
    if size_bytes <= most_bytes:
        yield view
        return
    length = view.shape[dimension]
    at_once = most_bytes // (size_bytes // length)
    for begin in range(0, length, max(at_once, 1)):
        part = view.narrow(dimension, begin, min(max(at_once, 1), length - begin))
        if at_once:
            yield part
        else:
            yield from cut(part, most_bytes, dimension + 1, itemsize)


def _parts(kept: Kept, most_bytes: int) -> Iterator[Kept]:
    """What is only copied needs no memory; what is combined comes in parts."""
    if kept.reduction is None:
        yield kept
        return
    for target, source in zip(
        cut(kept.target, most_bytes), cut(kept.source, most_bytes), strict=True
    ):
        yield Kept(target, source, kept.reduction)


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def cells_of(layout: Layout, rank: int, local: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The tensor of every cell a rank has: its whole local one, or stretches of the flat one."""
    if local is None or not 0 <= rank < layout.slots:
        return {}
    numbers = layout.cells_of(rank)
    if len(numbers) == 1:
        return {numbers[0]: local}
    cells = {}
    for cell in numbers:
        begin, shape = int(layout.cell_offset[cell]), tuple(layout.cell_shape[cell].tolist())
        cells[cell] = local[begin : begin + int(np.prod(shape))].view(shape)
    return cells


@functools.lru_cache(maxsize=256)
def transfers_of(plan: LayoutChange, dtype: DType, rank: int) -> Transfers:
    """What a rank receives, keeps and sends. Training loops redistribute alike again and again."""
    return Plan(plan.source, plan.target, dtype).for_rank(rank)


def in_order(rows: Transfers) -> list[int]:
    """The rows in the order both ends of a message list them."""
    columns = [rows.target_cell, rows.source_cell, rows.order, *rows.start.T[::-1]]
    order: list[int] = np.lexsort(columns).tolist()
    return order


def _view(
    cells: dict[int, torch.Tensor], cell: Any, start: np.ndarray[Any, Any], shape: Any
) -> torch.Tensor:
    whole = cells[int(cell)]
    strides = whole.stride()
    ahead = sum(a * b for a, b in zip(start.tolist(), strides, strict=True))
    return whole.as_strided(shape.tolist(), strides, whole.storage_offset() + ahead)
