"""Reads that many small tensors share while one rank's arrays are filled.

What a rank needs of tensors that are cut alike are the same boxes of their shards, at other places
of the files. In a file such a box is a short range, a *piece*::

    file      | a          | norm | b          |
    pieces       [==]        [==]    [==]            read at once, with what lies between them
    arrays       a           norm    b

1. `SharedReads.add` notes the pieces of all tensors of one kind: a few numbers for each.
2. Pieces that lie near together are one range, and ranges that fit into a buffer one task.
3. Pieces of one kind at equal distances in the buffer are one array, which is cast at once; each
   then goes to its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.blocks.shard_reads import BUFFER_BYTES, MAX_WASTE, reach_at_once
from reshard.checkpoint.storage.byte_ranges import (
    CoalescedRange,
    coalesce,
    pack_rounds,
    split_equal_steps,
    strided_arrays,
)
from reshard.checkpoint.storage.local_files import PAGE_BYTES, AlignedBuffer, SourceFile
from reshard.checkpoint.storage.shared_read_cache import ReadSpan
from reshard.dtypes import DType
from reshard.elements import cast_elements
from reshard.runs import IntArray

# A longer one gains nothing by company.
_MOST_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class PieceKind:
    """A box of a shard that lies near together in a file: what pieces of one kind have in common.

    `first` is the element of the shard that it begins with, `reach` counts those from there to its
    last, with what lies between; `strides` are those of its shape.
    """

    dtype: DType
    cast: DType | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    reach: int

    @classmethod
    def of(
        cls, kind: DType, cast: DType | None, view: View, local: Sequence[int], shape: Sequence[int]
    ) -> PieceKind | None:
        """The box of `shape` that begins at `local` of a shard; None where it is no small range.

        Args:
            kind: of its elements in the file.
            cast: what they become, if something else.
            view: how the shard lies in the file.
            local, shape: the box.
        """
        reach = reach_at_once(view.strides, shape, kind.itemsize_bytes)
        size_bytes = math.prod(shape) * kind.itemsize_bytes
        if reach is None or not size_bytes or reach * kind.itemsize_bytes > _MOST_PIECE_BYTES:
            return None
        first = view.offset + sum(a * s for a, s in zip(local, view.strides, strict=True))
        return cls(kind, cast, tuple(shape), view.strides, first, reach)

    @property
    def target_bytes(self) -> int:
        """Bytes of the part of an array that a piece fills."""
        return math.prod(self.shape) * (self.cast or self.dtype).itemsize_bytes

    def arrays(self, memory: memoryview, at: IntArray) -> NDArray[Any]:
        """The elements of pieces at equal distances in memory, as they go into the arrays."""
        found = strided_arrays(memory, self.dtype.storage, self.shape, at, self.strides)
        if self.cast is None:
            return found
        rounded = np.empty(found.size, dtype=self.cast.storage)
        cast_elements(found.reshape(-1), self.dtype, rounded, self.cast)
        return rounded.reshape(found.shape)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTask:
    """Ranges of files that are read together."""

    path: str
    ranges: list[CoalescedRange]

    @property
    def place(self) -> tuple[str, int]:
        """The file, and where in it the first range begins."""
        return self.path, self.ranges[0].start_bytes

    @property
    def spans(self) -> list[ReadSpan]:
        """What is read of an object."""
        return [
            ReadSpan(self.path, one.start_bytes, one.start_bytes + one.size_bytes, one.size_bytes)
            for one in self.ranges
        ]


class SharedReads:
    """The pieces of small tensors, by columns: the kind of each, its file, and where it begins."""

    def __init__(self) -> None:
        self._kinds: list[PieceKind] = []
        self._kind: list[IntArray] = []
        self._file: list[IntArray] = []
        self._start: list[IntArray] = []
        self._paths: dict[str, int] = {}
        self._targets: list[NDArray[Any]] = []
        self._names: list[str] = []

    def add(
        self,
        kind: PieceKind,
        path: str,
        starts: IntArray,
        names: Sequence[str],
        targets: Sequence[NDArray[Any]],
    ) -> None:
        """Add the same box of several tensors.

        Args:
            kind: of the pieces.
            path: the file of the shards.
            starts: where in it each shard begins, in bytes: shape `(tensors,)`.
            names: of the tensors.
            targets: the part of an array that each piece fills.
        """
        count = len(starts)
        self._kind.append(np.full(count, len(self._kinds)))
        self._kinds.append(kind)
        self._file.append(np.full(count, self._paths.setdefault(path, len(self._paths))))
        self._start.append(starts + kind.first * kind.dtype.itemsize_bytes)
        self._names += names
        self._targets += targets

    def tasks(self) -> Iterator[SharedTask]:
        """Ranges that hold all pieces, as many at a time as a buffer has room for."""
        if not self._kinds:
            return
        self._kind, self._file, self._start = (
            [np.concatenate(column)] for column in (self._kind, self._file, self._start)
        )
        (kind,), (file,), (start,) = self._kind, self._file, self._start
        reaches = [one.reach * one.dtype.itemsize_bytes for one in self._kinds]
        size = np.array(reaches, dtype=np.int64)[kind]
        # A page holds what lies around a short piece in any case.
        gaps = np.where(size <= PAGE_BYTES, PAGE_BYTES, (size * MAX_WASTE).astype(np.int64))
        paths = list(self._paths)
        room = AlignedBuffer.capacity_for(BUFFER_BYTES)
        together: list[CoalescedRange] = []
        filled = 0
        for one in coalesce(file, start, size, gaps, BUFFER_BYTES):
            needed = AlignedBuffer.capacity_for(one.size_bytes)
            if together and (filled + needed > room or one.file != together[0].file):
                yield SharedTask(paths[together[0].file], together)
                together, filled = [], 0
            together.append(one)
            filled += needed
        if together:
            yield SharedTask(paths[together[0].file], together)

    def read(
        self, task: SharedTask, files: OpenFiles[SourceFile], buffer: AlignedBuffer
    ) -> IntArray:
        """Read the ranges of a task into the arrays, and return the numbers of their pieces.

        Raises:
            RunError: a file that cannot be read.
        """
        file = files[task.path]
        done = []
        for together in pack_rounds(iter(task.ranges), buffer):
            at = []
            for one, region in together:
                file.read_into(region, one.start_bytes)
                at.append(self._start[0][one.pieces] + (region.start - one.start_bytes))
            pieces = np.concatenate([one.pieces for one, _ in together])
            self._spread(pieces, np.concatenate(at), buffer.memory)
            done.append(pieces)
        return np.concatenate(done)

    def _spread(self, pieces: IntArray, at: IntArray, memory: memoryview) -> None:
        """Copy pieces, which lie at `at` of the memory, into the arrays."""
        order = np.lexsort((at, self._kind[0][pieces]))
        pieces, at = pieces[order], at[order]
        kinds = self._kind[0][pieces]
        ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(pieces)]
        low = 0
        for high in ends:
            kind = self._kinds[int(kinds[low])]
            for a, b in split_equal_steps(at[low:high]):
                found = kind.arrays(memory, at[low + a : low + b])
                for piece, array in zip(pieces[low + a : low + b].tolist(), found, strict=True):
                    self._targets[piece][...] = array
            low = high

    def size_bytes(self, pieces: IntArray) -> int:
        """The bytes of arrays that these pieces fill."""
        counts = np.bincount(self._kind[0][pieces], minlength=len(self._kinds)).tolist()
        return sum(
            kind.target_bytes * count for kind, count in zip(self._kinds, counts, strict=True)
        )

    def describe(self, pieces: IntArray) -> Iterator[tuple[str, int]]:
        """The name of each piece's tensor, and the bytes of an array that it fills."""
        kinds = self._kind[0][pieces].tolist()
        for piece, kind in zip(pieces.tolist(), kinds, strict=True):
            yield self._names[piece], self._kinds[kind].target_bytes
