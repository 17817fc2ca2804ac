"""Batches of blocks, read together and written together: many small tensors share reads and writes.

A *section* is one block of each of several tensors of one kind: their shards are cut alike, so that
one span of the kind is a span of each tensor, and they are rearranged by one copy of arrays that
have one dimension more. A batch is a list of sections, that of a large tensor is of one block::

    reader   files --(ranges)--> span buffer --(a copy for each span)--> blocks
    writer   blocks --(a copy for each span)--> span buffer --(ranges)--> files

1. `pieces` are the bytes of files that the spans of all tensors of a batch take.
2. Pieces that lie together are one range, which is read or written by one call.
3. Between a range and the blocks, tensors at equal distances are one array.

Where blocks are ranges of files in their own order, they are read in place, and written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.checkpoint.blocks.block_io import (
    BlockReader,
    OpenFiles,
    Watch,
    Workspace,
    largest_span_bytes,
)
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.blocks.joined_ranges import (
    JoinedRange,
    arrays_at,
    equal_steps,
    in_rounds,
    join_pieces,
)
from reshard.checkpoint.blocks.strided_spans import spans_of
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.blocks.tiles import Span, Tiles, source_tiles, target_tiles
from reshard.checkpoint.files.aligned_memory import PAGE_BYTES, AlignedBuffer
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.files.target_file import TargetFile
from reshard.runs import IntArray

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

    def ranges(self, gap_bytes: int, most_bytes: int) -> Iterator[JoinedRange]:
        """The pieces that lie together, up to `most_bytes` of them or one piece."""
        return join_pieces(self.file, self.start, self.size, gap_bytes, most_bytes)


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
        return largest_span_bytes(self._tiles(kind), self.columns.kinds[kind].view, self.grid(kind))

    def _find_spans(self, number: int, block: int) -> tuple[_KindSpan, ...]:
        kind, grid = self.columns.kinds[number], self.grid(number)
        box, found = grid.box(block), []
        for tile in self._tiles(number).meeting(box):
            place, is_slot = kind.find_place(tile.slot, tile.number)
            start_bytes = tile.offset * grid.itemsize_bytes if is_slot else 0
            view = kind.view(tile.slot, tile.number)
            spans = spans_of(tile, view, grid, box, start_bytes)
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
            for a, b in equal_steps(places, targets):
                outer = arrays_at(memory, storage, span.shape, places[a:b], span.strides)
                inner = arrays_at(of.memory, storage, box_shape, targets[a:b])
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
        for together in in_rounds(ranges, workspace.span):
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

    def expect_digests(self, section: Section, found: Sequence[bytes]) -> None:
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
                tensor.expect_digest(section.block, digest)


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
        """The files that tensors are in, as `touched_ranges` numbers them."""
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

        def copied() -> Iterator[JoinedRange]:
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
        for together in in_rounds(copied(), workspace.span):
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

    def _write(self, one: JoinedRange, memory: memoryview, written: set[str]) -> None:
        name = self._file_names[one.file]
        written.add(name)
        self._files[name].write(memory, one.start_bytes)


def _join(columns: list[IntArray]) -> IntArray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
