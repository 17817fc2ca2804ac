"""Memory in pages, where a block lies as in its file, for direct I/O.

Direct I/O moves bytes between a disk and a program's own memory without the page cache's copy.
It wants three things to be multiples of a page: the address in memory, the offset in the file
and the number of bytes. A block of a tensor begins anywhere, so:

1. Memory comes in whole pages, straight from the operating system.
2. A block that begins `d` bytes into a page of its *file* is put `d` bytes into a page of
   *memory*. Then every page boundary of the file is a page boundary of the memory.
3. A block gets its pages for itself. A read of whole pages around the block therefore lands in
   this block's own pages, and may overwrite what lies there before and behind the block::

       file     |---------|---------|---------|---------|
                     [======= block =======]
       memory   |----[=====|=========|=====]---|
                 `----------- pages -----------'
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

from reshard.checkpoint.files.descriptors import Closing
from reshard.errors import UsageError

PAGE_BYTES = 4096
"""The unit of direct I/O: what every disk and file system in use accepts."""


def page_floor(position_bytes: int) -> int:
    """The page boundary at or before a position.

    >>> page_floor(4095), page_floor(4096)
    (0, 4096)
    """
    return position_bytes - position_bytes % PAGE_BYTES


def page_ceiling(position_bytes: int) -> int:
    """The page boundary at or after a position.

    >>> page_ceiling(4096), page_ceiling(4097)
    (4096, 8192)
    """
    return position_bytes + -position_bytes % PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class BufferRegion:
    """A place in an `AlignedBuffer` for bytes that lie somewhere in a file.

    `memory` is the place itself. `pages` are the whole pages around it: they belong to this
    region alone, and whoever fills the region may overwrite all of them. `lead_bytes` is where
    `memory` begins in `pages`. `end_bytes` is the position in the buffer behind the last page:
    the `at` of the next region.
    """

    memory: memoryview
    pages: memoryview
    lead_bytes: int
    end_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.lead_bytes < PAGE_BYTES:
            raise UsageError(
                f"a region that begins {self.lead_bytes} bytes into its first page: "
                f"expected 0 to {PAGE_BYTES - 1}; take regions from AlignedBuffer.region"
            )
        if self.pages.nbytes != page_ceiling(self.lead_bytes + self.memory.nbytes):
            raise UsageError(
                f"a region with {self.pages.nbytes} bytes of pages: expected "
                f"{page_ceiling(self.lead_bytes + self.memory.nbytes)} around its "
                f"{self.memory.nbytes} bytes; take regions from AlignedBuffer.region"
            )

    @property
    def start(self) -> int:
        """Where in the buffer the place begins."""
        return self.end_bytes - self.pages.nbytes + self.lead_bytes


class AlignedBuffer(Closing):
    """Anonymous private memory that begins on a page boundary, for one thread to work in.

    Regions are handed out where the caller says, and nothing is remembered about them: a caller
    who wants several at once puts each behind the one before it (`at=previous.end_bytes`) and
    has room for all of them if the capacity is the sum of their `capacity_for`. The memory
    counts as used only once it is touched.

    >>> with AlignedBuffer(AlignedBuffer.capacity_for(10_000)) as buffer:
    ...     region = buffer.region(file_offset_bytes=5000, size_bytes=10_000)
    ...     print(buffer.capacity_bytes, region.lead_bytes, len(region.memory), len(region.pages))
    16384 904 10000 12288

    Raises `UsageError` for a negative capacity.
    """

    __slots__ = ("_mapping", "_memory", "capacity_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise UsageError(f"a buffer of {capacity_bytes} bytes: expected 0 or more")
        self.capacity_bytes = max(page_ceiling(capacity_bytes), PAGE_BYTES)
        self._mapping: mmap.mmap | None = mmap.mmap(
            -1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._memory = memoryview(self._mapping)

    @staticmethod
    def capacity_for(size_bytes: int) -> int:
        """The capacity that holds one region of `size_bytes`, wherever it lies in its file.

        >>> AlignedBuffer.capacity_for(4096)
        8192
        """
        return page_ceiling(size_bytes + PAGE_BYTES - 1)

    def region(self, file_offset_bytes: int, size_bytes: int, at: int = 0) -> BufferRegion:
        """The place for the `size_bytes` at `file_offset_bytes` of a file.

        Its address is congruent to the file offset modulo 4096, and none of its pages begins
        before position `at` of the buffer.

        Raises `UsageError` for negative numbers, for a region that does not fit and for a
        buffer that is closed.
        """
        if self._mapping is None:
            raise UsageError("a region of a closed buffer: expected an open AlignedBuffer")
        if min(file_offset_bytes, size_bytes, at) < 0:
            raise UsageError(
                f"a region of {size_bytes} bytes at file offset {file_offset_bytes}, buffer "
                f"position {at}: expected none of them to be negative"
            )
        lead_bytes = file_offset_bytes % PAGE_BYTES
        first = page_ceiling(at)
        start = first + lead_bytes
        end = page_ceiling(start + size_bytes)
        if end > self.capacity_bytes:
            raise UsageError(
                f"a region of {size_bytes} bytes for file offset {file_offset_bytes} does not fit "
                f"behind position {at} of a buffer of {self.capacity_bytes} bytes: expected room "
                f"up to {end}; sum AlignedBuffer.capacity_for over the regions held at once"
            )
        return BufferRegion(
            memory=self._memory[start : start + size_bytes],
            pages=self._memory[first:end],
            lead_bytes=lead_bytes,
            end_bytes=end,
        )

    @property
    def memory(self) -> memoryview:
        """All of it; what a region is of it begins at `region.start`."""
        # A view of its own: who still looks at it does not keep this buffer from being closed.
        return self._memory[:]

    def close(self) -> None:
        """Release the memory: at once, or with the last view of it that is still in use."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._memory.release()
            # Python refuses to unmap memory that is still looked at; it unmaps with the last view.
            with contextlib.suppress(BufferError):
                mapping.close()

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else f"{self.capacity_bytes} bytes"
        return f"AlignedBuffer({state})"
