"""Marker objects of an unfinished upload, stored with the checkpoint's objects.

::

    model/                              the target
      .reshard/<conversion>/upload.json     the upload ids of files, and the size of their parts
      .reshard/<conversion>/commit          exists while files become visible in sequence

Another machine finds the parts of an earlier run by `upload.json`. A checkpoint with a `commit`
object is not read: some files could belong to the old checkpoint and some to the new checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.checkpoint.storage.object_stores import FolderListing
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import CheckpointError, FormatError

#: The folder of markers in a target.
MARKER_FOLDER = ".reshard"
UPLOAD_NAME = "upload.json"
COMMIT_NAME = "commit"
_FORMAT_VERSION = 1


class UploadMarker(NamedTuple):
    """The upload id of each file by name, and the size of its parts except the last."""

    uploads: Mapping[str, str] = MappingProxyType({})
    part_bytes: Mapping[str, int] = MappingProxyType({})

    def to_bytes(self) -> bytes:
        """Return the content of the marker object."""
        return json.dumps(
            {
                "format_version": _FORMAT_VERSION,
                "uploads": dict(self.uploads),
                "part_bytes": dict(self.part_bytes),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes, address: str) -> UploadMarker:
        """Return the marker that `to_bytes` wrote. Raises `FormatError`.

        >>> UploadMarker.from_bytes(UploadMarker({"a": "1"}, {"a": 8}).to_bytes(), "s3://b/m")
        UploadMarker(uploads={'a': '1'}, part_bytes={'a': 8})
        """
        try:
            document: Any = json.loads(content)
            if document["format_version"] == _FORMAT_VERSION:
                uploads = {str(name): str(upload) for name, upload in document["uploads"].items()}
                sizes = {str(name): int(size) for name, size in document["part_bytes"].items()}
                return cls(uploads, sizes)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise FormatError(
            f"{address} is not a marker of this version of reshard; finish the conversion with the "
            "version that began it, or start over with --restart"
        )


def marker_key(folder: str, conversion_id: str, name: str) -> str:
    """Return the key of a marker object.

    >>> marker_key("model", "c0ffee", COMMIT_NAME)
    'model/.reshard/c0ffee/commit'
    """
    return f"{folder}/{MARKER_FOLDER}/{conversion_id}/{name}"


def conversion_of(folder: str, key: str) -> str | None:
    """Return the conversion of a key in a target's marker folder, or None for other keys.

    >>> conversion_of("model", "model/.reshard/c0ffee/commit"), conversion_of("model", "model/a")
    ('c0ffee', None)
    """
    prefix = f"{folder}/{MARKER_FOLDER}/"
    conversion_id = key.removeprefix(prefix).partition("/")[0]
    return conversion_id if key.startswith(prefix) and conversion_id else None


def check_committed(folder: Path) -> None:
    """Raise CheckpointError for a folder of a store that a conversion is writing or replacing."""
    listing = folder.look() if isinstance(folder, RemotePath) else None
    if not isinstance(listing, FolderListing) or MARKER_FOLDER not in listing.folders:
        return
    if not listing.objects and listing.folders == {MARKER_FOLDER}:
        raise CheckpointError(
            f"no checkpoint in {folder}: a conversion is writing one; wait for it to end, or run "
            "the same command again, it continues"
        )
    for conversion in (folder / MARKER_FOLDER).iterdir():
        if (conversion / COMMIT_NAME).is_file():
            raise CheckpointError(
                f"the checkpoint in {folder} is half old and half new: a conversion is replacing "
                "it; wait for it to end, or run the same command again, it continues"
            )
