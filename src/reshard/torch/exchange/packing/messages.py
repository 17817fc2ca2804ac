"""Messages of one rank: the views of its tensors that travel together, or stay.

Both ends of a message list its pieces in the same way (`reshard.plans.schedule.messages`)::

    rank 0   pack |p q r| ---- one message for small pieces ---->  | unpack   rank 1
                  | P.. | ---- a large piece, part by part ------> | in place where it is
                                                                   dense in the target

A large piece is cut along its leading dimensions, so that each part is dense wherever the piece
is.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.plan import Plan
from reshard.plans.schedule.messages import align, group_pieces, order_message, order_transfers
from reshard.torch.exchange.packing.pieces import Piece, PieceForm, cut

_Lists = list[list[int]]
# A step of a pipeline, and a stage in it.
Place = tuple[int, int]
FIRST_PLACE: Place = (0, 0)


class RankTransfers(NamedTuple):
    """The transfers of one tensor on one rank, with its local tensors there.

    `received` are the transfers into this rank, those that stay included, `sent` those to
    others. `source` and `target` are the local tensors, None where the rank holds nothing.
    `dtype` is that of the elements that travel, None for the local tensors' own. `place` is the
    step and the stage that they have in a pipeline; what a later stage sends has to have arrived.
    """

    change: LayoutChange
    received: Transfers
    sent: Transfers
    source: torch.Tensor | None
    target: torch.Tensor | None
    dtype: torch.dtype | None = None
    place: Place = FIRST_PLACE

    @classmethod
    def of(
        cls,
        change: LayoutChange,
        transfers: Transfers,
        rank: int,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        place: Place = FIRST_PLACE,
    ) -> RankTransfers:
        """All transfers of a rank, as `job.for_rank(rank)` gives them, in both directions."""
        into = transfers.target_slot == rank
        ends = transfers.take(into), transfers.take(~into), source, target
        return cls(change, *ends, dtype, place)

    def split(self, peers: Iterable[int]) -> tuple[RankTransfers | None, RankTransfers | None]:
        """The transfers from and to some ranks, and those of all others; None where none are."""
        chosen = np.array(sorted(peers), dtype=np.int64)
        received, sent = (
            np.isin(slots, chosen) for slots in (self.received.source_slot, self.sent.target_slot)
        )
        halves = [(received, sent), (~received, ~sent)]
        first, second = (
            self._replace(received=self.received.take(into), sent=self.sent.take(out))
            if into.any() or out.any()
            else None
            for into, out in halves
        )
        return first, second


@dataclass(frozen=True, eq=False)
class RankMessage:
    """Pieces that travel together, all of contributions of one `order` of combination.

    `key` is its place in the order of all messages: first that in a pipeline, then, contributions
    one after another, their order, the turn among its pair's messages, how far its receiver is
    behind its sender, the number among its pair's, and its sender. Region by region: the number,
    the order, the distance, the sender.
    """

    key: tuple[int, ...]
    order: int
    peer: int
    is_sent: bool
    pieces: tuple[Piece, ...]

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of its pieces' elements."""
        return sum(form.size_bytes for _, form in self.pieces)

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Where each piece begins, and last where the message ends, in bytes."""
        sizes = [form.size_bytes for _, form in self.pieces]
        begins = list(itertools.accumulate(map(align, sizes[:-1]), initial=0))
        return [*begins, begins[-1] + sizes[-1]]

    @property
    def contents(self) -> list[Any]:
        """Which memory it carries, and as what: messages with equal contents carry the same."""
        return [
            (one.view.data_ptr(), one.view.shape, one.view.stride(), one.view.dtype, one.dtype)
            for one in self.pieces
        ]

    def carries_like(self, other: RankMessage) -> bool:
        """Whether another message carries the same memory, as the same."""
        return len(self.pieces) == len(other.pieces) and all(
            one is two or one.lies_like(two)
            for one, two in zip(self.pieces, other.pieces, strict=True)
        )

    @property
    def direct(self) -> torch.Tensor | None:
        """The bytes of its only piece where they lie dense in the local tensor."""
        (first, *others) = self.pieces
        is_cast = first.dtype is not first.view.dtype
        if others or is_cast or first.reduction is not None or not first.view.is_contiguous():
            return None
        # One element alone may have any stride, and is dense.
        return first.view.as_strided((first.view.numel(),), (1,)).view(torch.uint8)


class LocalCopy(NamedTuple):
    """What a rank has already: `source` is copied, or combined by `reduction`, into `target`."""

    target: torch.Tensor
    source: torch.Tensor
    reduction: str | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalCombination:
    """Contributions of one order that a rank has itself, at their place in the order of all."""

    key: tuple[int, ...]
    order: int
    copies: tuple[LocalCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankMessages:
    """All that one rank has to do: messages in their order, what is copied, what is combined."""

    messages: tuple[RankMessage, ...]
    copies: tuple[LocalCopy, ...]
    combinations: tuple[LocalCombination, ...]


class _Row(NamedTuple):
    """A transfer of a tensor on one rank: with whom, and where its box is here.

    Where it stays, `kept_from` is its box in the source.
    """

    order: int
    peer: int
    place: _Place
    kept_from: _Place | None = None


class _Place(NamedTuple):
    """Where a box lies in the tensor of a cell, of given strides: its first element is `ahead`."""

    cell: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ahead: int
    is_whole: bool

    def view(self, cells: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The box."""
        whole = cells[self.cell]
        if self.is_whole:
            return whole
        # One call, where `narrow` would be one for each dimension.
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.ahead)


