"""Reading and writing local files by many threads, with direct I/O where that is faster.

Direct I/O moves bytes between a disk and a program's own memory without the page cache's copy. The
memory address, the file offset and the number of bytes must be multiples of a page. A block of a
tensor begins anywhere, so:

1. Memory is allocated in whole pages (`AlignedBuffer`).
2. A block that begins `d` bytes into a page of its *file* is placed `d` bytes into a page of
   *memory*, so page boundaries of the file are page boundaries of the memory.
3. Blocks do not share pages of memory, since a read of whole pages around a block may overwrite the
   bytes before and after the block in its first and last page::

       file     |---------|---------|---------|---------|
                     [======= block =======]
       memory   |----[=====|=========|=====]---|
                 `----------- pages -----------'

Reading a region (`SourceFile`):

1. A few KiB are read through the page cache; the remaining steps are for larger regions.
2. Bytes that are cached are copied from the cache (`RWF_NOWAIT`). On a miss the kernel reads the
   whole request ahead. So the first request is a page, and each following request is four times as
   large: a miss wastes at most about three times the bytes that were cached.
3. From the first page that is not cached on, whole pages around the region are read directly.
4. Requests that the file system refuses to serve directly, and the end of a file, are read
   buffered.

Writing a region (`TargetFile`)::

    file    |---------|---------|---------|---------|
                  [====|=========|=========|==]
                  head |------- body ------| tail
               buffered      direct         buffered

1. The body, the pages wholly inside the region, is written directly if the region's address is
   congruent to its offset; the head and the tail are written through the page cache.
2. This is safe when threads write disjoint regions at once. A page of the file that contains the
   edge of a region is not wholly inside any region, so *no thread* writes it directly; the page
   cache merges the buffered writes of the threads that share it, byte by byte. A page that is
   wholly inside a region is written by that region's thread alone. So no page is written directly
   and buffered at the same time, and the kernel keeps direct and buffered accesses that follow
   each other consistent (a direct write flushes and drops the cached copies of its pages).
3. The page cache's pages must be no larger than ours. On a machine with larger pages every write
   is buffered.
4. `sync` makes both kinds of writes durable: the data, and the metadata needed to find it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard._records import Record
from reshard.checkpoint.storage.filesystem import (
    CONTINUES,
    Closing,
    close_descriptor,
    describe_free_space,
    open_own,
    reason,
)
from reshard.errors import RunError, SourceChangedError, UsageError
from reshard.system import (
    REFUSALS,
    allocate,
    announce_read,
    find_cached_read,
    open_direct,
    punch_hole,
    read_at,
    reopen,
    reopen_direct,
    sync_data,
    write_at,
)

PAGE_BYTES = 4096
"""The unit of direct I/O, which every disk and file system in use accepts."""
# For smaller regions the page cache is faster: it reads ahead and gathers writes.
MIN_DIRECT_BYTES = 64 * 1024


def page_floor(position_bytes: int) -> int:
    """Return the page boundary at or before a position.

    >>> page_floor(4095), page_floor(4096)
    (0, 4096)
    """
    return position_bytes - position_bytes % PAGE_BYTES


def page_ceiling(position_bytes: int) -> int:
    """Return the page boundary at or after a position.

    >>> page_ceiling(4096), page_ceiling(4097)
    (4096, 8192)
    """
    return position_bytes + -position_bytes % PAGE_BYTES


class BufferRegion(NamedTuple):
    """A region of an `AlignedBuffer` for bytes of a file.

    `memory` holds the bytes. `pages` are the whole pages around it; they belong to this region
    alone, and filling the region may overwrite all of them. `lead_bytes` is the offset of `memory`
    in `pages`, `end_bytes` the position in the buffer after the last page: the `at` of the next
    region.
    """

    memory: memoryview
    pages: memoryview
    lead_bytes: int
    end_bytes: int

    @property
    def start(self) -> int:
        """The position in the buffer at which the region begins."""
        return self.end_bytes - self.pages.nbytes + self.lead_bytes


class AlignedBuffer(Closing):
    """A page-aligned anonymous private memory buffer for one thread.

    The caller chooses where regions are placed; the buffer does not track them. For several
    regions at once, place each after the previous (`at=previous.end_bytes`); they fit if the
    capacity is the sum of their `capacity_for`. The memory counts as used only once it is touched.

    >>> with AlignedBuffer.of(10_000) as buffer:
    ...     region = buffer.region(file_offset_bytes=5000, size_bytes=10_000)
    ...     print(buffer.capacity_bytes, region.lead_bytes, len(region.memory), len(region.pages))
    16384 904 10000 12288
    """

    __slots__ = ("_mapping", "_memory", "capacity_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        # A mapping cannot be empty.
        self.capacity_bytes = max(page_ceiling(capacity_bytes), PAGE_BYTES)
        # Private, since Python maps shared memory by default, which forked processes write to too.
        self._mapping: mmap.mmap | None = mmap.mmap(
            -1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._memory = memoryview(self._mapping)

    @classmethod
    def of(cls, size_bytes: int) -> AlignedBuffer:
        """Return a buffer with room for a region of `size_bytes` at any file offset."""
        return cls(cls.capacity_for(size_bytes))

    @staticmethod
    def capacity_for(size_bytes: int) -> int:
        """Return the capacity that holds a region of `size_bytes` at any file offset.

        >>> AlignedBuffer.capacity_for(4096)
        8192
        """
        return page_ceiling(size_bytes + PAGE_BYTES - 1)

    def region(self, file_offset_bytes: int, size_bytes: int, at: int = 0) -> BufferRegion:
        """Return a region for the `size_bytes` at `file_offset_bytes` of a file.

        Its address is congruent to the file offset modulo 4096, and none of its pages begins
        before position `at` of the buffer.

        Raises `UsageError` for a region that does not fit, and for a closed buffer.
        """
        if self._mapping is None:
            raise UsageError("a region of a closed buffer: expected an open AlignedBuffer")
        lead_bytes = file_offset_bytes % PAGE_BYTES
        first = page_ceiling(at)
        start = first + lead_bytes
        end = page_ceiling(start + size_bytes)
        if end > self.capacity_bytes:
            raise UsageError(
                f"a region of {size_bytes} bytes for file offset {file_offset_bytes} does not fit "
                f"after position {at} of a buffer of {self.capacity_bytes} bytes: expected room "
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
        """The whole buffer; a region begins at `region.start` of it."""
        # Return a new view, so that its users do not prevent this buffer from being closed.
        return self._memory[:]

    def close(self) -> None:
        """Release the memory, at once or with the last view of it that is in use."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._memory.release()
            # Python does not unmap memory while views exist; it unmaps with the last view.
            with contextlib.suppress(BufferError):
                mapping.close()

    def __repr__(self) -> str:
        state = "closed" if self._mapping is None else f"{self.capacity_bytes} bytes"
        return f"AlignedBuffer({state})"


