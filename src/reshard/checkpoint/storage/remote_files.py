"""Objects that many threads read at once, as `SourceFile` reads files.

A request to a store takes as long as the bytes of a quarter of a mebibyte or so, so ranges that lie
near each other are asked for together. Each thread waits for its own request: as many are under way
as there are threads.

Small ranges of many objects, such as what describes one tensor each, asked for together.

A request takes as long as some hundred kibibytes, whatever is asked for; what opens a checkpoint
would wait for one after the other::

    objects    |head|.... w ....|tail|head|.... b ....|tail|
    requests   |-1--|           |-----2---|           |-3--|       all under way at once
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.storage.filesystem import CONTINUES, reason
from reshard.checkpoint.storage.local_files import BufferRegion, FileIdentity, SourceFile
from reshard.checkpoint.storage.object_stores import IN_FLIGHT, ObjectState
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import RunError, SourceChangedError, UsageError

#: What may be read in vain to save a request, and the most that is then in memory.
JOINED_BYTES = 128 << 10
_MAX_JOINED_BYTES = 4 << 20
_THREADS = 4
# They wait for answers, most of the time.
_THREADS_OF_PLACES = 16


class RemoteFile(SourceFile):
    """An object, read by ranges; see `SourceFile`."""

    def __init__(self, path: RemotePath, expected: FileIdentity | None = None) -> None:
        self.path = path
        self._counter = threading.Lock()
        self._read_bytes = 0
        self._key = path.key
        try:
            self._source = path.place.source
            self.identity = self._look_at_identity() if expected is None else expected
        except OSError as error:
            raise RunError(f"{path}: cannot open for reading: {reason(error)}") from error

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Fill the whole of `region` with the object's bytes from `offset_bytes` on.

        Raises `SourceChangedError` where it is another object by then, or shorter, `RunError` where
        the store does not answer, `UsageError` for a negative offset.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        if offset_bytes < 0:
            raise UsageError(f"{self.path}: reading at offset {offset_bytes}: expected 0 or more")
        if memory.nbytes:
            self._read(memory.cast("B"), offset_bytes)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Fill `memory` with ranges of `size_bytes` each; those near each other come together.

        Raises as `read_into`.
        """
        for first, last in _join(offsets, size_bytes):
            low, high = offsets[first], offsets[last] + size_bytes
            if first == last:
                self.read_into(memory[first * size_bytes : (first + 1) * size_bytes], low)
                continue
            joined = memoryview(bytearray(high - low))
            self._read(joined, low)
            for number in range(first, last + 1):
                begin, at = offsets[number] - low, number * size_bytes
                memory[at : at + size_bytes] = joined[begin : begin + size_bytes]

    def close(self) -> None:
        """Nothing is held."""

    def _expect_inside(self, view: memoryview, offset: int) -> None:
        if offset + len(view) > self.size_bytes:
            raise SourceChangedError(
                f"{self.path}: ends early: expected {len(view)} bytes at offset {offset}, and it "
                f"had {self.size_bytes} bytes when it was opened; put the whole file back and "
                "start over"
            )

    def _read(self, view: memoryview, offset: int) -> None:
        self._expect_inside(view, offset)
        try:
            found = self._source.read_into(self._key, offset, view)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot read {len(view)} bytes at offset {offset}: {reason(error)}; "
                f"check the connection, then {CONTINUES}"
            ) from error
        identity = self._identify(found)
        if identity != self.identity:
            raise self._describe_change(identity)
        with self._counter:
            self._read_bytes += len(view)

    def _look_at_identity(self) -> FileIdentity:
        found = self._source.head(self._key)
        if found is None:
            raise FileNotFoundError(2, os.strerror(2), str(self.path))
        return self._identify(found)

    def _identify(self, state: ObjectState) -> FileIdentity:
        return FileIdentity.of(self.path.name, state.stat_result())

    def _describe_change(self, now: FileIdentity) -> SourceChangedError:
        return SourceChangedError(
            f"{self.path}: changed since it was opened: expected {self.size_bytes} bytes of "
            f"{self.identity.modified_ns} ns, found {now.size_bytes} of {now.modified_ns} ns, or "
            "other content of that size; wait until nobody writes it and start over"
        )


