"""Derived files: content that is created from other files when it is first read.

Content that cannot be read in place, such as a compressed shard, or that is computed, is created as
a whole::

    data file         [packed w][packed b]
                          |         |
    derived file      [w ........][b ..]            page-aligned; holes until read

A `DerivedFile` describes such a file by its parts, which know how to create their content. A
`ScratchFile` is the file, opened. It is unnamed, so the system removes it when it is closed or its
process ends in any way. Each part is stored once, by the first thread that needs it; other threads
wait. Memory does not grow with the parts; the disk needs room for those that are read.
"""

from __future__ import annotations

import bisect
import itertools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from reshard._records import Record
from reshard.binding import FileRange
from reshard.checkpoint.storage.byte_streams import ReadRange
from reshard.checkpoint.storage.filesystem import reason, write_all
from reshard.checkpoint.storage.local_files import BufferRegion, Damage, SourceFile, page_ceiling
from reshard.errors import DigestError, FormatError, RunError

# The maximum offset in a derived file, larger than any disk.
_MAX_OFFSET = 2**62


class DerivedPart(Record):
    """A part of a derived file: `size_bytes`, created from a range of the source.

    `label` names the part in errors.
    """

    label: str
    source_start_bytes: int
    source_bytes: int
    size_bytes: int

    def create(self, read: ReadRange) -> Iterator[bytes]:
        """Yield the content in pieces; none if all of it is zeros.

        `read(offset, size)` returns bytes of the source.

        Raises FormatError or DigestError for a damaged source, at the latest after the last piece.
        """
        raise NotImplementedError


