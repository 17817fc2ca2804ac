"""The marker: what a store holds of an upload that is under way, beside its parts.

::

    model/                              the target
      .reshard/<conversion>/upload.json     which uploads the files are, and how long parts are
      .reshard/<conversion>/commit          there while files become visible one after the other

A machine that has nothing of an earlier run finds its parts by the first. A reader that sees the
second does not read: it would see some files of one checkpoint and some of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.checkpoint.storage.object_stores import FolderListing
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.errors import CheckpointError, FormatError

#: The folder of markers in a target.
MARKER_FOLDER = ".reshard"
UPLOAD_NAME = "upload.json"
COMMIT_NAME = "commit"
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class UploadMarker:
    """The upload of each file by its name, and the bytes of its parts but the last."""

    uploads: Mapping[str, str] = field(default_factory=dict)
    part_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """What the store holds."""
        return json.dumps(
            {
                "format_version": _FORMAT_VERSION,
                "uploads": dict(self.uploads),
                "part_bytes": dict(self.part_bytes),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes, address: str) -> UploadMarker:
        """What `to_bytes` made. Raises `FormatError`.

        >>> UploadMarker.from_bytes(UploadMarker({"a": "1"}, {"a": 8}).to_bytes(), "s3://b/m")
        UploadMarker(uploads={'a': '1'}, part_bytes={'a': 8})
        """
        try:
            found: Any = json.loads(content)
            if found["format_version"] == _FORMAT_VERSION:
                uploads = {str(name): str(one) for name, one in found["uploads"].items()}
                sizes = {str(name): int(one) for name, one in found["part_bytes"].items()}
                return cls(uploads, sizes)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise FormatError(
            f"{address} is not what this version of reshard writes there; finish the conversion "
            "with the version that began it, or start over with --restart"
        )


def marker_key(folder: str, conversion_id: str, name: str) -> str:
    """The key of an object of the marker.

    >>> marker_key("model", "c0ffee", COMMIT_NAME)
    'model/.reshard/c0ffee/commit'
    """
    return f"{folder}/{MARKER_FOLDER}/{conversion_id}/{name}"


def conversion_of(folder: str, key: str) -> str | None:
    """The conversion that a key in a target's marker folder is of; None for other keys.

    >>> conversion_of("model", "model/.reshard/c0ffee/commit"), conversion_of("model", "model/a")
    ('c0ffee', None)
    """
    within = f"{folder}/{MARKER_FOLDER}/"
    found = key.removeprefix(within).partition("/")[0]
    return found if key.startswith(within) and found else None


def check_committed(folder: Path) -> None:
    """Raise CheckpointError for a folder of a store while a conversion puts a checkpoint there."""
    found = folder.look() if isinstance(folder, RemotePath) else None
    if not isinstance(found, FolderListing) or MARKER_FOLDER not in found.folders:
        return
    if not found.objects and found.folders == {MARKER_FOLDER}:
        raise CheckpointError(
            f"no checkpoint in {folder}: a conversion has begun to write one; wait for it to end, "
            "or run the same command again, it continues"
        )
    for one in (folder / MARKER_FOLDER).iterdir():
        if (one / COMMIT_NAME).is_file():
            raise CheckpointError(
                f"the checkpoint in {folder} is half of one and half of another: a conversion puts "
                "it in its place; wait for it to end, or run the same command again, it continues"
            )
