"""Files that are read, fast and in bounded memory, by many threads at once.

Reading a region:

1. A few KiB are read through the page cache; the rest of the steps is for larger regions.
2. What is in the page cache already is copied out of it (`RWF_NOWAIT`). The kernel answers a
   miss by reading the whole request ahead, so the first question is one page and each next one
   four times as large: a miss wastes at most about three times what was found.
3. From the first page that is not cached, whole pages around the region are read directly.
   They land in the region's own pages (`aligned_memory`).
4. What a file system refuses to do directly, and the end of a file, is read buffered.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.checkpoint.files.aligned_memory import PAGE_BYTES, BufferRegion, page_floor
from reshard.checkpoint.files.descriptors import (
    CONTINUES,
    DIRECT_MINIMUM_BYTES,
    Closing,
    close_descriptor,
    reason,
)
from reshard.errors import FormatError, RunError, SourceChangedError, UsageError
from reshard.system import (
    REFUSALS,
    announce_read,
    find_cached_read,
    open_direct,
    read_at,
    reopen,
    reopen_direct,
)


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
