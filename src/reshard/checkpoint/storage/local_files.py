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

Files that are read, fast and in bounded memory, by many threads at once.

Reading a region:

1. A few KiB are read through the page cache; the rest of the steps is for larger regions.
2. What is in the page cache already is copied out of it (`RWF_NOWAIT`). The kernel answers a
   miss by reading the whole request ahead, so the first question is one page and each next one
   four times as large: a miss wastes at most about three times what was found.
3. From the first page that is not cached, whole pages around the region are read directly.
   They land in the region's own pages (`aligned_memory`).
4. What a file system refuses to do directly, and the end of a file, is read buffered.

Files that are written by many threads at once, fast and for certain.

Writing a region::

    file    |---------|---------|---------|---------|
                  [====|=========|=========|==]
                  head |------- body ------| tail
               buffered      direct         buffered

1. The body, the pages wholly inside the region, is written directly if the region's address is
   congruent to its offset; the head and the tail are written through the page cache.
2. Why this is right when threads write disjoint regions at once: a page of the file that holds
   the edge of some region is not wholly inside any region, so *no thread* writes it directly; the
   page cache merges the buffered writes of the neighbours that share it, byte by byte. A page
   that is wholly inside a region is touched by that region's writer alone. So no page is under a
   direct and a buffered write at once, and the kernel keeps one page's two roads in step when
   they follow each other (a direct write flushes and drops the cached copies of its pages).
3. That needs the cache's pages to be no larger than ours. On a machine with larger ones every
   write is buffered.
4. `sync` makes both roads durable: the data, and what is needed to find it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reshard.checkpoint.storage.filesystem import (
    CONTINUES,
    DIRECT_MINIMUM_BYTES,
    Closing,
    close_descriptor,
    describe_free_space,
    open_own,
    reason,
)
from reshard.errors import FormatError, RunError, SourceChangedError, UsageError
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


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of a file, by which a change is noticed: it changes one of these.

    `name` is the last part of the path, so that the same file is the same from any folder.

    >>> FileIdentity.from_json(FileIdentity("a.safetensors", 10, 1_700_000_000, 7).to_json())
    FileIdentity(name='a.safetensors', size_bytes=10, modified_ns=1700000000, inode=7)
    """

    name: str
    size_bytes: int
    modified_ns: int
    inode: int

    def __post_init__(self) -> None:
        # The clock of a file may stand before 1970.
        if self.size_bytes < 0 or self.inode < 0:
            raise UsageError(
                f"a file identity of {self.name!r} with {self.size_bytes} bytes, inode "
                f"{self.inode}: expected neither to be negative"
            )

    @classmethod
    def of(cls, name: str, state: os.stat_result) -> FileIdentity:
        """The identity of the file `name` whose state is `os.stat`'s answer."""
        return cls(name, state.st_size, state.st_mtime_ns, state.st_ino)

    def to_json(self) -> dict[str, str | int]:
        """A value that `json.dumps` takes and `from_json` gives back."""
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "modified_ns": self.modified_ns,
            "inode": self.inode,
        }

    @classmethod
    def from_json(cls, value: Any) -> FileIdentity:
        """The identity that `to_json` wrote. Raises `FormatError` for anything else."""
        expected = {"name": str, "size_bytes": int, "modified_ns": int, "inode": int}
        if (
            not isinstance(value, Mapping)
            or {key: type(item) for key, item in value.items()} != expected
            or min(value["size_bytes"], value["inode"]) < 0
        ):
            raise FormatError(
                f"not a file identity: {value!r}: expected name (text), size_bytes, modified_ns "
                "and inode (whole numbers); was the record written by this program?"
            )
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Damage:
    """`size_bytes` of the file `name` that are not what was written, and how that is known."""

    name: str
    start_bytes: int
    size_bytes: int
    problem: str


