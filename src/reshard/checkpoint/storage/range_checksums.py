"""CRC-32 of byte ranges of files, combined from pieces in any order.

The checksum of `A + B` follows from the checksums of `A` and `B` and the length of `B`: the
checksum of `A` is multiplied by a power of x, as polynomials over bits modulo the CRC's polynomial.
So each piece's checksum is multiplied by the power for the bytes that follow it in the range, and
all products are added, which for bits is an exclusive or. The order does not matter, and pieces do
not have to be kept::

    range   |--- A ---|-- B --|----- C -----|
    CRC     A * x^8(b+c)  +  B * x^8c  +  C

Source: the mathematics of cyclic redundancy checks (Peterson and Brown, 1961).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from reshard.errors import MissingExtraError, UsageError


def crc32(memory: memoryview | bytes, checksum: int = 0) -> int:
    """Return the CRC-32 of bytes, continued from `checksum`, the CRC-32 of the bytes before them.

    >>> crc32(b"world", crc32(b"hello, ")) == crc32(b"hello, world")
    True

    Raises:
        MissingExtraError: zlib-ng is not installed.
    """
    return int(_zlib_ng().crc32(memory, checksum))


def shift_crc32(checksum: int, size_bytes: int) -> int:
    """Return the contribution of a piece with this CRC-32 to a range with `size_bytes` after it.

    >>> front, back = b"hello, ", b"world"
    >>> shift_crc32(crc32(front), len(back)) ^ crc32(back) == crc32(front + back)
    True
    """
    # Combining with an empty piece, whose checksum is 0, only multiplies.
    return int(_zlib_ng().crc32_combine(checksum, 0, size_bytes))


def _zlib_ng() -> ModuleType:
    # This package is several times as fast as the standard library, which is slower than a disk.
    try:
        from zlib_ng import zlib_ng
    except ImportError as error:
        raise MissingExtraError(
            "PyTorch's archives need the package zlib-ng for checksums; "
            "pip install 'reshard[checkpoint]'"
        ) from error
    return zlib_ng


@dataclass(slots=True)
class _Range:
    start_bytes: int
    stop_bytes: int
    checksum: int = 0
    seen_bytes: int = 0


class RangeChecksums:
    """The CRC-32 of ranges of files, `(start, size)` in bytes by file name; thread-safe.

    >>> checksums = RangeChecksums({"a": [(10, 11)]})
    >>> checksums.add("a", 16, b"world")
    >>> checksums.add("a", 10, b"hello ")
    >>> checksums.of("a", 10) == crc32(b"hello world")
    True
    """

    def __init__(self, ranges: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        self.ranges, self._lock = ranges, threading.Lock()
        self._ranges = {
            name: [_Range(start, start + size) for start, size in sorted(of_file)]
            for name, of_file in ranges.items()
        }

    def add(self, name: str, start_bytes: int, memory: memoryview | bytes) -> None:
        """Add bytes of a file; those outside all ranges are ignored.

        Raises UsageError for bytes that are partly in a range.
        """
        entry = self._at(name, start_bytes)
        size = memory.nbytes if isinstance(memory, memoryview) else len(memory)
        if entry is None or not size:
            return
        if start_bytes + size > entry.stop_bytes:
            raise UsageError(
                f"bytes {start_bytes}:{start_bytes + size} of {name} cross the end of a range at "
                f"{entry.stop_bytes}"
            )
        checksum = shift_crc32(crc32(memory), entry.stop_bytes - start_bytes - size)
        self.contribute(name, entry.start_bytes, checksum, size)

    def contribute(self, name: str, start_bytes: int, checksum: int, seen_bytes: int) -> None:
        """Add the contribution of bytes of the range that begins there (`shift_crc32`).

        Bytes outside all ranges are ignored.
        """
        entry = self._at(name, start_bytes)
        if entry is not None:
            with self._lock:
                entry.checksum ^= checksum
                entry.seen_bytes += seen_bytes

    def state(self) -> dict[str, list[tuple[int, int]]]:
        """Return the checksums and byte counts so far, for `merge` in another process."""
        with self._lock:
            return {
                name: [(r.checksum, r.seen_bytes) for r in ranges]
                for name, ranges in self._ranges.items()
            }

    def merge(self, state: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Add the checksums of another process for the same ranges.

        >>> seen = [RangeChecksums({"a": [(0, 11)]}) for _ in range(2)]
        >>> seen[0].add("a", 0, b"hello ")
        >>> seen[1].add("a", 6, b"world")
        >>> seen[0].merge(seen[1].state())
        >>> seen[0].of("a", 0) == crc32(b"hello world")
        True
        """
        with self._lock:
            for name, ranges in state.items():
                for entry, (checksum, seen_bytes) in zip(self._ranges[name], ranges, strict=True):
                    entry.checksum ^= checksum
                    entry.seen_bytes += seen_bytes

    def of(self, name: str, start_bytes: int) -> int | None:
        """Return the checksum of the range that begins there, or None until all its bytes were
        added.

        Raises UsageError if no range begins there.
        """
        entry = self._at(name, start_bytes)
        # An empty range contains no byte by which it would be found.
        if entry is None and (start_bytes, 0) in self.ranges.get(name, ()):
            return 0
        if entry is None or entry.start_bytes != start_bytes:
            raise UsageError(f"no range of {name} begins at byte {start_bytes}")
        is_complete = entry.seen_bytes == entry.stop_bytes - entry.start_bytes
        return entry.checksum if is_complete else None

    def _at(self, name: str, start_bytes: int) -> _Range | None:
        ranges = self._ranges.get(name, [])
        # Ranges do not overlap, so only the last range that begins at or before the byte can match.
        at = bisect.bisect_right(ranges, start_bytes, key=lambda r: r.start_bytes) - 1
        return ranges[at] if at >= 0 and start_bytes < ranges[at].stop_bytes else None
