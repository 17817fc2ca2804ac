"""Compressed archives: files that are unpacked when they are first read.

The elements of a tensor are nowhere in a file until its archive is unpacked, and only all of it
can be. What is unpacked of one file goes into a file without a name, in which every storage has
its place from the start::

    __0_0.distcp            [packed w][packed b][a number]
                                |         |
    __0_0.distcp/unpacked   [w ........][b ..]            each from a page on; holes until read

1. The front of each archive, the little that opening a checkpoint unpacks, says how long its
   storage is and how the tensor lies in it. So each storage has its place before it is unpacked.
2. When something in it is first read, the archive is unpacked from beginning to end, once,
   through a small buffer: memory does not grow with the archive, the disk takes the storage.
3. Then the archive's directory is there: it must say what the front said, and its checksum
   must be that of the storage.
4. The system removes a file without a name when it is closed, or its process ends in any way.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.binding import FileRange
from reshard.checkpoint.files.byte_streams import ByteStream, RangeStream
from reshard.checkpoint.files.scratch_file import ScratchFile, ScratchPart, next_start_bytes
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats.torch_dcp.stream_transforms import unpacked
from reshard.checkpoint.formats.torch_files.archive import (
    FRONT_BYTES,
    read_archive,
    read_archive_front,
)
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.checkpoint.formats.torch_files.zip_records import ReadRange
from reshard.errors import DigestError, FormatError

# What stands behind the storage: small records, and the directory.
_MOST_TAIL_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedArchive:
    """An archive that is stored transformed, such as compressed, in a file.

    Its `packed_bytes` at `place` were transformed by `transforms`, which are undone in that
    order. `front` is what its beginning says. Its storage is unpacked to `start_bytes` of the
    file without a name; `label` names it in errors.
    """

    label: str
    place: FileRange
    packed_bytes: int
    transforms: tuple[str, ...]
    front: ArchivedTensor
    start_bytes: int = 0

    @property
    def stop_bytes(self) -> int:
        """Where the unpacked storage ends."""
        return self.start_bytes + self.front.storage_bytes

    @property
    def next_start_bytes(self) -> int:
        """Where the next storage may begin."""
        return next_start_bytes(self.stop_bytes)


def unpacked_name(file: str) -> str:
    """The name under which tensors find what is unpacked of a file; no file can have it.

    >>> unpacked_name("__0_0.distcp")
    '__0_0.distcp/unpacked'
    """
    return f"{file}/unpacked"


def look_into(
    read: ReadRange,
    place: FileRange,
    packed_bytes: int,
    transforms: tuple[str, ...],
    tensor_bytes: int,
    label: str,
) -> PackedArchive:
    """The archive of a tensor of `tensor_bytes`, of which only the front is unpacked.

    `read(offset, size)` returns bytes of the file.

    Raises:
        CheckpointError: a transform that is not known.
        MissingExtraError: one whose package is not installed.
        FormatError: no such archive, or one of more than `tensor_bytes`.
    """
    packed = RangeStream(read, place.start_bytes, packed_bytes)
    stream = unpacked(packed, transforms, _find_most_bytes(tensor_bytes), label)
    front = read_archive_front(stream.read(FRONT_BYTES), label)
    if front.storage_bytes > tensor_bytes:
        raise FormatError(
            f"{label} would be unpacked to a storage of {front.storage_bytes} bytes, expected "
            f"{tensor_bytes} by .metadata; the file is damaged, or made to fill the disk"
        )
    return PackedArchive(label, place, packed_bytes, transforms, front)


def _find_most_bytes(storage_bytes: int) -> int:
    return FRONT_BYTES + storage_bytes + _MOST_TAIL_BYTES


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The transformed archives of one file, in the order of their unpacked storages."""

    archives: tuple[PackedArchive, ...]

    @property
    def source(self) -> str:
        """The file that they are in."""
        return self.archives[0].place.path

    def open(self, path: Path, source: SourceFile, scratch: Path | None) -> SourceFile:
        """Open the unpacked contents for reading."""
        return UnpackedFile(path, self.archives, source, scratch)


class UnpackedFile(ScratchFile):
    """The unpacked contents of one file; each archive is unpacked when it is first read.

    `packed` is that file, and stays open as long; `scratch` the folder in which there is room.

    Raises `RunError` where no file can be made in `scratch`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        archives: Sequence[PackedArchive],
        packed: SourceFile,
        scratch: Path | None = None,
    ) -> None:
        self._archives = archives
        parts = [
            ScratchPart(
                one.start_bytes,
                one.front.storage_bytes,
                one.place.path,
                one.place.start_bytes,
                one.packed_bytes,
            )
            for one in archives
        ]
        super().__init__(path, parts, packed, scratch)

    def make_part(self, number: int) -> None:
        """Unpack an archive and check it: its storage into the file, the rest in memory."""
        self._unpack(self._archives[number])

    def _unpack(self, archive: PackedArchive) -> None:
        storage_bytes = archive.front.storage_bytes
        packed = RangeStream(self.read_packed, archive.place.start_bytes, archive.packed_bytes)
        most_bytes = _find_most_bytes(storage_bytes)
        stream = unpacked(packed, archive.transforms, most_bytes, archive.label)
        front = stream.read(archive.front.start_bytes)
        checksum = self._unpack_storage(stream, archive)
        tail = stream.read(most_bytes)
        size_bytes = len(front) + storage_bytes + len(tail)

        # The archive as a whole: its storage is in the file, what is around it in memory.
        def read(offset: int, size: int) -> bytes:
            # `at` counts from the storage's first byte; a range may lie in all three parts.
            at, content = offset - len(front), b""
            if at < 0:
                content, at = front[offset:][:size], 0
            inside = max(0, min(size - len(content), storage_bytes - at))
            start = archive.start_bytes + at
            content += self.read_back(start, inside)
            behind = max(0, at - storage_bytes)
            return content + tail[behind : behind + size - len(content)]

        whole = read_archive(read, 0, size_bytes, archive.label)
        if replace(whole, crc32=None) != archive.front:
            raise FormatError(
                f"{archive.label} is damaged: its beginning and its directory speak of different "
                "tensors; fetch the file again"
            )
        if whole.crc32 not in (None, checksum):
            raise DigestError(
                f"{archive.label} is not what was written: the checksum of what is unpacked is "
                f"{checksum:08x}, the archive itself says {whole.crc32:08x}. It was damaged, fetch "
                "it again"
            )

    def _unpack_storage(self, stream: ByteStream, archive: PackedArchive) -> int:
        """Write the storage into the file and return its checksum."""
        checksum, at = 0, archive.start_bytes
        while at < archive.stop_bytes:
            piece = stream.read(min(_PIECE_BYTES, archive.stop_bytes - at))
            if not piece:
                raise FormatError(
                    f"{archive.label} ends early: {at - archive.start_bytes} bytes of its storage "
                    f"come out, expected {archive.front.storage_bytes}; it was cut off, fetch the "
                    "file again"
                )
            checksum = zlib.crc32(piece, checksum)
            self.write(piece, at)
            at += len(piece)
        return checksum
