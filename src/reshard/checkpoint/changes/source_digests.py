"""Digests of what tensors are computed from, compared with those that a manifest recorded.

A computed tensor has other blocks than its sources, so that a block of a source is read in pieces::

    source, bfloat16    |      block 0      |      block 1      |
    computed, float32   | block 0 | block 1 | block 2 | block 3 |

1. A block that is read at once is digested at once.
2. Pieces in order are digested one after the other. A piece whose predecessor is still missing is
   kept, up to `MAX_KEPT_BYTES` for all of them.
3. Blocks of which only a part was read, or pieces that are no range of the tensor, are read again
   at the end (`check_rest`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, Workspace, WorkspaceSize
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.files.pipeline import run_in_threads
from reshard.checkpoint.files.progress import check_stop
from reshard.checkpoint.files.source_file import SourceFile
from reshard.layout import Box

MAX_KEPT_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class _Pieces:
    """The beginning of a block as a digest under way, and pieces that come after a gap."""

    digest: Any
    end: int
    later: dict[int, bytes] = field(default_factory=dict)


class _TensorBlocks:
    """The blocks of a source: which were touched, and which compared."""

    def __init__(self, reader: BlockReader) -> None:
        self.reader, self.lock = reader, threading.Lock()
        self.touched = np.zeros(reader.grid.count, dtype=bool)
        self.compared = np.zeros(reader.grid.count, dtype=bool)
        self.pieces: dict[int, _Pieces] = {}


class SourceDigests:
    """Compares the sources of computed tensors with their recorded digests.

    Args:
        files: of the sources.
    """

    def __init__(self, files: OpenFiles[SourceFile]) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._tensors: dict[str, _TensorBlocks] = {}
        self._complete: set[str] = set()
        self._kept_bytes = 0

    def add(self, source: StoredTensor, box: Box, elements: NDArray[Any]) -> None:
        """Take the elements of a box that was read.

        Raises:
            DigestError: a block that is not what was written.
        """
        if source.digest is None or not box.elements or source.name in self._complete:
            return
        with self._lock:
            found = self._tensors.get(source.name)
            if found is None:
                # Another tensor of the same name, such as of an adapter, is not this one.
                found = _TensorBlocks(BlockReader(source, self._files))
                self._tensors[source.name] = found
        if found.reader.tensor.digest != source.digest:
            return
        grid = found.reader.grid
        start = _flat(box.start, grid.shape)
        stop = _flat([end - 1 for end in box.stop], grid.shape) + 1
        first, last = _block_at(grid, start), _block_at(grid, stop - 1)
        found.touched[first : last + 1] = True
        if stop - start != box.elements:
            return
        memory = np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data
        size = grid.itemsize_bytes
        for block in range(first, last + 1):
            begin, end = _range_of(grid, block)
            low, high = max(begin, start), min(end, stop)
            piece = memory[(low - start) * size : (high - start) * size]
            if (low, high) == (begin, end):
                self._compare(found, block, block_digest(piece))
            else:
                self._add_piece(found, block, (low - begin) * size, piece, (end - begin) * size)

    def _compare(self, found: _TensorBlocks, block: int, digest: bytes) -> None:
        found.reader.expect_digest(block, digest)
        with found.lock:
            found.compared[block] = True
            is_complete = bool(found.compared.all())
        if is_complete:
            with self._lock:
                self._complete.add(found.reader.tensor.name)
                self._tensors.pop(found.reader.tensor.name, None)

    def _add_piece(
        self, found: _TensorBlocks, block: int, at: int, piece: memoryview, size_bytes: int
    ) -> None:
        import xxhash

        with found.lock:
            if found.compared[block]:
                return
            own = found.pieces.setdefault(block, _Pieces(xxhash.xxh3_128(), 0))
            if at > own.end:
                if at not in own.later and self._keep(len(piece)):
                    own.later[at] = bytes(piece)
                return
            if at + len(piece) <= own.end:
                return
            own.digest.update(piece[own.end - at :])
            own.end = at + len(piece)
            while own.end in own.later:
                kept = own.later.pop(own.end)
                self._keep(-len(kept))
                own.digest.update(kept)
                own.end += len(kept)
            if own.end < size_bytes:
                return
            del found.pieces[block]
        self._compare(found, block, own.digest.digest())

    def _keep(self, size_bytes: int) -> bool:
        """Count bytes that are kept, or no longer; return whether there is room for them."""
        with self._lock:
            if self._kept_bytes + size_bytes > MAX_KEPT_BYTES:
                return False
            self._kept_bytes += size_bytes
            return True

    def check_rest(self, threads: int, stop: threading.Event | None = None) -> None:
        """Read the blocks again that were read in part, or not in order.

        Raises:
            DigestError: a block that is not what was written.
            RunError: a file that cannot be read; `stop` was set.
        """

        def tasks() -> Iterator[tuple[BlockReader, int]]:
            for found in list(self._tensors.values()):
                for block in np.flatnonzero(found.touched & ~found.compared).tolist():
                    check_stop(stop)
                    yield found.reader, block

        def work(task: tuple[BlockReader, int], memory: Workspace) -> None:
            reader, block = task
            reader.read_checked(block, memory)

        readers = [found.reader for found in self._tensors.values()]
        if readers:
            size = WorkspaceSize(
                max(reader.grid.largest_bytes for reader in readers),
                max(reader.span_bytes for reader in readers),
            )
            for _ in run_in_threads(tasks(), work, size.new_workspace, threads):
                pass


def _flat(index: tuple[int, ...] | list[int], shape: tuple[int, ...]) -> int:
    """Return the place of an element in row-major order."""
    place = 0
    for at, size in zip(index, shape, strict=True):
        place = place * size + at
    return place


def _steps(grid: BlockGrid) -> tuple[int, int, int]:
    """Return the elements of an outer index and of a chunk, and the blocks of an outer index."""
    if not grid.shape:
        return 1, 1, 1
    length = grid.shape[grid.dimension]
    inner = math.prod(grid.shape[grid.dimension + 1 :])
    return length * inner, grid.chunk * inner, -(-length // grid.chunk)


def _block_at(grid: BlockGrid, place: int) -> int:
    """Return the block of an element."""
    outer, chunk, blocks = _steps(grid)
    index, rest = divmod(place, outer)
    return index * blocks + rest // chunk


def _range_of(grid: BlockGrid, block: int) -> tuple[int, int]:
    """Return the elements of a block as a range in row-major order."""
    outer, chunk, blocks = _steps(grid)
    index, number = divmod(block, blocks)
    begin = index * outer + number * chunk
    return begin, min(begin + chunk, (index + 1) * outer)
