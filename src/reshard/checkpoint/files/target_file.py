"""Files that are written by many threads at once, fast and for certain.

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

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from reshard.checkpoint.files.aligned_memory import PAGE_BYTES, page_ceiling, page_floor
from reshard.checkpoint.files.descriptors import (
    CONTINUES,
    DIRECT_MINIMUM_BYTES,
    Closing,
    close_descriptor,
    describe_full,
    reason,
)
from reshard.checkpoint.files.own_files import open_own
from reshard.errors import RunError, UsageError
from reshard.system import REFUSALS, allocate, open_direct, punch_hole, sync_data, write_at

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
            found = describe_full(self.path.parent)
            advice = f"{'' if found is None else f': {found}'}; free space and {CONTINUES}"
        elif error.errno in _FORBIDDEN:
            advice = f"; make it writable and {CONTINUES}"
        else:
            advice = f"; check the disk and its file system, then {CONTINUES}"
        return RunError(f"{self.path}: {action}: {reason(error)}{advice}")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address