class SourceFile(Closing):
    """A file that many threads read at once, each into memory of its own.

    `size_bytes` and `identity` are what the file was when it was opened; `read_bytes` counts the
    bytes asked for and delivered. A context manager; holds two descriptors.

    A file without a name is given as `descriptor`; it is opened anew, and `path` names it in
    errors. Raises `RunError` naming the file when it cannot be opened or is not a regular file,
    and `SourceChangedError` when it is not the `expected` one.
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
        """How many bytes were asked for and delivered so far."""
        return self._read_bytes

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Fill the whole of `region` with the file's bytes from `offset_bytes` on.

        A `BufferRegion` made for this offset by an `AlignedBuffer` is read directly where that
        pays; all of its `pages` may be overwritten. A plain memoryview is read through the page
        cache, and nothing around it is touched.

        Raises `SourceChangedError` when the file ends early, `RunError` when the system cannot
        read, `UsageError` for a negative offset. Each names the file and the offset.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        size_bytes = memory.nbytes
        if offset_bytes < 0:
            raise UsageError(f"{self.path}: reading at offset {offset_bytes}: expected 0 or more")
        if size_bytes == 0:
            return
        view = memory.cast("B")
        try:
            filled = 0
            if isinstance(region, BufferRegion) and size_bytes >= DIRECT_MINIMUM_BYTES:
                filled = self._read_cached(view, offset_bytes)
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
        """Fill `memory` with ranges of `size_bytes` each, one behind the other.

        Those that are not cached are announced together before the first of them is read: many
        small reads that each wait for the disk take its latency each, and share it then.

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
        # Calls in a loop of very many: names that are looked up once.
        (read, flag), descriptor = cached_read, self._descriptor
        for number, offset in enumerate(offsets):
            begin = number * size_bytes
            try:
                count = read(descriptor, [memory[begin : begin + size_bytes]], offset, flag)
            except BlockingIOError:
                count = 0
            except OSError as error:
                # Another read meets what else is wrong.
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
        """Raise `SourceChangedError` unless the file is what it was when it was opened."""
        try:
            now = self._look_at_identity()
        except OSError as error:
            raise RunError(f"{self.path}: cannot be looked at: {reason(error)}") from error
        if now != self.identity:
            raise self._describe_change(now)

    def find_damage(self, offset_bytes: int) -> Damage | None:
        """The damage, if any, in the bytes from which the byte at `offset_bytes` is derived.

        None for a file that is read as it lies: only a derived file can know.
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
            f"found {_describe(now)}; wait until nobody writes it and start over"
        )

    def _look_at_identity(self) -> FileIdentity:
        state = os.fstat(self._descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise RunError(f"{self.path}: not a regular file: expected a file with the bytes in it")
        return FileIdentity.of(self.path.name, state)

    def _read_cached(self, view: memoryview, offset: int) -> int:
        """Copy what is cached from the start of the view on, and return the number of bytes."""
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
            if count < len(piece):
                break
            step *= 4
        return filled

    def _read_pages(self, region: BufferRegion, offset: int, filled: int) -> int:
        """Read whole pages from the one that holds byte `filled` on; returns the bytes filled.

        That may be more than was needed: the last page is read whole.
        """
        first, lead = offset - region.lead_bytes, region.lead_bytes
        needed = lead + region.memory.nbytes
        done = page_floor(lead + filled)
        while self._direct >= 0 and needed - (lead + filled) >= DIRECT_MINIMUM_BYTES:
            try:
                count = read_at(self._direct, region.pages[done:], first + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                break
            # Behind what was granted anything may lie now, also where good bytes lay before.
            filled = max(0, done + count - lead)
            # A page that came in part is asked for again; none at all is the end of the file.
            if page_floor(done + count) == done:
                break
            done = page_floor(done + count)
        return filled

    def _read_buffered(self, view: memoryview, offset: int, filled: int) -> None:
        while filled < len(view):
            count = read_at(self._descriptor, view[filled:], offset + filled)
            if count == 0:
                found = os.fstat(self._descriptor).st_size
                raise SourceChangedError(
                    f"{self.path}: ends early: expected {len(view)} bytes at offset {offset}, "
                    f"found {filled}; the file had {self.size_bytes} bytes when it was opened and "
                    f"has {found} now; put the whole file back and start over"
                )
            filled += count


def _describe(identity: FileIdentity) -> str:
    return (
        f"{identity.size_bytes} bytes modified at {identity.modified_ns} ns "
        f"(inode {identity.inode})"
    )


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}


def free_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes an ordinary user may still write to the file system of an existing `path`.

    Raises `RunError` naming the path.
    """
    try:
        state = os.statvfs(path)
    except OSError as error:
        raise RunError(f"{os.fspath(path)}: cannot ask for free space: {reason(error)}") from error
    return state.f_bavail * state.f_frsize


