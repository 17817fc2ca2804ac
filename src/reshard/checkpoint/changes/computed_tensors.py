"""Tensors computed from stored tensors, a block at a time or in batches.

A `ComputedTensor` fills any box of itself, reading boxes of its sources. The size of each read is
bounded, so the memory of a conversion is known before it begins::

    source files --(read_box)--> inputs --(fill)--> block --> target files

`ChangedReader` reads batches of blocks as they are written to the target; all blocks of a batch are
produced in the same way::

    copied      files --(one read)--> blocks
    cast        files --(one read)--> inputs --(one cast)--> blocks
    computed    files --(reads for each)--> inputs --> block, block, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.checkpoint.blocks.block_io import (
    BlockMemory,
    BlockReader,
    OpenFiles,
    Section,
    SectionDigests,
    Watch,
    Workspace,
    aligned_bytes,
    digest_blocks,
)
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.source_digests import SourceDigests
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.storage.byte_ranges import split_equal_steps, strided_arrays
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.dtypes import DType
from reshard.elements import CastCounts, cast_elements
from reshard.layout import Box

#: The memory for the arithmetic of a block, in addition to its buffers.
SCRATCH_BYTES = 8 * 1024 * 1024

# Reads the bare elements of a box of a source, valid until the same source is read again.
ReadBox = Callable[[int, Box], NDArray[Any]]


class ComputedTensor(Protocol):
    """A tensor that is computed from stored tensors, its `sources`."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[StoredTensor, ...]: ...

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the maximum number of bytes of each source that are read at once for a box."""

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the bare elements of a box into `out`, which has its shape."""


class ComputedReader:
    """Reads the blocks of a computed tensor."""

    def __init__(
        self,
        tensor: ComputedTensor,
        files: OpenFiles[SourceFile],
        watch: Watch | None = None,
        note: Callable[[CastCounts], None] | None = None,
        digests: SourceDigests | None = None,
    ) -> None:
        self._digests = digests
        self.tensor = tensor
        self.grid = BlockGrid.of(tensor.shape, tensor.dtype.itemsize_bytes)
        self._readers = [BlockReader(source, files, watch) for source in tensor.sources]
        self._note = note

    @property
    def span_bytes(self) -> int:
        """The maximum number of bytes of a shard in memory at once."""
        return max((reader.span_bytes(0) for reader in self._readers), default=0)

    @property
    def input_bytes(self) -> tuple[int, ...]:
        """The maximum number of bytes of each source in memory at once, for the largest block."""
        return self.tensor.input_bytes(self.grid.box(0)) if self.grid.count else ()

    def read_checked(
        self, index: int, workspace: Workspace, at: int = 0
    ) -> tuple[memoryview, bytes]:
        """Return the bytes of block `index`, valid until the next call, and their digest.

        They begin at `at` of the workspace's memory for blocks.

        Raises:
            RunError: a file that cannot be read.
            DigestError: bytes of a source that differ from the bytes that were written.
        """
        box = self.grid.box(index)
        size_bytes = box.elements * self.grid.itemsize_bytes
        memory = workspace.block.memory[at : at + size_bytes]
        out = np.frombuffer(memory, dtype=self.tensor.dtype.storage).reshape(box.shape)

        def read(source: int, part: Box) -> NDArray[Any]:
            inputs = workspace.inputs[source]
            elements = self._readers[source].read_box(part, inputs, workspace.span)
            if self._digests is not None:
                self._digests.add(self.tensor.sources[source], part, elements)
            return elements

        counts = self.tensor.fill(box, out, read)
        if self._note is not None and counts != CastCounts():
            self._note(counts)
        return memory, block_digest(memory)


class CastTensor(Record):
    """A stored or computed tensor cast to `dtype`, rounded to nearest.

    Elements of a computed tensor are rounded to its own type first.
    """

    source: StoredTensor | ComputedTensor
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the source."""
        return self.source.shape

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The stored source, or the sources of the computed source."""
        return (self.source,) if isinstance(self.source, StoredTensor) else self.source.sources

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the bytes of the same box, or the bytes read to compute it."""
        if isinstance(self.source, StoredTensor):
            return (box.elements * self.source.dtype.itemsize_bytes,)
        return self.source.input_bytes(box)

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the box's elements, rounded."""
        counts = CastCounts()
        if isinstance(self.source, StoredTensor):
            elements = read(0, box)
        else:
            elements = np.empty(box.shape, self.source.dtype.storage)
            counts = self.source.fill(box, elements, read)
        flat = elements.reshape(-1)
        return counts + cast_elements(flat, self.source.dtype, out.reshape(-1), self.dtype)