class _PieceRows(NamedTuple):
    """The rows of tensors that are cut alike and lie alike, each with what takes its pieces."""

    received: list[tuple[_Place, PieceForm, Callable[[Piece], None]]]
    kept: list[tuple[_Place, _Place, str | None, Callable[[LocalCopy], None]]]
    # What is sent to several ranks is one place, of that number.
    sent: list[tuple[int, Callable[[Piece], None]]]
    sent_places: list[tuple[_Place, PieceForm]]


@dataclass(slots=True, eq=False)
class RankPieces:
    """What a rank sends, receives and has itself: pieces by order of contributions, and by peer."""

    sent: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    received: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    local: dict[int, list[LocalCopy]] = field(default_factory=dict)
    # Tensors that are cut alike, and lie alike in memory, have the same rows. They are known by
    # objects that one of them has, which stay for as long.
    _rows: dict[tuple[Any, ...], _PieceRows] = field(default_factory=dict)
    _listed: list[RankTransfers] = field(default_factory=list)

    def add(self, tensor: RankTransfers, rank: int, *, with_sent: bool = True) -> None:
        """List the pieces of one tensor; without those that it sends where they are known."""
        change, received, sent, source, target, dtype, _ = tensor
        sources = cells_of(change.source, rank, source)
        targets = cells_of(change.target, rank, target)
        # Changes and transfers that are equal are one object each; they say the shapes.
        key = (
            id(change),
            id(received),
            id(sent),
            rank,
            dtype,
            None if source is None else (source.dtype, source.stride()),
            None if target is None else (target.dtype, target.stride()),
        )
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._list_rows(tensor, sources, targets)
        if rows.received:
            views = _view_places([place for place, _, _ in rows.received], targets)
            for view, (_, form, take) in zip(views, rows.received, strict=True):
                take(Piece(view, form))
        for place, kept_from, reduction, keep in rows.kept:
            keep(LocalCopy(place.view(targets), kept_from.view(sources), reduction))
        if rows.sent and with_sent:
            views = _view_places([place for place, _ in rows.sent_places], sources)
            pieces = [
                Piece(view, form) for view, (_, form) in zip(views, rows.sent_places, strict=True)
            ]
            for number, take in rows.sent:
                take(pieces[number])

    def _list_rows(
        self,
        tensor: RankTransfers,
        sources: Mapping[int, torch.Tensor],
        targets: Mapping[int, torch.Tensor],
    ) -> _PieceRows:
        rows = _PieceRows([], [], [], [])
        self._listed.append(tensor)
        number_of: dict[_Place, int] = {}
        for row in _list_received(tensor.received, sources, targets):
            # The first contribution is copied into the target, later ones are combined with it.
            reduction = (tensor.change.source.reduction or "sum") if row.order else None
            if row.kept_from is not None:
                keep = self.local.setdefault(row.order, []).append
                rows.kept.append((row.place, row.kept_from, reduction, keep))
            else:
                take = self.received.setdefault((row.order, row.peer), []).append
                travels = tensor.dtype or targets[row.place.cell].dtype
                form = PieceForm.of(row.place.shape, travels, reduction)
                rows.received.append((row.place, form, take))
        for row in _list_sent(tensor.sent, sources):
            take = self.sent.setdefault((row.order, row.peer), []).append
            rows.sent.append((number_of.setdefault(row.place, len(number_of)), take))
        for place in number_of:
            travels = tensor.dtype or sources[place.cell].dtype
            rows.sent_places.append((place, PieceForm.of(place.shape, travels)))
        return rows


