"""How do the pieces of a plan travel between the ranks of a process group?

Each rank knows its own part of the plan, and both ends of a message list its pieces in the same
order, so nothing but the elements themselves is sent::

    rank 0   pack |p q r| ---- one message for all small pieces ---->  | unpack   rank 1
                  |  P  | ---- a large piece travels by itself ------> | in place where it is
                                                                         dense in the target

1. Once, messages are listed by peer, with the views of source and target behind each piece.
2. `start` posts every receive, then packs and posts the sends, then copies what stays.
3. `finish` waits, unpacks, and combines the contributions of partial tensors in order. What
   would need too much memory at once comes in batches, one after another.

A prepared exchange can run again and again: it keeps its views and its staging memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import RunError
from reshard.layout import Layout
from reshard.planning.plan import Plan
from reshard.planning.transfers import Transfers
from reshard.torch.reductions import combine, complete

# A piece of at least this many bytes is a message of its own, and may be received in place.
LARGE_PIECE_BYTES = 1 << 18
# Every piece in a packed message begins where any dtype may.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """One tensor's part of an exchange on one rank.

    `received` are the transfers into this rank, those that stay included, `sent` those to
    others. `source` and `target` are the local tensors, None where the rank holds nothing.
    """

    plan: Plan
    received: Transfers
    sent: Transfers
    source: torch.Tensor | None
    target: torch.Tensor | None


@dataclass(slots=True, eq=False)
class _Message:
    """Pieces that travel together. `place` is where it lies in the staging memory."""

    peer: int
    views: list[torch.Tensor]
    sizes_bytes: list[int]
    direct: torch.Tensor | None
    place: int = 0

    @property
    def staged_bytes(self) -> int:
        # The last piece ends the message: one piece alone is as long as it is unpacked.
        if self.direct is not None:
            return 0
        return sum(map(_aligned, self.sizes_bytes[:-1])) + self.sizes_bytes[-1]


@dataclass(slots=True, eq=False)
class _Combination:
    """A contribution that is added to what is there: of `order`, from a view."""

    order: int
    reduction: str
    target: torch.Tensor
    source: torch.Tensor
    is_received: bool


@dataclass(slots=True, eq=False)
class _Batch:
    """What travels at one time."""

    sends: list[_Message]
    receives: list[_Message]
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    combinations: list[_Combination]


class Exchange:
    """The messages of one rank, prepared to run any number of times.

    Args:
        batches: movements that travel together, batch after batch; every rank has the same
            list, with its own transfers.
        rank: this process's, among the slots of the layouts.
        group: of all ranks that have a part.
        device: where the staging memory is.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Movement]],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        self._batches = [_batch(movements, rank) for movements in batches]
        self._send_staging = _staging([batch.sends for batch in self._batches], device)
        self._receive_staging = _staging([batch.receives for batch in self._batches], device)
        self._works: list[tuple[_Message | None, Any]] = []
        self._is_running = False

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sends in one run."""
        return sum(sum(message.sizes_bytes) for one in self._batches for message in one.sends)

    @property
    def received_bytes(self) -> int:
        """Bytes this rank receives in one run."""
        return sum(sum(message.sizes_bytes) for one in self._batches for message in one.receives)

    @property
    def extra_bytes(self) -> int:
        """Memory beyond source and target: staging, and contributions until they are combined."""
        beside: int = sum(
            one.source.numel() * one.source.element_size()
            for batch in self._batches
            for one in batch.combinations
            if one.is_received
        )
        return int(self._send_staging.numel() + self._receive_staging.numel()) + beside

    def run(self) -> None:
        """`start` and `finish`."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Begin with the first batch. Sources must not change until `finish` has returned.

        Raises RunError where the process group cannot send.
        """
        if self._is_running:
            raise RunError("this exchange runs already; finish it before it starts again")
        self._is_running = True
        if self._batches:
            self._post(self._batches[0])

    def finish(self) -> None:
        """Wait for what has begun, and do the rest.

        Raises RunError where a message does not come; the targets are not usable then.
        """
        if not self._is_running:
            raise RunError("this exchange has not started")
        try:
            for number, batch in enumerate(self._batches):
                if number:
                    self._post(batch)
                self._complete(batch)
        finally:
            self._is_running = False

    def _post(self, batch: _Batch) -> None:
        try:
            for message in batch.receives:
                buffer = _buffer(message, self._receive_staging)
                self._works.append((message, dist.irecv(buffer, message.peer, self._group)))
            for message in batch.sends:
                buffer = _buffer(message, self._send_staging)
                if message.direct is None:
                    for view, piece in _pieces(message, buffer):
                        piece.copy_(view)
                self._works.append((None, dist.isend(buffer, message.peer, self._group)))
        except RuntimeError as error:
            raise RunError(f"a message could not be sent: {error}") from error
        for target, source in batch.kept:
            target.copy_(source)

    def _complete(self, batch: _Batch) -> None:
        works, self._works = self._works, []
        try:
            for message, work in works:
                work.wait()
                if message is not None and message.direct is None:
                    for view, piece in _pieces(message, _buffer(message, self._receive_staging)):
                        view.copy_(piece)
        except RuntimeError as error:
            raise RunError(f"a message did not arrive: {error}") from error
        for one in batch.combinations:
            combine(one.reduction, one.target, one.source)


def _batch(movements: Sequence[Movement], rank: int) -> _Batch:
    combinations: list[_Combination] = []
    incoming: dict[int, list[tuple[torch.Tensor, int]]] = {}
    outgoing: dict[int, list[tuple[torch.Tensor, int]]] = {}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for movement in movements:
        plan = movement.plan
        sources = cells_of(plan.source, rank, movement.source)
        targets = cells_of(plan.target, rank, movement.target)
        reduction = plan.source.reduction or "sum"
        rows = movement.received
        for row in _in_order(rows):
            view = _view(targets, rows.target_cell[row], rows.target_start[row], rows.shape[row])
            order = int(rows.order[row])
            if rows.stays[row]:
                cell, start = rows.source_cell[row], rows.source_start[row]
                own = _view(sources, cell, start, rows.shape[row])
                if order:
                    combinations.append(_Combination(order, reduction, view, own, False))
                else:
                    kept.append((view, own))
                continue
            if order:
                beside = torch.empty_like(view, memory_format=torch.contiguous_format)
                combinations.append(_Combination(order, reduction, view, beside, True))
                view = beside
            size_bytes = view.numel() * view.element_size()
            incoming.setdefault(int(rows.source_slot[row]), []).append((view, size_bytes))
        rows = movement.sent
        for row in _in_order(rows):
            view = _view(sources, rows.source_cell[row], rows.source_start[row], rows.shape[row])
            size_bytes = view.numel() * view.element_size()
            outgoing.setdefault(int(rows.target_slot[row]), []).append((view, size_bytes))
    combinations.sort(key=lambda one: one.order)
    return _Batch(_messages(outgoing, rank), _messages(incoming, rank), kept, combinations)


def _in_order(rows: Transfers) -> list[int]:
    """The rows in the order both ends of a message list them."""
    columns = [*rows.start.T[::-1], rows.order, rows.source_cell, rows.target_cell]
    order: list[int] = np.lexsort(columns).tolist()
    return order


def _messages(pieces: dict[int, list[tuple[torch.Tensor, int]]], rank: int) -> list[_Message]:
    messages: list[_Message] = []
    peers = sorted(pieces)
    # Each rank begins with the peer behind it, so that not all talk to the same one at first.
    first = sum(peer < rank for peer in peers)
    for peer in peers[first:] + peers[:first]:
        small = [(view, size) for view, size in pieces[peer] if size < LARGE_PIECE_BYTES]
        large = [(view, size) for view, size in pieces[peer] if size >= LARGE_PIECE_BYTES]
        groups = ([small] if small else []) + [[one] for one in large]
        for members in groups:
            views = [view for view, _ in members]
            dense = len(views) == 1 and views[0].is_contiguous()
            direct = _bytes_of(views[0]) if dense else None
            messages.append(_Message(peer, views, [size for _, size in members], direct))
    return messages


def _staging(batches: list[list[_Message]], device: torch.device) -> torch.Tensor:
    """Memory for the largest batch; every message gets its place in it."""
    largest = 0
    for messages in batches:
        total = 0
        for message in messages:
            message.place = total
            total += _aligned(message.staged_bytes)
        largest = max(largest, total)
    return torch.empty(largest, dtype=torch.uint8, device=device)


def _buffer(message: _Message, staging: torch.Tensor) -> torch.Tensor:
    if message.direct is not None:
        return message.direct
    return staging[message.place : message.place + message.staged_bytes]


def _pieces(message: _Message, buffer: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Each view with its part of the packed message, of the same shape and dtype."""
    offsets = itertools.accumulate(map(_aligned, message.sizes_bytes), initial=0)
    for view, size, offset in zip(message.views, message.sizes_bytes, offsets, strict=False):
        yield view, buffer[offset : offset + size].view(view.dtype).view(view.shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _bytes_of(view: torch.Tensor) -> torch.Tensor:
    return view.reshape(-1).view(torch.uint8)


def cells_of(layout: Layout, rank: int, local: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The tensor of every cell a rank has: its whole local one, or stretches of the flat one."""
    if local is None or rank >= layout.slots:
        return {}
    numbers = layout.cells_of(rank)
    if len(numbers) == 1:
        return {numbers[0]: local}
    cells = {}
    for cell in numbers:
        begin, shape = int(layout.cell_offset[cell]), tuple(layout.cell_shape[cell].tolist())
        cells[cell] = local[begin : begin + int(np.prod(shape))].view(shape)
    return cells


def _view(
    cells: dict[int, torch.Tensor], cell: Any, start: np.ndarray[Any, Any], shape: Any
) -> torch.Tensor:
    view = cells[int(cell)]
    for dimension, (begin, length) in enumerate(zip(start.tolist(), shape.tolist(), strict=True)):
        view = view.narrow(dimension, begin, length)
    return view


def complete_contributions(plan: Plan, rank: int, target: torch.Tensor | None) -> None:
    """Scale means, and fill contributions that combine nothing, once all else is in place."""
    complete(plan, cells_of(plan.target, rank, target))
