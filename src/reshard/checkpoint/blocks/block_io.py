"""Reading and writing blocks of tensors, in batches.

A `BlockReader` gathers blocks of tensors in row-major order, a `BlockWriter` spreads them over
files. They work in a `Workspace`, the memory of a thread, and allocate no other memory.

Many small tensors share reads and writes. A *section* contains the same block of each of several
tensors of the same kind. Their shards are alike, so a span of the kind is a span of each tensor,
and a single copy of arrays with an additional dimension rearranges all of them. A batch is a list
of sections; the batch of a large tensor is a single block::

    reader   files --(ranges)--> span buffer --(a copy for each span)--> blocks
    writer   blocks --(a copy for each span)--> span buffer --(ranges)--> files

1. `pieces` are the byte ranges of the spans of all tensors of a batch.
2. Adjacent pieces are merged into a range, which a single call reads or writes.
3. Between a range and the blocks, tensors at equal distances are copied as a single array.

A block whose bytes are a range of a file, in the same order, is read and written without the span
buffer. Computed tensors read boxes of their sources that are not blocks (`BlockReader.read_box`).
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.blocks.spans import Span, Tiles, list_spans, source_tiles, target_tiles
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.storage.byte_ranges import (
    CoalescedRange,
    coalesce,
    pack_rounds,
    split_equal_steps,
    strided_arrays,
)
from reshard.checkpoint.storage.filesystem import Closing
from reshard.checkpoint.storage.local_files import (
    PAGE_BYTES,
    AlignedBuffer,
    BufferRegion,
    SourceFile,
    TargetFile,
)
from reshard.checkpoint.storage.remote_files import open_source
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import DigestError
from reshard.layout import Box
from reshard.log import LOGGER
from reshard.runs import IntArray, concatenate
from reshard.system import raise_open_file_limit

if TYPE_CHECKING:
    from reshard.checkpoint.storage.shared_read_cache import ReadSpan, SharedReadCache


class Workspace(Closing):
    """The memory of a thread: room for a block, and for a span of a shard.

    `inputs` has room for boxes of the sources from which a block is computed.
    """

    def __init__(
        self, block_bytes: int, span_bytes: int, input_bytes: tuple[int, ...] = ()
    ) -> None:
        self.span_bytes = span_bytes
        self.block, self.span = AlignedBuffer.of(block_bytes), AlignedBuffer.of(span_bytes)
        self.inputs = tuple(map(AlignedBuffer.of, input_bytes))

    def for_inputs(self) -> Workspace:
        """Return the same memory for reading sources of other blocks, into the first input."""
        # A shallow copy: the buffers are the same memory.
        workspace = copy.copy(self)
        workspace.block = self.inputs[0]
        return workspace

    def close(self) -> None:
        """Release the memory."""
        for buffer in (self.block, self.span, *self.inputs):
            buffer.close()


class WorkspacePair(Closing):
    """The memory of a thread that reads blocks of two checkpoints."""

    def __init__(self, first: Workspace, second: Workspace) -> None:
        self.first, self.second = first, second

    def close(self) -> None:
        """Release the memory."""
        self.first.close()
        self.second.close()


class WorkspaceSize(Record):
    """The size of a thread's `Workspace`, and of its additional memory for arithmetic.

    A batch of small tensors has at most `batch_bytes`.
    """

    block_bytes: int
    span_bytes: int
    input_bytes: tuple[int, ...] = ()
    scratch_bytes: int = 0
    batch_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """The total size."""
        parts = (self.block_bytes, self.span_bytes, *self.input_bytes)
        return sum(map(AlignedBuffer.capacity_for, parts)) + self.scratch_bytes

    def with_batches(self, batch_bytes: int, *, has_inputs: bool = False) -> WorkspaceSize:
        """Return the size with room for batches; if `has_inputs`, also in the first input."""
        inputs = self.input_bytes
        if has_inputs:
            inputs = (max(batch_bytes, *inputs[:1]), *inputs[1:])
        return self.replace(
            block_bytes=max(self.block_bytes, batch_bytes),
            span_bytes=max(self.span_bytes, batch_bytes),
            input_bytes=inputs,
            batch_bytes=batch_bytes,
        )

    def new_workspace(self) -> Workspace:
        """Return a workspace of that size."""
        return Workspace(self.block_bytes, self.span_bytes, self.input_bytes)


File = TypeVar("File", bound=Closing)


class OpenFiles(Generic[File]):
    """Files of a folder, each opened once by the first thread that needs it."""

    def __init__(self, open_file: Callable[[str], File]) -> None:
        self._open = open_file
        self._files: dict[str, File] = {}
        # Reentrant: opening a file may need another open file.
        self._lock = threading.RLock()
        # A checkpoint of a thousand ranks has more files than a process may open by default.
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
    """Return the tensor files of a checkpoint, opened for reading when first used.

    Opening a file raises `SourceChangedError` if it is not the file whose header was read.

    Args:
        checkpoint: the checkpoint.
        scratch: the folder in which derived files are created; the system's temporary folder if
            None.
        shared: a cache of remote objects, shared with other processes of this host.
    """

    def open_file(name: str) -> SourceFile:
        LOGGER.debug("%s: opened for reading", checkpoint.path(name))
        if name in checkpoint.held:
            return checkpoint.held[name]()
        derived = checkpoint.derived.get(name)
        if derived is None:
            path, identity = checkpoint.path(name), checkpoint.identities.get(name)
            if shared is not None and isinstance(path, RemotePath):
                from reshard.checkpoint.storage.shared_read_cache import CachedRemoteFile

                return CachedRemoteFile(path, identity, shared, name)
            return open_source(path, identity)
        return derived.open(checkpoint.path(name), files[derived.source], scratch)

    files: OpenFiles[SourceFile] = OpenFiles(open_file)
    return files


def share_reads(
    checkpoint: Checkpoint, readers: int, tasks: Iterable[Iterable[ReadSpan]]
) -> SharedReadCache:
    """Return a cache of a remote checkpoint's files, shared by the readers of this host.

    `tasks` are the spans of each task of this process, in the order in which they begin.
    """
    from reshard.checkpoint.storage.shared_read_cache import SharedReadCache

    # Derived files are created by each process, and held ones are in its memory: not shared.
    sizes = {
        file.name: file.size_bytes
        for file in checkpoint.files
        if file.name not in checkpoint.derived and file.name not in checkpoint.held
    }
    spans = [[span for span in task if span[0].name in sizes] for task in tasks]
    return SharedReadCache(str(checkpoint.folder), readers, sizes, spans)


# Called with every range of a file that is read or written: its file, first byte and content.
Watch = Callable[[str, int, memoryview], None]


def max_span_bytes(
    tiles: Tiles, view_of: Callable[[int, int], View | None], grid: BlockGrid
) -> int:
    """Return the maximum bytes of a shard in memory; `view_of(slot, cell)` is its view."""
    max_bytes = 0
    for tile in tiles.tiles:
        view = view_of(tile.slot, tile.number)
        if view is not None:
            size = view.extent(tile.local_shape) * grid.itemsize_bytes
            max_bytes = max(max_bytes, min(size, max(grid.block_bytes, grid.itemsize_bytes)))
            continue
        # With padding, a shard's rows may be longer than the tensor's.
        rows, *row = tile.local_shape[grid.dimension :] or (1,)
        row_bytes = math.prod(row) * grid.itemsize_bytes
        max_bytes = max(max_bytes, min(rows * row_bytes, max(grid.block_bytes, row_bytes)))
    return max_bytes


# Pieces are merged over gaps of at most this size, whose bytes are read too.
_MAX_GAP = PAGE_BYTES
# A multiple of every element size, so that the blocks of a batch are aligned arrays.
_ALIGNMENT = 64


def aligned_bytes(sizes: IntArray) -> IntArray:
    """Return the maximum bytes that blocks of these sizes take in a batch."""
    rounded: IntArray = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    return rounded


class Section(NamedTuple):
    """Block number `block` of the tensors in `rows`, all of the kind `kind`."""

    kind: int
    rows: IntArray
    block: int


class BlockMemory(Record, eq=False):
    """The blocks of a section in memory: each has `size_bytes` bytes, from an offset in `at`."""

    memory: memoryview
    at: IntArray
    size_bytes: int

    def __iter__(self) -> Iterator[memoryview]:
        memory, size = self.memory, self.size_bytes
        for begin in self.at.tolist():
            yield memory[begin : begin + size]


#: The digests of the blocks of each section.
SectionDigests = list[list[bytes]]


def digest_blocks(blocks: Sequence[BlockMemory]) -> SectionDigests:
    """Return the digests of the blocks of each section."""
    return [list(map(block_digest, of_section)) for of_section in blocks]


class _Stretch(NamedTuple):
    """Pieces `low` to `high`: the same span of all tensors of a section.

    `is_whole` is whether the span is the whole block, in the block's own order.
    """

    section: int
    span: Span
    is_whole: bool
    low: int
    high: int


class _FilePieces(NamedTuple):
    """Byte ranges of files, as columns of file numbers, begins and sizes, with their spans."""

    file: IntArray
    start: IntArray
    size: IntArray
    stretches: list[_Stretch]

    def ranges(self, gap_bytes: int, max_bytes: int) -> Iterator[CoalescedRange]:
        """Yield ranges that cover all pieces, merging pieces with small gaps between them."""
        return coalesce(self.file, self.start, self.size, gap_bytes, max_bytes)


class _BlockFiles:
    """The spans of the tensors of a source or a target, in their files."""

    def __init__(
        self, columns: TensorColumns, tiles: Callable[[int], Tiles], watch: Watch | None
    ) -> None:
        self.columns = columns
        self._watch = watch
        self._file_names = list(dict.fromkeys(f for kind in columns.kinds for f in kind.files))
        self._file_numbers = {name: number for number, name in enumerate(self._file_names)}
        # The caches belong to the object and are released with it. Threads look up few kinds often.
        self._tiles = lru_cache(maxsize=4096)(tiles)
        self._spans = lru_cache(maxsize=1024)(self._find_spans)
        self.grid = lru_cache(maxsize=4096)(lambda kind: columns.kinds[kind].grid)

    def span_bytes(self, kind: int) -> int:
        """Return the maximum bytes of a shard of this kind in memory at once."""
        return max_span_bytes(self._tiles(kind), self.columns.kinds[kind].view, self.grid(kind))

    def _find_spans(self, number: int, block: int) -> tuple[tuple[int, Span, bool], ...]:
        """Return the spans of a block of a kind: place, span, and whether it is the whole block."""
        grid = self.grid(number)
        box = grid.box(block)
        spans = self._list_spans(number, box, grid)
        return tuple((place, span, span.is_all_of(box)) for place, span in spans)

    def _list_spans(self, number: int, box: Box, grid: BlockGrid) -> Iterator[tuple[int, Span]]:
        """Yield the place and the span of every range of a box of tensors of a kind.

        Spans are relative to the begin of their place.
        """
        kind = self.columns.kinds[number]
        for tile in self._tiles(number).intersecting(box):
            place, start_bytes = kind.find_place(tile.slot, tile.number, tile.offset)
            view = kind.view(tile.slot, tile.number)
            for span in list_spans(tile, view, grid, box, start_bytes):
                yield place, span

    def _locate_spans(self, row: int, box: Box, grid: BlockGrid) -> Iterator[tuple[str, int, Span]]:
        """Yield the file, the first byte and the span of every range of a box of a tensor."""
        number, first = int(self.columns.kind[row]), int(self.columns.first[row])
        files = self.columns.kinds[number].files
        for place, span in self._list_spans(number, box, grid):
            yield files[place], int(self.columns.starts[first + place]) + span.start_bytes, span

    def _find_pieces(self, sections: Sequence[Section]) -> _FilePieces:
        files: list[IntArray] = []
        starts: list[IntArray] = []
        sizes: list[IntArray] = []
        stretches: list[_Stretch] = []
        low = 0
        for number, section in enumerate(sections):
            kind, count = self.columns.kinds[section.kind], len(section.rows)
            first = self.columns.first[section.rows]
            for place, span, is_whole in self._spans(section.kind, section.block):
                starts.append(self.columns.starts[first + place] + span.start_bytes)
                files.append(np.full(count, self._file_numbers[kind.files[place]]))
                sizes.append(np.full(count, span.size_bytes))
                stretches.append(_Stretch(number, span, is_whole, low, low + count))
                low += count
        return _FilePieces(concatenate(files), concatenate(starts), concatenate(sizes), stretches)

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
        """Copy the chosen pieces; piece `i` is at `at[i]` of `memory`."""
        stretches = pieces.stretches
        chosen = np.sort(chosen)
        bounds = [stretch.low for stretch in stretches]
        cuts = np.searchsorted(chosen, [*bounds, len(pieces.start)]).tolist()
        for stretch, low, high in zip(stretches, cuts, cuts[1:], strict=False):
            if low == high:
                continue
            kind = self.columns.kinds[sections[stretch.section].kind]
            storage, block = kind.dtype.storage, blocks[stretch.section]
            span, mine = stretch.span, chosen[low:high]
            box_shape = (
                self.grid(sections[stretch.section].kind).box(sections[stretch.section].block).shape
            )
            places, targets = at[mine], block.at[mine - stretch.low]
            for a, b in split_equal_steps(places, targets):
                outer = strided_arrays(memory, storage, span.shape, places[a:b], span.strides)
                inner = strided_arrays(block.memory, storage, box_shape, targets[a:b])
                # Padding is written as zeros, not as the buffer's previous content.
                if span.has_gaps and not into_blocks:
                    outer[...] = np.zeros((), dtype=storage)
                span.copy(inner, outer, into_block=into_blocks)

    def _show(
        self, pieces: _FilePieces, chosen: IntArray, memory: memoryview, at: IntArray
    ) -> None:
        if self._watch is not None:
            for piece in chosen.tolist():
                begin = int(at[piece])
                part = memory[begin : begin + int(pieces.size[piece])]
                self._watch(self._file_names[pieces.file[piece]], int(pieces.start[piece]), part)


class BlockReader(_BlockFiles):
    """A reader of blocks of stored tensors.

    Args:
        tensors: the tensors as columns, or a single tensor, which gets row 0.
        files: the files of the tensors.
        watch: called with the file, the first byte and the content of every piece that is read.

    Raises:
        CoverageError: shards that leave part of a tensor out.
    """

    def __init__(
        self,
        tensors: TensorColumns | StoredTensor,
        files: OpenFiles[SourceFile],
        watch: Watch | None = None,
    ) -> None:
        if isinstance(tensors, StoredTensor):
            # The tensor caches its assembly; the columns would create a new tensor without it.
            assembly, columns = tensors.assembly, TensorColumns.of({tensors.name: tensors})
            super().__init__(columns, lambda _: source_tiles(assembly), watch)
        else:
            columns = tensors
            super().__init__(
                columns, lambda kind: source_tiles(columns.sample(kind).assembly), watch
            )
        self._files = files

    def workspace_size(self, rows: IntArray | None = None) -> WorkspaceSize:
        """Return the memory that a thread needs to read the tensors in these rows, or all."""
        number = self.columns.kind if rows is None else self.columns.kind[rows]
        # Not `np.unique`, which imports `numpy.ma`: a tenth of the start of a command.
        kinds = np.flatnonzero(np.bincount(number)).tolist()
        return WorkspaceSize(
            max((self.grid(kind).largest_bytes for kind in kinds), default=0),
            max(map(self.span_bytes, kinds), default=0),
        )

    def read_block(self, block: int, workspace: Workspace, row: int = 0) -> memoryview:
        """Return the bytes of a block in row-major order, valid until the next call.

        Raises:
            RunError: a file that cannot be read.
            SourceChangedError: a file that became shorter.
        """
        section = Section(int(self.columns.kind[row]), np.array([row]), block)
        return next(iter(self.read([section], workspace)[0]))

    def read_checked(
        self, block: int, workspace: Workspace, row: int = 0
    ) -> tuple[memoryview, bytes]:
        """Return a block as `read_block` does, and its digest, checked against a recorded digest.

        Raises:
            DigestError: bytes that differ from those written.
        """
        memory = self.read_block(block, workspace, row)
        digest = block_digest(memory)
        self.verify_digest(block, digest, row)
        return memory, digest

    def read(self, sections: Sequence[Section], workspace: Workspace) -> list[BlockMemory]:
        """Return the blocks of each section in row-major order, valid until the next call.

        Raises:
            RunError: a file that cannot be read.
            SourceChangedError: a file that became shorter.
        """
        pieces = self._find_pieces(sections)
        # Most blocks are contiguous in their files, and need no copy.
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
        ranges = pieces.ranges(_MAX_GAP, workspace.span_bytes)
        for packed in pack_rounds(ranges, workspace.span):
            for joined, region in packed:
                self._read(joined, region, pieces, at)
            chosen = np.concatenate([joined.pieces for joined, _ in packed])
            self._show(pieces, chosen, span_memory, at)
            self._copy(sections, pieces, chosen, span_memory, at, blocks, into_blocks=True)
        return blocks

    def read_digested(
        self, sections: Sequence[Section], workspace: Workspace
    ) -> tuple[list[BlockMemory], SectionDigests]:
        """Return blocks as `read` does, and their digests, checked against recorded digests.

        Raises:
            DigestError: bytes that differ from those written.
        """
        blocks = self.read(sections, workspace)
        digests = digest_blocks(blocks)
        self.verify_digests(sections, digests)
        return blocks, digests

    def _read_in_place(
        self, sections: Sequence[Section], pieces: _FilePieces, buffer: AlignedBuffer
    ) -> list[BlockMemory] | None:
        stretches = pieces.stretches
        if len(stretches) != len(sections) or not all(s.is_whole for s in stretches):
            return None
        packed, end = [], 0
        for joined in pieces.ranges(_MAX_GAP, buffer.capacity_bytes):
            if end + AlignedBuffer.capacity_for(joined.size_bytes) > buffer.capacity_bytes:
                return None
            packed.append((joined, buffer.region(joined.start_bytes, joined.size_bytes, at=end)))
            end = packed[-1][1].end_bytes
        at = np.zeros(len(pieces.start), dtype=np.int64)
        for joined, region in packed:
            self._read(joined, region, pieces, at)
        self._show(pieces, np.arange(len(at)), buffer.memory, at)
        return [
            BlockMemory(buffer.memory, at[s.low : s.high], s.span.size_bytes) for s in stretches
        ]

    def _read(
        self, joined: CoalescedRange, region: BufferRegion, pieces: _FilePieces, at: IntArray
    ) -> None:
        """Read a range into a region, and set the positions of its pieces in the buffer."""
        self._files[self._file_names[joined.file]].read_into(region, joined.start_bytes)
        at[joined.pieces] = pieces.start[joined.pieces] + (region.start - joined.start_bytes)

    def read_box(
        self, box: Box, into: AlignedBuffer, over: AlignedBuffer, row: int = 0
    ) -> NDArray[Any]:
        """Return the elements of a box as an array of its shape, valid until `into` is used again.

        Args:
            box: the box of the tensor.
            into: a buffer with room for the box.
            over: a buffer with room for `span_bytes`.
            row: the row of the tensor.

        Raises:
            RunError: a file that cannot be read.
        """
        kind = int(self.columns.kind[row])
        grid, storage = self.grid(kind), self.columns.kinds[kind].dtype.storage
        cut = max(
            (d for d, size in enumerate(box.shape) if size < grid.shape[d]), default=grid.dimension
        )
        cut = max(cut, grid.dimension)
        grid = grid.replace(dimension=cut, chunk=1, count=0)
        lead, size_bytes = box.shape[:cut], box.elements * grid.itemsize_bytes
        if math.prod(lead) == 1:
            spans = list(self._locate_spans(row, box, grid))
            # If the box is a single range of a file, in the same order, it is read in place.
            if len(spans) == 1 and spans[0][2].is_all_of(box):
                name, start_bytes, _ = spans[0]
                region = into.region(start_bytes, size_bytes)
                self._read_range(name, start_bytes, region)
                return np.frombuffer(region.memory, storage).reshape(box.shape)
        array = np.frombuffer(into.region(0, size_bytes).memory, storage).reshape(box.shape)
        # A span has a single index of each dimension before the cut, so the loop is over these.
        for index in np.ndindex(*lead):
            start = tuple(a + i for a, i in zip(box.start, index, strict=False))
            stop = tuple(a + 1 for a in start)
            inner = Box((*start, *box.start[cut:]), (*stop, *box.stop[cut:]))
            part = array[tuple(slice(i, i + 1) for i in index)]
            for name, start_bytes, span in self._locate_spans(row, inner, grid):
                region = over.region(start_bytes, span.size_bytes)
                self._read_range(name, start_bytes, region)
                elements = np.frombuffer(region.memory, storage)
                span.copy(part, span.over(elements), into_block=True)
        return array

    def _read_range(self, name: str, start_bytes: int, region: BufferRegion) -> None:
        self._files[name].read_into(region, start_bytes)
        if self._watch is not None:
            self._watch(name, start_bytes, region.memory)

    def verify_digests(self, sections: Sequence[Section], digests: SectionDigests) -> None:
        """Compare the digests of the blocks of sections with the recorded digests, if any.

        Raises:
            DigestError: bytes that differ from those written.
        """
        if self.columns.digests is not None:
            for section, of_section in zip(sections, digests, strict=True):
                for row, digest in zip(section.rows.tolist(), of_section, strict=True):
                    self.verify_digest(section.block, digest, row)

    def verify_digest(self, block: int, digest: bytes, row: int = 0) -> None:
        """Compare the digest of a block with the recorded digest, if any.

        Raises:
            DigestError: bytes that differ from those written.
        """
        recorded = self.columns.digests
        expected = None if recorded is None else recorded.of_block(row, block)
        if expected is not None and expected != digest:
            box = self.grid(int(self.columns.kind[row])).box(block)
            places = self.places(block, row)
            file = places[0].rpartition(" bytes ")[0]
            raise DigestError(
                f"{self._files[file].path.parent / places[0]}, {box} of tensor "
                f"{self.columns.names[row]!r}, is not what was written: its digest is "
                f"{digest.hex()}, the manifest has {expected.hex()}. `reshard inspect --digest` "
                "lists all that differ"
            )

    def places(self, block: int, row: int = 0) -> tuple[str, ...]:
        """Return the byte ranges from which a block is read, as text."""
        grid = self.grid(int(self.columns.kind[row]))
        return tuple(
            f"{name} bytes {start_bytes}:{start_bytes + span.size_bytes}"
            for name, start_bytes, span in self._locate_spans(row, grid.box(block), grid)
        )


class BlockWriter(_BlockFiles):
    """A writer of batches to the files of tensors, which calls `watch` with each piece."""

    def __init__(
        self, columns: TensorColumns, files: OpenFiles[TargetFile], watch: Watch | None = None
    ) -> None:
        super().__init__(
            columns, lambda kind: target_tiles(columns.sample(kind).stored_layout), watch
        )
        self._files = files

    @property
    def file_names(self) -> list[str]:
        """The files of the tensors, in the order of `WrittenRanges.file`."""
        return self._file_names

    def extents(self, kind: int, block: int) -> IntArray:
        """Return the byte ranges of a block of the tensors of a kind: shape `(places, 5)`.

        The columns are the file's number, the number of the place, the first byte and the end
        relative to the begin of the place, and the number of bytes written between them.
        """
        ends: dict[int, tuple[int, int, int]] = {}
        for place, span, _ in self._spans(kind, block):
            start, size = span.start_bytes, span.size_bytes
            low, high, written = ends.get(place, (start, start + size, 0))
            ends[place] = min(low, start), max(high, start + size), written + size
        files = self.columns.kinds[kind].files
        rows = [(self._file_numbers[files[at]], at, *ends[at]) for at in ends]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def has_copies(self, kind: int, block: int) -> bool:
        """Return whether blocks with this number, of a kind, are stored with copies or padding."""
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
            if stretch.is_whole:
                whole[stretch.low : stretch.high] = True
                in_block[stretch.low : stretch.high] = blocks[stretch.section].at
        written: set[str] = set()
        memory = blocks[0].memory if blocks else memoryview(b"")
        span_memory = workspace.span.memory

        def write_in_place() -> Iterator[CoalescedRange]:
            """Write the ranges that need no copy, and yield the others."""
            for joined in pieces.ranges(0, workspace.span_bytes):
                begin = int(in_block[joined.pieces[0]])
                # The pieces must lie in memory as in the file. Their address must be congruent to
                # the file offset modulo a page, since direct I/O writes whole pages.
                shifts = in_block[joined.pieces] - pieces.start[joined.pieces]
                is_same = whole[joined.pieces].all() and (shifts == shifts[0]).all()
                if is_same and (begin - joined.start_bytes) % PAGE_BYTES == 0:
                    self._write(joined, memory[begin : begin + joined.size_bytes], written)
                    self._show(pieces, joined.pieces, memory, in_block)
                else:
                    yield joined

        at = np.zeros(len(pieces.start), dtype=np.int64)
        for packed in pack_rounds(write_in_place(), workspace.span):
            for joined, region in packed:
                at[joined.pieces] = pieces.start[joined.pieces] + (
                    region.start - joined.start_bytes
                )
            chosen = np.concatenate([joined.pieces for joined, _ in packed])
            self._copy(sections, pieces, chosen, span_memory, at, blocks, into_blocks=False)
            for joined, region in packed:
                self._write(joined, region.memory, written)
            self._show(pieces, chosen, span_memory, at)
        return written

    def show_written(self, sections: Sequence[Section], files: OpenFiles[SourceFile]) -> None:
        """Call `watch` as `write` does, with blocks already in the files. Raises RunError."""
        pieces = self._find_pieces(sections)
        # All pieces share a buffer, since `watch` uses the content before it returns.
        memory = memoryview(bytearray(int(pieces.size.max(initial=0))))
        at = np.zeros(len(pieces.start), dtype=np.int64)
        for piece in range(len(at)):
            name, size = self._file_names[pieces.file[piece]], int(pieces.size[piece])
            files[name].read_into(memory[:size], int(pieces.start[piece]))
            self._show(pieces, np.array([piece]), memory, at)

    def _write(self, joined: CoalescedRange, memory: memoryview, written: set[str]) -> None:
        name = self._file_names[joined.file]
        written.add(name)
        self._files[name].write(memory, joined.start_bytes)


# The number of blocks whose ranges are in memory at once.
_BLOCKS_AT_A_TIME = 1 << 15


class WrittenRanges(NamedTuple):
    """The byte ranges that blocks write: columns of shape `(ranges,)`.

    A range extends from the first to the last byte that a block writes in a shard, so it may
    contain bytes of other blocks: `size` is the number of bytes that the block writes in it.
    `block` is the position of the block among those requested, `file` an index of
    `BlockWriter.file_names`.
    """

    block: IntArray
    file: IntArray
    start: IntArray
    stop: IntArray
    size: IntArray


def find_written_ranges(
    writer: BlockWriter, rows: IntArray, blocks: IntArray
) -> Iterator[WrittenRanges]:
    """Yield the ranges that blocks write, some blocks at a time.

    Blocks of the same number, of tensors of one kind, write the same ranges relative to the begins
    of their tensors' shards: these ranges are found once, and added to the begins as columns.

    Args:
        writer: the writer of the files.
        rows: the row of each block's tensor, shape `(blocks,)`.
        blocks: the number of each block in its tensor.
    """
    for at in range(0, len(rows), _BLOCKS_AT_A_TIME):
        part = slice(at, at + _BLOCKS_AT_A_TIME)
        yield _find_ranges(writer, rows[part], blocks[part], at)


def _find_ranges(writer: BlockWriter, rows: IntArray, blocks: IntArray, at: int) -> WrittenRanges:
    columns = writer.columns
    kinds = columns.kind[rows]
    parts: list[IntArray] = [np.zeros((5, 0), dtype=np.int64)]
    for chosen in split_alike(kinds, blocks):
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
        parts.append(ranges.reshape(5, -1))
    return WrittenRanges(*np.concatenate(parts, axis=1))


def split_alike(first: IntArray, second: IntArray) -> list[IntArray]:
    """Return the rows of each pair of values, in the order of the pairs; rows keep their order.

    >>> [rows.tolist() for rows in split_alike(np.array([1, 0, 1, 1]), np.array([5, 2, 5, 4]))]
    [[1], [3], [0, 2]]
    """
    order = np.lexsort((second, first))
    pairs = np.stack([first[order], second[order]])
    cuts = np.flatnonzero((pairs[:, 1:] != pairs[:, :-1]).any(axis=0)) + 1
    return np.split(order, cuts) if len(order) else []
