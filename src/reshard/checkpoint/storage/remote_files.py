"""Objects of a store as files: read by many threads at once, and prefetched.

Even the smallest request takes as long as transferring some hundred KiB. So ranges that are close
together are read by a single request, and small ranges that are known beforehand, such as the
metadata of each tensor, are all requested at once::

    objects    |head|.... w ....|tail|head|.... b ....|tail|
    requests   |-1--|           |-----2---|           |-3--|       all in flight at once
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.checkpoint.storage.byte_ranges import ByteRange, coalesce
from reshard.checkpoint.storage.filesystem import CONTINUES, reason
from reshard.checkpoint.storage.local_files import BufferRegion, FileIdentity, SourceFile
from reshard.checkpoint.storage.object_stores import IN_FLIGHT, ObjectState
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import RunError, SourceChangedError

#: The maximum gap that is read to save a request, and the maximum size of such a request.
JOINED_BYTES = 128 << 10
_MAX_JOINED_BYTES = 4 << 20
_THREADS = 4
# More threads for remote files, since they wait for responses most of the time.
_REMOTE_THREADS = 16


class RemoteFile(SourceFile):
    """An object of a store, read by ranges; see `SourceFile`."""

    def __init__(self, path: RemotePath, expected: FileIdentity | None = None) -> None:
        self.path = path
        self._counter = threading.Lock()
        self._read_bytes = 0
        self._key = path.key
        try:
            self._source = path.store.source
            self.identity = self._look_at_identity() if expected is None else expected
        except OSError as error:
            raise RunError(f"{path}: cannot open for reading: {reason(error)}") from error

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Fill the whole of `region` with the object's bytes from `offset_bytes` on.

        Raises `SourceChangedError` if the object was replaced or is shorter, and `RunError` if the
        store does not answer.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        if memory.nbytes:
            self._read(memory.cast("B"), offset_bytes)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Fill `memory` with consecutive ranges of `size_bytes` each, merging adjacent ranges.

        Raises as `read_into`.
        """
        start = np.array(offsets, dtype=np.int64)
        file, size = np.zeros_like(start), np.full_like(start, size_bytes)
        for joined in coalesce(file, start, size, JOINED_BYTES, _MAX_JOINED_BYTES):
            if len(joined.pieces) == 1:
                at = int(joined.pieces[0]) * size_bytes
                self.read_into(memory[at : at + size_bytes], joined.start_bytes)
                continue
            content = memoryview(bytearray(joined.size_bytes))
            self._read(content, joined.start_bytes)
            for number in joined.pieces.tolist():
                begin, at = offsets[number] - joined.start_bytes, number * size_bytes
                memory[at : at + size_bytes] = content[begin : begin + size_bytes]

    def close(self) -> None:
        """Do nothing: requests do not keep a file open."""

    def _expect_inside(self, view: memoryview, offset: int) -> None:
        if offset + len(view) > self.size_bytes:
            raise SourceChangedError(
                f"{self.path}: ends early: expected {len(view)} bytes at offset {offset}, and it "
                f"had {self.size_bytes} bytes when it was opened; restore the whole file and start "
                "over"
            )

    def _read(self, view: memoryview, offset: int) -> None:
        self._expect_inside(view, offset)
        try:
            state = self._source.read_into(self._key, offset, view)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot read {len(view)} bytes at offset {offset}: {reason(error)}; "
                f"check the connection, then {CONTINUES}"
            ) from error
        identity = self._identify(state)
        if identity != self.identity:
            raise self._describe_change(identity)
        with self._counter:
            self._read_bytes += len(view)

    def _look_at_identity(self) -> FileIdentity:
        state = self._source.head(self._key)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return self._identify(state)

    def _identify(self, state: ObjectState) -> FileIdentity:
        return FileIdentity.of(self.path.name, state.stat_result())

    def _describe_change(self, now: FileIdentity) -> SourceChangedError:
        return SourceChangedError(
            f"{self.path}: changed since it was opened: expected {self.size_bytes} bytes of "
            f"{self.identity.modified_ns} ns, found {now.size_bytes} of {now.modified_ns} ns, or "
            "other content of that size; wait until no process writes it, then start over"
        )


def open_source(path: Path, expected: FileIdentity | None = None) -> SourceFile:
    """Open a local file or an object for reading. Raises as `SourceFile`."""
    if isinstance(path, RemotePath):
        return RemoteFile(path, expected)
    return SourceFile(path, expected)


def choose_threads(threads: int | None, *folders: Path, argument: str = "threads") -> int:
    """Return how many threads read checkpoints in these folders: `threads`, or the default if None.

    Raises:
        UsageError: `threads` is not an integer of at least 1; `argument` is its name in the text.

    >>> choose_threads(None, Path("model")), choose_threads(None, RemotePath("s3://bucket/model"))
    (4, 16)
    """
    if threads is not None:
        return check_int(threads, argument, minimum=1)
    if any(isinstance(folder, RemotePath) for folder in folders):
        return _REMOTE_THREADS
    return _THREADS


_PREFETCH_GAP_BYTES = 64 << 10
_MAX_PREFETCHED_BYTES = 1 << 20


class PrefetchedRanges:
    """Prefetched ranges of the files of a remote folder; always empty for a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The begin and the content of the ranges of each file, in ascending order.
        self._content: dict[str, list[tuple[int, bytes]]] = {}

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """Request ranges, several at a time, and drop the ranges of earlier calls.

        Raises OSError.
        """
        self._content = {}
        if not isinstance(self._folder, RemotePath):
            return
        joined = list(coalesce_named(ranges))
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            for span, content in zip(joined, threads.map(self._read, joined), strict=True):
                self._content.setdefault(span.name, []).append((span.start, content))

    def _read(self, span: ByteRange) -> bytes:
        with (self._folder / span.name).open("rb", buffering=0) as file:
            stream: Any = file
            return bytes(stream.fetch(span.start, span.stop - span.start))

    def get(self, name: str, start: int, size: int) -> bytes | None:
        """Return bytes of a file, or None if not all of them were prefetched."""
        ranges = self._content.get(name, [])
        at = bisect_right(ranges, start, key=lambda entry: entry[0]) - 1
        if at < 0:
            return None
        begin, content = ranges[at]
        return content[start - begin :][:size] if start + size <= begin + len(content) else None


def coalesce_named(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """Yield the ranges to request, by name and offset, merging those that are close together.

    >>> close = [ByteRange("a", 0, 10), ByteRange("a", 900, 950), ByteRange("b", 5, 9)]
    >>> [tuple(r) for r in coalesce_named([ByteRange("a", 10**6, 10**6 + 1), *close])]
    [('a', 0, 950), ('a', 1000000, 1000001), ('b', 5, 9)]
    """
    listed = [*ranges]
    names = sorted({span.name for span in listed})
    number = {name: at for at, name in enumerate(names)}
    rows = [(number[name], start, stop - start) for name, start, stop in listed]
    file, start, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    for joined in coalesce(file, start, size, _PREFETCH_GAP_BYTES, _MAX_PREFETCHED_BYTES):
        stop = joined.start_bytes + joined.size_bytes
        yield ByteRange(names[joined.file], joined.start_bytes, stop)