def _view_places(places: Sequence[_Place], cells: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """The boxes of places."""
    if len(cells) != 1:
        return [place.view(cells) for place in places]
    # Of one tensor it is asked once where that begins.
    (whole,) = cells.values()
    begin = whole.storage_offset()
    return [
        whole if one.is_whole else whole.as_strided(one.shape, one.strides, begin + one.ahead)
        for one in places
    ]


def _list_received(
    rows: Transfers, sources: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]
) -> Iterator[_Row]:
    # As lists at once: of small tensors, to take numbers out of columns is most of the work.
    orders, stays, senders = rows.order.tolist(), rows.stays.tolist(), rows.source_slot.tolist()
    shapes = rows.shape.tolist()
    into = rows.target_cell.tolist(), rows.target_start.tolist(), shapes
    out = rows.source_cell.tolist(), rows.source_start.tolist(), shapes
    for row in order_transfers(rows):
        kept_from = _find_place(sources, out, row) if stays[row] else None
        yield _Row(orders[row], senders[row], _find_place(targets, into, row), kept_from)


def _list_sent(rows: Transfers, sources: Mapping[int, torch.Tensor]) -> Iterator[_Row]:
    orders, receivers = rows.order.tolist(), rows.target_slot.tolist()
    out = rows.source_cell.tolist(), rows.source_start.tolist(), rows.shape.tolist()
    for row in order_transfers(rows) if len(rows) else ():
        yield _Row(orders[row], receivers[row], _find_place(sources, out, row))


def list_messages(
    tensors: Iterable[RankTransfers],
    rank: int,
    ranks: int,
    message_bytes: int,
    in_a_turn: int = 1,
    by_region: bool = False,
    sent: Sequence[RankMessage] | None = None,
) -> RankMessages:
    """What one rank has to do for tensors that every rank lists in the same order.

    Args:
        tensors: with this rank's transfers and local tensors.
        rank: this rank, among `ranks`.
        message_bytes: the most bytes of a message, the same on every rank; a multiple of 16.
        in_a_turn: how many messages go to one rank before those to another, likewise the same.
        by_region: whether all contributions to a region travel before the next region does. One
            tensor only, whose contributions are cut alike.
        sent: the messages that this rank sends, where they are known: `tensors` may then be
            without those that send only.
    """
    by_place: defaultdict[Place, RankPieces] = defaultdict(RankPieces)
    # Views take half the time there, and are none that only this mode may write.
    with torch.inference_mode():
        for tensor in tensors:
            by_place[tensor.place].add(tensor, rank, with_sent=sent is None)
    messages: list[RankMessage] = list(sent or ())
    copies: list[LocalCopy] = []
    combinations: list[LocalCombination] = []
    for place, pieces in by_place.items():
        for is_sent, by_peer in ((True, pieces.sent), (False, pieces.received)):
            for (order, peer), of_pair in by_peer.items():
                sender, receiver = (rank, peer) if is_sent else (peer, rank)
                for number, pieces_of in enumerate(pack_messages(of_pair, message_bytes)):
                    # Both ends find the same key, so their messages are in one order.
                    key = order_message(
                        order, number, sender, receiver, ranks, in_a_turn, by_region
                    )
                    message = RankMessage((*place, *key), order, peer, is_sent, tuple(pieces_of))
                    messages.append(message)
        # Copies wait for nothing; what is combined has its place among the messages.
        copies += pieces.local.pop(0, ())
        for order, of_order in sorted(pieces.local.items()):
            if by_region:
                for number, of_region in enumerate(_cut_like_messages(of_order, message_bytes)):
                    key = (*place, number, order, -1)
                    combinations.append(LocalCombination(key, order, of_region))
            else:
                parts = tuple(part for one in of_order for part in _cut_copy(one, message_bytes))
                combinations.append(LocalCombination((*place, order, -1), order, parts))
    messages.sort(key=lambda message: message.key)
    return RankMessages(tuple(messages), tuple(copies), tuple(combinations))


