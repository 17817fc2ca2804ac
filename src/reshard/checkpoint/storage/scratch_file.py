"""Files without a name whose parts are created when they are first read.

Content that cannot be read in place, such as a compressed shard, is unpacked as a whole::

    data file         [packed w][packed b]
                          |         |
    scratch file      [w ........][b ..]            page-aligned; holes until read

Each part is created once, by the first thread that needs it; other threads wait. The system removes
the file when it is closed or its process ends in any way. Memory does not grow with the parts; the
disk needs room for those that are read.
"""

from __future__ import annotations

import bisect
import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.binding import FileRange
from reshard.checkpoint.storage.filesystem import read_range, reason
from reshard.checkpoint.storage.local_files import BufferRegion, Damage, SourceFile, page_ceiling
from reshard.errors import DigestError, FormatError, RunError
from reshard.system import MAX_CALL_BYTES

# The maximum offset in a scratch file, larger than any disk.
_MAX_OFFSET = 2**62


class PackedFile(NamedTuple):
    """A file with packed parts, whose unpacked contents can be read.

    Attributes:
        source: the name of the file.
        parts: the parts, in the order of their unpacked offsets.
        create: `create(path, parts, packed, folder)` returns the scratch file.
    """

    source: str
    parts: tuple[Any, ...]
    create: Callable[[Path, tuple[Any, ...], SourceFile, Path | None], SourceFile]

    def open(self, path: Path, source: SourceFile, scratch: Path | None) -> SourceFile:
        """Open the unpacked contents for reading."""
        return self.create(path, self.parts, source, scratch)


class PackedFiles:
    """The packed parts of a checkpoint, collected by file while the checkpoint is opened.

    A part is a dataclass with a `label`, and its range in the scratch file, `start_bytes` and
    `stop_bytes`.
    """

    def __init__(
        self, create: Callable[[Path, tuple[Any, ...], SourceFile, Path | None], SourceFile]
    ) -> None:
        self._create = create
        self._parts: dict[str, list[Any]] = {}

    def add(self, source: str, part: Any) -> FileRange:
        """Add a part of a file, and return the location to which it will be unpacked.

        Raises FormatError if the parts are too large for any disk.
        """
        parts = self._parts.setdefault(source, [])
        part = replace(part, start_bytes=page_ceiling(parts[-1].stop_bytes) if parts else 0)
        if part.stop_bytes > _MAX_OFFSET:
            raise FormatError(
                f"{part.label} would be unpacked to {part.stop_bytes - part.start_bytes} bytes, "
                "more than any disk has; the checkpoint is damaged"
            )
        parts.append(part)
        return FileRange(f"{source}/unpacked", part.start_bytes)

    @property
    def files(self) -> dict[str, PackedFile]:
        """The files by the names with which tensors refer to them. No real file has such a name."""
        return {
            f"{source}/unpacked": PackedFile(source, tuple(parts), self._create)
            for source, parts in self._parts.items()
        }


class ScratchPart(NamedTuple):
    """A part of a scratch file, and the packed bytes in the file `source` to create it from."""

    start_bytes: int
    size_bytes: int
    source: str
    packed_start_bytes: int
    packed_bytes: int

    @property
    def stop_bytes(self) -> int:
        """The end of the part."""
        return self.start_bytes + self.size_bytes