def _join(offsets: Sequence[int], size_bytes: int) -> Iterator[tuple[int, int]]:
    """The first and last number of ranges that are asked for together.

    >>> list(_join([0, 1000, 10**6, 10**6 + 50], 10))
    [(0, 1), (2, 3)]
    """
    first = 0
    for number in range(1, len(offsets) + 1):
        if number < len(offsets):
            gap = offsets[number] - offsets[number - 1] - size_bytes
            span = offsets[number] + size_bytes - offsets[first]
            if 0 <= gap <= JOINED_BYTES and span <= _MAX_JOINED_BYTES:
                continue
        if offsets:
            yield first, number - 1
        first = number


def open_source(path: Path, expected: FileIdentity | None = None) -> SourceFile:
    """A file of this machine, or an object, for reading. Raises as `SourceFile`."""
    if isinstance(path, RemotePath):
        return RemoteFile(path, expected)
    return SourceFile(path, expected)


def default_threads(said: int | None, *folders: Path) -> int:
    """How many threads read checkpoints in these folders: as many as somebody said, or usual ones.

    >>> default_threads(None, Path("model")), default_threads(None, RemotePath("s3://bucket/model"))
    (4, 16)
    """
    if said is not None:
        return said
    if any(isinstance(folder, RemotePath) for folder in folders):
        return _THREADS_OF_PLACES
    return _THREADS


_PREFETCH_GAP_BYTES = 64 << 10
_MAX_PREFETCHED_BYTES = 1 << 20


class NamedRange(NamedTuple):
    """Bytes `start` to `stop` of the file `name`."""

    name: str
    start: int
    stop: int


class PrefetchedRanges:
    """Ranges of the files of a folder that were asked for; none where it is of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, list[tuple[int, bytes]]] = {}

    def ask(self, ranges: Iterable[NamedRange]) -> None:
        """Ask for ranges, several at a time; what was asked for before is forgotten.

        Raises OSError.
        """
        self._found = {}
        if not isinstance(self._folder, RemotePath):
            return
        joined = list(join_ranges(ranges))
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            found = list(threads.map(self._read, joined))
        for one, content in zip(joined, found, strict=True):
            self._found.setdefault(one.name, []).append((one.start, content))

    def _read(self, one: NamedRange) -> bytes:
        with (self._folder / one.name).open("rb", buffering=0) as file:
            stream: Any = file
            return bytes(stream.fetch(one.start, one.stop - one.start))

    def find(self, name: str, start: int, size: int) -> bytes | None:
        """Bytes of a file, where all of them were asked for."""
        ranges = self._found.get(name, [])
        at = bisect_right(ranges, start, key=lambda one: one[0]) - 1
        if at < 0:
            return None
        begin, content = ranges[at]
        return content[start - begin :][:size] if start + size <= begin + len(content) else None


def join_ranges(ranges: Iterable[NamedRange]) -> Iterator[NamedRange]:
    """Ranges as they are asked for, by name and place: those near each other are one.

    >>> near = [NamedRange("a", 0, 10), NamedRange("a", 900, 950), NamedRange("b", 5, 9)]
    >>> [tuple(one) for one in join_ranges([NamedRange("a", 10**6, 10**6 + 1), *near])]
    [('a', 0, 950), ('a', 1000000, 1000001), ('b', 5, 9)]
    """
    for name, of_name in groupby(sorted(ranges), key=lambda one: one.name):
        start, stop = -1, -1
        for one in of_name:
            if start >= 0 and (
                one.start - stop > _PREFETCH_GAP_BYTES or one.stop - start > _MAX_PREFETCHED_BYTES
            ):
                yield NamedRange(name, start, stop)
                start = -1
            start, stop = (one.start, one.stop) if start < 0 else (start, max(stop, one.stop))
        yield NamedRange(name, start, stop)
