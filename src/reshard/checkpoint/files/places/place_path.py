"""Paths in places: `s3://bucket/model/config.json` with the methods of `pathlib.Path` that read.

Formats look for names, read files and list folders by the methods of a `Path`. A `PlacePath` has
them, so every format reads from every place. What would write raises `PermissionError`.

    as_path("model")               a path of this machine
    as_path("file:///data/model")  likewise
    as_path("s3://bucket/model")   a PlacePath
    as_path("org/model")           a model of the Hub, where there is neither such a path nor `org`
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath, PurePath
from typing import IO, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from reshard.checkpoint.files.places.object_source import (
    IN_FLIGHT,
    FolderListing,
    ObjectState,
)
from reshard.checkpoint.files.places.place import (
    ALIASES,
    PARTS,
    KnownPlace,
    find_place,
    forget_place,
)
from reshard.checkpoint.files.places.place_stream import PlaceStream
from reshard.errors import UsageError

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PLACE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
#: The name of a model of the Hub, and its revision.
HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}(@[\w./-]+)?")


Found = TypeVar("Found")


class PlacePath(PosixPath):
    """A path in a place; text of it is its address.

    >>> path = PlacePath("s3://bucket/model") / "config.json"
    >>> str(path), path.name, str(path.parent), path.root_parts, path.key
    ('s3://bucket/model/config.json', 'config.json', 's3://bucket/model', ('s3', 'bucket'), \
'model/config.json')
    >>> path.relative_to(path.parent).as_posix()
    'config.json'
    """

    # Its parts are those of the path `/s3:/bucket/model/config.json`.

    def __new__(cls, *segments: str | os.PathLike[str]) -> PlacePath:
        return super().__new__(cls, *_split_addresses(segments))

    if sys.version_info >= (3, 12):

        def __init__(self, *segments: str | os.PathLike[str]) -> None:
            super().__init__(*_split_addresses(segments))

    def __str__(self) -> str:
        parts = self.parts
        if parts[:1] != ("/",) or len(parts) < 2:
            return "/".join(part for part in parts if part != "/") or "."
        return f"{parts[1]}//" + "/".join(parts[2:])

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"PlacePath({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacePath, (str(self),)

    def as_posix(self) -> str:
        """The same as text of it."""
        return str(self)

    @property
    def root_parts(self) -> tuple[str, ...]:
        """What names the place: the scheme, and a bucket, a server, or two parts of the Hub."""
        scheme = self.parts[1].rstrip(":")
        return (scheme, *self.parts[2 : 2 + PARTS[scheme]])

    @property
    def key(self) -> str:
        """What names the object, or the folder, in the place."""
        return "/".join(self.parts[1 + len(self.root_parts) :])

    @property
    def place(self) -> KnownPlace:
        """Where it is. Raises as `find_place`."""
        return find_place(self.root_parts)

    def look(self) -> ObjectState | FolderListing | None:
        """The object or folder there; None where there is neither. Raises OSError."""
        try:
            return self.place.find(self.key)
        except OSError as error:
            # A source knows keys, and nothing of addresses.
            raise type(error)(error.errno, error.strerror, str(self)) from error

    def find(self) -> ObjectState | FolderListing:
        """The object or folder there. Raises OSError."""
        found = self.look()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return found

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and identity. Raises OSError."""
        found = self.find()
        if isinstance(found, FolderListing):
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        return found.stat_result()

    def lstat(self) -> os.stat_result:
        """The same as `stat`: there are no links."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object or a folder."""
        return self.look() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is a folder: keys that go on behind this one."""
        return isinstance(self.look(), FolderListing)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object."""
        return isinstance(self.look(), ObjectState)

    def is_symlink(self) -> bool:
        """No: there are none."""
        return False

    def is_mount(self) -> bool:
        """No."""
        return False

    def resolve(self, strict: bool = False) -> PlacePath:
        """Itself."""
        return self

    def absolute(self) -> PlacePath:
        """Itself."""
        return self

    def iterdir(self) -> Iterator[PlacePath]:  # type: ignore[override]
        """What is in the folder. Raises OSError."""
        found = self.find()
        if not isinstance(found, FolderListing):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self))
        return iter([self / name for name in sorted({*found.objects, *found.folders})])

    def glob(self, pattern: str, **options: Any) -> Generator[PlacePath]:
        """Yield the entries whose name matches a pattern without folders. Raises OSError."""
        if "/" in pattern or "**" in pattern:
            raise UsageError(f"the pattern {pattern!r} in {self}; give one of names in the folder")
        entries = self.iterdir() if self.is_dir() else ()
        return (entry for entry in entries if fnmatch.fnmatchcase(entry.name, pattern))

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """The object, for reading. Raises OSError."""
        if set(mode) - set("rbt"):
            self._refuse()
        found = self.find()
        if isinstance(found, FolderListing):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        stream: Any = PlaceStream(self.place.source, self.key, found, str(self))
        opened: IO[Any] = stream
        if "b" not in mode:
            opened = io.TextIOWrapper(io.BufferedReader(stream), encoding, errors, newline)
        return opened

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EROFS, "places are only read; give a path here", str(self))

    mkdir = rmdir = unlink = rename = replace = touch = chmod = symlink_to = _refuse
    hardlink_to = _refuse


