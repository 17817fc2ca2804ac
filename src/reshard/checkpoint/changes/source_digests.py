"""Comparing sources that are read in other blocks with the digests that a manifest recorded.

The blocks of a computed tensor differ from those of its sources, so a block of a source is read in
pieces. So is a block that becomes a part of a fused tensor::

    source, bfloat16    |      block 0      |      block 1      |
    computed, float32   | block 0 | block 1 | block 2 | block 3 |

1. A block that is read in a single call is digested in a single call.
2. Pieces in order are digested incrementally. A piece whose predecessor is missing is kept, up to
   `MAX_KEPT_BYTES` in total.
3. Blocks that were read in part only, or in pieces that are not ranges of the tensor, are read
   again at the end (`verify_rest`).
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.block_io import (
    BlockReader,
    OpenFiles,
    Watch,
    Workspace,
    WorkspaceSize,
)
from reshard.checkpoint.blocks.grid import block_digest
from reshard.checkpoint.blocks.spans import source_tiles
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.checkpoint.storage.threads import check_stop, run_in_threads
from reshard.layout import Box

MAX_KEPT_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class _Pieces:
    """The incremental digest of the beginning of a block up to `end`, and pieces after a gap."""

    digest: Any
    end: int
    later: dict[int, bytes] = field(default_factory=dict)


class _TensorBlocks:
    """The blocks of a source, and which of them were read and compared."""

    def __init__(self, tensor: StoredTensor, files: OpenFiles[SourceFile]) -> None:
        self.tensor, self.reader, self.lock = tensor, BlockReader(tensor, files), threading.Lock()
        self.grid = grid = self.reader.grid(0)
        self.touched = np.zeros(grid.count, dtype=bool)
        self.compared = np.zeros(grid.count, dtype=bool)
        self.pieces: dict[int, _Pieces] = {}
        length = grid.shape[grid.dimension] if grid.shape else 1
        inner = math.prod(grid.shape[grid.dimension + 1 :]) * grid.itemsize_bytes
        # For an index of the dimensions before the split dimension: its bytes, the bytes of a
        # chunk, and the number of its blocks.
        self._steps = length * inner, grid.chunk * inner, -(-length // grid.chunk)

    def touch(self, start: int, stop: int) -> range:
        """Mark the blocks of a range of bytes as read, and return them."""
        outer, chunk, blocks = self._steps
        first, last = (at // outer * blocks + at % outer // chunk for at in (start, stop - 1))
        self.touched[first : last + 1] = True
        return range(first, last + 1)

    def range_of(self, block: int) -> tuple[int, int]:
        """Return the bytes of a block as a range of the tensor in row-major order."""
        outer, chunk, blocks = self._steps
        index, number = divmod(block, blocks)
        begin = index * outer + number * chunk
        return begin, min(begin + chunk, (index + 1) * outer)


class _StoredRange(NamedTuple):
    """Bytes `start:stop` of a file, which are the bytes of a tensor from byte `place` on.

    `place` is None for a shard whose bytes are not a range of the tensor: its blocks are read again
    at the end.
    """

    start: int
    stop: int
    place: int | None
    blocks: _TensorBlocks


class SourceDigests:
    """A comparison of the sources of computed and fused tensors with their recorded digests.

    Args:
        files: the files of the sources.
        absorbed: tensors that are read as parts of others, by ranges of files (`watching`).
    """

    def __init__(self, files: OpenFiles[SourceFile], absorbed: Iterable[StoredTensor] = ()) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._tensors: dict[str, _TensorBlocks] = {}
        self._complete: set[str] = set()
        self._kept_bytes = 0
        self._ranges: dict[str, list[_StoredRange]] = {}
        for tensor in absorbed:
            self._register(tensor)
        for ranges in self._ranges.values():
            ranges.sort(key=lambda r: r.start)

    def _register(self, tensor: StoredTensor) -> None:
        """Record the ranges of files in which a tensor is stored."""
        blocks = _TensorBlocks(tensor, self._files)
        size, shape = blocks.grid.itemsize_bytes, tensor.shape
        for tile in source_tiles(tensor.assembly).tiles:
            box = tile.bounds
            start, stop = _flat_range(box, shape)
            is_plain = (
                tensor.view(tile.slot, tile.number) is None
                and box.shape == tile.local_shape
                and all(len(pieces) == 1 for pieces in tile.start)
                and stop - start == box.elements
            )
            place = tensor.file_range(tile.slot, tile.number, tile.offset)
            length = (stop - start) * size if is_plain else tensor.shard_size_bytes(tile.slot)
            stored = _StoredRange(
                place.start_bytes,
                place.start_bytes + length,
                start * size if is_plain else None,
                blocks,
            )
            self._ranges.setdefault(place.path, []).append(stored)
        self._tensors[tensor.name] = blocks

    def watching(self, watch: Watch | None) -> Watch | None:
        """Return a function to call with every range that is read, which calls `watch` too."""
        if not self._ranges:
            return watch

        def both(file: str, start_bytes: int, memory: memoryview) -> None:
            self._watch(file, start_bytes, memory)
            if watch is not None:
                watch(file, start_bytes, memory)

        return both

    def _watch(self, file: str, start_bytes: int, memory: memoryview) -> None:
        ranges = self._ranges.get(file, [])
        stop_bytes = start_bytes + len(memory)
        at = bisect.bisect_right(ranges, start_bytes, key=lambda r: r.start) - 1
        # Ranges of tied tensors are equal.
        while at > 0 and ranges[at - 1].stop > start_bytes:
            at -= 1
        for stored in ranges[max(at, 0) :]:
            if stored.start >= stop_bytes:
                break
            low, high = max(stored.start, start_bytes), min(stored.stop, stop_bytes)
            if low < high and stored.place is None:
                stored.blocks.touched[:] = True
            elif low < high and stored.place is not None:
                piece = memory[low - start_bytes : high - start_bytes]
                self._add_range(stored.blocks, stored.place + low - stored.start, piece)

    def add(self, source: StoredTensor, box: Box, elements: NDArray[Any]) -> None:
        """Add the elements of a box that was read.

        Raises:
            DigestError: a block that differs from its recorded digest.
        """
        if source.digest is None or not box.elements or source.name in self._complete:
            return
        with self._lock:
            blocks = self._tensors.get(source.name)
            if blocks is None:
                # Tensors of another checkpoint, such as an adapter, may have the same name: the
                # digests are compared below.
                blocks = _TensorBlocks(source, self._files)
                self._tensors[source.name] = blocks
        if blocks.tensor.digest != source.digest:
            return
        size = blocks.grid.itemsize_bytes
        start, stop = _flat_range(box, source.shape)
        if stop - start != box.elements:
            blocks.touch(start * size, stop * size)
            return
        # Digests take contiguous memory only.
        memory = np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data
        self._add_range(blocks, start * size, memory)

    def _add_range(self, blocks: _TensorBlocks, start: int, memory: memoryview) -> None:
        """Add a range of a tensor's bytes in row-major order."""
        stop = start + len(memory)
        for block in blocks.touch(start, stop):
            if blocks.compared[block]:
                continue
            begin, end = blocks.range_of(block)
            low, high = max(begin, start), min(end, stop)
            piece = memory[low - start : high - start]
            if (low, high) == (begin, end):
                self._compare(blocks, block, block_digest(piece))
            else:
                self._add_piece(blocks, block, low - begin, piece, end - begin)

    def _compare(self, blocks: _TensorBlocks, block: int, digest: bytes) -> None:
        blocks.reader.verify_digest(block, digest)
        with blocks.lock:
            blocks.compared[block] = True
            is_complete = bool(blocks.compared.all())
        if is_complete:
            with self._lock:
                self._complete.add(blocks.tensor.name)
                self._tensors.pop(blocks.tensor.name, None)

    def _add_piece(
        self, blocks: _TensorBlocks, block: int, at: int, piece: memoryview, size_bytes: int
    ) -> None:
        import xxhash

        with blocks.lock:
            if blocks.compared[block]:
                return
            own = blocks.pieces.setdefault(block, _Pieces(xxhash.xxh3_128(), 0))
            if at > own.end:
                if at not in own.later and self._keep(len(piece)):
                    own.later[at] = bytes(piece)
                return
            if at + len(piece) <= own.end:
                return
            own.digest.update(piece[own.end - at :])
            own.end = at + len(piece)
            while own.end in own.later:
                later = own.later.pop(own.end)
                self._keep(-len(later))
                own.digest.update(later)
                own.end += len(later)
            if own.end < size_bytes:
                return
            del blocks.pieces[block]
        self._compare(blocks, block, own.digest.digest())

    def _keep(self, size_bytes: int) -> bool:
        """Add to the number of kept bytes, and return whether there is room for them."""
        with self._lock:
            if self._kept_bytes + size_bytes > MAX_KEPT_BYTES:
                return False
            self._kept_bytes += size_bytes
            return True

    def verify_rest(self, threads: int, stop: threading.Event | None = None) -> None:
        """Read the blocks again that were read in part, or out of order.

        Raises:
            DigestError: a block that differs from its recorded digest.
            RunError: a file that cannot be read; `stop` was set.
        """

        def tasks() -> Iterator[tuple[BlockReader, int]]:
            for blocks in list(self._tensors.values()):
                for block in np.flatnonzero(blocks.touched & ~blocks.compared).tolist():
                    check_stop(stop)
                    yield blocks.reader, block

        def work(task: tuple[BlockReader, int], memory: Workspace) -> None:
            reader, block = task
            reader.read_checked(block, memory)

        sizes = [blocks.reader.workspace_size() for blocks in self._tensors.values()]
        if sizes:
            size = WorkspaceSize(
                max(size.block_bytes for size in sizes), max(size.span_bytes for size in sizes)
            )
            for _ in run_in_threads(tasks(), work, size.new_workspace, threads):
                pass


def _flat_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the range of elements in row-major order from the first to the last of a box."""
    first = last = 0
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        first = first * size + start
        last = last * size + stop - 1
    return first, last + 1


def find_absorbed(
    before: Mapping[str, StoredTensor], after: Mapping[str, StoredTensor]
) -> tuple[StoredTensor, ...]:
    """Return the tensors with digests that became parts of other tensors."""
    if before is after or (isinstance(before, TensorColumns) and before.digests is None):
        return ()
    remaining = {tensor.digest.tensor for tensor in after.values() if tensor.digest is not None}
    return tuple(
        tensor
        for tensor in before.values()
        if tensor.digest is not None and tensor.digest.tensor not in remaining
    )
