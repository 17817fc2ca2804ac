"""One place, such as a bucket, and what was seen of it.

A format asks for many names: is there an index, a config, a manifest? A folder is listed once and
answers all of them. What was seen is forgotten when somebody names the place anew
(`forget_place`), so that a checkpoint that is opened later is that of then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reshard.checkpoint.files.places.hub import open_hub
from reshard.checkpoint.files.places.object_source import (
    FolderListing,
    ObjectSource,
    ObjectState,
    open_bucket,
)

# Parts of an address that name the place: a bucket, a server, a model of somebody.
PARTS = {"s3": 1, "gs": 1, "az": 1, "http": 1, "https": 1, "hf": 2}
#: Other ways to write schemes.
ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az"}


class KnownPlace:
    """A source, with its folders as they were when they were first asked for.

    >>> class Shelf:
    ...     def look_at(self, key):
    ...         return ObjectState(3) if key == "a/x" else None
    ...
    ...     def list_folder(self, key):
    ...         return FolderListing({"x": ObjectState(3)} if key == "a" else {})
    >>> place = KnownPlace(Shelf())
    >>> place.find("a/x")
    ObjectState(size_bytes=3, modified_s=0, tag=None)
    >>> [*place.find("a").objects], place.find("b") is None
    (['x'], True)
    """

    def __init__(self, source: ObjectSource) -> None:
        self.source = source
        self._lock = threading.RLock()
        self._folders: dict[str, FolderListing] = {}
        self._objects: dict[str, ObjectState | None] = {}

    def find(self, key: str) -> ObjectState | FolderListing | None:
        """The object or the folder of a key; None where there is neither. Raises OSError."""
        with self._lock:
            if key in self._folders:
                return self.list_folder(key)
            parent, _, name = key.rpartition("/")
            listed = self._folders.get(parent)
            if listed is not None:
                if name in listed.objects:
                    return listed.objects[name]
                if listed.is_whole:
                    return self.list_folder(key) if name in listed.folders else None
            if key and key not in self._objects:
                self._objects[key] = self.source.look_at(key)
            return self._objects.get(key) or self.list_folder(key)

    def list_folder(self, key: str) -> FolderListing | None:
        """What is in a folder; None for one that is not there. Raises OSError."""
        with self._lock:
            if key not in self._folders:
                self._folders[key] = self.source.list_folder(key)
            found = self._folders[key]
            return found if found.objects or found.folders else None


_places: dict[tuple[str, ...], KnownPlace] = {}
_lock = threading.Lock()


def find_place(root: Sequence[str]) -> KnownPlace:
    """The place of a scheme and what follows it, such as `("s3", "bucket")`.

    Raises:
        MissingExtraError: the package that reaches it is not installed.
        OSError: it cannot be reached.
    """
    with _lock:
        known = _places.get(tuple(root))
    if known is not None:
        return known
    scheme, name, *model = root
    source: ObjectSource
    source = open_hub(name, *model) if scheme == "hf" else open_bucket(scheme, name)
    with _lock:
        return _places.setdefault(tuple(root), KnownPlace(source))


def forget_place(root: Sequence[str]) -> None:
    """Open a place anew when it is next named, with the settings and credentials of then."""
    with _lock:
        _places.pop(tuple(root), None)
