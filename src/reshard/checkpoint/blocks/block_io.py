"""One block of a tensor, read from the shards that hold it.

A reader gathers a block in the tensor's own row-major order. It works in a `Workspace`, the memory
of one thread, and never allocates more than that has::

    files --(one range at a time)--> span buffer --(Span.copy)--> block

A block that is one range of one file, in its own order, is read without the copy. Many tensors at
once are read and written by `batches`.

Batches of blocks, read together and written together: many small tensors share reads and writes.

A *section* is one block of each of several tensors of one kind: their shards are cut alike, so that
one span of the kind is a span of each tensor, and they are rearranged by one copy of arrays that
have one dimension more. A batch is a list of sections, that of a large tensor is of one block::

    reader   files --(ranges)--> span buffer --(a copy for each span)--> blocks
    writer   blocks --(a copy for each span)--> span buffer --(ranges)--> files

1. `pieces` are the bytes of files that the spans of all tensors of a batch take.
2. Pieces that lie together are one range, which is read or written by one call.
3. Between a range and the blocks, tensors at equal distances are one array.

Where blocks are ranges of files in their own order, they are read in place, and written from it.

Which bytes of files blocks touch, for very many blocks at once.

Blocks with one number, of tensors of one kind, touch the same ranges behind the begins of their
tensors' shards: these are found once, and added to the begins as columns. A range goes from the
first to the last byte that a block writes in a shard, so it may have bytes of other blocks in it:
`size` is what the block itself writes there.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.blocks.spans import (
    Span,
    Tiles,
    extent,
    list_spans,
    source_tiles,
    target_tiles,
)
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.storage.byte_ranges import (
    CoalescedRange,
    coalesce,
    pack_rounds,
    split_equal_steps,
    strided_arrays,
)
from reshard.checkpoint.storage.filesystem import Closable
from reshard.checkpoint.storage.local_files import (
    PAGE_BYTES,
    AlignedBuffer,
    BufferRegion,
    SourceFile,
    TargetFile,
)
from reshard.checkpoint.storage.remote_files import open_source
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.shared_read_cache import CachedRemoteFile, SharedReadCache
from reshard.errors import DigestError
from reshard.layout import Box
from reshard.log import LOGGER
from reshard.runs import IntArray
from reshard.system import raise_open_file_limit


class Workspace:
    """The memory that one thread works in: room for one block, and for one span of a shard.

    `inputs` has room for boxes of what a block is computed from, where it is not read as it is.
    """

    def __init__(
        self, block_bytes: int, span_bytes: int, input_bytes: tuple[int, ...] = ()
    ) -> None:
        self.span_bytes = span_bytes
        self.block = AlignedBuffer(AlignedBuffer.capacity_for(block_bytes))
        self.span = AlignedBuffer(AlignedBuffer.capacity_for(span_bytes))
        self.inputs = tuple(AlignedBuffer(AlignedBuffer.capacity_for(n)) for n in input_bytes)

    def for_inputs(self) -> Workspace:
        """The same memory for blocks that others are made of: they lie in the first input."""
        found = copy.copy(self)
        found.block = self.inputs[0]
        return found

    def close(self) -> None:
        """Give the memory back."""
        for buffer in (self.block, self.span, *self.inputs):
            buffer.close()


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """The memory that one thread works in, as numbers: that of a `Workspace`, and what arithmetic
    takes beside it. A batch of small tensors has at most `batch_bytes` in it.
    """

    block_bytes: int
    span_bytes: int
    input_bytes: tuple[int, ...] = ()
    scratch_bytes: int = 0
    batch_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """All of it."""
        parts = (self.block_bytes, self.span_bytes, *self.input_bytes)
        return sum(map(AlignedBuffer.capacity_for, parts)) + self.scratch_bytes

    def with_batches(self, batch_bytes: int, *, has_inputs: bool = False) -> WorkspaceSize:
        """The same with room for batches of so many bytes, also in the first input if asked."""
        inputs = self.input_bytes
        if has_inputs:
            inputs = (max(batch_bytes, *inputs[:1]), *inputs[1:])
        return dataclasses.replace(
            self,
            block_bytes=max(self.block_bytes, batch_bytes),
            span_bytes=max(self.span_bytes, batch_bytes),
            input_bytes=inputs,
            batch_bytes=batch_bytes,
        )

    def new_workspace(self) -> Workspace:
        """A workspace of that size."""
        return Workspace(self.block_bytes, self.span_bytes, self.input_bytes)


File = TypeVar("File", bound=Closable)


class OpenFiles(Generic[File]):
    """Files of one folder, each opened once, by the first thread that needs it."""

    def __init__(self, open_file: Callable[[str], File]) -> None:
        self._open = open_file
        self._files: dict[str, File] = {}
        # To open a file may need another one open.
        self._lock = threading.RLock()
        raise_open_file_limit()

    def __getitem__(self, name: str) -> File:
        with self._lock:
            if name not in self._files:
                self._files[name] = self._open(name)
            return self._files[name]

    def __iter__(self) -> Iterator[File]:
        with self._lock:
            return iter(list(self._files.values()))

    def close(self) -> None:
        """Close every file that was opened."""
        for file in self:
            file.close()


def open_sources(
    checkpoint: Checkpoint, scratch: Path | None = None, shared: SharedReadCache | None = None
) -> OpenFiles[SourceFile]:
    """The tensor files of a checkpoint, for reading; objects as `shared` with other processes.

    Derived files are made when something in them is first read, in the folder `scratch` (that of
    temporary files when None). To open a file raises
    `SourceChangedError` where it is no longer the file whose header says where the tensors are.
    """

    def open_file(name: str) -> SourceFile:
        LOGGER.debug("%s: opened for reading", checkpoint.path(name))
        if name in checkpoint.held:
            return checkpoint.held[name].open()
        derived = checkpoint.derived.get(name)
        if derived is None:
            path, identity = checkpoint.path(name), checkpoint.identities.get(name)
            if shared is not None and isinstance(path, RemotePath):
                return CachedRemoteFile(path, identity, shared, name)
            return open_source(path, identity)
        return derived.open(checkpoint.path(name), files[derived.source], scratch)

    files: OpenFiles[SourceFile] = OpenFiles(open_file)
    return files


# Called with every range of a file that is read or written: its file, where it begins, its bytes.
Watch = Callable[[str, int, memoryview], None]


def max_span_bytes(
    tiles: Tiles, view_of: Callable[[int, int], View | None], grid: BlockGrid
) -> int:
    """The most bytes of a shard that are in memory at once; `view_of(slot, cell)` is its view."""
    most = 0
    for tile in tiles.tiles:
        view = view_of(tile.slot, tile.number)
        if view is not None:
            size = extent(view, tile.local_shape) * grid.itemsize_bytes
            most = max(most, min(size, max(grid.block_bytes, grid.itemsize_bytes)))
            continue
        # Padding makes a shard's rows longer than the tensor's own.
        rows, *row = tile.local_shape[grid.dimension :] or (1,)
        row_bytes = math.prod(row) * grid.itemsize_bytes
        most = max(most, min(rows * row_bytes, max(grid.block_bytes, row_bytes)))
    return most


class _BlockAccess:
    """The tiles of one tensor, and the spans of each block in them."""

    def __init__(self, tensor: StoredTensor, tiles: Tiles) -> None:
        self.tensor = tensor
        self.grid = BlockGrid.of(tensor.shape, tensor.dtype.itemsize_bytes)
        self._tiles = tiles

    @property
    def span_bytes(self) -> int:
        """The most bytes of a shard that are in memory at once."""
        return max_span_bytes(self._tiles, self.tensor.view, self.grid)

    def spans(self, box: Box, grid: BlockGrid | None = None) -> Iterator[tuple[str, Span]]:
        """Every range of a file that lies in a block of the grid, with the file's name."""
        grid = self.grid if grid is None else grid
        for tile in self._tiles.meeting(box):
            address = self.tensor.file_range(tile.slot, tile.number, tile.offset)
            view = self.tensor.view(tile.slot, tile.number)
            for span in list_spans(tile, view, grid, box, address.start_bytes):
                yield address.path, span

    def array(self, memory: memoryview, shape: tuple[int, ...]) -> NDArray[Any]:
        """Memory as an array of the tensor's bare elements."""
        return np.frombuffer(memory, dtype=self.tensor.dtype.storage).reshape(shape)


