"""The CRC-32 of ranges of files, put together from pieces in any order.

The checksum of `A + B` follows from those of `A` and `B` and the length of `B`: what stands in
front is multiplied by a power of x, in polynomials over bits modulo the CRC's own. So each
piece is multiplied by the power for what lies behind it in the range, and all are added, which
for bits is an exclusive or: the order does not matter, and nothing has to be kept::

    range   |--- A ---|-- B --|----- C -----|
    CRC     A * x^8(b+c)  +  B * x^8c  +  C

Source: the mathematics of cyclic redundancy checks (Peterson and Brown, 1961).
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from reshard.errors import MissingExtraError, UsageError


def crc32(memory: memoryview | bytes, checksum: int = 0) -> int:
    """The CRC-32 of bytes, continued from `checksum`, that of the bytes in front of them.

    >>> crc32(b"world", crc32(b"hello, ")) == crc32(b"hello, world")
    True

    Raises:
        MissingExtraError: zlib-ng is not installed.
    """
    return int(_zlib_ng().crc32(memory, checksum))


def moved(checksum: int, size_bytes: int) -> int:
    """What a piece with this CRC-32 contributes to a range that has `size_bytes` behind it.

    >>> front, back = b"hello, ", b"world"
    >>> moved(crc32(front), len(back)) ^ crc32(back) == crc32(front + back)
    True
    """
    # Combined with a piece that adds nothing: only the multiplication is left.
    return int(_zlib_ng().crc32_combine(checksum, 0, size_bytes))


def _zlib_ng() -> ModuleType:
    # Several times the speed of the standard library's, which would cost more than the disk.
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


@dataclass(frozen=True)
class RangeChecksums:
    """The CRC-32 of ranges of files, `(start, size)` in bytes by file name; safe for threads.

    >>> checksums = RangeChecksums({"a": [(10, 11)]})
    >>> checksums.add("a", 16, b"world")
    >>> checksums.add("a", 10, b"hello ")
    >>> checksums.of("a", 10) == crc32(b"hello world")
    True
    """

    ranges: Mapping[str, Iterable[tuple[int, int]]]
    _found: dict[str, list[_Range]] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name, ranges in self.ranges.items():
            self._found[name] = [_Range(start, start + size) for start, size in sorted(ranges)]

    def add(self, name: str, start_bytes: int, memory: memoryview | bytes) -> None:
        """Add bytes of a file; those that lie in no range are ignored.

        Raises UsageError for bytes that lie partly in a range.
        """
        found = self._at(name, start_bytes)
        size = memory.nbytes if isinstance(memory, memoryview) else len(memory)
        if found is None or not size:
            return
        if start_bytes + size > found.stop_bytes:
            raise UsageError(
                f"bytes {start_bytes}:{start_bytes + size} of {name} cross the end of a range at "
                f"{found.stop_bytes}"
            )
        checksum = moved(crc32(memory), found.stop_bytes - start_bytes - size)
        self.contribute(name, found.start_bytes, checksum, size)

    def contribute(self, name: str, start_bytes: int, checksum: int, seen_bytes: int) -> None:
        """Add what bytes of the range that begins there contribute to its checksum (`moved`).

        What begins in no range is ignored.
        """
        found = self._at(name, start_bytes)
        if found is not None:
            with self._lock:
                found.checksum ^= checksum
                found.seen_bytes += seen_bytes

    def state(self) -> dict[str, list[tuple[int, int]]]:
        """The checksums and byte counts so far, for `merge` in another process."""
        with self._lock:
            return {
                name: [(one.checksum, one.seen_bytes) for one in ranges]
                for name, ranges in self._found.items()
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
                for found, (checksum, seen_bytes) in zip(self._found[name], ranges, strict=True):
                    found.checksum ^= checksum
                    found.seen_bytes += seen_bytes

    def of(self, name: str, start_bytes: int) -> int | None:
        """The checksum of the range that begins there; None until all of its bytes were added.

        Raises UsageError where no range begins.
        """
        found = self._at(name, start_bytes)
        if found is None and (start_bytes, 0) in self.ranges.get(name, ()):
            return 0
        if found is None or found.start_bytes != start_bytes:
            raise UsageError(f"no range of {name} begins at byte {start_bytes}")
        whole = found.seen_bytes == found.stop_bytes - found.start_bytes
        return found.checksum if whole else None

    def _at(self, name: str, start_bytes: int) -> _Range | None:
        ranges = self._found.get(name, [])
        # Ranges do not overlap: the last that begins at or before the byte is the only candidate.
        at = bisect.bisect_right(ranges, start_bytes, key=lambda one: one.start_bytes) - 1
        return ranges[at] if at >= 0 and start_bytes < ranges[at].stop_bytes else None
