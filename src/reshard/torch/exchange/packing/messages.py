"""Messages of a rank: the views of its tensors that are sent together, or stay.

Both ends of a message list its pieces in the same way (`reshard.plans.schedule`)::

    rank 0   pack |p q r| ---- one message for small pieces ---->  | unpack   rank 1
                  | P.. | ---- a large piece, part by part ------> | in place where it is
                                                                   dense in the target

In stages between hosts, each byte is sent once to a host and forwarded within it, part by part,
while the next parts arrive (`reshard.plans.hierarchical`). All steps are in one exchange; a message
that forwards a part depends on the messages with the same part::

    step 0    part 0: source -> target
    step 1    part 1: source -> target     part 0: target -> target, on another rank of the host

A large piece is split along its leading dimensions, so that each part is dense if the piece is
dense.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.plan import Plan
from reshard.plans.schedule import (
    PipelineSpan,
    group_pieces,
    list_steps,
    order_message,
    order_transfers,
)
from reshard.runs import IntArray
from reshard.torch.exchange.packing.pieces import (
    MessagePieces,
    Piece,
    PieceForm,
    cut,
    list_spans,
    row_bytes,
)

_Lists = list[list[int]]
# By cell, the tensors of the cell in several similar tensors.
_Cells = Mapping[int, Sequence[torch.Tensor]]
PiecesByPair = dict[tuple[int, int], MessagePieces]
# A step of a pipeline, and a stage in it.
Place = tuple[int, int]
FIRST_PLACE: Place = (0, 0)


class RankTransfers(NamedTuple):
    """The transfers on a rank of a tensor, or of several tensors of a kind.

    Tensors with equal layouts and strides are of a kind. `received` are the transfers of each
    tensor into this rank, including local ones, and `sent` those to others. `sources` and `targets`
    are the local tensors, or None if the rank has no part. `dtype` is that of the sent elements, or
    None for the local tensors' own. `place` is the step and stage in a pipeline; data sent in a
    later stage must have arrived. `numbers` are the positions of the tensors among all; by default
    their order in the list.
    """

    change: LayoutChange
    received: Transfers
    sent: Transfers
    sources: Sequence[torch.Tensor | None]
    targets: Sequence[torch.Tensor | None]
    dtype: torch.dtype | None = None
    place: Place = FIRST_PLACE
    numbers: Sequence[int] | None = None

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
        """Return all transfers of a tensor in both directions, from `job.for_rank(rank)`."""
        return cls(change, *_part_directions(transfers, rank), [source], [target], dtype, place)

    def split(self, peers: Iterable[int]) -> tuple[RankTransfers | None, RankTransfers | None]:
        """Return the transfers from and to some ranks, and the others, or None if empty."""
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
    """Pieces that are sent together, all of contributions of the same `order`.

    `key` is its position in the order of all messages. It begins with the position in a pipeline.
    If contributions are sent consecutively, these follow: their order, the turn among its
    pair's messages, the distance from sender to receiver, the number among its pair's, and its
    sender. If they are sent region by region: the number, the order, the distance, the sender.
    """

    key: tuple[int, ...]
    order: int
    peer: int
    is_sent: bool
    pieces: MessagePieces

    @functools.cached_property
    def size_bytes(self) -> int:
        """The size of its pieces' elements."""
        return sum(self.pieces.sizes_bytes)

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The offset of each piece, and the end of the message, in bytes."""
        return self.pieces.offsets

    @property
    def contents(self) -> list[Any]:
        """The memory and dtypes of its elements: equal for messages that carry the same data."""
        return [
            (one.view.data_ptr(), one.view.shape, one.view.stride(), one.view.dtype, one.dtype)
            for one in self.pieces
        ]

    def carries_like(self, other: RankMessage) -> bool:
        """Return whether another message carries the same memory as the same dtypes."""
        own, its = self.pieces, other.pieces
        columns = own.views, its.views, own.forms, its.forms
        return len(own) == len(its) and all(
            (view is like and form is form_like)
            or Piece(view, form).lies_like(Piece(like, form_like))
            for view, like, form, form_like in zip(*columns, strict=True)
        )

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are those of the local tensors, without casts or combinations."""
        return all(
            form.reduction is None and form.dtype is view.dtype
            for view, form in zip(self.pieces.views, self.pieces.forms, strict=True)
        )

    @property
    def mean_row_bytes(self) -> int:
        """The mean length of the contiguous rows of its pieces."""
        rows = sum(view.nbytes / row_bytes(view) for view in self.pieces.views if view.numel())
        return int(self.size_bytes / max(rows, 1))

    def list_spans(self) -> IntArray:
        """Return the spans of memory of its pieces, in order."""
        return list_spans(self.pieces.views)

    @property
    def direct(self) -> torch.Tensor | None:
        """The bytes of its only piece if they are dense in the local tensor, or None."""
        if len(self.pieces) > 1:
            return None
        view, form = self.pieces[0]
        if form.dtype is not view.dtype or form.reduction is not None or not view.is_contiguous():
            return None
        # A single element is dense with any stride.
        return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


