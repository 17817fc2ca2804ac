"""What a store does for a checkpoint that is written to it: objects that are put in parts.

An object that is *begun* is not there yet: its parts are put in any order, by any process that
knows the upload, and may be listed. `complete` makes the object of them at once.

What a store refuses is raised as `OSError`, with the address as its `filename` and the reason as
its `strerror`.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reshard.checkpoint.files.descriptors import CONTINUES, close_descriptor, reason
from reshard.errors import RunError
from reshard.system import read_at

#: The name under which an object says which conversion wrote it: letters alone, since servers turn
#: underscores of headers into hyphens, or drop them, and Azure takes no hyphens.
CONVERSION_KEY = "reshardconversion"
#: Attempts at a request before it is an error, where the store has a setting for that.
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that is there: its size, when it was written, by which conversion, its checksum.

    The checksum is text that the store makes of the bytes, empty where it lists none.
    """

    size_bytes: int
    modified_s: float = 0.0
    conversion_id: str | None = None
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that is there: its size, and the store's checksum, empty where it lists none."""

    size_bytes: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An object that was begun and is not complete: its key, when it was begun, and its parts."""

    key: str
    upload: str
    began_s: float
    size_bytes: int = 0


class ObjectTarget(Protocol):
    """A bucket that is written to."""

    def begin(self, key: str, conversion_id: str, parts_key: str) -> str:
        """Begin an object; what the other methods call the upload.

        Where parts are objects themselves, their keys begin with `parts_key`.
        """

    def put_part(self, key: str, upload: str, number: int, body: FileStream) -> str:
        """Put part `number`, counted from 0, and return the checksum that is listed for it.

        One that is there is replaced.
        """

    def list_parts(self, key: str, upload: str) -> dict[int, StoredPart] | None:
        """Each part that is there; None where there is no such upload."""

    def complete(self, key: str, upload: str, parts: int, conversion_id: str) -> None:
        """Make the object of parts 0 to `parts`; one that is there already is well."""

    def abort(self, key: str, upload: str) -> None:
        """Give up an object that was begun, with its parts."""

    def put(self, key: str, body: FileStream | bytes, conversion_id: str = "") -> None:
        """Put a small object."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a small object; None where there is none."""

    def look_at(self, key: str) -> StoredObject | None:
        """An object; None where there is none."""

    def list_objects(self, prefix: str) -> Mapping[str, StoredObject]:
        """All objects whose keys begin so; which conversion wrote them is not said."""

    def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """What was begun and is not complete, of keys that begin so."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are well."""

    def close(self) -> None:
        """Close connections."""


class FileStream(io.RawIOBase):
    """A range of a file of this machine as a stream that can be read again from its begin."""

    # Where opening fails, the base class closes the object.
    _descriptor = -1

    def __init__(self, path: Path, start_bytes: int, stop_bytes: int) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._start, self.size_bytes = start_bytes, stop_bytes - start_bytes
        self._at = 0

    def __len__(self) -> int:
        return self.size_bytes

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte, counted from the begin, from here, or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size_bytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or as much of it as there is up to the end."""
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(self.size_bytes - self._at, 0))
        count = read_at(self._descriptor, view[:size], self._start + self._at) if size else 0
        if size and not count:
            raise OSError(errno.EIO, "the file ends early; did another program cut it?")
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)
        super().close()


@contextmanager
def store_refusals(action: str) -> Iterator[None]:
    """Turn what a store or the system refuses into a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = f"check the connection, then {CONTINUES}"
        if isinstance(error, PermissionError):
            advice = (
                f"see that these credentials may read, write, list and delete, then {CONTINUES}"
            )
        elif error.errno == errno.EINVAL:
            advice = f"set that right, then {CONTINUES}"
        raise RunError(f"cannot {action}: {error.filename}: {reason(error)}; {advice}") from error


def shorten(text: str) -> str:
    """What a store says, in a line; nothing of queries, which may have secrets.

    >>> shorten("no answer from http://host/key?X-Amz-Signature=abc\\n twice")
    'no answer from http://host/key twice'
    """
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:300]
