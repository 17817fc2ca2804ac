"""Where the values of keys lie: in files of their own, or in an OCDBT database.

Zarr has an array as values of keys: `NAME/.zarray` says what it is, `NAME/0.1` is a chunk. Orbax
has these as files in the folder, or as the keys of one database. Either way a value is a range of
a file, or, where the database has it in a node, its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax.ocdbt import (
    DataPlace,
    NodePlace,
    decode_manifest,
    decode_node,
)
from reshard.checkpoint.manifest import is_plain_name
from reshard.checkpoint.storage.filesystem import read_up_to, reason
from reshard.errors import CheckpointError, FormatError

MANIFEST_NAME = "manifest.ocdbt"
# Of a database, and of what is read into memory of a folder at once.
MOST_KEYS = 20_000_000
MOST_NODE_BYTES = 256 << 20
MOST_READ_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The value of a key: `size_bytes` at `place`, or `content` where it is known already."""

    size_bytes: int
    place: FileRange | None = None
    content: bytes | None = None

    def read(self, folder: Path, start_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Its bytes, or some of them, from `start_bytes` on.

        Raises FormatError where they are not all there, or too many to be read at once.
        """
        size = self.size_bytes - start_bytes if size_bytes is None else size_bytes
        if self.place is None:
            return (self.content or b"")[start_bytes : start_bytes + size]
        return read_range(folder / self.place.path, self.place.start_bytes + start_bytes, size)


def read_range(path: Path, start_bytes: int, size_bytes: int) -> bytes:
    """Bytes of a file.

    Raises:
        CheckpointError: a file that is missing, or cannot be read.
        FormatError: a file that ends before, or more than are read at once.
    """
    if size_bytes > MOST_NODE_BYTES:
        raise FormatError(
            f"{path}: {size_bytes} bytes should be read at once, {MOST_NODE_BYTES} are the most; "
            "the file is damaged"
        )
    try:
        with path.open("rb") as file:
            file.seek(start_bytes)
            content = read_up_to(file, size_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is not complete") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    if len(content) != size_bytes:
        raise FormatError(
            f"{path} ends at byte {start_bytes + len(content)}, {size_bytes} bytes at "
            f"{start_bytes} were expected; it was cut off, or belongs to another save"
        )
    return content


class KeyValues:
    """The values of a checkpoint by key: `values["w/.zarray"]`. Where a key is not, None."""

    def __init__(self, folder: Path, values: Mapping[str, StoredValue] | None) -> None:
        self.folder = folder
        self._values = values
        self._sizes: dict[str, int] = {}

    @property
    def is_database(self) -> bool:
        """Whether they are in an OCDBT database."""
        return self._values is not None

    def find(self, key: str) -> StoredValue | None:
        """Where the value of a key is; None where there is none.

        Raises:
            FormatError: a key that leads out of the folder; a range that is not in its file.
        """
        if self._values is not None:
            found = self._values.get(key)
            if found is not None and found.place is not None:
                self._check_inside(key, found.place, found.size_bytes)
            return found
        if not is_inside(key):
            raise FormatError(f"the key {key!r} in {self.folder} would lie outside of the folder")
        size = self._find_size(key)
        return None if size < 0 else StoredValue(size, FileRange(key, 0))

    def _check_inside(self, key: str, place: FileRange, size_bytes: int) -> None:
        size = self._find_size(place.path)
        if size < 0:
            raise CheckpointError(
                f"{self.folder / place.path} is missing, which should have {key!r}; the checkpoint "
                "is not complete"
            )
        if place.start_bytes + size_bytes > size:
            raise FormatError(
                f"{self.folder / place.path} has {size} bytes, but {key!r} should be in bytes "
                f"{place.start_bytes}:{place.start_bytes + size_bytes}; the file was cut off, or "
                "belongs to another save"
            )

    def _find_size(self, name: str) -> int:
        """The size of a file, -1 where there is none."""
        if name not in self._sizes:
            try:
                path = self.folder / name
                self._sizes[name] = path.stat().st_size if path.is_file() else -1
            except (OSError, ValueError):
                self._sizes[name] = -1
        return self._sizes[name]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The files in which values were found, and their sizes."""
        return {name: size for name, size in self._sizes.items() if size >= 0}


def is_inside(path: str) -> bool:
    """Whether a path that was read from a file stays inside its folder.

    >>> is_inside("ocdbt.process_0/d/5ddf"), is_inside("d/../../x"), is_inside("/etc/x")
    (True, False, False)
    """
    return all(map(is_plain_name, path.split("/")))


def open_key_values(folder: Path) -> KeyValues:
    """The values in a folder: those of its database, if there is one, or its files.

    Raises:
        CheckpointError: a file that is missing.
        FormatError: a database that is damaged.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return KeyValues(folder, None)
    manifest = decode_manifest(read_range(path, 0, path.stat().st_size), str(path))
    values: dict[str, StoredValue] = {}
    waiting = [manifest.root] if manifest.root else []
    seen: set[DataPlace] = set()
    while waiting:
        node = waiting.pop()
        # A tree has each node once; one that has not could be without end.
        if node.place in seen:
            raise FormatError(f"{path} leads to {_name(node)} twice; it is damaged")
        seen.add(node.place)
        found = decode_node(_read_node(folder, node), node, f"{folder / _name(node)}")
        waiting += reversed(found.children)
        for key, value in found.values.items():
            values[_decode_key(key, path)] = _place(value, path)
        if len(values) > MOST_KEYS:
            raise FormatError(f"{path} has more than {MOST_KEYS} keys; it is damaged")
    return KeyValues(folder, values)


def _read_node(folder: Path, node: NodePlace) -> bytes:
    _expect_inside(node.place.path, folder / MANIFEST_NAME)
    return read_range(folder / node.place.path, node.place.start_bytes, node.place.size_bytes)


def _name(node: NodePlace) -> str:
    stop = node.place.start_bytes + node.place.size_bytes
    return f"{node.place.path} bytes {node.place.start_bytes}:{stop}"


def _decode_key(key: bytes, path: Path) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{path} has the key {key!r}, which is no text; it is damaged") from None


def _place(value: bytes | DataPlace, path: Path) -> StoredValue:
    if isinstance(value, bytes):
        return StoredValue(len(value), content=value)
    _expect_inside(value.path, path)
    return StoredValue(value.size_bytes, FileRange(value.path, value.start_bytes))


def _expect_inside(name: str, path: Path) -> None:
    if not is_inside(name):
        raise FormatError(f"{path} refers to {name!r}, outside of its folder; it is damaged")
