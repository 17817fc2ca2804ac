"""Files without a name, whose parts are made when something in them is first read.

What cannot be read where it lies, such as a compressed shard, is made as a whole::

    data file         [packed w][packed b]
                          |         |
    without a name    [w ........][b ..]            each from a page on; holes until read

Each part is made once, by the first thread that needs it; others wait. The system removes the file
when it is closed, or its process ends in any way. Memory does not grow with the parts, the disk
needs room for those that are read.
"""

from __future__ import annotations

import bisect
import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.checkpoint.storage.filesystem import read_range, reason
from reshard.checkpoint.storage.local_files import PAGE_BYTES, BufferRegion, Damage, SourceFile
from reshard.errors import DigestError, FormatError, RunError
from reshard.system import MAX_CALL_BYTES


@dataclass(frozen=True, slots=True)
class ScratchPart:
    """A part of a scratch file: its bytes there, and what they are made of: `packed_bytes` from
    `packed_start_bytes` on of the file `source`."""

    start_bytes: int
    size_bytes: int
    source: str
    packed_start_bytes: int
    packed_bytes: int

    @property
    def stop_bytes(self) -> int:
        """Where it ends."""
        return self.start_bytes + self.size_bytes


def next_start_bytes(stop_bytes: int) -> int:
    """Where a part may begin that comes behind another.

    >>> next_start_bytes(1), next_start_bytes(4096)
    (4096, 4096)
    """
    return -(-stop_bytes // PAGE_BYTES) * PAGE_BYTES


class ScratchFile(SourceFile):
    """A file without a name; `parts` are in order, and `packed` is what they are made of.

    `packed` stays open as long. It is made in `folder`, that of temporary files when None. It reads
    nothing itself: `read_bytes` are those of `packed`.

    Raises `RunError` where no file can be made there.
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
        # One a part: threads make different parts of a file at once.
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
            # Only a size: the file takes no room where nothing is made yet.
            self._scratch.truncate(next_start_bytes(parts[-1].stop_bytes))
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

        Raises FormatError or DigestError for what it is made of.
        """

    def write(self, content: bytes | memoryview, start_bytes: int) -> None:
        """Write bytes of a part. Raises RunError where there is no room."""
        try:
            written = 0
            while written < len(content):
                piece = content[written : written + MAX_CALL_BYTES]
                written += os.pwrite(self._scratch.fileno(), piece, start_bytes + written)
        except OSError as error:
            raise self._explain_no_room(error) from error

    def read_back(self, start_bytes: int, size_bytes: int) -> bytes:
        """Bytes that were written."""
        return read_range(self._scratch, start_bytes, size_bytes)

    def read_packed(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Bytes of the file that parts are made of."""
        content = bytearray(size_bytes)
        self._packed.read_into(memoryview(content), offset_bytes)
        return bytes(content)

    def _explain_no_room(self, error: OSError) -> RunError:
        return RunError(f"cannot unpack {self._packed.path} into {self._room}: {reason(error)}")

    @property
    def read_bytes(self) -> int:
        """None of its own: what parts are made of was read, and counted, in the packed file."""
        return 0

    def check_unchanged(self) -> None:
        """Do nothing: a file without a name cannot change; the packed file is checked itself."""

    def close(self) -> None:
        """Close the file, which removes it."""
        super().close()
        self._scratch.close()

    def find_damage(self, offset_bytes: int) -> Damage | None:
        """Make the part at `offset_bytes`; where what it is made of is damaged, how.

        Raises RunError where there is no room, or if the packed file cannot be read.
        """
        number = self._find(offset_bytes)
        try:
            self._make_once(number)
        except (DigestError, FormatError) as error:
            part = self._parts[number]
            return Damage(part.source, part.packed_start_bytes, part.packed_bytes, str(error))
        return None

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """As `SourceFile.read_into`; makes parts that are not yet.

        Raises also FormatError or DigestError for what is damaged.
        """
        memory = region.memory if isinstance(region, BufferRegion) else region
        number = self._find(offset_bytes)
        while number < len(self._starts) and self._starts[number] < offset_bytes + memory.nbytes:
            self._make_once(number)
            number += 1
        super().read_into(region, offset_bytes)

    def read_ranges(self, memory: memoryview, offsets: Sequence[int], size_bytes: int) -> None:
        """As `SourceFile.read_ranges`; makes parts that are not yet."""
        at = np.array(offsets, dtype=np.int64)
        first = np.maximum(np.searchsorted(self._starts, at, "right") - 1, 0)
        stop = np.searchsorted(self._starts, at + size_bytes, "left")
        for low, high in {*zip(first.tolist(), stop.tolist(), strict=True)}:
            for number in range(low, high):
                self._make_once(number)
        super().read_ranges(memory, offsets, size_bytes)

    def find_whole(self, offset_bytes: int, size_bytes: int) -> int | None:
        """The part that these bytes are all of, if it is not made yet."""
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