class BlockReader(_BlockAccess):
    """Reads the blocks of one stored tensor; `watch` is called with every range that is read.

    Raises:
        CoverageError: shards that leave part of the tensor out.
    """

    def __init__(
        self, tensor: StoredTensor, files: OpenFiles[SourceFile], watch: Watch | None = None
    ) -> None:
        super().__init__(tensor, source_tiles(tensor.assembly))
        self._files = files
        self._watch = watch

    def read(self, index: int, workspace: Workspace) -> memoryview:
        """The bytes of block `index` in row-major order, valid until the next call.

        Raises:
            RunError: a file that cannot be read.
            SourceChangedError: a file that became shorter.
        """
        return self._read_spans(self.grid.box(index), self.grid, workspace.block, workspace.span)

    def _read_spans(
        self, box: Box, grid: BlockGrid, into: AlignedBuffer, over: AlignedBuffer
    ) -> memoryview:
        size_bytes = box.elements * grid.itemsize_bytes
        spans = list(self.spans(box, grid))
        # The block lies in one range of one file, in its own order: it is read in place.
        if len(spans) == 1 and spans[0][1].is_all_of(box):
            name, span = spans[0]
            region = into.region(span.start_bytes, size_bytes)
            self._read(name, region, span)
            return region.memory
        # Otherwise each range is read into the second buffer and spread over the block.
        memory = into.region(0, size_bytes).memory
        self._spread(spans, self.array(memory, box.shape), over)
        return memory

    def _spread(
        self, spans: Iterable[tuple[str, Span]], block: NDArray[Any], over: AlignedBuffer
    ) -> None:
        for name, span in spans:
            region = over.region(span.start_bytes, span.size_bytes)
            self._read(name, region, span)
            span.copy(block, span.over(self.array(region.memory, (-1,))), into_block=True)

    def read_box(self, box: Box, into: AlignedBuffer, over: AlignedBuffer) -> NDArray[Any]:
        """The bare elements of any box, of its shape, valid as long as `into` is not used again.

        Args:
            box: of the tensor.
            into: has room for it.
            over: has room for `span_bytes`.

        Raises:
            RunError: a file that cannot be read.
        """
        shape = self.tensor.shape
        cut = max(
            (d for d, size in enumerate(box.shape) if size < shape[d]), default=self.grid.dimension
        )
        cut = max(cut, self.grid.dimension)
        grid = dataclasses.replace(self.grid, dimension=cut, chunk=1, count=0)
        lead = box.shape[:cut]
        if math.prod(lead) == 1:
            memory = self._read_spans(box, grid, into, over)
            return self.array(memory, box.shape)
        # Spans are of single indices of the dimensions before the cut: one after the other.
        array = self.array(into.region(0, box.elements * grid.itemsize_bytes).memory, box.shape)
        for index in np.ndindex(*lead):
            start = tuple(a + i for a, i in zip(box.start, index, strict=False))
            stop = tuple(a + 1 for a in start)
            inner = Box((*start, *box.start[cut:]), (*stop, *box.stop[cut:]))
            part = array[tuple(slice(i, i + 1) for i in index)]
            self._spread(self.spans(inner, grid), part, over)
        return array

    def _read(self, name: str, region: BufferRegion, span: Span) -> None:
        self._files[name].read_into(region, span.start_bytes)
        if self._watch is not None:
            self._watch(name, span.start_bytes, region.memory)

    def read_checked(self, index: int, workspace: Workspace) -> tuple[memoryview, bytes]:
        """Like `read`, with the block's digest, which is compared with the recorded one if any.

        Raises:
            DigestError: bytes that are not those that were written.
        """
        memory = self.read(index, workspace)
        found = block_digest(memory)
        self.verify_digest(index, found)
        return memory, found

    def verify_digest(self, index: int, found: bytes) -> None:
        """Compare the digest of block `index` with the recorded one, if any.

        Raises:
            DigestError: bytes that are not those that were written.
        """
        recorded = self.tensor.digest
        if recorded is not None and recorded.blocks[index] != found:
            file, _ = next(self.spans(self.grid.box(index)))
            raise DigestError(
                f"{self._files[file].path.parent / self.places(index)[0]}, "
                f"{self.grid.box(index)} of tensor {self.tensor.name!r}, is not what was written: "
                f"its digest is {found.hex()}, the manifest says "
                f"{recorded.blocks[index].hex()}. `reshard inspect --digest` lists all that differ"
            )

    def places(self, index: int) -> tuple[str, ...]:
        """The bytes of files that block `index` is read from, as text."""
        return tuple(
            f"{name} bytes {span.start_bytes}:{span.start_bytes + span.size_bytes}"
            for name, span in self.spans(self.grid.box(index))
        )


