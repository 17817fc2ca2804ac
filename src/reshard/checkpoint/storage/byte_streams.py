"""Byte streams, and their content before compression.

Compressed streams are decoded piece by piece, in bounded memory and to a bounded length:

1. A Zstandard frame that requires a window of more than `MAX_WINDOW_BYTES` is refused.
2. An empty frame (`_LAST_FRAME`) is appended to the packed bytes. If the stream was truncated, the
   decoder is still inside a frame, and reads the empty frame as the header of a block with an
   impossible size. So a truncated stream is detected wherever it was truncated.
3. Output beyond the declared length is an error, so that a small file cannot fill a disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from reshard.errors import FormatError, MissingExtraError

#: `read(offset, size)` returns bytes of a file.
ReadRange = Callable[[int, int], bytes]

# Every decoder should support this (RFC 8878, 3.1.1.1.2); the usual levels need no more.
MAX_WINDOW_BYTES = 8 << 20
READ_BYTES = 128 << 10
PIECE_BYTES = 1 << 20
_PART_BYTES = 4 << 20
# A skippable frame without content (RFC 8878, 3.1.2).
_LAST_FRAME = b"\x5f\x2a\x4d\x18" + bytes(4)


class ByteStream(Protocol):
    """A stream of bytes; `read` returns fewer bytes than requested only at its end."""

    def read(self, size: int, /) -> bytes: ...


class RangeStream:
    """A range of a file as a stream."""

    def __init__(self, read: ReadRange, start_bytes: int, size_bytes: int) -> None:
        self._read = read
        self._at = start_bytes
        self._end = start_bytes + size_bytes

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or those that are left."""
        size = min(size, self._end - self._at)
        content = self._read(self._at, size) if size else b""
        self._at += size
        return content


def read_pieces(stream: ByteStream, size_bytes: int, label: str) -> Iterator[bytes]:
    """Yield the next `size_bytes` of a stream in pieces; `label` names them in errors.

    Raises FormatError if the stream ends before.
    """
    left = size_bytes
    while left:
        piece = stream.read(min(PIECE_BYTES, left))
        if not piece:
            raise FormatError(
                f"{label} ends early: {size_bytes - left} bytes come out, expected {size_bytes}; "
                "it was cut off, fetch the file again"
            )
        left -= len(piece)
        yield piece


class DecodedStream:
    """The decoded content of a compressed stream, of at most `max_bytes`.

    Args:
        codec: `zstd` for Zstandard frames, `gzip` for a gzip or zlib stream.
        packed: the compressed stream.
        max_bytes: the declared length.
        label: names the stream in errors.
        promise: names the declaration of its length in errors.

    Raises MissingExtraError if zstandard is needed and not installed. Reading raises FormatError
    for an invalid stream, and for a stream longer than `max_bytes`.
    """

    def __init__(
        self, codec: str, packed: ByteStream, max_bytes: int, label: str, promise: str
    ) -> None:
        unpack = _unpack_zstandard if codec == "zstd" else _unpack_deflate
        self._read_part = unpack(packed, label)
        self._label, self._promise, self._left = label, promise, max_bytes

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or those that are left."""
        parts: list[bytes] = []
        # Request a byte more than declared, to detect a longer stream.
        left = min(size, self._left + 1)
        while left and (part := self._read_part(left)):
            parts.append(part)
            left -= len(part)
        content = parts[0] if len(parts) == 1 else b"".join(parts)
        self._left -= len(content)
        if self._left < 0:
            raise expansion_error(self._label, self._promise)
        return content


def _unpack_zstandard(packed: ByteStream, label: str) -> Callable[[int], bytes]:
    """Return a function that decodes at most a number of bytes, and returns none at the end."""
    zstandard = import_zstandard(label)
    is_ended = False

    def read_packed(size: int, /) -> bytes:
        """Read the stream, and then the empty frame by which a truncated stream is detected."""
        nonlocal is_ended
        content = b"" if is_ended else packed.read(size)
        if content or is_ended:
            return content
        is_ended = True
        return _LAST_FRAME

    decoder: Any = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    reader = decoder.stream_reader(
        SimpleNamespace(read=read_packed),
        read_size=READ_BYTES,
        read_across_frames=True,
        closefd=False,
    )

    def read_part(size: int) -> bytes:
        try:
            # The reader allocates the requested size before it decodes, so requests are limited.
            return bytes(reader.read(min(size, _PART_BYTES)))
        except zstandard.ZstdError as error:
            raise FormatError(
                f"{label} is damaged: it is not a Zstandard stream with a window of at most "
                f"{MAX_WINDOW_BYTES} bytes ({error}); fetch the file again"
            ) from error

    return read_part


def _unpack_deflate(packed: ByteStream, label: str) -> Callable[[int], bytes]:
    """Return a function as `_unpack_zstandard` does, for a gzip or zlib stream."""
    # Adding 32 to the window bits makes the decoder detect which of the two formats it is.
    decoder = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)

    def read_part(size: int) -> bytes:
        part = b""
        while not part and not decoder.eof:
            content = decoder.unconsumed_tail or packed.read(READ_BYTES)
            try:
                part = decoder.decompress(content, size)
            except zlib.error as error:
                raise FormatError(
                    f"{label} is damaged: it is not a gzip or zlib stream ({error}); fetch "
                    "the file again"
                ) from error
            if not content and not part:
                raise FormatError(f"{label} ends early: it was truncated, fetch it again")
        return part

    return read_part


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
