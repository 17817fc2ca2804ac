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

Among very many small tensors, most pieces differ only in their memory. So a piece consists of its
view and its form, which similar pieces share, and pieces that are sent together are columns of
both::

    view                                    form
    rows 0 to 8 of layers.0.up      \\
    rows 0 to 8 of layers.1.up       >      bfloat16 of shape [8, 64], 1024 bytes, copied
    rows 0 to 8 of layers.2.up      /
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from reshard.binding import dense_strides
from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans import schedule
from reshard.plans.plan import Plan
from reshard.runs import IntArray


class PieceForm(NamedTuple):
    """The properties that similar pieces share.

    Attributes:
        dtype: of the sent elements, which are cast during packing and unpacking.
        reduction: the combination with the target; None if the piece replaces the target.
        shape: of the view.
        strides: of the packed elements, in row major order.
        size_bytes: of the sent elements.
    """

    dtype: torch.dtype
    reduction: str | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, reduction: str | None = None
    ) -> PieceForm:
        """Return the form of pieces of a shape.

        >>> form = PieceForm.of((4, 3, 2), torch.bfloat16)
        >>> form.strides, form.size_bytes
        ((6, 2, 1), 48)
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        return cls(dtype, reduction, shape, dense_strides(shape), size_bytes)


class Piece(NamedTuple):
    """A view of a local tensor, and the form in which it is sent."""

    view: torch.Tensor
    form: PieceForm

    @classmethod
    def of(cls, view: torch.Tensor, dtype: torch.dtype, reduction: str | None = None) -> Piece:
        """Return a view whose elements are sent as `dtype`."""
        return cls(view, PieceForm.of(tuple(view.shape), dtype, reduction))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its sent elements."""
        return self.form.dtype

    @property
    def reduction(self) -> str | None:
        """The combination with the target, or None."""
        return self.form.reduction

    @property
    def size_bytes(self) -> int:
        """The size of its sent elements."""
        return self.form.size_bytes

    @property
    def contents(self) -> tuple[Any, ...]:
        """Its memory and dtypes: equal for pieces that carry the same data."""
        view = self.view
        return view.data_ptr(), view.shape, view.stride(), view.dtype, self.dtype

    def parts(self, most_bytes: int) -> Iterator[Piece]:
        """Yield the piece in parts of at most `most_bytes`, in row major order."""
        for view in cut(self.view, most_bytes, itemsize=self.dtype.itemsize):
            yield Piece.of(view, self.dtype, self.reduction)


class MessagePieces(Sequence[Piece]):
    """Pieces that are packed consecutively: their `views` and `forms`.

    >>> pieces = MessagePieces.of([Piece.of(torch.zeros(3), torch.float32)] * 2)
    >>> pieces[1].size_bytes, pieces.offsets
    (12, [0, 16, 28])
    """

    __slots__ = ("forms", "views")

    def __init__(self, views: Sequence[torch.Tensor], forms: Sequence[PieceForm]) -> None:
        self.views = views
        self.forms = forms

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> MessagePieces:
        """Return pieces as columns."""
        listed = list(pieces)
        return cls([view for view, _ in listed], [form for _, form in listed])

    def take(self, numbers: Sequence[int]) -> MessagePieces:
        """Return the pieces of some numbers, in the order of the numbers."""
        return MessagePieces(
            *(list(map(column.__getitem__, numbers)) for column in (self.views, self.forms))
        )

    @property
    def sizes_bytes(self) -> list[int]:
        """The size of each piece's sent elements."""
        return [form.size_bytes for form in self.forms]

    @property
    def offsets(self) -> list[int]:
        """The offset of each packed piece, and the end of the last, in bytes."""
        sizes = self.sizes_bytes
        begins = list(itertools.accumulate(map(schedule.align, sizes[:-1]), initial=0))
        return [*begins, begins[-1] + sizes[-1]]

    def parts_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return each piece's part of a packed buffer, in its sent dtype."""
        dtypes = {form.dtype for form in self.forms}
        wholes = {}
        for dtype in dtypes:
            # The buffer's length may not be a multiple of every itemsize, but every piece fits in
            # it.
            stop = buffer.numel() // dtype.itemsize * dtype.itemsize
            wholes[dtype] = buffer.narrow(0, 0, stop).view(dtype)
        # As in `list_messages`; only views as another dtype would belong to this mode.
        with torch.inference_mode():
            sizes = self.sizes_bytes
            has_gaps = any(size % schedule.ALIGNMENT_BYTES for size in set(sizes[:-1]))
            if len(dtypes) == 1 and 0 not in sizes and not has_gaps:
                # A single call for all, as they have no gaps.
                (packed,) = wholes.values()
                return list(torch._utils._unflatten_dense_tensors(packed, self.views))
            # `as_strided` counts from the start of the storage, and the buffer may be a part of it.
            begin_bytes = buffer.storage_offset()
            return [
                wholes[form.dtype].as_strided(
                    form.shape, form.strides, (begin_bytes + low) // form.dtype.itemsize
                )
                for form, low in zip(self.forms, self.offsets, strict=False)
            ]

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, number: int) -> Piece:  # type: ignore[override]
        return Piece(self.views[number], self.forms[number])

    def __iter__(self) -> Iterator[Piece]:
        return map(Piece, self.views, self.forms)