# What lies between two pieces is read with them, if it is no more than this.
_LARGEST_GAP = PAGE_BYTES
_ALIGNMENT = 64


def aligned_bytes(sizes: IntArray) -> IntArray:
    """What blocks of these sizes take in a batch, at most."""
    rounded: IntArray = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    return rounded


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Block number `block` of the tensors in `rows`, all of which are of the kind `kind`."""

    kind: int
    rows: IntArray
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockMemory:
    """The blocks of one section in memory: `at` is where each begins, of `size_bytes` bytes."""

    memory: memoryview
    at: IntArray
    size_bytes: int

    def __iter__(self) -> Iterator[memoryview]:
        memory, size = self.memory, self.size_bytes
        for begin in self.at.tolist():
            yield memory[begin : begin + size]


@dataclass(frozen=True, slots=True, eq=False)
class _KindSpan:
    """A span of a block in the shard at a place; it begins there at `span.start_bytes`."""

    place: int
    span: Span
    is_whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Pieces `low` to `high`: the same span of all tensors of a section."""

    section: int
    part: _KindSpan
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class _FilePieces:
    """Bytes of files: the file's number, begin and size of each; and which spans they are."""

    file: IntArray
    start: IntArray
    size: IntArray
    stretches: list[_Stretch]

    def ranges(self, gap_bytes: int, most_bytes: int) -> Iterator[CoalescedRange]:
        """The pieces that lie together, up to `most_bytes` of them or one piece."""
        return coalesce(self.file, self.start, self.size, gap_bytes, most_bytes)


