"""Weights with low-rank changes merged into them: `W + scale * B @ A`, as PEFT does on a CPU.

1. A and B are taken as float32. An element of their product is summed in float64 and rounded once,
   so that it does not depend on the order of a sum; then it is multiplied by the scale.
2. The sum with the weight is of float32, and rounded to the weight's type. Further adapters start
   from that.
3. With a magnitude (DoRA), each output of the sum is multiplied by magnitude / norm, where the norm
   is that of the sum's row.

A weight is rows by columns here: its first dimension, and the others as one.

Sources: LoRA (arXiv 2106.09685); DoRA (arXiv 2402.09353); PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.changes.computed import ReadBox
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType, dtype
from reshard.elements import CastCounts, as_float32, cast_elements
from reshard.layout import Box

# Elements of a product at once, and of a piece of A in float64: 1 MiB and 2 MiB.
_PRODUCT, _FACTOR = 1 << 17, 1 << 18


@dataclass(frozen=True, slots=True)
class LowRankChange:
    """One adapter of a weight.

    Attributes:
        a: `(rank, inputs...)`.
        b: `(outputs, rank, 1...)`.
        scale: of the product.
        is_swapped: whether the weight has its inputs in the first dimension.
        magnitude: of each output (DoRA); None for a plain sum.
        is_rounded: whether the product is rounded to the weight's type before it is added, as PEFT
            does for embeddings.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    is_swapped: bool = False
    magnitude: StoredTensor | None = None
    is_rounded: bool = False

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """Its tensors."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @property
    def rank(self) -> int:
        """The rank."""
        return self.a.shape[0]


@dataclass(frozen=True)
class _Merged:
    """A tensor of the base with what adapters add to it, in its own type."""

    base: StoredTensor

    @property
    def dtype(self) -> DType:
        """The base's."""
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The base's."""
        return self.base.shape


