"""Pieces of local tensors that travel: views, with what they travel as.

Of very many small tensors most pieces are alike but for where they lie. So a piece is its view,
and its form, which all pieces that are alike have in common::

    view                                    form
    rows 0 to 8 of layers.0.up      \\
    rows 0 to 8 of layers.1.up       >      bfloat16 of shape [8, 64], 1024 bytes, copied
    rows 0 to 8 of layers.2.up      /
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch


class PieceForm(NamedTuple):
    """What a piece has alike with others.

    Attributes:
        dtype: as which its elements travel: they are cast while they are packed and unpacked.
        reduction: by what it is combined with what is there; None where it replaces that.
        shape: of the view.
        strides: of the same elements where they are packed, in row major order.
        size_bytes: of its elements as they travel.
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
        """That of pieces of a shape.

        >>> form = PieceForm.of((4, 3, 2), torch.bfloat16)
        >>> form.strides, form.size_bytes
        ((6, 2, 1), 48)
        """
        ends = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
        strides = tuple(ends)[::-1] if shape else ()
        return cls(dtype, reduction, shape, strides, math.prod(shape) * dtype.itemsize)


class Piece(NamedTuple):
    """A view of a local tensor, and what it travels as."""

    view: torch.Tensor
    form: PieceForm

    @classmethod
    def of(cls, view: torch.Tensor, dtype: torch.dtype, reduction: str | None = None) -> Piece:
        """A view whose elements travel as `dtype`."""
        return cls(view, PieceForm.of(tuple(view.shape), dtype, reduction))

    @property
    def dtype(self) -> torch.dtype:
        """As which its elements travel."""
        return self.form.dtype

    @property
    def reduction(self) -> str | None:
        """By what it is combined with what is there."""
        return self.form.reduction

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements as they travel."""
        return self.form.size_bytes

    def lies_like(self, other: Piece) -> bool:
        """Whether another piece has the same memory, and travels as the same."""
        own, its = self.view, other.view
        return (
            own.data_ptr() == its.data_ptr()
            and (own.shape, own.stride()) == (its.shape, its.stride())
            and (own.dtype, self.dtype) == (its.dtype, other.dtype)
        )

    def parts(self, most_bytes: int) -> Iterator[Piece]:
        """The piece in parts of at most `most_bytes`, in row major order."""
        for view in cut(self.view, most_bytes, itemsize=self.dtype.itemsize):
            yield Piece.of(view, self.dtype, self.reduction)


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
    # How many rows fit; where not even one does, each is cut along the next dimension.
    at_once = most_bytes // (size_bytes // length)
    for begin in range(0, length, max(at_once, 1)):
        part = view.narrow(dimension, begin, min(max(at_once, 1), length - begin))
        if at_once:
            yield part
        else:
            yield from cut(part, most_bytes, dimension + 1, itemsize)