class _BatchAccess:
    """The spans of the tensors of one side, in their files."""

    def __init__(
        self, columns: TensorColumns, tiles: Callable[[int], Tiles], watch: Watch | None
    ) -> None:
        self.columns = columns
        self._watch = watch
        self._file_names = list(dict.fromkeys(f for kind in columns.kinds for f in kind.files))
        self._file_numbers = {name: number for number, name in enumerate(self._file_names)}
        self._tiles = lru_cache(maxsize=4096)(tiles)
        self._spans = lru_cache(maxsize=1024)(self._find_spans)
        self.grid = lru_cache(maxsize=4096)(self._make_grid)

    def _make_grid(self, kind: int) -> BlockGrid:
        """The blocks of the tensors of a kind."""
        of = self.columns.kinds[kind]
        return BlockGrid.of(of.layout.shape, of.dtype.itemsize_bytes)

    def span_bytes(self, kind: int) -> int:
        """The most bytes of a shard of this kind that must be in memory at once."""
        return max_span_bytes(self._tiles(kind), self.columns.kinds[kind].view, self.grid(kind))

    def _find_spans(self, number: int, block: int) -> tuple[_KindSpan, ...]:
        kind, grid = self.columns.kinds[number], self.grid(number)
        box, found = grid.box(block), []
        for tile in self._tiles(number).meeting(box):
            place, is_slot = kind.find_place(tile.slot, tile.number)
            start_bytes = tile.offset * grid.itemsize_bytes if is_slot else 0
            view = kind.view(tile.slot, tile.number)
            spans = list_spans(tile, view, grid, box, start_bytes)
            found += [_KindSpan(place, span, span.is_all_of(box)) for span in spans]
        return tuple(found)

    def _find_pieces(self, sections: Sequence[Section]) -> _FilePieces:
        files: list[IntArray] = []
        starts: list[IntArray] = []
        sizes: list[IntArray] = []
        stretches: list[_Stretch] = []
        low = 0
        for number, section in enumerate(sections):
            kind, count = self.columns.kinds[section.kind], len(section.rows)
            first = self.columns.first[section.rows]
            for part in self._spans(section.kind, section.block):
                starts.append(self.columns.starts[first + part.place] + part.span.start_bytes)
                files.append(np.full(count, self._file_numbers[kind.files[part.place]]))
                sizes.append(np.full(count, part.span.size_bytes))
                stretches.append(_Stretch(number, part, low, low + count))
                low += count
        return _FilePieces(_join(files), _join(starts), _join(sizes), stretches)

    def _copy(
        self,
        sections: Sequence[Section],
        pieces: _FilePieces,
        chosen: IntArray,
        memory: memoryview,
        at: IntArray,
        blocks: Sequence[BlockMemory],
        *,
        into_blocks: bool,
    ) -> None:
        """Copy the chosen pieces, of which piece `i` lies at `at[i]` of `memory`."""
        stretches = pieces.stretches
        chosen = np.sort(chosen)
        bounds = [stretch.low for stretch in stretches]
        cuts = np.searchsorted(chosen, [*bounds, len(pieces.start)]).tolist()
        for stretch, low, high in zip(stretches, cuts, cuts[1:], strict=False):
            if low == high:
                continue
            kind = self.columns.kinds[sections[stretch.section].kind]
            storage, of = kind.dtype.storage, blocks[stretch.section]
            span, mine = stretch.part.span, chosen[low:high]
            box_shape = (
                self.grid(sections[stretch.section].kind).box(sections[stretch.section].block).shape
            )
            places, targets = at[mine], of.at[mine - stretch.low]
            for a, b in split_equal_steps(places, targets):
                outer = strided_arrays(memory, storage, span.shape, places[a:b], span.strides)
                inner = strided_arrays(of.memory, storage, box_shape, targets[a:b])
                # Padding is written as zeros, not as what was in the buffer.
                if span.has_gaps and not into_blocks:
                    outer[...] = np.zeros((), dtype=storage)
                span.copy_many(inner, outer, into_block=into_blocks)

    def _show(
        self, pieces: _FilePieces, chosen: IntArray, memory: memoryview, at: IntArray
    ) -> None:
        if self._watch is not None:
            for piece in chosen.tolist():
                begin = int(at[piece])
                part = memory[begin : begin + int(pieces.size[piece])]
                self._watch(self._file_names[pieces.file[piece]], int(pieces.start[piece]), part)


