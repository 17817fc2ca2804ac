"""Transforms of a storage writer, such as a compression, and how they are undone.

PyTorch's distributed checkpoint can send an item through extensions on its way to the file.
Each has a descriptor in `.metadata`, in the order in which a reader undoes them::

    archive  --zstd-->  packed bytes in the file      transform_descriptors  ["stream.zstd/1"]
    archive  <--zstd--  packed bytes                  (`unpacked`)

1. A descriptor is a name and a version. One that is not known is refused, never guessed.
2. What comes out is read piece by piece, in bounded memory (`files.byte_streams`).
3. What comes out between two transforms is bounded too, so that a small file cannot keep a
   reader busy for hours.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.checkpoint.files.byte_streams import (
    READ_BYTES,
    ByteStream,
    ZStandardStream,
    find_zstandard,
)
from reshard.checkpoint.formats.torch_files.pickle_terms import shortened
from reshard.errors import CheckpointError

ZSTANDARD = "stream.zstd"
# Name and major version of what can be undone.
KNOWN_TRANSFORMS = (f"{ZSTANDARD}/1",)
MOST_TRANSFORMS = 4


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
        find_zstandard(label)


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
        most = most_bytes if left == 0 else 2 * most_bytes + READ_BYTES
        stream = ZStandardStream(stream, most, label, ".metadata")
    return stream