# A rank's own contributions of an order: their key among all messages, the order, the copies.
LocalCombination = tuple[tuple[int, ...], int, "tuple[LocalCopy, ...]"]


class LocalCopy(NamedTuple):
    """A local transfer: `source` is copied, or combined by `reduction`, into `target`."""

    target: torch.Tensor
    source: torch.Tensor
    reduction: str | None


class _Place(NamedTuple):
    """The position of a box in a cell's tensor of given strides: its first element is `ahead`."""

    cell: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ahead: int
    is_whole: bool

    def views(self, cells: _Cells) -> Sequence[torch.Tensor]:
        """Return views of the box in similar tensors: the columns of their cells."""
        wholes = cells[self.cell]
        if self.is_whole:
            return wholes
        # A single call for each, while `narrow` would take a call for each dimension.
        shape, strides, ahead = self.shape, self.strides, self.ahead
        if not ahead:
            return [one.as_strided(shape, strides) for one in wholes]
        return [one.as_strided(shape, strides, one.storage_offset() + ahead) for one in wholes]


class _Column(NamedTuple):
    """A piece of each of several similar tensors, with its place in the order of all."""

    places: IntArray
    views: Sequence[torch.Tensor]
    form: PieceForm


class _CopyColumn(NamedTuple):
    """A copy, or a combination, of each of several similar tensors, with its place."""

    places: IntArray
    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    reduction: str | None


def list_pieces(
    tensors: Sequence[RankTransfers], rank: int, *, with_sent: bool = True
) -> tuple[PiecesByPair, PiecesByPair, dict[int, list[LocalCopy]]]:
    """List the pieces that a rank sends and receives, and its copies.

    Work is done once for tensors of a kind; only views are made for each.

    Args:
        tensors: in the same order on every rank.
        rank: this rank.
        with_sent: whether to list sent pieces.

    Returns:
        Pieces sent, and received, by order of contributions and peer; copies, by order.
    """
    sent: defaultdict[tuple[int, int], list[_Column]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[_Column]] = defaultdict(list)
    local: defaultdict[int, list[_CopyColumn]] = defaultdict(list)
    kinds = _join_kinds(tensors)
    # The rows of a tensor are adjacent.
    rows = max((len(one.received) + len(one.sent) for one in kinds), default=0)
    for kind in kinds:
        places = np.array(kind.numbers) * rows
        change = kind.change
        sources = _list_cells(change.source, rank, kind.sources)
        targets = _list_cells(change.target, rank, kind.targets)
        for order, peer, place, kept_from in _list_received(kind.received, sources, targets):
            # The first contribution is copied into the target, later contributions are combined
            # with it.
            reduction = (change.source.reduction or "sum") if order else None
            views = place.views(targets)
            if kept_from is not None:
                copies = _CopyColumn(places, views, kept_from.views(sources), reduction)
                local[order].append(copies)
            else:
                form = PieceForm.of(place.shape, kind.dtype or views[0].dtype, reduction)
                received[order, peer].append(_Column(places, views, form))
            places = places + 1
        # Data sent to several ranks is a single view.
        known: dict[_Place, tuple[Sequence[torch.Tensor], PieceForm]] = {}
        for order, peer, place in _list_sent(kind.sent, sources) if with_sent else ():
            if place not in known:
                views = place.views(sources)
                known[place] = views, PieceForm.of(place.shape, kind.dtype or views[0].dtype)
            sent[order, peer].append(_Column(places, *known[place]))
            places = places + 1
    merged = (
        {pair: _merge_pieces(columns) for pair, columns in by_pair.items()}
        for by_pair in (sent, received)
    )
    return *merged, {order: _merge_copies(columns) for order, columns in local.items()}  # type: ignore[return-value]


def _join_kinds(tensors: Iterable[RankTransfers]) -> list[RankTransfers]:
    """Return the tensors of each kind together, with their numbers."""
    kinds: dict[object, list[RankTransfers]] = {}
    for listed, one in enumerate(tensors):
        # Equal changes are the same object, as are equal transfers; they determine the shapes.
        ends = [
            tensor is None or (tensor.dtype, tensor.stride())
            for tensor in (one.sources[0], one.targets[0])
        ]
        key = (id(one.change), id(one.received), id(one.sent), one.dtype, *ends)
        numbered = one if one.numbers is not None else one._replace(numbers=[listed])
        kinds.setdefault(key, []).append(numbered)
    return [of[0] if len(of) == 1 else _join(of) for of in kinds.values()]