class DerivedFile(Record):
    """A file that consists of parts derived from the file `source`."""

    source: str
    parts: Sequence[DerivedPart]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each part, and the end of the file."""
        # Whole pages, so that parts are read by direct I/O without reading adjacent parts.
        sizes = (page_ceiling(part.size_bytes) for part in self.parts)
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def size_bytes(self) -> int:
        """The size of the content, without the room between parts."""
        return sum(part.size_bytes for part in self.parts)

    def open(self, path: Path, source: SourceFile, scratch: Path | None) -> ScratchFile:
        """Open the file for reading, in the folder `scratch`."""
        return ScratchFile(path, self, source, scratch)


class DerivedFiles:
    """The derived parts of a checkpoint, collected by source while the checkpoint is opened."""

    def __init__(self) -> None:
        self._parts: dict[str, list[DerivedPart]] = {}
        self._ends: dict[str, int] = {}

    def add(self, source: str, part: DerivedPart) -> FileRange:
        """Add a part that is derived from `source`, and return its address.

        Raises FormatError if the parts are too large for any disk.
        """
        start = self._ends.get(source, 0)
        if start + part.size_bytes > _MAX_OFFSET:
            raise FormatError(
                f"{part.label} would be unpacked to {part.size_bytes} bytes, more than any disk "
                "has; the checkpoint is damaged"
            )
        self._parts.setdefault(source, []).append(part)
        self._ends[source] = start + page_ceiling(part.size_bytes)
        return FileRange(f"{source}/unpacked", start)

    @property
    def files(self) -> dict[str, DerivedFile]:
        """The files by the names with which tensors refer to them. No real file has such a name."""
        return {
            f"{source}/unpacked": DerivedFile(source, tuple(parts))
            for source, parts in self._parts.items()
        }


class ScratchFile(SourceFile):
    """A derived file, open for reading.

    Args:
        path: names the file in errors.
        derived: its parts.
        source: the file from which it is derived, which must stay open as long as this file.
        folder: the folder of the file; the folder of temporary files if None.

    Raises `RunError` if the file cannot be created.
    """

    def __init__(
        self, path: Path, derived: DerivedFile, source: SourceFile, folder: Path | None = None
    ) -> None:
        self._derived, self._source = derived, source
        # Each part has a lock, so that threads can create different parts at the same time.
        self._locks = [threading.Lock() for _ in derived.parts]
        self._is_created = [False] * len(derived.parts)
        # The parts that were read as a whole without being stored.
        self._read_whole: set[int] = set()
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._room = f"{path} in {folder} (needs {derived.size_bytes} bytes there)"
        try:
            self._scratch = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._explain_no_room(error) from error
        try:
            # This only sets the size: parts do not take disk space until they are created.
            self._scratch.truncate(derived.starts[-1])
            super().__init__(path, descriptor=self._scratch.fileno())
        except OSError as error:
            self._scratch.close()
            raise self._explain_no_room(error) from error
        except RunError:
            self._scratch.close()
            raise

    def _explain_no_room(self, error: OSError) -> RunError:
        return RunError(f"cannot create {self._room}: {reason(error)}")

    @property
    def read_bytes(self) -> int:
        """Zero, since the source counts the bytes that are read."""
        return 0

    def check_unchanged(self) -> None:
        """Do nothing: the file does not have a name, and the source is checked itself."""

    def close(self) -> None:
        """Close the file, which removes it."""
        super().close()
        self._scratch.close()

    def find_damage(self, offset_bytes: int) -> Damage | None:
        """Create the part at `offset_bytes`, and return the damage of its source, if any.

        Raises RunError if the disk is full, or if the source cannot be read.
        """
        number = self._find(offset_bytes)
        try:
            self._create_once(number)
        except (DigestError, FormatError) as error:
            part = self._derived.parts[number]
            return Damage(
                self._derived.source, part.source_start_bytes, part.source_bytes, str(error)
            )
        return None

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Read as `SourceFile.read_into`, creating missing parts first.

        Also raises FormatError or DigestError for parts whose source is damaged.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        number = self._find(offset_bytes)
        part, starts = self._derived.parts[number], self._derived.starts
        is_whole = (starts[number], part.size_bytes) == (offset_bytes, memory.nbytes)
        # A reader that requests all of a part gets it without a detour over the disk. It is stored
        # if it is read again, so that it is created twice at most.
        if is_whole and not self._is_created[number] and number not in self._read_whole:
            self._create_in(memory.cast("B"), part)
            # Threads that get here at the same time each fill their own memory.
            self._read_whole.add(number)
            return
        while number < len(self._locks) and starts[number] < offset_bytes + memory.nbytes:
            self._create_once(number)
            number += 1
        super().read_into(region, offset_bytes)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Read as `SourceFile.read_ranges`, creating missing parts first."""
        at, starts = np.array(offsets, dtype=np.int64), self._derived.starts[:-1]
        first = np.maximum(np.searchsorted(starts, at, "right") - 1, 0)
        stop = np.searchsorted(starts, at + size_bytes, "left")
        # A set, since many ranges are in the same parts.
        for low, high in {*zip(first.tolist(), stop.tolist(), strict=True)}:
            for number in range(low, high):
                self._create_once(number)
        super().read_ranges(memory, offsets, size_bytes)

    def _find(self, offset_bytes: int) -> int:
        # Empty parts begin where others do: the last part that begins there is not empty.
        index = bisect.bisect_right(self._derived.starts, offset_bytes) - 1
        return min(index, len(self._locks) - 1)

    def _create_once(self, number: int) -> None:
        with self._locks[number]:
            if not self._is_created[number]:
                at = self._derived.starts[number]
                for piece in self._derived.parts[number].create(self._read_source):
                    try:
                        write_all(self._scratch.fileno(), piece, at)
                    except OSError as error:
                        raise self._explain_no_room(error) from error
                    at += len(piece)
                self._is_created[number] = True

    def _create_in(self, memory: memoryview, part: DerivedPart) -> None:
        at = 0
        for piece in part.create(self._read_source):
            memory[at : at + len(piece)] = piece
            at += len(piece)
        # A buffer is used again and again: it has the content of the last region.
        if not at:
            memory[:] = bytes(len(memory))

    def _read_source(self, offset_bytes: int, size_bytes: int) -> bytes:
        content = bytearray(size_bytes)
        self._source.read_into(memoryview(content), offset_bytes)
        return bytes(content)