def list_spans(views: Iterable[torch.Tensor]) -> IntArray:
    """Return the contiguous rows of tensors, in row major order, as addresses and lengths.

    >>> spans = list_spans([torch.zeros(3, 4, 5)[:, :2]])
    >>> np.diff(spans[:, 0]).tolist(), spans[:, 1].tolist()
    ([80, 80], [40, 40, 40])
    """
    tables = [_list_rows(view) for view in views if view.numel()]
    return tables[0] if len(tables) == 1 else np.concatenate(tables or [np.empty((0, 2), np.int64)])


def _list_rows(view: torch.Tensor) -> IntArray:
    length, itemsize = row_bytes(view), view.element_size()
    # The dimensions of a row itself are not expanded.
    offsets, left = np.zeros(1, dtype=np.int64), view.nbytes // length
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if left == 1:
            break
        offsets = (offsets[:, None] + np.arange(size) * (stride * itemsize)).ravel()
        left //= size
    return np.stack([offsets + view.data_ptr(), np.full(len(offsets), length)], axis=1)


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, row-major; a view if they are dense in memory.

    >>> view_bytes(torch.zeros(3, 2, dtype=torch.int16)[:1, 1]).tolist()
    [0, 0]
    """
    dense = tensor.detach().contiguous()
    # A single element is dense with any stride, but torch views only stride 1 as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the length of a tensor's longest contiguous runs, in row major order.

    >>> row_bytes(torch.zeros(3, 4, 5)[:, :2]), row_bytes(torch.zeros(4, 5).T)
    (40, 4)
    """
    elements = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if length != 1:
            if stride != elements:
                break
            elements *= length
    return int(elements * tensor.dtype.itemsize)