class BatchReader(_BatchAccess):
    """Reads batches of stored tensors; `watch` is called with every piece that is read.

    Raises:
        CoverageError: shards that leave part of a tensor out.
    """

    def __init__(
        self, columns: TensorColumns, files: OpenFiles[SourceFile], watch: Watch | None = None
    ) -> None:
        super().__init__(columns, lambda kind: source_tiles(columns.sample(kind).assembly), watch)
        self._files = files

    def read(self, sections: Sequence[Section], workspace: Workspace) -> list[BlockMemory]:
        """The blocks of each section, in row-major order, valid until the next call.

        Raises:
            RunError: a file that cannot be read.
            SourceChangedError: a file that became shorter.
        """
        pieces = self._find_pieces(sections)
        in_place = self._read_in_place(sections, pieces, workspace.block)
        if in_place is not None:
            return in_place
        memory, blocks, end = workspace.block.memory, [], 0
        for section in sections:
            size = self.grid(section.kind).size_bytes(section.block)
            end += -end % _ALIGNMENT
            at = end + np.arange(len(section.rows), dtype=np.int64) * size
            end += len(section.rows) * size
            blocks.append(BlockMemory(memory, at, size))
        at = np.zeros(len(pieces.start), dtype=np.int64)
        span_memory = workspace.span.memory
        ranges = pieces.ranges(_LARGEST_GAP, workspace.span_bytes)
        for together in pack_rounds(ranges, workspace.span):
            for one, region in together:
                self._files[self._file_names[one.file]].read_into(region, one.start_bytes)
                at[one.pieces] = pieces.start[one.pieces] + (region.start - one.start_bytes)
            chosen = np.concatenate([one.pieces for one, _ in together])
            self._show(pieces, chosen, span_memory, at)
            self._copy(sections, pieces, chosen, span_memory, at, blocks, into_blocks=True)
        return blocks

    def _read_in_place(
        self, sections: Sequence[Section], pieces: _FilePieces, buffer: AlignedBuffer
    ) -> list[BlockMemory] | None:
        stretches = pieces.stretches
        if len(stretches) != len(sections) or not all(one.part.is_whole for one in stretches):
            return None
        regions, end = [], 0
        for one in pieces.ranges(_LARGEST_GAP, buffer.capacity_bytes):
            if end + AlignedBuffer.capacity_for(one.size_bytes) > buffer.capacity_bytes:
                return None
            region = buffer.region(one.start_bytes, one.size_bytes, at=end)
            regions.append((one, region))
            end = region.end_bytes
        at = np.zeros(len(pieces.start), dtype=np.int64)
        for one, region in regions:
            self._files[self._file_names[one.file]].read_into(region, one.start_bytes)
            at[one.pieces] = pieces.start[one.pieces] + (region.start - one.start_bytes)
        self._show(pieces, np.arange(len(at)), buffer.memory, at)
        return [
            BlockMemory(buffer.memory, at[one.low : one.high], one.part.span.size_bytes)
            for one in stretches
        ]

    def verify_digests(self, section: Section, found: Sequence[bytes]) -> None:
        """Compare the digests of a section's blocks with those that are recorded, if any.

        Raises:
            DigestError: bytes that are not those that were written.
        """
        recorded = self.columns.digests
        if recorded is None:
            return
        for row, digest in zip(section.rows.tolist(), found, strict=True):
            expected = recorded.of_block(row, section.block)
            if expected is not None and expected != digest:
                tensor = BlockReader(self.columns.tensor(row), self._files)
                tensor.verify_digest(section.block, digest)


