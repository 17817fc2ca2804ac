"""Archives that were transformed, such as compressed, and are unpacked when they are first read.

A storage writer of PyTorch can send items through extensions on their way to the file. `.metadata`
lists a descriptor (name and version) of each, in the order in which a reader reverses them::

    archive  --zstd-->  packed bytes in the file      transform_descriptors  ["stream.zstd/1"]
    archive  <--zstd--  packed bytes                  (`unpacked`)

An unknown descriptor is an error. An archive can only be unpacked from beginning to end, so its
storage is a part of a derived file (`storage.derived_files`).

1. Opening a checkpoint unpacks only the front of each archive, which contains the length of its
   storage and the tensor's view of it.
2. When an element of it is first read, the archive is unpacked once, through a small buffer:
   memory does not grow with the archive. The output of each transform is bounded, so that a small
   file cannot keep a reader busy for hours.
3. The archive's directory must agree with its front, and its checksum with the storage.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.reading import (
    FRONT_BYTES,
    read_archive,
    read_archive_front,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.storage.byte_streams import (
    READ_BYTES,
    ByteStream,
    DecodedStream,
    RangeStream,
    ReadRange,
    import_zstandard,
    read_pieces,
)
from reshard.checkpoint.storage.derived_files import DerivedPart
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


class PackedArchive(DerivedPart):
    """The storage of an archive that is stored transformed, such as compressed.

    Attributes:
        transforms: in the order in which they are reversed.
        front: the tensor that its first bytes describe.
    """

    transforms: tuple[str, ...]
    front: ArchivedTensor

    def create(self, read: ReadRange) -> Iterator[bytes]:
        """Yield the storage, and check the archive."""
        max_bytes = _max_archive_bytes(self.size_bytes)
        packed = RangeStream(read, self.source_start_bytes, self.source_bytes)
        stream = unpacked(packed, self.transforms, max_bytes, self.label)
        front = stream.read(self.front.start_bytes)
        checksum = 0
        for piece in read_pieces(stream, self.size_bytes, self.label):
            yield piece
            checksum = zlib.crc32(piece, checksum)
        self._check(front, stream.read(max_bytes), checksum)

    def _check(self, front: bytes, tail: bytes, checksum: int) -> None:
        """Compare the archive's directory with its front, and its checksum with the storage."""
        storage_end = len(front) + self.size_bytes

        def read(offset: int, size: int) -> bytes:
            # The storage is not kept, and reads as zeros: no record of a description is in it.
            hole = min(storage_end, offset + size) - max(len(front), offset)
            content = front[offset:][:size] + bytes(max(0, hole))
            rest = max(0, offset - storage_end)
            return content + tail[rest : rest + size - len(content)]

        whole = read_archive(read, 0, storage_end + len(tail), self.label)
        if dataclasses.replace(whole, crc32=None) != self.front:
            raise FormatError(
                f"{self.label} is damaged: its beginning and its directory describe different "
                "tensors; fetch the file again"
            )
        if whole.crc32 not in (None, checksum):
            raise DigestError(
                f"{self.label} is not what was written: the checksum of the unpacked storage is "
                f"{checksum:08x}, in the archive it is {whole.crc32:08x}. It was damaged, fetch it "
                "again"
            )


def open_packed(
    read: ReadRange,
    start_bytes: int,
    packed_bytes: int,
    transforms: tuple[str, ...],
    tensor_bytes: int,
    label: str,
) -> PackedArchive:
    """Describe the archive of a tensor of `tensor_bytes`, unpacking only its front.

    It has `packed_bytes` from `start_bytes` of its file on.

    Raises:
        CheckpointError, MissingExtraError: as `check_transforms`.
        FormatError: not such an archive, or an archive of more than `tensor_bytes`.
    """
    packed = RangeStream(read, start_bytes, packed_bytes)
    stream = unpacked(packed, transforms, _max_archive_bytes(tensor_bytes), label)
    front = read_archive_front(stream.read(FRONT_BYTES), label)
    if front.storage_bytes > tensor_bytes:
        raise FormatError(
            f"{label} would be unpacked to a storage of {front.storage_bytes} bytes, expected "
            f"{tensor_bytes} by .metadata; the file is damaged, or made to fill the disk"
        )
    return PackedArchive(label, start_bytes, packed_bytes, front.storage_bytes, transforms, front)


def _max_archive_bytes(storage_bytes: int) -> int:
    return FRONT_BYTES + storage_bytes + _MAX_TAIL_BYTES