def cut(
    view: torch.Tensor, most_bytes: int, dimension: int = 0, itemsize: int | None = None
) -> Iterator[torch.Tensor]:
    """Return a tensor in parts of at most `most_bytes`, split along its leading dimensions.

    `most_bytes` is at least the size of an element, which is `itemsize` if given.

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
    # The number of rows that fit; if no row fits, each is split along the next dimension.
    at_once = most_bytes // (size_bytes // length)
    for begin in range(0, length, max(at_once, 1)):
        part = view.narrow(dimension, begin, min(max(at_once, 1), length - begin))
        if at_once:
            yield part
        else:
            yield from cut(part, most_bytes, dimension + 1, itemsize)


PiecesByPair = dict[tuple[int, int], MessagePieces]
# A step of a pipeline, and a stage in it.
Place = tuple[int, int]
FIRST_PLACE: Place = (0, 0)


class RankTransfers(NamedTuple):
    """The transfers on a rank of a tensor, or of several tensors of a kind.

    Tensors with equal layouts and strides are of a kind. `received` are the transfers of each
    tensor into this rank, including local ones, and `sent` those to others. `sources` and `targets`
    are the local tensors, or None without a part. `dtype` is that of the sent elements, or
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
        """The contents of its pieces: equal for messages that carry the same data."""
        return [piece.contents for piece in self.pieces]

    def carries_like(self, other: RankMessage) -> bool:
        """Return whether another message carries the same memory as the same dtypes."""
        pieces, others = self.pieces, other.pieces
        columns = pieces.views, others.views, pieces.forms, others.forms
        return len(pieces) == len(others) and all(
            (view is like and form is form_like)
            or Piece(view, form).contents == Piece(like, form_like).contents
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
        return view_bytes(view)


# A rank's own contributions of an order: their key among all messages, the order, the copies.
LocalCombination = tuple[tuple[int, ...], int, "tuple[LocalCopy, ...]"]


class LocalCopy(NamedTuple):
    """A local transfer: `source` is copied, or combined by `reduction`, into `target`."""

    target: torch.Tensor
    source: torch.Tensor
    reduction: str | None


class _BoxView(NamedTuple):
    """A box of a local tensor: its strides, and the offset of its first element, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_whole: bool

    def views(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the box in each of several similar tensors."""
        if self.is_whole:
            return tensors
        # A single call for each, while `narrow` would take a call for each dimension.
        shape, strides, offset = self.shape, self.strides, self.offset
        if not offset:
            return [tensor.as_strided(shape, strides) for tensor in tensors]
        return [
            tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
            for tensor in tensors
        ]


class _MovedBox(NamedTuple):
    """A box that a rank receives, sends, or copies from its own source, `local_source`."""

    order: int
    peer: int
    box: _BoxView
    form: PieceForm
    local_source: _BoxView | None = None


# Rows of several similar tensors: the position of each row among all, and its values by column.
_Rows = tuple[IntArray, tuple[Sequence[Any], ...]]


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
    # Pieces as views and forms; copies as targets, sources and reductions.
    sent: defaultdict[tuple[int, int], list[_Rows]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[_Rows]] = defaultdict(list)
    local: defaultdict[int, list[_Rows]] = defaultdict(list)
    kinds = _join_kinds(tensors)
    # The rows of a tensor are adjacent.
    rows = max((len(kind.received) + len(kind.sent) for kind in kinds), default=0)
    for kind in kinds:
        places, many = np.array(kind.numbers) * rows, len(kind.sources)
        # Tensors of a kind have parts on the same ranks.
        sources, targets = (
            cast("Sequence[torch.Tensor]", () if tensors_of[0] is None else tensors_of)
            for tensors_of in (kind.sources, kind.targets)
        )
        ends = [
            (tensors_of[0].dtype, tensors_of[0].stride()) if len(tensors_of) else None
            for tensors_of in (sources, targets)
        ]
        outgoing_rows = kind.sent if with_sent else None
        into, out = _list_boxes(kind.change, kind.received, outgoing_rows, rank, *ends, kind.dtype)
        for order, peer, box, form, local_source in into:
            views = box.views(targets)
            if local_source is not None:
                copies = views, local_source.views(sources), [form.reduction] * many
                local[order].append((places, copies))
            else:
                received[order, peer].append((places, (views, [form] * many)))
            places = places + 1
        # Data sent to several ranks is a single view.
        views_of: dict[_BoxView, tuple[Sequence[torch.Tensor], list[PieceForm]]] = {}
        for order, peer, box, form, _ in out:
            if box not in views_of:
                views_of[box] = box.views(sources), [form] * many
            sent[order, peer].append((places, views_of[box]))
            places = places + 1
    outgoing, incoming = (
        {pair: MessagePieces(*_sort_rows(rows_of)) for pair, rows_of in by_pair.items()}
        for by_pair in (sent, received)
    )
    copies_of = {
        order: list(map(LocalCopy, *_sort_rows(rows_of))) for order, rows_of in local.items()
    }
    return outgoing, incoming, copies_of


def _join_kinds(tensors: Iterable[RankTransfers]) -> list[RankTransfers]:
    """Return the tensors of each kind together, with their numbers."""
    kinds: dict[object, list[RankTransfers]] = {}
    for number, moved in enumerate(tensors):
        # Equal changes are the same object, as are equal transfers; they determine the shapes.
        ends = [
            tensor is None or (tensor.dtype, tensor.stride())
            for tensor in (moved.sources[0], moved.targets[0])
        ]
        key = (id(moved.change), id(moved.received), id(moved.sent), moved.dtype, *ends)
        numbered = moved if moved.numbers is not None else moved._replace(numbers=[number])
        kinds.setdefault(key, []).append(numbered)
    return [kind[0] if len(kind) == 1 else _join(kind) for kind in kinds.values()]


def _join(tensors: Sequence[RankTransfers]) -> RankTransfers:
    """Return the tensors of a kind as a single object."""
    return tensors[0]._replace(
        sources=[source for tensor in tensors for source in tensor.sources],
        targets=[target for tensor in tensors for target in tensor.targets],
        numbers=[number for tensor in tensors for number in tensor.numbers or ()],
    )


def _sort_rows(parts: Sequence[_Rows]) -> list[list[Any]]:
    """Return the columns of all rows, in the order of their positions."""
    if len(parts) == 1 and len(parts[0][0]) == 1:
        return list(map(list, parts[0][1]))
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable").tolist()
    columns = zip(*(columns for _, columns in parts), strict=True)
    return [
        list(map(list(itertools.chain.from_iterable(column)).__getitem__, order))
        for column in columns
    ]


# The dtype and strides of a local tensor, or None without a part.
_LocalForm = tuple[torch.dtype, tuple[int, ...]] | None


# Cached, since layers have equal layouts, and training loops repeat redistributions.
@functools.lru_cache(maxsize=256)
def _list_boxes(
    change: LayoutChange,
    received: Transfers,
    sent: Transfers | None,
    rank: int,
    source: _LocalForm,
    target: _LocalForm,
    dtype: torch.dtype | None,
) -> tuple[list[_MovedBox], list[_MovedBox]]:
    """Return the boxes that a rank receives and sends of each tensor of a kind, in order."""
    into, out = [], []
    if target is not None and len(received):
        boxes = _find_boxes(change.target, rank, target[1], received, is_target=True)
        sources: list[_BoxView | None] = [None] * len(received)
        if source is not None:
            local = received.take(received.stays)
            own = _find_boxes(change.source, rank, source[1], local, is_target=False)
            for row, box in zip(received.stays.nonzero()[0].tolist(), own, strict=True):
                sources[row] = box
        orders, senders = received.order.tolist(), received.source_slot.tolist()
        for row in schedule.order_transfers(received):
            # The first contribution is copied into the target, later contributions are combined
            # with it.
            reduction = (change.source.reduction or "sum") if orders[row] else None
            form = PieceForm.of(boxes[row].shape, dtype or target[0], reduction)
            into.append(_MovedBox(orders[row], senders[row], boxes[row], form, sources[row]))
    if source is not None and sent is not None and len(sent):
        boxes = _find_boxes(change.source, rank, source[1], sent, is_target=False)
        orders, receivers = sent.order.tolist(), sent.target_slot.tolist()
        for row in schedule.order_transfers(sent):
            form = PieceForm.of(boxes[row].shape, dtype or source[0])
            out.append(_MovedBox(orders[row], receivers[row], boxes[row], form))
    return into, out


def _find_boxes(
    layout: Layout, rank: int, strides: tuple[int, ...], rows: Transfers, *, is_target: bool
) -> list[_BoxView]:
    """Return the box of each row in a rank's tensor of given strides."""
    numbers = _number_cells(layout, rank)
    wholes = []
    for cell in numbers:
        shape = tuple(layout.cell_shape[cell].tolist())
        if len(numbers) == 1:
            wholes.append((0, shape, strides))
        else:
            # Cells are stored consecutively in a flat tensor.
            (step,) = strides
            offset = int(layout.cell_offset[cell]) * step
            wholes.append((offset, shape, tuple(step * stride for stride in dense_strides(shape))))
    cells, starts = (
        (rows.target_cell, rows.target_start)
        if is_target
        else (rows.source_cell, rows.source_start)
    )
    boxes = []
    # As lists at once: for small tensors, indexing arrays takes most of the time.
    columns = cells.tolist(), starts.tolist(), map(tuple, rows.shape.tolist())
    for cell, start, shape in zip(*columns, strict=True):
        begin, whole, cell_strides = wholes[cell - numbers.start]
        offset = begin + sum(map(operator.mul, start, cell_strides))
        is_whole = len(numbers) == 1 and shape == whole
        boxes.append(_BoxView(shape, cell_strides, offset, is_whole))
    return boxes


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
                    key = schedule.order_message(
                        order, number, sender, receiver, ranks, in_a_turn, by_region
                    )
                    message = RankMessage((*place, *key), order, peer, is_sent, pieces_of)
                    messages.append(message)
        # Copies depend on nothing; combinations have a position among the messages.
        copies += local.get(0, ())
        for order, of_order in sorted(local.items()):
            # The first contributions are copies.
            if not order:
                continue
            if by_region:
                for number, of_region in enumerate(_cut_like_messages(of_order, message_bytes)):
                    key = (*place, number, order, -1)
                    combinations.append((key, order, of_region))
            else:
                parts = tuple(part for copy in of_order for part in _cut_copy(copy, message_bytes))
                combinations.append(((*place, order, -1), order, parts))
    messages.sort(key=lambda message: message.key)
    return messages, copies, combinations


def pack_messages(pieces: MessagePieces, message_bytes: int) -> Iterator[MessagePieces]:
    """Yield the pieces of each message between two ranks, which follow from their shapes."""
    together, alone = schedule.group_pieces(pieces.sizes_bytes, message_bytes)
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
    sides = ([copy.target for copy in copies], [copy.source for copy in copies])
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


def stage_transfers(
    change: LayoutChange,
    stages: Sequence[Transfers],
    span: schedule.PipelineSpan,
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> Iterator[RankTransfers]:
    """Return the transfers of a tensor on a rank, each with its place in the pipeline.

    The first stage is from the source to the target, all others from target to target.
    """
    within = LayoutChange(change.target, change.target)
    for step, stage, rows in schedule.list_steps(stages, change.target.shape, span):
        ends = (change, source) if stage == 0 else (within, target)
        place = step, stage
        yield RankTransfers.of(ends[0], rows, rank, ends[1], target, dtype, place)