class FileIdentity(Record):
    """The identity of a file: any change of the file changes some of these fields.

    `name` is the last part of the path, so the identity does not depend on the folder.

    >>> FileIdentity("a", 10, 1_700_000_000, 7).to_json()
    {'name': 'a', 'size_bytes': 10, 'modified_ns': 1700000000, 'inode': 7}
    """

    name: str
    size_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, state: os.stat_result) -> FileIdentity:
        """Return the identity of the file `name` from its `os.stat` result."""
        return cls(name, state.st_size, state.st_mtime_ns, state.st_ino)

    def to_json(self) -> dict[str, str | int]:
        """Return the fields for the description of a conversion."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "modified_ns": self.modified_ns,
            "inode": self.inode,
        }


class Damage(NamedTuple):
    """A range of the file `name` that differs from the bytes originally written, and how that was
    detected.
    """

    name: str
    start_bytes: int
    size_bytes: int
    problem: str


class SourceFile(Closing):
    """A file that many threads read at once, each into its own memory.

    `size_bytes` and `identity` are the values at opening; `read_bytes` counts the bytes requested
    and delivered. The file is a context manager, and holds two descriptors.

    A file without a name is passed as `descriptor`, which is reopened; `path` names it in errors.
    Raises `RunError` if the file cannot be opened or is not a regular file, and
    `SourceChangedError` if its identity is not `expected`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        expected: FileIdentity | None = None,
        descriptor: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._counter = threading.Lock()
        self._read_bytes = 0
        self._cached_read = find_cached_read()
        self._descriptor = self._direct = -1
        try:
            if descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY)
            else:
                self._descriptor = reopen(descriptor, os.O_RDONLY)
            self.identity = self._look_at_identity()
            if expected is not None:
                self.identity = expected
                self.check_unchanged()
            # Whether I/O is direct is a property of an open file, not of a call.
            if descriptor is None:
                self._direct = open_direct(self.path, os.O_RDONLY)
            else:
                self._direct = reopen_direct(descriptor, os.O_RDONLY)
        except OSError as error:
            self.close()
            raise RunError(f"{self.path}: cannot open for reading: {reason(error)}") from error
        except RunError:
            self.close()
            raise

    @property
    def size_bytes(self) -> int:
        """The size of the file when it was opened."""
        return self.identity.size_bytes

    @property
    def read_bytes(self) -> int:
        """The number of bytes requested and delivered so far."""
        return self._read_bytes

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Fill the whole of `region` with the file's bytes from `offset_bytes` on.

        A `BufferRegion` allocated for this offset by an `AlignedBuffer` is read directly where that
        is faster; all of its `pages` may be overwritten. A plain memoryview is read through the
        page cache, and nothing around it is touched.

        Raises `SourceChangedError` if the file ends early, and `RunError` if the system cannot
        read. Both name the file and the offset.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        size_bytes = memory.nbytes
        if size_bytes == 0:
            return
        view = memory.cast("B")
        try:
            filled = 0
            if isinstance(region, BufferRegion) and size_bytes >= MIN_DIRECT_BYTES:
                filled = self._read_cached(view, offset_bytes)
                # Direct I/O requires that page boundaries of the file and of memory coincide.
                if offset_bytes % PAGE_BYTES == region.lead_bytes:
                    filled = self._read_pages(region, offset_bytes, filled)
            self._read_buffered(view, offset_bytes, filled)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot read {size_bytes} bytes at offset {offset_bytes}: "
                f"{reason(error)}; check the device, then {CONTINUES}"
            ) from error
        with self._counter:
            self._read_bytes += size_bytes

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Fill `memory` with consecutive ranges of `size_bytes` each.

        Ranges that are not cached are all announced to the system before the first of them is
        read, so that they share the disk's latency instead of each waiting for it.

        Raises as `read_into`.
        """
        late = self._read_cached_ranges(memory, offsets, size_bytes)
        for number in late:
            announce_read(self._descriptor, offsets[number], size_bytes)
        for number in late:
            begin = number * size_bytes
            self.read_into(memory[begin : begin + size_bytes], offsets[number])

    def _read_cached_ranges(
        self, memory: memoryview, offsets: Sequence[int], size_bytes: int
    ) -> Sequence[int]:
        """Copy the ranges that are cached, and return the numbers of the others."""
        cached_read = self._cached_read
        if cached_read is None or not size_bytes:
            return range(len(offsets))
        late: list[int] = []
        # Local names are faster, and this loop runs very many times.
        (read, flag), descriptor = cached_read, self._descriptor
        for number, offset in enumerate(offsets):
            begin = number * size_bytes
            try:
                count = read(descriptor, [memory[begin : begin + size_bytes]], offset, flag)
            except BlockingIOError:
                count = 0
            except OSError as error:
                # Other errors are raised by the read that follows.
                # A file system that refuses this call will always refuse it: do not try again.
                if error.errno in REFUSALS:
                    self._cached_read = None
                late += range(number, len(offsets))
                break
            if count != size_bytes:
                late.append(number)
        with self._counter:
            self._read_bytes += (len(offsets) - len(late)) * size_bytes
        return late

    def check_unchanged(self) -> None:
        """Raise `SourceChangedError` unless the file is the same as when it was opened."""
        try:
            now = self._look_at_identity()
        except OSError as error:
            raise RunError(f"{self.path}: cannot stat: {reason(error)}") from error
        if now != self.identity:
            raise self._describe_change(now)

    def find_damage(self, offset_bytes: int) -> Damage | None:
        """Return the damage, if any, in the bytes from which the byte at `offset_bytes` is derived.

        None for a plain file: only derived content can be checked.
        """
        return None

    def close(self) -> None:
        """Close the file. No thread may be reading it."""
        self._descriptor = close_descriptor(self._descriptor)
        self._direct = close_descriptor(self._direct)

    def __repr__(self) -> str:
        return f"SourceFile({str(self.path)!r}, {self.size_bytes} bytes)"

    def _describe_change(self, now: FileIdentity) -> SourceChangedError:
        return SourceChangedError(
            f"{self.path}: changed since it was opened: expected {_describe(self.identity)}, "
            f"found {_describe(now)}; wait until no process writes it, then start over"
        )

    def _look_at_identity(self) -> FileIdentity:
        state = os.fstat(self._descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise RunError(f"{self.path}: not a regular file; give a file with the bytes in it")
        return FileIdentity.of(self.path.name, state)

    def _read_cached(self, view: memoryview, offset: int) -> int:
        """Copy cached bytes from the start of the view on, and return their number."""
        filled, step = 0, PAGE_BYTES
        while (cached_read := self._cached_read) is not None and filled < len(view):
            read, flag = cached_read
            piece = view[filled : filled + step]
            try:
                count = read(self._descriptor, [piece], offset + filled, flag)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self._cached_read = None
                break
            filled += count
            # The bytes after a short read are not cached, or the file ends.
            if count < len(piece):
                break
            step *= 4
        return filled

    def _read_pages(self, region: BufferRegion, offset: int, filled: int) -> int:
        """Read whole pages from the page of byte `filled` on, and return the bytes filled.

        The result may exceed the region, since the last page is read whole.
        """
        first, lead = offset - region.lead_bytes, region.lead_bytes
        needed = lead + region.memory.nbytes
        done = page_floor(lead + filled)
        while self._direct >= 0 and needed - (lead + filled) >= MIN_DIRECT_BYTES:
            try:
                count = read_at(self._direct, region.pages[done:], first + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                break
            # The call may have overwritten bytes after those it read, including bytes read before.
            filled = max(0, done + count - lead)
            # Request a page again that was read in part. Without a whole page, the file ends.
            if page_floor(done + count) == done:
                break
            done = page_floor(done + count)
        return filled

    def _read_buffered(self, view: memoryview, offset: int, filled: int) -> None:
        while filled < len(view):
            count = read_at(self._descriptor, view[filled:], offset + filled)
            if count == 0:
                size = os.fstat(self._descriptor).st_size
                raise SourceChangedError(
                    f"{self.path}: ends early: expected {len(view)} bytes at offset {offset}, "
                    f"found {filled}; the file had {self.size_bytes} bytes when it was opened and "
                    f"has {size} now; restore the whole file and start over"
                )
            filled += count


def _describe(identity: FileIdentity) -> str:
    return (
        f"{identity.size_bytes} bytes modified at {identity.modified_ns} ns "
        f"(inode {identity.inode})"
    )


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


class TargetFile(Closing):
    """A file of known size that many threads write at once, each to disjoint regions.

    The file is created, or opened with the content that an earlier run wrote, and all its space is
    allocated up front, so a disk that is too small is reported before anything is written. With
    `is_sparse`, space is taken as the file is written, because parts of it are released meanwhile
    (`release`). `written_bytes` counts the bytes accepted; they are durable after `sync`. The file
    is a context manager, and holds two descriptors.

    Raises `RunError` naming the file if it cannot be created or the disk lacks room.
    """

    def __init__(
        self, path: str | os.PathLike[str], size_bytes: int, *, is_sparse: bool = False
    ) -> None:
        self.path = Path(path)
        self.size_bytes = size_bytes
        self._is_sparse = is_sparse
        self._counter = threading.Lock()
        self._written_bytes = 0
        self._descriptor = self._direct = -1
        try:
            self._descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            self._allocate()
            # With larger pages, direct and buffered writes could touch the same page.
            if mmap.PAGESIZE <= PAGE_BYTES:
                # The name may have become a link since `open_own` checked it.
                self._direct = open_direct(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError as error:
            self.close()
            raise self._explain_refusal(f"cannot create with {size_bytes} bytes", error) from error

    @property
    def written_bytes(self) -> int:
        """The number of bytes passed to `write` and accepted so far."""
        return self._written_bytes

    def write(self, region: memoryview, offset_bytes: int) -> None:
        """Write the whole of `region` at `offset_bytes`; other threads write other regions.

        `region` is contiguous memory. If its address is congruent to the offset modulo 4096 (the
        `memory` of a `BufferRegion` allocated for this offset), its whole pages are written
        directly.

        Raises `RunError` naming file, offset and reason if the system cannot write, and
        `UsageError` for bytes outside the file.
        """
        size_bytes = region.nbytes
        if not 0 <= offset_bytes <= self.size_bytes - size_bytes:
            raise UsageError(
                f"{self.path}: writing {size_bytes} bytes at offset {offset_bytes}: expected them "
                f"inside the file's {self.size_bytes} bytes"
            )
        if size_bytes == 0:
            return
        view = region.cast("B")
        try:
            start = page_ceiling(offset_bytes) - offset_bytes
            stop = page_floor(offset_bytes + size_bytes) - offset_bytes
            if stop - start >= MIN_DIRECT_BYTES and _address(view[start:]) % PAGE_BYTES == 0:
                self._write_buffered(view[:start], offset_bytes)
                start += self._write_pages(view[start:stop], offset_bytes + start)
            else:
                start = 0
            self._write_buffered(view[start:], offset_bytes + start)
        except OSError as error:
            action = f"cannot write {size_bytes} bytes at offset {offset_bytes}"
            raise self._explain_refusal(action, error) from error
        with self._counter:
            self._written_bytes += size_bytes

    def release(self, start_bytes: int, stop_bytes: int) -> None:
        """Release the disk space of a range, which then reads as zeros.

        No thread may write the range. Does nothing if the file system does not support holes.
        Raises `RunError`.
        """
        try:
            punch_hole(self._descriptor, start_bytes, stop_bytes)
        except OSError as error:
            action = f"cannot release bytes {start_bytes}:{stop_bytes}"
            raise self._explain_refusal(action, error) from error

    def sync(self) -> None:
        """Wait until everything written is on the disk. Raises `RunError` if that fails."""
        try:
            # This syncs the file, so it includes what was written by the other descriptor.
            sync_data(self._descriptor)
        except OSError as error:
            raise self._explain_refusal("cannot sync", error) from error

    def close(self) -> None:
        """Close the file without syncing it. No thread may be writing it."""
        self._descriptor = close_descriptor(self._descriptor)
        self._direct = close_descriptor(self._direct)

    def __repr__(self) -> str:
        return f"TargetFile({str(self.path)!r}, {self.size_bytes} bytes)"

    def _allocate(self) -> None:
        state = os.fstat(self._descriptor)
        # An earlier run has allocated the space already; st_blocks is always in units of 512 bytes.
        if state.st_size == self.size_bytes and state.st_blocks * 512 >= self.size_bytes:
            return
        if self.size_bytes > 0 and not self._is_sparse:
            try:
                allocate(self._descriptor, self.size_bytes)
            except OSError:
                # Free the space that was allocated in vain.
                os.ftruncate(self._descriptor, min(state.st_size, self.size_bytes))
                raise
        os.ftruncate(self._descriptor, self.size_bytes)

    def _write_pages(self, view: memoryview, offset: int) -> int:
        """Write whole pages directly, and return the bytes written: fewer than all if refused."""
        done = 0
        while self._direct >= 0 and done < len(view):
            try:
                count = write_at(self._direct, view[done:], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                break
            # A page that was written in part is written again; if none was, the rest is written
            # buffered.
            if page_floor(count) == 0:
                break
            done += page_floor(count)
        return done

    def _write_buffered(self, view: memoryview, offset: int) -> None:
        while view:
            count = write_at(self._descriptor, view, offset)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote no bytes and reported no error")
            view, offset = view[count:], offset + count

    def _explain_refusal(self, action: str, error: OSError) -> RunError:
        if error.errno in _FULL:
            free = describe_free_space(self.path.parent)
            advice = f"{'' if free is None else f': {free}'}; free space and {CONTINUES}"
        elif error.errno in _FORBIDDEN:
            advice = f"; make it writable and {CONTINUES}"
        else:
            advice = f"; check the disk and its file system, then {CONTINUES}"
        return RunError(f"{self.path}: {action}: {reason(error)}{advice}")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
