"""Streams of bytes, and what they are before they were compressed.

What is compressed is decoded piece by piece, in bounded memory and to a bounded length:

1. A frame of Zstandard that asks for a window of more than `MAX_WINDOW_BYTES` is refused.
2. Behind the packed bytes its decoder is given a frame of nothing (`_LAST_FRAME`). One that is
   still inside of a frame takes it for the head of a block of a size that no block has, so a
   stream that was cut off is noticed wherever the cut is.
3. What comes out beyond the promised length is an error, so that a small file cannot fill a disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from reshard.errors import FormatError, MissingExtraError

# What the format asks every decoder to support (RFC 8878, 3.1.1.1.2); all usual levels keep to it.
MAX_WINDOW_BYTES = 8 << 20
READ_BYTES = 128 << 10
_PART_BYTES = 4 << 20
# A skippable frame without content (RFC 8878, 3.1.2).
_LAST_FRAME = b"\x5f\x2a\x4d\x18" + bytes(4)


class ByteStream(Protocol):
    """A stream of bytes; `read` returns fewer than asked for only at its end."""

    def read(self, size: int, /) -> bytes: ...


class RangeStream:
    """A range of a file as a stream; `read(offset, size)` returns bytes of the file."""

    def __init__(
        self, read: Callable[[int, int], bytes], start_bytes: int, size_bytes: int
    ) -> None:
        self._read = read
        self._at = start_bytes
        self._end = start_bytes + size_bytes

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, or those that are left."""
        size = min(size, self._end - self._at)
        content = self._read(self._at, size) if size else b""
        self._at += size
        return content


class _Followed:
    """A stream, and some bytes behind its end."""

    def __init__(self, stream: ByteStream, behind: bytes) -> None:
        self._stream = stream
        self._behind = behind

    def read(self, size: int, /) -> bytes:
        content = self._stream.read(size)
        if not content:
            content, self._behind = self._behind[:size], self._behind[size:]
        return content


class ZStandardStream:
    """A stream of Zstandard frames, decoded, of at most `most_bytes`.

    `label` names it in errors, `promise` what says how long it is. Reading raises FormatError for
    bytes that are no such stream, and for one that is longer.

    Raises MissingExtraError where zstandard is not installed.
    """

    def __init__(self, packed: ByteStream, most_bytes: int, label: str, promise: str) -> None:
        zstandard = import_zstandard(label)
        self._error: type[Exception] = zstandard.ZstdError
        self._label = label
        self._promise = promise
        self._left = most_bytes
        decoder: Any = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._reader = decoder.stream_reader(
            _Followed(packed, _LAST_FRAME),
            read_size=READ_BYTES,
            read_across_frames=True,
            closefd=False,
        )

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, or those that are left."""
        parts: list[bytes] = []
        # One byte more than there may be, to notice a stream that goes on.
        left = min(size, self._left + 1)
        try:
            # The reader allocates all that it is asked for before it decodes.
            while left and (part := self._reader.read(min(left, _PART_BYTES))):
                parts.append(part)
                left -= len(part)
        except self._error as error:
            raise FormatError(
                f"{self._label} is damaged: it is no Zstandard stream that can be decoded in "
                f"{MAX_WINDOW_BYTES} bytes ({error}); fetch the file again"
            ) from error
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        self._left -= len(content)
        if self._left < 0:
            raise expansion_error(self._label, self._promise)
        return content


class DeflateStream:
    """A stream of gzip or zlib, decoded, as a `ZStandardStream` is."""

    def __init__(self, packed: ByteStream, most_bytes: int, label: str, promise: str) -> None:
        self._packed = packed
        self._label = label
        self._promise = promise
        self._left = most_bytes
        # 32 more bits than the window: the decoder finds out which of the two it is.
        self._decoder = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, or those that are left."""
        parts: list[bytes] = []
        left = min(size, self._left + 1)
        while left and not self._decoder.eof:
            packed = self._decoder.unconsumed_tail or self._packed.read(READ_BYTES)
            try:
                part = self._decoder.decompress(packed, left)
            except zlib.error as error:
                raise FormatError(
                    f"{self._label} is damaged: it is no stream of gzip or zlib ({error}); fetch "
                    "the file again"
                ) from error
            if not packed and not part:
                raise FormatError(f"{self._label} ends early; it was cut off, fetch it again")
            parts.append(part)
            left -= len(part)
        content = b"".join(parts)
        self._left -= len(content)
        if self._left < 0:
            raise expansion_error(self._label, self._promise)
        return content


def expansion_error(label: str, promise: str) -> FormatError:
    """The error of a stream that is longer than `promise` says."""
    return FormatError(
        f"{label} expands beyond what {promise} promises of it; the file is damaged, or made to "
        "fill the disk"
    )


def import_zstandard(label: str) -> ModuleType:
    """The package zstandard, which `label` needs. Raises MissingExtraError where there is none."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            f"{label} is compressed by Zstandard, which needs the package zstandard; "
            "pip install 'reshard[checkpoint]'"
        ) from error
    return zstandard