def _split_addresses(segments: tuple[str | os.PathLike[str], ...]) -> Iterator[Any]:
    """Segments of a path, where the first one may be an address."""
    for segment in segments:
        address = None if isinstance(segment, PurePath) else _ADDRESS.fullmatch(str(segment))
        yield segment if address is None else f"/{address[1]}:/{address[2]}"


def check_path_text(given: str | os.PathLike[str]) -> str:
    r"""Return the text of a path.

    Raises:
        UsageError: a value that is not a path; a path with a null character.

    >>> check_path_text("model\0")
    Traceback (most recent call last):
    reshard.errors.UsageError: the path 'model\x00' has a null character; give one without it
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise UsageError(f"a checkpoint at {given!r}; give a path as text, or a Path")
    text = os.fspath(given)
    # Each function of Python reports it in its own words, as a ValueError, and some as "not there".
    if "\0" in text:
        raise UsageError(f"the path {text!r} has a null character; give one without it")
    return text


def as_path(given: str | os.PathLike[str]) -> Path:
    """The path that a user names: of this machine, or an address.

    Raises:
        UsageError: what is no path, or has a null character; an address without a bucket or a
            model, or with a user's name or a query in it.
        MissingExtraError: an address whose package is not installed.

    >>> as_path("file:///data/my%20model"), as_path("gcs://bucket//model/")
    (PosixPath('/data/my model'), PlacePath('gs://bucket/model'))
    """
    if isinstance(given, PlacePath):
        forget_place(given.root_parts)
        return given
    text = check_path_text(given)
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return _find_on_hub(text) or Path(given)
    scheme = ALIASES.get(address[1].lower(), address[1].lower())
    if scheme == "file":
        return _path_of_file(text)
    if scheme not in PARTS:
        return Path(given)
    names = [name for name in address[2].split("/") if name]
    if len(names) < PARTS[scheme]:
        what = {"hf": "hf://organisation/model", "az": "az://container/folder"}
        raise UsageError(
            f"the address {text!r} is too short; give {what.get(scheme, scheme + '://name/folder')}"
        )
    if "@" in names[0] and scheme != "hf":
        raise UsageError(
            f"the address of {names[0].rpartition('@')[2]} has a user's name in it; give "
            "credentials as the store's own tools take them, such as by the environment"
        )
    if not _PLACE_NAME.fullmatch(names[0]) and scheme not in ("http", "https"):
        raise UsageError(
            f"the address {text!r} has the name {names[0]!r}; names are of letters, "
            "digits, `.`, `-` and `_`"
        )
    if any(character.isspace() for character in names[0]):
        raise UsageError(f"the address {text!r} has a space in its host; give it without")
    if scheme in ("http", "https") and ("?" in text or "#" in text):
        raise UsageError(
            f"the address {text.partition('?')[0]!r} has a query; give one without, or fetch the "
            "file, and name that"
        )
    if ".." in names or "." in names:
        raise UsageError(f"the address {text!r} has `.` or `..` in it; give it without them")
    path = PlacePath(f"{scheme}://" + "/".join(names))
    forget_place(path.root_parts)
    return path


def _path_of_file(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"the address {text!r} is of the host {parts.netloc!r}; give a path here")
    return Path(check_path_text(unquote(parts.path)))


def _find_on_hub(text: str) -> PlacePath | None:
    """The model of a bare name; None for what is, or may be meant as, a path."""
    if not HUB_NAME.fullmatch(text) or os.path.lexists(text):
        return None
    if os.path.lexists(text.partition("/")[0]):
        return None
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        return None
    path = PlacePath(f"hf://{text}")
    forget_place(path.root_parts)
    return path


def join_path(folder: Path, name: str) -> Path:
    """A file of a folder; by its whole path or its address, one that is elsewhere.

    >>> join_path(Path("model"), "a.pt"), join_path(PlacePath("s3://bucket/model"), "/data/b.pt")
    (PosixPath('model/a.pt'), PosixPath('/data/b.pt'))
    """
    if "://" in name and _ADDRESS.fullmatch(name):
        return PlacePath(name)
    return Path(name) if name.startswith("/") else folder / name


def read_each(read: Callable[[Path], Found], paths: Iterable[Path]) -> Iterator[Found]:
    """What is read of each path, in their order; of places, of several at a time.

    Of this machine each is read when it is asked for. Raises what `read` does.

    >>> list(read_each(len, map(Path, []))), list(read_each(str, [Path("a"), Path("b")]))
    ([], ['a', 'b'])
    """
    listed = [*paths]
    if not any(isinstance(path, PlacePath) for path in listed):
        yield from map(read, listed)
        return
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        yield from threads.map(read, listed)


def walk_folder(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each folder from one on, with the names of the folders and of the other files in it, sorted.

    Only those folders are entered that are left in the list. Raises OSError.
    """
    if not isinstance(folder, PlacePath):
        for parent, folders, files in os.walk(folder, onerror=_raise):
            folders.sort()
            yield Path(parent), folders, sorted(files)
        return
    found = folder.find()
    if isinstance(found, FolderListing):
        folders = sorted(found.folders)
        yield folder, folders, sorted(found.objects)
        for name in folders:
            yield from walk_folder(folder / name)


def _raise(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, which `os.walk` skips by default."""
    raise error
