"""Tensors in another floating-point type.

Very many that are cast alike are columns (`CastColumns`), and small ones are cast together
(`cast_blocks`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.batches import BlockMemory
from reshard.checkpoint.blocks.joined_ranges import arrays_at, equal_steps
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.computed import ComputedTensor, ReadBox
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.elements import CastCounts, cast_elements
from reshard.layout import Box


@dataclass(frozen=True)
class CastTensor:
    """A stored tensor's elements as `dtype`."""

    source: StoredTensor
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's."""
        return self.source.shape

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The one."""
        return (self.source,)

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """The same box of the source."""
        return (box.elements * self.source.dtype.itemsize_bytes,)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The box's elements, rounded."""
        elements = read(0, box).reshape(-1)
        return cast_elements(elements, self.source.dtype, out.reshape(-1), self.dtype)


@dataclass(frozen=True)
class CastComputed:
    """A computed tensor's elements as `dtype`: what it is computed in is rounded first."""

    made: ComputedTensor
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the computed tensor."""
        return self.made.shape

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """What it is computed from."""
        return self.made.sources

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """As of the computed tensor."""
        return self.made.input_bytes(box)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """The box's elements, computed and then rounded."""
        elements = np.empty(box.shape, self.made.dtype.storage)
        counts = self.made.fill(box, elements, read)
        flat = elements.reshape(-1)
        return counts + cast_elements(flat, self.made.dtype, out.reshape(-1), self.dtype)


class CastColumns(Mapping[str, ComputedTensor]):
    """Tensors of `stored` that become `dtype`, by name; each `CastTensor` is made when asked for.

    `is_cast` says which of them do, shape `(tensors,)`.
    """

    def __init__(self, stored: TensorColumns, is_cast: NDArray[np.bool_], dtype: DType) -> None:
        self.stored = stored
        self.is_cast = is_cast
        self.dtype = dtype

    def __getitem__(self, name: str) -> CastTensor:
        row = self.stored.row(name)
        if not self.is_cast[row]:
            raise KeyError(name)
        return CastTensor(self.stored.tensor(row), self.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.stored and bool(self.is_cast[self.stored.row(str(name))])

    def __iter__(self) -> Iterator[str]:
        return itertools.compress(self.stored.names, self.is_cast.tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.is_cast))

    def tensors(self) -> TensorColumns:
        """All of `stored`, in the types that they become; what is cast has no digest."""
        kinds, kind = list(self.stored.kinds), self.stored.kind.copy()
        for number in np.unique(kind[self.is_cast]).tolist():
            kind[self.is_cast & (self.stored.kind == number)] = len(kinds)
            kinds.append(dataclasses.replace(kinds[number], dtype=self.dtype))
        digests = self.stored.digests
        if digests is not None:
            known = ~self.is_cast if digests.known is None else digests.known & ~self.is_cast
            digests = dataclasses.replace(digests, known=known)
        return TensorColumns(self.stored.names, kinds, kind, self.stored.starts, digests)


def split_casts(
    tensors: Mapping[str, StoredTensor], computed: Mapping[str, ComputedTensor]
) -> tuple[Mapping[str, StoredTensor], Collection[str]]:
    """The tensors, those that are only cast as they are stored; and the names of what is computed
    in another way.
    """
    if isinstance(computed, CastColumns):
        return computed.stored, ()
    casts = {name: made.source for name, made in computed.items() if isinstance(made, CastTensor)}
    if not casts:
        return tensors, computed.keys()
    return {**tensors, **casts}, computed.keys() - casts.keys()


def cast_blocks(
    read: Sequence[BlockMemory], types: Sequence[tuple[DType, DType]], out: memoryview
) -> tuple[list[BlockMemory], CastCounts]:
    """Blocks of sections in another type, written into `out` one behind the other.

    Args:
        read: the blocks of each section.
        types: of each section, and what it becomes.
        out: room for all of them.
    """
    blocks, counts, end = [], CastCounts(), 0
    for of, (kind, target) in zip(read, types, strict=True):
        elements = of.size_bytes // kind.itemsize_bytes
        size = elements * target.itemsize_bytes
        end += -end % target.itemsize_bytes
        at = end + np.arange(len(of.at), dtype=np.int64) * size
        for a, b in equal_steps(of.at):
            found = arrays_at(of.memory, kind.storage, (elements,), of.at[a:b])
            begin, count = int(at[a]), (b - a) * elements
            rounded = np.frombuffer(out, target.storage, count, begin)
            counts += cast_elements(found.reshape(-1), kind, rounded, target)
        blocks.append(BlockMemory(out, at, size))
        end += len(of.at) * size
    return blocks, counts