class BatchWriter(_BatchAccess):
    """Writes batches into the files that store tensors, and calls `watch` with each piece."""

    def __init__(
        self, columns: TensorColumns, files: OpenFiles[TargetFile], watch: Watch | None = None
    ) -> None:
        super().__init__(
            columns, lambda kind: target_tiles(columns.sample(kind).stored_layout), watch
        )
        self._files = files

    @property
    def file_names(self) -> list[str]:
        """The files that tensors are in, as `find_written_ranges` numbers them."""
        return self._file_names

    def extents(self, kind: int, block: int) -> IntArray:
        """Where a block of the tensors of a kind is written: shape `(places, 5)`.

        A row has the file's number, the place, the first byte and the end behind the begin of the
        place, with whatever lies between, and how many bytes are written.
        """
        ends: dict[int, tuple[int, int, int]] = {}
        for one in self._spans(kind, block):
            start, size = one.span.start_bytes, one.span.size_bytes
            low, high, written = ends.get(one.place, (start, start + size, 0))
            ends[one.place] = min(low, start), max(high, start + size), written + size
        files = self.columns.kinds[kind].files
        rows = [(self._file_numbers[files[at]], at, *ends[at]) for at in ends]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def has_copies(self, kind: int, block: int) -> bool:
        """Whether a block of the tensors of a kind is written more than once, or with padding."""
        written = int(self.extents(kind, block)[:, 4].sum())
        return written != self.grid(kind).size_bytes(block)

    def write(
        self, sections: Sequence[Section], blocks: Sequence[BlockMemory], workspace: Workspace
    ) -> set[str]:
        """Write the blocks of each section, and return the names of the files that were written.

        Raises:
            RunError: a file that cannot be written, such as on a full disk.
        """
        pieces = self._find_pieces(sections)
        whole = np.zeros(len(pieces.start), dtype=bool)
        in_block = np.zeros(len(pieces.start), dtype=np.int64)
        for stretch in pieces.stretches:
            if stretch.part.is_whole:
                whole[stretch.low : stretch.high] = True
                in_block[stretch.low : stretch.high] = blocks[stretch.section].at
        written: set[str] = set()
        memory = blocks[0].memory if blocks else memoryview(b"")
        span_memory = workspace.span.memory

        def copied() -> Iterator[CoalescedRange]:
            for one in pieces.ranges(0, workspace.span_bytes):
                begin = int(in_block[one.pieces[0]])
                # In memory as in the file, and congruent to its place there modulo a page.
                shifts = in_block[one.pieces] - pieces.start[one.pieces]
                is_there = whole[one.pieces].all() and (shifts == shifts[0]).all()
                if is_there and (begin - one.start_bytes) % PAGE_BYTES == 0:
                    self._write(one, memory[begin : begin + one.size_bytes], written)
                    self._show(pieces, one.pieces, memory, in_block)
                else:
                    yield one

        at = np.zeros(len(pieces.start), dtype=np.int64)
        for together in pack_rounds(copied(), workspace.span):
            for one, region in together:
                at[one.pieces] = pieces.start[one.pieces] + (region.start - one.start_bytes)
            chosen = np.concatenate([one.pieces for one, _ in together])
            self._copy(sections, pieces, chosen, span_memory, at, blocks, into_blocks=False)
            for one, region in together:
                self._write(one, region.memory, written)
            self._show(pieces, chosen, span_memory, at)
        return written

    def show_written(self, sections: Sequence[Section], files: OpenFiles[SourceFile]) -> None:
        """Call `watch` as `write` does, with blocks that are in the files. Raises RunError."""
        pieces = self._find_pieces(sections)
        memory = memoryview(bytearray(int(pieces.size.max(initial=0))))
        at = np.zeros(len(pieces.start), dtype=np.int64)
        for piece in range(len(at)):
            name, size = self._file_names[pieces.file[piece]], int(pieces.size[piece])
            files[name].read_into(memory[:size], int(pieces.start[piece]))
            self._show(pieces, np.array([piece]), memory, at)

    def _write(self, one: CoalescedRange, memory: memoryview, written: set[str]) -> None:
        name = self._file_names[one.file]
        written.add(name)
        self._files[name].write(memory, one.start_bytes)


