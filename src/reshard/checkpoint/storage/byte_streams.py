"""Byte streams, and their content before compression.

Compressed streams are decoded piece by piece, in bounded memory and to a bounded length:

1. A Zstandard frame that requires a window of more than `MAX_WINDOW_BYTES` is refused.
2. After the packed bytes the decoder is given an empty frame (`_LAST_FRAME`). A decoder that is
   still inside a frame reads it as the header of a block of an impossible size, so a truncated
   stream is detected wherever it was truncated.
3. Output beyond the declared length is an error, so that a small file cannot fill a disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from reshard.errors import FormatError, MissingExtraError

# Every decoder should support this (RFC 8878, 3.1.1.1.2); the usual levels need no more.
MAX_WINDOW_BYTES = 8 << 20
READ_BYTES = 128 << 10
_PART_BYTES = 4 << 20
# A skippable frame without content (RFC 8878, 3.1.2).
_LAST_FRAME = b"\x5f\x2a\x4d\x18" + bytes(4)


class ByteStream(Protocol):
    """A stream of bytes; `read` returns fewer bytes than requested only at its end."""

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
        """Return the next `size` bytes, or those that are left."""
        size = min(size, self._end - self._at)
        content = self._read(self._at, size) if size else b""
        self._at += size
        return content


class _Appended:
    """A stream followed by some bytes."""

    def __init__(self, stream: ByteStream, tail: bytes) -> None:
        self._stream, self._tail = stream, tail

    def read(self, size: int, /) -> bytes:
        content = self._stream.read(size)
        if not content:
            content, self._tail = self._tail[:size], self._tail[size:]
        return content


class ZStandardStream:
    """The decoded content of Zstandard frames, of at most `max_bytes`.

    `label` names it in errors, `promise` the declaration of its length. Reading raises FormatError
    for an invalid stream, and for a longer one.

    Raises MissingExtraError if zstandard is not installed.
    """

    def __init__(self, packed: ByteStream, max_bytes: int, label: str, promise: str) -> None:
        zstandard = import_zstandard(label)
        self._error: type[Exception] = zstandard.ZstdError
        self._label = label
        self._promise = promise
        self._left = max_bytes
        decoder: Any = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._reader = decoder.stream_reader(
            _Appended(packed, _LAST_FRAME),
            read_size=READ_BYTES,
            read_across_frames=True,
            closefd=False,
        )

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or those that are left."""
        parts: list[bytes] = []
        # One byte more than declared, to detect a longer stream.
        left = min(size, self._left + 1)
        try:
            # The reader allocates the whole request before it decodes.
            while left and (part := self._reader.read(min(left, _PART_BYTES))):
                parts.append(part)
                left -= len(part)
        except self._error as error:
            raise FormatError(
                f"{self._label} is damaged: it is not a Zstandard stream with a window of at most "
                f"{MAX_WINDOW_BYTES} bytes ({error}); fetch the file again"
            ) from error
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        self._left -= len(content)
        if self._left < 0:
            raise expansion_error(self._label, self._promise)
        return content


class DeflateStream:
    """The decoded content of a gzip or zlib stream; see `ZStandardStream`."""

    def __init__(self, packed: ByteStream, max_bytes: int, label: str, promise: str) -> None:
        self._packed = packed
        self._label = label
        self._promise = promise
        self._left = max_bytes
        # Adding 32 makes the decoder detect which of the two it is.
        self._decoder = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or those that are left."""
        parts: list[bytes] = []
        left = min(size, self._left + 1)
        while left and not self._decoder.eof:
            packed = self._decoder.unconsumed_tail or self._packed.read(READ_BYTES)
            try:
                part = self._decoder.decompress(packed, left)
            except zlib.error as error:
                raise FormatError(
                    f"{self._label} is damaged: it is not a gzip or zlib stream ({error}); fetch "
                    "the file again"
                ) from error
            if not packed and not part:
                raise FormatError(f"{self._label} ends early: it was truncated, fetch it again")
            parts.append(part)
            left -= len(part)
        content = b"".join(parts)
        self._left -= len(content)
        if self._left < 0:
            raise expansion_error(self._label, self._promise)
        return content


def expansion_error(label: str, promise: str) -> FormatError:
    """Return the error for a stream that is longer than declared by `promise`."""
    return FormatError(
        f"{label} expands beyond the length in {promise}; the file is damaged, or made to fill the "
        "disk"
    )


def import_zstandard(label: str) -> ModuleType:
    """Import the package zstandard, which `label` needs. Raises MissingExtraError."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            f"{label} is compressed by Zstandard, which needs the package zstandard; "
            "pip install 'reshard[checkpoint]'"
        ) from error
    return zstandard