class TargetFile(Closing):
    """A file of known size that many threads write at once, each its own disjoint regions.

    The file is created, or opened with what an earlier run wrote, and all its space is taken up
    front: a disk that is too small is noticed before anything is written. One that `is_sparse`
    takes space as it is written, since parts of it are given back meanwhile (`give_back`).
    `written_bytes` counts what was handed over; it is safe after `sync`. A context manager; holds
    two descriptors.

    Raises `RunError` naming the file when it cannot be created or there is no room for it, and
    `UsageError` for a negative size.
    """

    def __init__(
        self, path: str | os.PathLike[str], size_bytes: int, *, is_sparse: bool = False
    ) -> None:
        self.path = Path(path)
        self.size_bytes = size_bytes
        if size_bytes < 0:
            raise UsageError(f"{self.path}: a file of {size_bytes} bytes: expected 0 or more")
        self._is_sparse = is_sparse
        self._counter = threading.Lock()
        self._written_bytes = 0
        self._descriptor = self._direct = -1
        try:
            self._descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            self._allocate()
            if mmap.PAGESIZE <= PAGE_BYTES:
                self._direct = open_direct(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError as error:
            self.close()
            raise self._explain_refusal(f"cannot create with {size_bytes} bytes", error) from error

    @property
    def written_bytes(self) -> int:
        """How many bytes were handed to `write` and taken so far."""
        return self._written_bytes

    def write(self, region: memoryview, offset_bytes: int) -> None:
        """Write the whole of `region` at `offset_bytes`; other threads write other regions.

        `region` is contiguous memory. Where its address is congruent to the offset modulo 4096
        (the `memory` of a `BufferRegion` made for this offset) its whole pages go straight to the
        disk.

        Raises `RunError` naming file, offset and reason when the system cannot write, and
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
            if stop - start >= DIRECT_MINIMUM_BYTES and _address(view[start:]) % PAGE_BYTES == 0:
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

    def give_back(self, start_bytes: int, stop_bytes: int) -> None:
        """Give the space of a range back, which reads as zeros then; no thread may write it.

        Where the file system has no holes, nothing happens. Raises `RunError`.
        """
        try:
            punch_hole(self._descriptor, start_bytes, stop_bytes)
        except OSError as error:
            action = f"cannot give back bytes {start_bytes}:{stop_bytes}"
            raise self._explain_refusal(action, error) from error

    def sync(self) -> None:
        """Wait until everything written is on the disk. Raises `RunError` if that fails."""
        try:
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
        if state.st_size == self.size_bytes and state.st_blocks * 512 >= self.size_bytes:
            return
        if self.size_bytes > 0 and not self._is_sparse:
            try:
                allocate(self._descriptor, self.size_bytes)
            except OSError:
                # Space that was taken in vain is free again for others.
                os.ftruncate(self._descriptor, min(state.st_size, self.size_bytes))
                raise
        os.ftruncate(self._descriptor, self.size_bytes)

    def _write_pages(self, view: memoryview, offset: int) -> int:
        """Write whole pages directly; returns the bytes written, fewer than all if refused."""
        done = 0
        while self._direct >= 0 and done < len(view):
            try:
                count = write_at(self._direct, view[done:], offset + done)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                break
            # A page that was written in part is written again; if none was, the other road is
            # taken for what is left.
            if page_floor(count) == 0:
                break
            done += page_floor(count)
        return done

    def _write_buffered(self, view: memoryview, offset: int) -> None:
        while view:
            count = write_at(self._descriptor, view, offset)
            if count == 0:
                raise OSError(errno.EIO, "the system took no bytes and gave no reason")
            view, offset = view[count:], offset + count

    def _explain_refusal(self, action: str, error: OSError) -> RunError:
        if error.errno in _FULL:
            found = describe_free_space(self.path.parent)
            advice = f"{'' if found is None else f': {found}'}; free space and {CONTINUES}"
        elif error.errno in _FORBIDDEN:
            advice = f"; make it writable and {CONTINUES}"
        else:
            advice = f"; check the disk and its file system, then {CONTINUES}"
        return RunError(f"{self.path}: {action}: {reason(error)}{advice}")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
