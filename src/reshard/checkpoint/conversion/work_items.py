"""The work of a conversion: the blocks of the target's tensors, in batches, and their digests.

Blocks are numbered consecutively over all tensors of the target, in their order: the blocks of
tensor `row` begin at `first_block[row]`. Consecutive blocks of small tensors form a batch (see
`reshard.checkpoint.blocks.block_io`) if they are made in the same way: copied, cast or computed. A
block of a large tensor is a batch by itself.

`BlockDigests` collects the digest of each block, from which a tensor's digest follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import (
    BlockReader,
    BlockWriter,
    OpenFiles,
    Section,
    aligned_bytes,
    split_alike,
)
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, BlockGrid, block_digest
from reshard.checkpoint.blocks.tensor_columns import DigestColumns, TensorColumns
from reshard.dtypes import DType
from reshard.elements import is_castable
from reshard.runs import IntArray


class Batch(Record, eq=False):
    """A batch of blocks that are moved together: their numbers, and the sections to read and write.

    The numbers are in the order of the sections. Blocks that are read are cast if types differ;
    computed blocks have no section to read.
    """

    numbers: IntArray
    read: tuple[Section, ...]
    written: tuple[Section, ...]
    size_bytes: int


class WorkItems(Record, eq=False):
    """The blocks that a conversion moves, from tensors of the source to those of the target.

    A tensor that has another floating-point type in the source is cast. `computed` names tensors
    that are neither moved nor cast; the source may lack tensors of these names.
    """

    source: TensorColumns
    target: TensorColumns
    computed: Collection[str] = ()

    @cached_property
    def grids(self) -> tuple[BlockGrid, ...]:
        """The blocks of each kind of the target."""
        return tuple(kind.grid for kind in self.target.kinds)

    @cached_property
    def block_counts(self) -> IntArray:
        """The number of blocks of each tensor, shape `(tensors,)`."""
        return self.target.by_kind([grid.count for grid in self.grids])

    @cached_property
    def first_block(self) -> IntArray:
        """The index of each tensor's first block, then the total: shape `(tensors + 1,)`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.block_counts)])

    @property
    def count(self) -> int:
        """The number of all blocks."""
        return int(self.first_block[-1])

    @property
    def source_rows(self) -> IntArray:
        """The row in the source of each tensor of the target; -1 if it is computed.

        A cast tensor of several blocks counts as computed: blocks have a fixed size in bytes, so
        the blocks of the two types have different elements.
        """
        return self._origins[0]

    @property
    def is_cast(self) -> NDArray[np.bool_]:
        """Whether a tensor is read and then cast to another type: shape `(tensors,)`."""
        return self._origins[1]

    @cached_property
    def _origins(self) -> tuple[IntArray, NDArray[np.bool_]]:
        """`source_rows` and `is_cast`."""
        # 1. The row of the source tensor of the same name, or -1 if the tensor is computed.
        source, target = self.source, self.target
        if source.names == target.names:
            rows = np.arange(len(target.names), dtype=np.int64)
        else:
            source_rows = (
                -1 if name in self.computed else source.row(name) for name in target.names
            )
            rows = np.fromiter(source_rows, np.int64, len(target.names))
        for name in self.computed:
            # The target's format may leave out a computed tensor, or store it elsewhere.
            if name in target:
                rows[target.row(name)] = -1
        # 2. Tensors whose types differ, and are cast. The types are compared as numbers, since
        # there may be very many tensors.
        types: dict[DType, int] = {}
        before, after = (
            columns.by_kind([types.setdefault(kind.dtype, len(types)) for kind in columns.kinds])
            for columns in (source, target)
        )
        castable = np.array([is_castable(dtype) for dtype in types] or [False])
        is_cast = np.zeros(len(rows), dtype=bool)
        there = rows >= 0
        old, new = before[rows[there]], after[there]
        is_cast[there] = (old != new) & castable[old] & castable[new]
        # 3. Casts of several blocks are computed.
        if is_cast.any():
            counts = source.by_kind([kind.grid.count for kind in source.kinds])
            is_computed = is_cast & (self.block_counts > 1)
            is_computed[is_cast] |= counts[rows[is_cast]] > 1
            rows = np.where(is_computed, -1, rows)
            is_cast &= ~is_computed
        return rows, is_cast

    @cached_property
    def is_small(self) -> NDArray[np.bool_]:
        """Whether a tensor has a single block: shape `(tensors,)`."""
        small: NDArray[np.bool_] = self.block_counts == 1
        return small

    @cached_property
    def _room(self) -> IntArray:
        """The maximum bytes that each small tensor takes in a batch: shape `(tensors,)`."""
        sizes = self.target.tensor_bytes.copy()
        read = self.source.tensor_bytes[self.source_rows[self.is_cast]]
        sizes[self.is_cast] = np.maximum(sizes[self.is_cast], read)
        return aligned_bytes(sizes)

    @property
    def cast_bytes(self) -> int:
        """The size of the largest tensor that is read to be cast."""
        read = self.source.tensor_bytes[self.source_rows[self.is_cast]]
        return int(read.max()) if len(read) else 0

    @cached_property
    def largest_bytes(self) -> tuple[int, int]:
        """The sizes of the largest block and shard span of tensors that are not computed."""
        # Sizes are known without opening a file.
        nothing: OpenFiles[Any] = OpenFiles(dict[str, Any]().__getitem__)
        reader, writer = BlockReader(self.source, nothing), BlockWriter(self.target, nothing)
        # Kinds of the source that are only read to compute other tensors do not count here.
        moved = self.source.kind[self.source_rows[self.source_rows >= 0]]
        # Not `np.unique`, which imports `numpy.ma`: a tenth of the start of a command.
        spans = [reader.span_bytes(kind) for kind in np.flatnonzero(np.bincount(moved)).tolist()]
        spans += [writer.span_bytes(kind) for kind in range(len(self.target.kinds))]
        block = max((grid.largest_bytes for grid in self.grids), default=0)
        return block, max(spans, default=0)

    @cached_property
    def batched_bytes(self) -> int:
        """The bytes of all small tensors in batches, up to the maximum of a batch."""
        # A single small tensor is read as a block of its own.
        if np.count_nonzero(self.is_small) < 2:
            return 0
        sizes = self._room[self.is_small]
        # With the sixteenth that `batches` leaves for ranges that are extended to whole pages.
        return min(int(sizes.sum()) * 17 // 16, blocks.BLOCK_BYTES)

    def places(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return the row of each block's tensor, and the block's index in that tensor."""
        rows = np.searchsorted(self.first_block, numbers, "right") - 1
        return rows, numbers - self.first_block[rows]

    def size_bytes(self, numbers: IntArray) -> int:
        """Return the number of bytes of blocks."""
        rows, numbers = self.places(numbers)
        alone = self.block_counts[rows] == 1
        total = int(self.target.tensor_bytes[rows[alone]].sum())
        for row, block in zip(rows[~alone].tolist(), numbers[~alone].tolist(), strict=True):
            total += self.grids[self.target.kind[row]].size_bytes(block)
        return total

    def blocks_of(self, rows: IntArray) -> IntArray:
        """Return the numbers of the blocks of the tensors in these rows, ascending."""
        is_chosen = np.zeros(len(self.target), dtype=bool)
        is_chosen[rows] = True
        return np.flatnonzero(np.repeat(is_chosen, self.block_counts))

    def last_name(self, batch: Batch) -> str:
        """Return the name of the last tensor of a batch."""
        return self.target.names[int(batch.written[-1].rows[-1])]

    def batches(self, numbers: IntArray, batch_bytes: int) -> Iterator[Batch]:
        """Yield the blocks of these numbers, ascending, in batches of at most `batch_bytes`."""
        if not len(numbers):
            return
        rows = np.searchsorted(self.first_block, numbers, "right") - 1
        small = self.is_small[rows]
        # The remaining sixteenth is for ranges that are extended to whole pages.
        limit = batch_bytes - batch_bytes // 16
        reach = np.cumsum(self._room[rows])
        # The begins of runs of small tensors that are made in the same way, and of single blocks.
        way = np.where(self.is_cast[rows], 2, self.source_rows[rows] >= 0)
        changes = np.append(True, ~small[:-1] | (way[1:] != way[:-1]))
        begins = np.flatnonzero(~small | changes).tolist()
        for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
            at = begin
            while at < end:
                stop = at + 1
                if end - begin > 1:
                    before = int(reach[at - 1]) if at else 0
                    stop += int(np.searchsorted(reach[at + 1 : end], before + limit, "right"))
                yield self._batch(numbers[at:stop], rows[at:stop])
                at = stop

    def _batch(self, numbers: IntArray, rows: IntArray) -> Batch:
        target_kind, source_rows = self.target.kind[rows], self.source_rows[rows]
        if len(rows) == 1:
            row, grid = int(rows[0]), self.grids[int(target_kind[0])]
            block = int(numbers[0] - self.first_block[row])
            read: tuple[Section, ...] = ()
            if source_rows[0] >= 0:
                read = (Section(int(self.source.kind[source_rows[0]]), source_rows, block),)
            written = (Section(int(target_kind[0]), rows, block),)
            return Batch(numbers, read, written, grid.size_bytes(block))
        is_computed = bool(source_rows[0] < 0)
        source_kind = source_rows if is_computed else self.source.kind[source_rows]
        # Sorted by kind; blocks of the same kind stay in the order of the target.
        alike = split_alike(target_kind, source_kind)
        reads, writes = [], []
        for chosen in alike:
            if not is_computed:
                reads.append(Section(int(source_kind[chosen[0]]), source_rows[chosen], 0))
            writes.append(Section(int(target_kind[chosen[0]]), rows[chosen], 0))
        size_bytes = int(self.target.tensor_bytes[rows].sum())
        return Batch(numbers[np.concatenate(alike)], tuple(reads), tuple(writes), size_bytes)


class HostBlocks(Record, eq=False):
    """The blocks that a host works on.

    Attributes:
        numbers: the numbers of the blocks to do.
        is_known: whether each block was done before, by any host.
        counts: whether this host adds each block to checksums; each block counts on one host.
        earlier: whether this host did a block that it counts in an earlier run.
    """

    numbers: IntArray
    is_known: NDArray[np.bool_]
    counts: NDArray[np.bool_]
    earlier: NDArray[np.bool_]

    @classmethod
    def alone(cls, finished: NDArray[np.bool_]) -> HostBlocks:
        """Return the blocks of a run on a single host."""
        done = finished.copy()
        return cls(np.flatnonzero(~done), done, np.ones(len(done), dtype=bool), done)


class BlockDigests:
    """The blocks of a checkpoint's tensors, and their digests as they become known."""

    def __init__(self, work_items: WorkItems) -> None:
        self.work_items = work_items
        # 16 bytes a block: a checkpoint of 1 TB has 250,000 of them.
        self.found = np.zeros((work_items.count, DIGEST_BYTES), dtype=np.uint8)

    def note(self, numbers: IntArray, digests: bytes) -> None:
        """Record the concatenated digests of blocks."""
        self.found[numbers] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)

    def of(self, row: int) -> bytes:
        """Return the concatenated digests of the blocks of a tensor."""
        begin, end = self.work_items.first_block[row : row + 2].tolist()
        return self.found[begin:end].tobytes()

    def columns(self) -> DigestColumns:
        """Return the digests of all tensors and of their blocks."""
        first, blocks = self.work_items.first_block, self.found.tobytes()
        ends = (first * DIGEST_BYTES).tolist()
        memory = memoryview(blocks)
        whole = b"".join(block_digest(memory[begin:end]) for begin, end in itertools.pairwise(ends))
        return DigestColumns(first, blocks, whole)

    def digests(self, rows: Iterable[int]) -> dict[str, str]:
        """Return the digests of tensors, as text."""
        names = self.work_items.target.names
        return {names[row]: block_digest(self.of(row)).hex() for row in rows}