def _join(tensors: Sequence[RankTransfers]) -> RankTransfers:
    """Return the tensors of a kind as a single object."""
    return tensors[0]._replace(
        sources=[source for one in tensors for source in one.sources],
        targets=[target for one in tensors for target in one.targets],
        numbers=[number for one in tensors for number in one.numbers or ()],
    )


def _list_cells(layout: Layout, rank: int, locals_of: Sequence[torch.Tensor | None]) -> _Cells:
    """Return the tensors of each cell of a rank, for local tensors of equal layouts."""
    if len(locals_of) > 1 and locals_of[0] is not None and len(_number_cells(layout, rank)) == 1:
        return {_number_cells(layout, rank)[0]: cast("Sequence[torch.Tensor]", locals_of)}
    every = [cells_of(layout, rank, local) for local in locals_of]
    return {cell: [cells[cell] for cells in every] for cell in every[0]}


def _merge_pieces(columns: Sequence[_Column]) -> MessagePieces:
    """Return the pieces of columns, in their order."""
    views = [view for column in columns for view in column.views]
    forms = [form for column in columns for form in [column.form] * len(column.places)]
    return MessagePieces(views, forms).take(_sort_places(columns))


def _merge_copies(columns: Sequence[_CopyColumn]) -> list[LocalCopy]:
    copies = [
        LocalCopy(target, source, column.reduction)
        for column in columns
        for target, source in zip(column.targets, column.sources, strict=True)
    ]
    return list(map(copies.__getitem__, _sort_places(columns)))


def _sort_places(columns: Sequence[_Column | _CopyColumn]) -> list[int]:
    """Return the permutation that sorts the entries of all columns by position."""
    places = np.concatenate([column.places for column in columns])
    order: list[int] = np.argsort(places, kind="stable").tolist()
    return order


def _list_received(
    rows: Transfers, sources: _Cells, targets: _Cells
) -> Iterator[tuple[int, int, _Place, _Place | None]]:
    """Return orders, senders and boxes in the target, and local boxes in the source."""
    # As lists at once: for small tensors, indexing arrays takes most of the time.
    orders, stays, senders = rows.order.tolist(), rows.stays.tolist(), rows.source_slot.tolist()
    shapes = rows.shape.tolist()
    into = rows.target_cell.tolist(), rows.target_start.tolist(), shapes
    out = rows.source_cell.tolist(), rows.source_start.tolist(), shapes
    for row in order_transfers(rows):
        kept_from = _find_place(sources, out, row) if stays[row] else None
        yield orders[row], senders[row], _find_place(targets, into, row), kept_from


def _list_sent(rows: Transfers, sources: _Cells) -> Iterator[tuple[int, int, _Place]]:
    """Return orders, receivers and boxes in the source."""
    orders, receivers = rows.order.tolist(), rows.target_slot.tolist()
    out = rows.source_cell.tolist(), rows.source_start.tolist(), rows.shape.tolist()
    for row in order_transfers(rows) if len(rows) else ():
        yield orders[row], receivers[row], _find_place(sources, out, row)


def list_messages(
    tensors: Iterable[RankTransfers],
    rank: int,
    ranks: int,
    message_bytes: int,
    in_a_turn: int = 1,
    by_region: bool = False,
    sent: Sequence[RankMessage] | None = None,
) -> tuple[list[RankMessage], list[LocalCopy], list[LocalCombination]]:
    """List the messages of a rank in order, its copies, and what it combines itself.

    Every rank lists the same tensors in the same order.

    Args:
        tensors: with this rank's transfers and local tensors.
        rank: this rank, among `ranks`.
        message_bytes: the maximum bytes of a message, the same on every rank; a multiple of 16.
        in_a_turn: the consecutive messages to a rank before the next; the same on every rank.
        by_region: whether all contributions to a region are sent before the next region's. A single
            tensor only, with equally sharded contributions.
        sent: the messages that this rank sends, if known: `tensors` may then omit tensors that are
            only sent.
    """
    by_place: defaultdict[Place, list[RankTransfers]] = defaultdict(list)
    for tensor in tensors:
        by_place[tensor.place].append(tensor)
    messages: list[RankMessage] = list(sent or ())
    copies: list[LocalCopy] = []
    combinations: list[LocalCombination] = []
    for place, at_place in by_place.items():
        # Views take half the time in inference mode, and may be written outside of it.
        with torch.inference_mode():
            *both, local = list_pieces(at_place, rank, with_sent=sent is None)
        for is_sent, by_peer in zip((True, False), both, strict=True):
            for (order, peer), of_pair in by_peer.items():
                sender, receiver = (rank, peer) if is_sent else (peer, rank)
                for number, pieces_of in enumerate(pack_messages(of_pair, message_bytes)):
                    # Both ends find the same key, so their messages have the same order.
                    key = order_message(
                        order, number, sender, receiver, ranks, in_a_turn, by_region
                    )
                    message = RankMessage((*place, *key), order, peer, is_sent, pieces_of)
                    messages.append(message)
        # Copies depend on nothing; combinations have a position among the messages.
        copies += local.get(0, ())
        for order, of_order in sorted(local.items()):
            if not order:
                continue
            if by_region:
                for number, of_region in enumerate(_cut_like_messages(of_order, message_bytes)):
                    key = (*place, number, order, -1)
                    combinations.append((key, order, of_region))
            else:
                parts = tuple(part for one in of_order for part in _cut_copy(one, message_bytes))
                combinations.append(((*place, order, -1), order, parts))
    messages.sort(key=lambda message: message.key)
    return messages, copies, combinations