class CastColumns(Mapping[str, ComputedTensor]):
    """Tensors of `stored` that are cast to `dtype`, by name, created on access.

    `is_cast` marks these tensors, shape `(tensors,)`.
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
        """Return all of `stored` in their new types; cast tensors have no digests."""
        kinds, kind = list(self.stored.kinds), self.stored.kind.copy()
        for number in np.flatnonzero(np.bincount(kind[self.is_cast])).tolist():
            kind[self.is_cast & (self.stored.kind == number)] = len(kinds)
            kinds.append(kinds[number].replace(dtype=self.dtype))
        digests = self.stored.digests
        if digests is not None:
            known = ~self.is_cast if digests.known is None else digests.known & ~self.is_cast
            digests = digests.replace(known=known)
        return TensorColumns(self.stored.names, kinds, kind, self.stored.starts, digests)


def split_casts(
    tensors: Mapping[str, StoredTensor], computed: Mapping[str, ComputedTensor]
) -> tuple[Mapping[str, StoredTensor], Collection[str]]:
    """Return the stored tensors, with the sources of casts, and the names computed otherwise."""
    if isinstance(computed, CastColumns):
        return computed.stored, ()
    casts = {
        name: tensor.source
        for name, tensor in computed.items()
        if isinstance(tensor, CastTensor) and isinstance(tensor.source, StoredTensor)
    }
    if not casts:
        return tensors, computed.keys()
    return {**tensors, **casts}, computed.keys() - casts.keys()


def cast_blocks(
    read: Sequence[BlockMemory], types: Sequence[tuple[DType, DType]], out: memoryview
) -> tuple[list[BlockMemory], CastCounts]:
    """Cast the blocks of sections into `out`, and return them with the counts of inexact casts.

    Args:
        read: the blocks of each section.
        types: the source and target type of each section.
        out: memory for all of them.
    """
    blocks, counts, end = [], CastCounts(), 0
    for section, (kind, target) in zip(read, types, strict=True):
        elements = section.size_bytes // kind.itemsize_bytes
        size = elements * target.itemsize_bytes
        end += -end % target.itemsize_bytes
        at = end + np.arange(len(section.at), dtype=np.int64) * size
        for a, b in split_equal_steps(section.at):
            stepped = strided_arrays(section.memory, kind.storage, (elements,), section.at[a:b])
            begin, count = int(at[a]), (b - a) * elements
            rounded = np.frombuffer(out, target.storage, count, begin)
            counts += cast_elements(stepped.reshape(-1), kind, rounded, target)
        blocks.append(BlockMemory(out, at, size))
        end += len(section.at) * size
    return blocks, counts


class ConstantTensor(Record):
    """A tensor without dimensions: `number` as `dtype`, a type of NumPy."""

    dtype: DType
    number: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The empty shape."""
        return ()

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """An empty tuple."""
        return ()

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return no sizes: nothing is read."""
        return ()

    def fill(self, box: Box, out: NDArray[Any], read: ReadBox) -> CastCounts:
        """Write the number."""
        out.reshape(-1)[:] = np.array([self.number], dtype=self.dtype.numpy).view(out.dtype)
        return CastCounts()


class ChangedReader:
    """Reads batches of the blocks of `target`, from `source` or by `computed`.

    Args:
        source: the tensors that are copied or cast.
        target: all tensors of the target.
        computed: the other tensors, by name.
        files: the files of the source.
        watch: called with every range that is read.
        note: called with the counts of elements that the new type cannot represent.
        digests: compares the sources of computed tensors with recorded digests.
    """

    def __init__(
        self,
        source: TensorColumns,
        target: TensorColumns,
        computed: Mapping[str, ComputedTensor],
        files: OpenFiles[SourceFile],
        watch: Watch | None = None,
        note: Callable[[CastCounts], None] | None = None,
        digests: SourceDigests | None = None,
    ) -> None:
        self._digests = digests
        self._target = target
        self._by_name = computed
        self._files, self._watch, self._note = files, watch, note
        self._reader = BlockReader(source, files, watch)
        # A reader per computed tensor, cached while its blocks are read.
        self._computed = lru_cache(maxsize=64)(self._open_computed)

    def _open_computed(self, row: int) -> ComputedReader:
        tensor = self._by_name[self._target.names[row]]
        return ComputedReader(tensor, self._files, self._watch, self._note, self._digests)

    def read(
        self, read: Sequence[Section], written: Sequence[Section], workspace: Workspace
    ) -> tuple[list[BlockMemory], SectionDigests]:
        """Return the blocks of each section, valid until the next call, and their digests.

        Args:
            read: the sections of the source; empty if blocks are computed.
            written: the sections of the target.
            workspace: the memory to read into.

        Raises:
            RunError: a file that cannot be read.
            DigestError: bytes that differ from the bytes that were written.
        """
        if not read:
            return self._compute(written, workspace)
        kinds = self._reader.columns.kinds, self._target.kinds
        types = [
            (kinds[0][before.kind].dtype, kinds[1][after.kind].dtype)
            for before, after in zip(read, written, strict=True)
        ]
        # All blocks of a batch are produced in the same way, so the first section decides.
        if types[0][0] is not types[0][1]:
            inputs = self._reader.read(read, workspace.for_inputs())
            # The recorded digests are of the elements before the cast.
            if self._reader.columns.digests is not None:
                self._reader.verify_digests(read, digest_blocks(inputs))
            blocks, counts = cast_blocks(inputs, types, workspace.block.memory)
            if self._note is not None and counts != CastCounts():
                self._note(counts)
            return blocks, digest_blocks(blocks)
        return self._reader.read_digested(read, workspace)

    def _compute(
        self, sections: Sequence[Section], workspace: Workspace
    ) -> tuple[list[BlockMemory], SectionDigests]:
        memory, end = workspace.block.memory, 0
        blocks, digests = [], []
        for section in sections:
            at, of_section, size = [], [], 0
            for row in section.rows.tolist():
                reader = self._computed(row)
                block, digest = reader.read_checked(section.block, workspace, end)
                at.append(end)
                of_section.append(digest)
                size = block.nbytes
                # Rounded as in the plan of the batch (`work_items`), which determines the size of
                # the memory.
                end += int(aligned_bytes(np.array(size)))
            blocks.append(BlockMemory(memory, np.array(at, dtype=np.int64), size))
            digests.append(of_section)
        return blocks, digests