def pack_messages(pieces: Sequence[Piece], message_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of each message between two ranks; it follows from their shapes alone."""
    together, alone = group_pieces([form.size_bytes for _, form in pieces], message_bytes)
    for numbers in together:
        yield [pieces[number] for number in numbers]
    for number in alone:
        for part in pieces[number].parts(message_bytes):
            yield [part]


def _cut_copy(copy: LocalCopy, most_bytes: int) -> Iterator[LocalCopy]:
    """A combination in parts of at most `most_bytes`."""
    parts = zip(cut(copy.target, most_bytes), cut(copy.source, most_bytes), strict=True)
    for target, source in parts:
        yield LocalCopy(target, source, copy.reduction)


def _cut_like_messages(
    copies: Sequence[LocalCopy], message_bytes: int
) -> Iterator[tuple[LocalCopy, ...]]:
    """What a rank has itself of one contribution, cut as if it travelled: message by message."""
    sides = ([one.target for one in copies], [one.source for one in copies])
    targets, sources = (
        pack_messages([Piece.of(view, view.dtype) for view in views], message_bytes)
        for views in sides
    )
    for into, out in zip(targets, sources, strict=True):
        yield tuple(
            LocalCopy(target.view, source.view, copies[0].reduction)
            for target, source in zip(into, out, strict=True)
        )


def cells_of(layout: Layout, rank: int, local: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """The tensor of every cell a rank has: its whole local one, or stretches of the flat one."""
    if local is None or not 0 <= rank < layout.slots:
        return {}
    # A rank with several boxes has them one after another in a flat tensor.
    numbers = _number_cells(layout, rank)
    if len(numbers) == 1:
        return {numbers[0]: local}
    cells = {}
    for cell in numbers:
        begin, shape = int(layout.cell_offset[cell]), tuple(layout.cell_shape[cell].tolist())
        cells[cell] = local[begin : begin + int(np.prod(shape))].view(shape)
    return cells


# Layers are cut alike, so that it is asked of few layouts, and of each again and again.
@functools.lru_cache(maxsize=1024)
def _number_cells(layout: Layout, rank: int) -> range:
    return layout.cells_of(rank)


@functools.lru_cache(maxsize=256)
def transfers_of(change: LayoutChange, dtype: DType, rank: int) -> Transfers:
    """What a rank receives, keeps and sends. Training loops redistribute alike again and again."""
    return Plan(change.source, change.target, dtype).for_rank(rank)


def _find_place(
    cells: Mapping[int, torch.Tensor], columns: tuple[list[int], _Lists, _Lists], row: int
) -> _Place:
    """The box of a row in its cell: the columns are cells, where boxes begin, and shapes."""
    numbers, starts, shapes = columns
    whole, shape = cells[numbers[row]], tuple(shapes[row])
    strides = whole.stride()
    ahead = sum(map(operator.mul, starts[row], strides))
    return _Place(numbers[row], shape, strides, ahead, shape == whole.shape)
