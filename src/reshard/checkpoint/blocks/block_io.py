"""One block of a tensor, read from the shards that hold it.

A reader gathers a block in the tensor's own row-major order. It works in a `Workspace`, the memory
of one thread, and never allocates more than that has::

    files --(one range at a time)--> span buffer --(Span.copy)--> block

A block that is one range of one file, in its own order, is read without the copy. Many tensors at
once are read and written by `batches`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.blocks.strided_spans import extent, spans_of
from reshard.checkpoint.blocks.tiles import Span, Tiles, source_tiles
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.files.aligned_memory import AlignedBuffer, BufferRegion
from reshard.checkpoint.files.descriptors import Closable
from reshard.checkpoint.files.places.host_reads import HostReads, SharingFile
from reshard.checkpoint.files.places.place_file import open_source
from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.checkpoint.files.source_file import SourceFile
from reshard.errors import DigestError
from reshard.layout import Box
from reshard.log import LOGGER
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
    checkpoint: Checkpoint, scratch: Path | None = None, shared: HostReads | None = None
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
            if shared is not None and isinstance(path, PlacePath):
                return SharingFile(path, identity, shared, name)
            return open_source(path, identity)
        return derived.open(checkpoint.path(name), files[derived.source], scratch)

    files: OpenFiles[SourceFile] = OpenFiles(open_file)
    return files


# Called with every range of a file that is read or written: its file, where it begins, its bytes.
Watch = Callable[[str, int, memoryview], None]


def largest_span_bytes(
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
        return largest_span_bytes(self._tiles, self.tensor.view, self.grid)

    def spans(self, box: Box, grid: BlockGrid | None = None) -> Iterator[tuple[str, Span]]:
        """Every range of a file that lies in a block of the grid, with the file's name."""
        grid = self.grid if grid is None else grid
        for tile in self._tiles.meeting(box):
            address = self.tensor.file_range(tile.slot, tile.number, tile.offset)
            view = self.tensor.view(tile.slot, tile.number)
            for span in spans_of(tile, view, grid, box, address.start_bytes):
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
        self.expect_digest(index, found)
        return memory, found

    def expect_digest(self, index: int, found: bytes) -> None:
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