class ScratchFile(SourceFile):
    """A file without a name, whose parts are created from a packed file.

    Args:
        path: names the file in errors.
        parts: the parts, in order.
        packed: the packed file, which must stay open as long as this file.
        folder: the folder of the file; the folder of temporary files if None.

    Raises `RunError` if the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parts: Sequence[ScratchPart],
        packed: SourceFile,
        folder: Path | None = None,
    ) -> None:
        self._parts = parts
        self._starts = [part.start_bytes for part in parts]
        # Each part has a lock, so that threads can create different parts at the same time.
        self._locks = [threading.Lock() for _ in parts]
        self._is_made = [False] * len(parts)
        self._packed = packed
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._room = f"{folder} (needs {sum(part.size_bytes for part in parts)} bytes there)"
        try:
            self._scratch = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._explain_no_room(error) from error
        try:
            # This only sets the size: parts do not take disk space until they are created.
            self._scratch.truncate(page_ceiling(parts[-1].stop_bytes))
            super().__init__(path, descriptor=self._scratch.fileno())
        except OSError as error:
            self._scratch.close()
            raise self._explain_no_room(error) from error
        except RunError:
            self._scratch.close()
            raise

    @abstractmethod
    def make_part(self, number: int) -> None:
        """Write a part with `write`, and check it.

        Raises FormatError or DigestError if the packed bytes are damaged.
        """

    def write(self, content: bytes | memoryview, start_bytes: int) -> None:
        """Write bytes of a part. Raises RunError if the disk is full."""
        try:
            written = 0
            while written < len(content):
                piece = content[written : written + MAX_CALL_BYTES]
                written += os.pwrite(self._scratch.fileno(), piece, start_bytes + written)
        except OSError as error:
            raise self._explain_no_room(error) from error

    def read_back(self, start_bytes: int, size_bytes: int) -> bytes:
        """Return bytes that were written."""
        return read_range(self._scratch, start_bytes, size_bytes)

    def read_packed(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Return bytes of the packed file."""
        content = bytearray(size_bytes)
        self._packed.read_into(memoryview(content), offset_bytes)
        return bytes(content)

    def _explain_no_room(self, error: OSError) -> RunError:
        return RunError(f"cannot unpack {self._packed.path} into {self._room}: {reason(error)}")

    @property
    def read_bytes(self) -> int:
        """Zero, since the packed file counts the bytes that are read."""
        return 0

    def check_unchanged(self) -> None:
        """Do nothing: the file does not have a name, and the packed file is checked itself."""

    def close(self) -> None:
        """Close the file, which removes it."""
        super().close()
        self._scratch.close()

    def find_damage(self, offset_bytes: int) -> Damage | None:
        """Create the part at `offset_bytes`, and return the damage of its packed bytes, if any.

        Raises RunError if the disk is full, or if the packed file cannot be read.
        """
        number = self._find(offset_bytes)
        try:
            self._make_once(number)
        except (DigestError, FormatError) as error:
            part = self._parts[number]
            return Damage(part.source, part.packed_start_bytes, part.packed_bytes, str(error))
        return None

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """Read as `SourceFile.read_into`, creating missing parts first.

        Also raises FormatError or DigestError for damaged parts.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        number = self._find(offset_bytes)
        while number < len(self._starts) and self._starts[number] < offset_bytes + memory.nbytes:
            self._make_once(number)
            number += 1
        super().read_into(region, offset_bytes)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """Read as `SourceFile.read_ranges`, creating missing parts first."""
        at = np.array(offsets, dtype=np.int64)
        first = np.maximum(np.searchsorted(self._starts, at, "right") - 1, 0)
        stop = np.searchsorted(self._starts, at + size_bytes, "left")
        # A set, since many ranges are in the same parts.
        for low, high in {*zip(first.tolist(), stop.tolist(), strict=True)}:
            for number in range(low, high):
                self._make_once(number)
        super().read_ranges(memory, offsets, size_bytes)

    def find_whole(self, offset_bytes: int, size_bytes: int) -> int | None:
        """Return the number of the part with exactly these bytes if it is not created yet."""
        number = self._find(offset_bytes)
        part = self._parts[number]
        if (part.start_bytes, part.size_bytes) != (offset_bytes, size_bytes):
            return None
        return None if self._is_made[number] else number

    def _find(self, offset_bytes: int) -> int:
        return max(0, bisect.bisect_right(self._starts, offset_bytes) - 1)

    def _make_once(self, number: int) -> None:
        with self._locks[number]:
            if not self._is_made[number]:
                self.make_part(number)
                self._is_made[number] = True