def _join(columns: list[IntArray]) -> IntArray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)


# Ranges of so many blocks are in memory at once.
_BLOCKS_AT_A_TIME = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class WrittenRanges:
    """Ranges of files: `block` says which of the blocks asked for touches each, by its place there.

    `file` is a number of `BatchWriter.file_names`. All have shape `(ranges,)`.
    """

    block: IntArray
    file: IntArray
    start: IntArray
    stop: IntArray
    size: IntArray


def find_written_ranges(
    writer: BatchWriter, rows: IntArray, blocks: IntArray
) -> Iterator[WrittenRanges]:
    """The ranges that blocks write, some blocks at a time.

    Args:
        writer: of the files.
        rows: the row of the tensor of each block, shape `(blocks,)`.
        blocks: the number of each block in its tensor.
    """
    for at in range(0, len(rows), _BLOCKS_AT_A_TIME):
        some = slice(at, at + _BLOCKS_AT_A_TIME)
        yield _find_ranges(writer, rows[some], blocks[some], at)


def _find_ranges(writer: BatchWriter, rows: IntArray, blocks: IntArray, at: int) -> WrittenRanges:
    columns = writer.columns
    kinds = columns.kind[rows]
    order = np.lexsort((blocks, kinds))
    pairs = np.stack([kinds[order], blocks[order]])
    cuts = np.flatnonzero((pairs[:, 1:] != pairs[:, :-1]).any(axis=0)) + 1
    found: list[IntArray] = [np.zeros((5, 0), dtype=np.int64)]
    for chosen in np.split(order, cuts) if len(order) else ():
        extents = writer.extents(int(kinds[chosen[0]]), int(blocks[chosen[0]]))
        file, place, low, high, size = extents.T[:, None, :]
        begin = columns.starts[columns.first[rows[chosen]][:, None] + place]
        ranges = np.stack(
            [
                np.broadcast_to(at + chosen[:, None], begin.shape),
                np.broadcast_to(file, begin.shape),
                begin + low,
                begin + high,
                np.broadcast_to(size, begin.shape),
            ]
        )
        found.append(ranges.reshape(5, -1))
    return WrittenRanges(*np.concatenate(found, axis=1))
