"""Pieces of local tensors that are sent: views, and the form in which they are sent.

Among very many small tensors, most pieces differ only in their memory. So a piece consists of its
view and its form, which similar pieces share::

    view                                    form
    rows 0 to 8 of layers.0.up      \\
    rows 0 to 8 of layers.1.up       >      bfloat16 of shape [8, 64], 1024 bytes, copied
    rows 0 to 8 of layers.2.up      /

Pieces that are sent together are columns of both.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from reshard.plans.schedule import ALIGNMENT_BYTES, align
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
        ends = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
        strides = tuple(ends)[::-1] if shape else ()
        return cls(dtype, reduction, shape, strides, math.prod(shape) * dtype.itemsize)


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

    def lies_like(self, other: Piece) -> bool:
        """Return whether another piece has the same memory and form."""
        own, its = self.view, other.view
        return (
            own.data_ptr() == its.data_ptr()
            and (own.shape, own.stride()) == (its.shape, its.stride())
            and (own.dtype, self.dtype) == (its.dtype, other.dtype)
        )

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
            *(list(map(of.__getitem__, numbers)) for of in (self.views, self.forms))
        )

    @property
    def sizes_bytes(self) -> list[int]:
        """The size of each piece's sent elements."""
        return [form.size_bytes for form in self.forms]

    @property
    def offsets(self) -> list[int]:
        """The offset of each packed piece, and the end of the last, in bytes."""
        sizes = self.sizes_bytes
        begins = list(itertools.accumulate(map(align, sizes[:-1]), initial=0))
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
            has_gaps = any(size % ALIGNMENT_BYTES for size in set(sizes[:-1]))
            if len(dtypes) == 1 and 0 not in sizes and not has_gaps:
                # A single call for all, as they have no gaps.
                (whole,) = wholes.values()
                return list(torch._utils._unflatten_dense_tensors(whole, self.views))
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
    offsets, left = np.zeros(1, dtype=np.int64), view.nbytes // length
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if left == 1:
            break
        offsets = (offsets[:, None] + np.arange(size) * (stride * itemsize)).ravel()
        left //= size
    return np.stack([offsets + view.data_ptr(), np.full(len(offsets), length)], axis=1)


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