def pack_messages(pieces: MessagePieces, message_bytes: int) -> Iterator[MessagePieces]:
    """Yield the pieces of each message between two ranks, which follow from their shapes."""
    together, alone = group_pieces(pieces.sizes_bytes, message_bytes)
    for numbers in together:
        yield pieces.take(numbers)
    for number in alone:
        for part in pieces[number].parts(message_bytes):
            yield MessagePieces.of([part])


def _cut_copy(copy: LocalCopy, most_bytes: int) -> Iterator[LocalCopy]:
    """Yield a combination in parts of at most `most_bytes`."""
    parts = zip(cut(copy.target, most_bytes), cut(copy.source, most_bytes), strict=True)
    for target, source in parts:
        yield LocalCopy(target, source, copy.reduction)


def _cut_like_messages(
    copies: Sequence[LocalCopy], message_bytes: int
) -> Iterator[tuple[LocalCopy, ...]]:
    """Partition a rank's own contribution as if it were sent, message by message."""
    sides = ([one.target for one in copies], [one.source for one in copies])
    targets, sources = (
        pack_messages(MessagePieces.of(Piece.of(view, view.dtype) for view in views), message_bytes)
        for views in sides
    )
    for into, out in zip(targets, sources, strict=True):
        yield tuple(
            LocalCopy(target.view, source.view, copies[0].reduction)
            for target, source in zip(into, out, strict=True)
        )


def cells_of(layout: Layout, rank: int, local: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Return the tensor of every cell of a rank: its local tensor, or ranges of a flat tensor."""
    if local is None or not 0 <= rank < layout.slots:
        return {}
    # A rank with several boxes stores them consecutively in a flat tensor.
    numbers = _number_cells(layout, rank)
    if len(numbers) == 1:
        return {numbers[0]: local}
    cells = {}
    for cell in numbers:
        begin, shape = int(layout.cell_offset[cell]), tuple(layout.cell_shape[cell].tolist())
        cells[cell] = local[begin : begin + int(np.prod(shape))].view(shape)
    return cells


# Cached, since layers have equal layouts.
@functools.lru_cache(maxsize=1024)
def _number_cells(layout: Layout, rank: int) -> range:
    return layout.cells_of(rank)


@functools.lru_cache(maxsize=256)
def _part_directions(transfers: Transfers, rank: int) -> tuple[Transfers, Transfers]:
    """Return the transfers into a rank, and those from it to others."""
    into = transfers.target_slot == rank
    return transfers.take(into), transfers.take(~into)


@functools.lru_cache(maxsize=256)
def transfers_of(change: LayoutChange, dtype: DType, rank: int) -> Transfers:
    """Return a rank's transfers; cached, since training loops repeat redistributions."""
    return Plan(change.source, change.target, dtype).for_rank(rank)


def _find_place(cells: _Cells, columns: tuple[list[int], _Lists, _Lists], row: int) -> _Place:
    """Return the box of a row in its cell, from columns of cells, offsets and shapes."""
    numbers, starts, shapes = columns
    whole, shape = cells[numbers[row]][0], tuple(shapes[row])
    strides = whole.stride()
    ahead = sum(map(operator.mul, starts[row], strides))
    return _Place(numbers[row], shape, strides, ahead, shape == whole.shape)


def stage_transfers(
    change: LayoutChange,
    stages: Sequence[Transfers],
    span: PipelineSpan,
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> Iterator[RankTransfers]:
    """Return the transfers of a tensor on a rank, each with its place in the pipeline.

    The first stage is from the source to the target, all others from target to target.
    """
    within = LayoutChange(change.target, change.target)
    for step, stage, rows in list_steps(stages, change.target.shape, span):
        ends = (change, source) if stage == 0 else (within, target)
        place = step, stage
        yield RankTransfers.of(ends[0], rows, rank, ends[1], target, dtype, place)