@dataclass(frozen=True)
class MergedWeight(_Merged):
    """A weight with the changes of adapters, one after another."""

    changes: tuple[LowRankChange, ...]
    _norms: dict[int, NDArray[np.float32]] = field(default_factory=dict, compare=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The weight, and the tensors of each change."""
        return (self.base, *(one for change in self.changes for one in change.sources))

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """A box of the weight, and the adapters whole."""
        adapters = (math.prod(one.shape) * one.dtype.itemsize_bytes for one in self.sources[1:])
        return (box.elements * self.base.dtype.itemsize_bytes, *adapters)

    def fill(self, box: Box, out: NDArray[np.generic], read: ReadBox) -> CastCounts:
        """The box's elements, merged and rounded."""
        factors = self._read_factors(read)
        for number, change in enumerate(self.changes):
            if change.magnitude is not None:
                self._find_norms(number, box, factors, read)
        return self._merge(box, len(self.changes), factors, read, out)

    def _read_factors(self, read: ReadBox) -> list[list[NDArray[np.float32]]]:
        """The tensors of each change: A `(rank, in)`, B `(out, rank)`, the magnitude `(out)`."""
        found: list[list[NDArray[np.float32]]] = []
        source = 1
        for change in self.changes:
            parts: list[NDArray[np.float32]] = []
            for one in change.sources:
                bare = read(source, Box((0,) * len(one.shape), one.shape)).reshape(-1)
                parts.append(as_float32(bare, one.dtype))
                source += 1
            parts[0] = parts[0].reshape(change.rank, -1)
            parts[1] = parts[1].reshape(-1, change.rank)
            found.append(parts)
        return found

    def _merge(
        self,
        box: Box,
        changes: int,
        factors: Sequence[Sequence[NDArray[np.float32]]],
        read: ReadBox,
        out: NDArray[np.generic],
    ) -> CastCounts:
        """Write the elements of a box into `out` after so many changes, rounded."""
        counts = CastCounts()
        bare = read(0, box)
        rows, columns = _find_ranges(box, self.shape)
        base = bare.reshape(rows.stop - rows.start, -1)
        target = out.reshape(base.shape)
        rank = max((one.rank for one in self.changes), default=1)
        wide = max(1, min(base.shape[1], _FACTOR // rank))
        high = max(1, _PRODUCT // wide)
        for top in range(0, base.shape[0], high):
            for left in range(0, base.shape[1], wide):
                inside = np.s_[top : top + high, left : left + wide]
                at_rows = range(rows.start + top, min(rows.start + top + high, rows.stop))
                first = columns.start + left
                at_columns = range(first, min(first + wide, columns.stop))
                piece = np.ascontiguousarray(base[inside])
                for number in range(changes):
                    piece, found = self._apply(number, piece, at_rows, at_columns, factors[number])
                    counts += found
                target[inside] = piece
        return counts

    def _apply(
        self,
        number: int,
        piece: NDArray[np.generic],
        rows: range,
        columns: range,
        factors: Sequence[NDArray[np.float32]],
    ) -> tuple[NDArray[np.generic], CastCounts]:
        """A piece of the weight, as bare elements, after one change."""
        merged = self._add(number, piece, rows, columns, factors)
        change = self.changes[number]
        if change.magnitude is not None:
            outputs = columns if change.is_swapped else rows
            part = slice(outputs.start, outputs.stop)
            with np.errstate(all="ignore"):
                factor = factors[2][part] / self._norms[number][part]
                merged = (factor if change.is_swapped else factor[:, None]) * merged
        rounded, counts = self._round(merged)
        return rounded.reshape(piece.shape), counts

    def _round(self, values: NDArray[np.float32]) -> tuple[NDArray[np.generic], CastCounts]:
        """Values as bare elements of the weight's type, of shape `(n,)`."""
        rounded = np.empty(values.size, dtype=self.dtype.storage)
        bare = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        return rounded, cast_elements(bare, dtype("float32"), rounded, self.dtype)

    def _add(
        self,
        number: int,
        piece: NDArray[np.generic],
        rows: range,
        columns: range,
        factors: Sequence[NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """The sum of a piece and its part of the product, in float32."""
        change, (a, b, *_) = self.changes[number], factors
        outputs, inputs = (columns, rows) if change.is_swapped else (rows, columns)
        left = b[outputs.start : outputs.stop].astype(np.float64)
        right = a[:, inputs.start : inputs.stop].astype(np.float64)
        product = (left @ right).astype(np.float32)
        delta = (product.T if change.is_swapped else product) * np.float32(change.scale)
        if change.is_rounded:
            delta = as_float32(self._round(delta)[0], self.dtype).reshape(delta.shape)
        values = as_float32(piece.reshape(-1), self.dtype).reshape(piece.shape)
        with np.errstate(all="ignore"):
            return values + delta

    def _find_norms(
        self,
        number: int,
        like: Box,
        factors: Sequence[Sequence[NDArray[np.float32]]],
        read: ReadBox,
    ) -> None:
        """The norms of the outputs of the sum of one change, found once, in boxes of a size."""
        with self._lock:
            if number in self._norms:
                return
            change = self.changes[number]
            total = np.zeros(factors[number][1].shape[0], dtype=np.float64)
            for box in _list_boxes(self.shape, like):
                bare = np.empty(box.shape, dtype=self.dtype.storage)
                self._merge(box, number, factors, read, bare)
                rows, columns = _find_ranges(box, self.shape)
                piece = bare.reshape(len(rows), -1)
                # In stretches: the product of a whole box in float64 would be several boxes.
                step = max(1, _PRODUCT // max(1, piece.shape[1]))
                for top in range(0, len(rows), step):
                    part = piece[top : top + step]
                    at = range(rows.start + top, rows.start + top + part.shape[0])
                    merged = self._add(number, part, at, columns, factors[number])
                    squares = np.square(merged, dtype=np.float64)
                    if change.is_swapped:
                        total[columns.start : columns.stop] += squares.sum(axis=0)
                    else:
                        total[at.start : at.stop] += squares.sum(axis=1)
            self._norms[number] = np.sqrt(total).astype(np.float32)


def _find_ranges(box: Box, shape: tuple[int, ...]) -> tuple[range, range]:
    """The rows and columns of a box, where all dimensions but the first are one.

    Blocks have one index of the dimensions before that in which they end, and all behind it.

    >>> _find_ranges(Box((2, 0, 0), (4, 3, 5)), (8, 3, 5))
    (range(2, 4), range(0, 15))
    >>> _find_ranges(Box((2, 1, 0), (3, 3, 5)), (8, 3, 5))
    (range(2, 3), range(5, 15))
    """
    first = 0
    for size, start in zip(shape[1:], box.start[1:], strict=True):
        first = first * size + start
    return range(box.start[0], box.stop[0]), range(first, first + math.prod(box.shape[1:]))


def _list_boxes(shape: tuple[int, ...], like: Box) -> list[Box]:
    """Boxes of whole rows that cover a weight, each no larger than `like`; or single indices."""
    row = math.prod(shape[1:])
    step = like.elements // row
    if step:
        return [
            Box((top, *(0 for _ in shape[1:])), (min(top + step, shape[0]), *shape[1:]))
            for top in range(0, shape[0], step)
        ]
    # Rows longer than a block: of two dimensions, which is all that has such.
    wide = like.elements
    return [
        Box((top, left), (top + 1, min(left + wide, shape[1])))
        for top in range(shape[0])
        for left in range(0, shape[1], wide)
    ]


@dataclass(frozen=True)
class MergedBias(_Merged):
    """A bias with those of adapters added: `bias + scale * change`, one after another."""

    changes: tuple[tuple[StoredTensor, float], ...]

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The bias and the changes."""
        return (self.base, *(tensor for tensor, _ in self.changes))

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """The same box of each."""
        return tuple(box.elements * one.dtype.itemsize_bytes for one in self.sources)

    def fill(self, box: Box, out: NDArray[np.generic], read: ReadBox) -> CastCounts:
        """The box's elements, rounded after each change."""
        counts = CastCounts()
        out[...] = read(0, box)
        for number, (tensor, scale) in enumerate(self.changes, 1):
            change = as_float32(read(number, box).reshape(-1), tensor.dtype)
            with np.errstate(all="ignore"):
                total = as_float32(out.reshape(-1), self.dtype) + change * np.float32(scale)
            bare = np.ascontiguousarray(total).view(np.uint32)
            counts += cast_elements(bare, dtype("float32"), out.reshape(-1), self.dtype)
        return counts
