"""Archives that were transformed, such as compressed, and are unpacked when they are first read.

A storage writer of PyTorch can send items through extensions on their way to the file. `.metadata`
lists a descriptor (name and version) of each, in the order in which a reader reverses them::

    archive  --zstd-->  packed bytes in the file      transform_descriptors  ["stream.zstd/1"]
    archive  <--zstd--  packed bytes                  (`unpacked`)

An unknown descriptor is an error. An archive can only be unpacked from beginning to end. The
archives of a file are unpacked into an unnamed file, at offsets that are known before::

    __0_0.distcp            [packed w][packed b][a number]
                                |         |
    __0_0.distcp/unpacked   [w ........][b ..]            each at a page; holes until read

1. Opening a checkpoint unpacks only the front of each archive, which contains the length of its
   storage and the tensor's view of it.
2. When an element of it is first read, the archive is unpacked once, through a small buffer:
   memory does not grow with the archive. The output of each transform is bounded, so that a small
   file cannot keep a reader busy for hours.
3. The archive's directory must agree with its front, and its checksum with the storage.
4. The system removes an unnamed file when it is closed, or when its process ends.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from reshard._records import Record
from reshard.binding import FileRange
from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.reading import (
    FRONT_BYTES,
    read_archive,
    read_archive_front,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.formats.torch_files.zip_archives import ReadRange
from reshard.checkpoint.storage.byte_streams import (
    READ_BYTES,
    ByteStream,
    DecodedStream,
    RangeStream,
    import_zstandard,
)
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.checkpoint.storage.scratch_file import ScratchFile, ScratchPart
from reshard.errors import CheckpointError, DigestError, FormatError

ZSTANDARD = "stream.zstd"

# Name and major version of the transforms that can be reversed.
KNOWN_TRANSFORMS = (f"{ZSTANDARD}/1",)
MAX_TRANSFORMS = 4


def check_transforms(transforms: Sequence[str], label: str) -> None:
    """Raise for transforms that cannot be reversed; `label` names the item in errors.

    >>> check_transforms(["stream.zstd/1"], "w")
    >>> check_transforms(["stream.secret/1"], "w")
    Traceback (most recent call last):
    reshard.errors.CheckpointError: w was transformed by stream.secret/1, which hides its
    elements; known are stream.zstd/1. Save it again without this extension of the storage writer

    Raises:
        CheckpointError: an unknown transform, or more than `MAX_TRANSFORMS` in a row.
        MissingExtraError: the package for a transform is not installed.
    """
    for descriptor in transforms:
        name, _, version = descriptor.partition("/")
        if (name, version.partition(".")[0]) != (ZSTANDARD, "1"):
            raise CheckpointError(
                f"{label} was transformed by {shortened(descriptor) or 'nothing named'}, which "
                f"hides its elements; known are {', '.join(KNOWN_TRANSFORMS)}. Save it again "
                "without this extension of the storage writer"
            )
    if len(transforms) > MAX_TRANSFORMS:
        raise CheckpointError(
            f"{label} was transformed {len(transforms)} times in a row; {MAX_TRANSFORMS} are the "
            "most that are undone. Save it again with fewer extensions of the storage writer"
        )
    if transforms:
        import_zstandard(label)


def unpacked(
    packed: ByteStream, transforms: Sequence[str], max_bytes: int, label: str
) -> ByteStream:
    """Return a stream of the original bytes, at most `max_bytes`; `label` names them in errors.

    Reading from it raises FormatError for bytes that the transforms cannot have written.

    Raises:
        CheckpointError, MissingExtraError: as `check_transforms`.
    """
    check_transforms(transforms, label)
    stream = packed
    for left in reversed(range(len(transforms))):
        # Compressing compressed bytes lengthens them by a little at most.
        limit = max_bytes if left == 0 else 2 * max_bytes + READ_BYTES
        stream = DecodedStream("zstd", stream, limit, label, ".metadata")
    return stream


# Small records and the directory follow the storage.
_MAX_TAIL_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20


class PackedArchive(Record):
    """An archive that is stored transformed, such as compressed.

    Attributes:
        label: for errors.
        place: of its `packed_bytes` bytes.
        transforms: in the order in which they are reversed.
        front: the tensor that its first bytes describe.
        start_bytes: the offset in the unnamed file to which its storage is unpacked.
    """

    label: str
    place: FileRange
    packed_bytes: int
    transforms: tuple[str, ...]
    front: ArchivedTensor
    start_bytes: int = 0

    @property
    def stop_bytes(self) -> int:
        """The end of the unpacked storage."""
        return self.start_bytes + self.front.storage_bytes


def open_packed(
    read: ReadRange,
    place: FileRange,
    packed_bytes: int,
    transforms: tuple[str, ...],
    tensor_bytes: int,
    label: str,
) -> PackedArchive:
    """Describe the archive of a tensor of `tensor_bytes`, unpacking only its front.

    `read(offset, size)` returns bytes of the file.

    Raises:
        CheckpointError, MissingExtraError: as `check_transforms`.
        FormatError: not such an archive, or an archive of more than `tensor_bytes`.
    """
    packed = RangeStream(read, place.start_bytes, packed_bytes)
    stream = unpacked(packed, transforms, _max_archive_bytes(tensor_bytes), label)
    front = read_archive_front(stream.read(FRONT_BYTES), label)
    if front.storage_bytes > tensor_bytes:
        raise FormatError(
            f"{label} would be unpacked to a storage of {front.storage_bytes} bytes, expected "
            f"{tensor_bytes} by .metadata; the file is damaged, or made to fill the disk"
        )
    return PackedArchive(label, place, packed_bytes, transforms, front)


def _max_archive_bytes(storage_bytes: int) -> int:
    return FRONT_BYTES + storage_bytes + _MAX_TAIL_BYTES


class UnpackedArchives(ScratchFile):
    """The unpacked archives of a file; each is unpacked when it is first read.

    Args:
        path: for errors.
        archives: of the file, in the order of their unpacked storages.
        packed: the file, which stays open as long.
        scratch: the folder for the unnamed file.

    Raises:
        RunError: the unnamed file cannot be created.
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
                archive.start_bytes,
                archive.front.storage_bytes,
                archive.place.path,
                archive.place.start_bytes,
                archive.packed_bytes,
            )
            for archive in archives
        ]
        super().__init__(path, parts, packed, scratch)

    def make_part(self, number: int) -> None:
        """Unpack the storage of an archive into the file, and check the archive."""
        self._unpack(self._archives[number])

    def _unpack(self, archive: PackedArchive) -> None:
        storage_bytes = archive.front.storage_bytes
        packed = RangeStream(self.read_packed, archive.place.start_bytes, archive.packed_bytes)
        max_bytes = _max_archive_bytes(storage_bytes)
        stream = unpacked(packed, archive.transforms, max_bytes, archive.label)
        front = stream.read(archive.front.start_bytes)
        checksum = self._unpack_storage(stream, archive)
        tail = stream.read(max_bytes)
        size_bytes = len(front) + storage_bytes + len(tail)

        # The storage is in the unnamed file, the front and the tail are in memory.
        def read(offset: int, size: int) -> bytes:
            # `at` counts from the storage's first byte; a range may extend over all three.
            at, content = offset - len(front), b""
            if at < 0:
                content, at = front[offset:][:size], 0
            inside = max(0, min(size - len(content), storage_bytes - at))
            start = archive.start_bytes + at
            content += self.read_back(start, inside)
            rest = max(0, at - storage_bytes)
            return content + tail[rest : rest + size - len(content)]

        whole = read_archive(read, 0, size_bytes, archive.label)
        if dataclasses.replace(whole, crc32=None) != archive.front:
            raise FormatError(
                f"{archive.label} is damaged: its beginning and its directory describe different "
                "tensors; fetch the file again"
            )
        if whole.crc32 not in (None, checksum):
            raise DigestError(
                f"{archive.label} is not what was written: the checksum of the unpacked storage is "
                f"{checksum:08x}, in the archive it is {whole.crc32:08x}. It was damaged, fetch "
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
