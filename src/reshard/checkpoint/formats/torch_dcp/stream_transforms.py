"""Transforms of a storage writer, such as a compression, and how they are undone.

PyTorch's distributed checkpoint can send an item through extensions on its way to the file.
Each has a descriptor in `.metadata`, in the order in which a reader undoes them::

    archive  --zstd-->  packed bytes in the file      transform_descriptors  ["stream.zstd/1"]
    archive  <--zstd--  packed bytes                  (`unpacked`)

1. A descriptor is a name and a version. One that is not known is refused, never guessed.
2. What comes out is read piece by piece, in bounded memory: a frame that asks for a window of
   more than `MOST_WINDOW_BYTES` is refused.
3. Behind the packed bytes the decoder is given a frame of nothing (`_LAST_FRAME`). One that is
   still inside of a frame takes it for the head of a block of a size that no block has, so a
   stream that was cut off is noticed wherever the cut is.
4. What comes out between two transforms is bounded too, so that a small file cannot keep a
   reader busy for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from reshard.checkpoint.formats.torch_files.pickle_terms import shortened
from reshard.errors import CheckpointError, FormatError, MissingExtraError

ZSTANDARD = "stream.zstd"
# Name and major version of what can be undone.
KNOWN_TRANSFORMS = (f"{ZSTANDARD}/1",)
MOST_TRANSFORMS = 4
# What the format asks every decoder to support (RFC 8878, 3.1.1.1.2); all usual levels keep to it.
MOST_WINDOW_BYTES = 8 << 20
_READ_BYTES = 128 << 10
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


def check_transforms(transforms: Sequence[str], label: str) -> None:
    """Raise for transforms that cannot be undone; `label` names the item in errors.

    >>> check_transforms(["stream.zstd/1"], "w")
    >>> check_transforms(["stream.secret/1"], "w")
    Traceback (most recent call last):
    reshard.errors.CheckpointError: w was transformed by stream.secret/1, which hides its
    elements; known are stream.zstd/1. Save it again without this extension of the storage writer

    Raises:
        CheckpointError: one that is not known, or more than `MOST_TRANSFORMS` in a row.
        MissingExtraError: the package that undoes it is not installed.
    """
    for descriptor in transforms:
        name, _, version = descriptor.partition("/")
        if (name, version.partition(".")[0]) != (ZSTANDARD, "1"):
            raise CheckpointError(
                f"{label} was transformed by {shortened(descriptor) or 'nothing named'}, which "
                f"hides its elements; known are {', '.join(KNOWN_TRANSFORMS)}. Save it again "
                "without this extension of the storage writer"
            )
    if len(transforms) > MOST_TRANSFORMS:
        raise CheckpointError(
            f"{label} was transformed {len(transforms)} times in a row; {MOST_TRANSFORMS} are the "
            "most that are undone. Save it again with fewer extensions of the storage writer"
        )
    if transforms:
        _zstandard(label)


def unpacked(
    packed: ByteStream, transforms: Sequence[str], most_bytes: int, label: str
) -> ByteStream:
    """The bytes before they were transformed; `label` names them in errors.

    `most_bytes` is how many of them there can be. Reading raises FormatError for bytes that
    are not what the transforms wrote.

    Raises:
        CheckpointError, MissingExtraError: as `check_transforms`.
    """
    check_transforms(transforms, label)
    stream = packed
    for left in reversed(range(len(transforms))):
        # What is packed again is at most a little longer than it was.
        most = most_bytes if left == 0 else 2 * most_bytes + _READ_BYTES
        stream = _ZStandardStream(stream, most, label)
    return stream


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


class _ZStandardStream:
    """A stream of Zstandard frames, decoded."""

    def __init__(self, packed: ByteStream, most_bytes: int, label: str) -> None:
        zstandard = _zstandard(label)
        self._error: type[Exception] = zstandard.ZstdError
        self._label = label
        self._left = most_bytes
        decoder: Any = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
        self._reader = decoder.stream_reader(
            _Followed(packed, _LAST_FRAME),
            read_size=_READ_BYTES,
            read_across_frames=True,
            closefd=False,
        )

    def read(self, size: int, /) -> bytes:
        try:
            # One byte more than there may be, to notice a stream that goes on.
            content: bytes = self._reader.read(min(size, self._left + 1))
        except self._error as error:
            raise FormatError(
                f"{self._label} is damaged: it is no Zstandard stream that can be decoded in "
                f"{MOST_WINDOW_BYTES} bytes ({error}); fetch the file again"
            ) from error
        self._left -= len(content)
        if self._left < 0:
            raise FormatError(
                f"{self._label} expands beyond what .metadata promises of it; the file is damaged, "
                "or made to fill the disk"
            )
        return content


def _zstandard(label: str) -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            f"{label} is compressed by {ZSTANDARD}, which needs the package zstandard; "
            "pip install 'reshard[checkpoint]'"
        ) from error
    return zstandard
