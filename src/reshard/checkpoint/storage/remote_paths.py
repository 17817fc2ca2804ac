"""An object as an open file, for headers: what is read brings what lies behind it.

A read at the beginning, and one that goes on behind what is there, bring a long window; one
elsewhere, as of the record of one tensor among others, a short one.

One place, such as a bucket, and what was seen of it.

A format asks for many names: is there an index, a config, a manifest? A folder is listed once and
answers all of them. What was seen is forgotten when somebody names the place anew
(`forget_store`), so that a checkpoint that is opened later is that of then.

Paths in places: `s3://bucket/model/config.json` with the methods of `pathlib.Path` that read.

Formats look for names, read files and list folders by the methods of a `Path`. A `RemotePath` has
them, so every format reads from every place. What would write raises `PermissionError`.

    as_path("model")               a path of this machine
    as_path("file:///data/model")  likewise
    as_path("s3://bucket/model")   a RemotePath
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
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath, PurePath
from typing import IO, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from reshard.checkpoint.storage.hub import open_hub
from reshard.checkpoint.storage.object_stores import (
    IN_FLIGHT,
    FolderListing,
    ObjectSource,
    ObjectState,
    open_bucket,
)
from reshard.errors import UsageError

# A header of a few thousand tensors, in one answer.
_WINDOW_BYTES = 256 << 10
_SHORT_WINDOW_BYTES = 16 << 10


class RemoteStream(io.RawIOBase):
    """The bytes of an object, by windows around what is asked for.

    Reading raises OSError where the object has changed since `state` was seen.
    """

    def __init__(self, source: ObjectSource, key: str, state: ObjectState, name: str) -> None:
        super().__init__()
        self._source, self._key, self._state, self.name = source, key, state, name
        self._at = self._window_start = 0
        self._window = memoryview(b"")

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
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._state.size_bytes}
        if base[whence] + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._at = base[whence] + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or as much of it as there is up to the end."""
        target = memoryview(buffer).cast("B")
        size = min(len(target), max(self._state.size_bytes - self._at, 0))
        begin = self._at - self._window_start
        if size and not (begin >= 0 and begin + size <= len(self._window)):
            goes_on = not self._at or 0 <= begin <= len(self._window) + _WINDOW_BYTES
            window_bytes = _WINDOW_BYTES if goes_on else _SHORT_WINDOW_BYTES
            wanted = min(max(size, window_bytes), self._state.size_bytes - self._at)
            content = self.fetch(self._at, wanted)
            self._window, self._window_start, begin = content, self._at, 0
        target[:size] = self._window[begin : begin + size]
        self._at += size
        return size

    def fetch(self, start: int, size: int) -> memoryview:
        """Bytes of the object and no more, by a request of their own. Raises OSError."""
        content = memoryview(bytearray(size))
        try:
            found = self._source.read_into(self._key, start, content)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.name) from error
        if found != self._state:
            raise OSError(errno.ESTALE, "it was replaced while it was read", self.name)
        return content


# Parts of an address that name the place: a bucket, a server, a model of somebody.
PARTS = {"s3": 1, "gs": 1, "az": 1, "http": 1, "https": 1, "hf": 2}
#: Other ways to write schemes.
ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az"}


class CachedStore:
    """A source, with its folders as they were when they were first asked for.

    >>> class Shelf:
    ...     def head(self, key):
    ...         return ObjectState(3) if key == "a/x" else None
    ...
    ...     def list_folder(self, key):
    ...         return FolderListing({"x": ObjectState(3)} if key == "a" else {})
    >>> place = CachedStore(Shelf())
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
                self._objects[key] = self.source.head(key)
            return self._objects.get(key) or self.list_folder(key)

    def list_folder(self, key: str) -> FolderListing | None:
        """What is in a folder; None for one that is not there. Raises OSError."""
        with self._lock:
            if key not in self._folders:
                self._folders[key] = self.source.list_folder(key)
            found = self._folders[key]
            return found if found.objects or found.folders else None


_places: dict[tuple[str, ...], CachedStore] = {}
_lock = threading.Lock()


def find_store(root: Sequence[str]) -> CachedStore:
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
        return _places.setdefault(tuple(root), CachedStore(source))


def forget_store(root: Sequence[str]) -> None:
    """Open a place anew when it is next named, with the settings and credentials of then."""
    with _lock:
        _places.pop(tuple(root), None)


_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PLACE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
#: The name of a model of the Hub, and its revision.
HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}(@[\w./-]+)?")


Found = TypeVar("Found")


class RemotePath(PosixPath):
    """A path in a place; text of it is its address.

    >>> path = RemotePath("s3://bucket/model") / "config.json"
    >>> str(path), path.name, str(path.parent), path.root_parts, path.key
    ('s3://bucket/model/config.json', 'config.json', 's3://bucket/model', ('s3', 'bucket'), \
'model/config.json')
    >>> path.relative_to(path.parent).as_posix()
    'config.json'
    """

    # Its parts are those of the path `/s3:/bucket/model/config.json`.

    def __new__(cls, *segments: str | os.PathLike[str]) -> RemotePath:
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
        return f"RemotePath({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePath, (str(self),)

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
    def place(self) -> CachedStore:
        """Where it is. Raises as `find_store`."""
        return find_store(self.root_parts)

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

    def resolve(self, strict: bool = False) -> RemotePath:
        """Itself."""
        return self

    def absolute(self) -> RemotePath:
        """Itself."""
        return self

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """What is in the folder. Raises OSError."""
        found = self.find()
        if not isinstance(found, FolderListing):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self))
        return iter([self / name for name in sorted({*found.objects, *found.folders})])

    def glob(self, pattern: str, **options: Any) -> Generator[RemotePath]:
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
        stream: Any = RemoteStream(self.place.source, self.key, found, str(self))
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
    (PosixPath('/data/my model'), RemotePath('gs://bucket/model'))
    """
    if isinstance(given, RemotePath):
        forget_store(given.root_parts)
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
    path = RemotePath(f"{scheme}://" + "/".join(names))
    forget_store(path.root_parts)
    return path


def _path_of_file(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"the address {text!r} is of the host {parts.netloc!r}; give a path here")
    return Path(check_path_text(unquote(parts.path)))


def _find_on_hub(text: str) -> RemotePath | None:
    """The model of a bare name; None for what is, or may be meant as, a path."""
    if not HUB_NAME.fullmatch(text) or os.path.lexists(text):
        return None
    if os.path.lexists(text.partition("/")[0]):
        return None
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        return None
    path = RemotePath(f"hf://{text}")
    forget_store(path.root_parts)
    return path


def join_path(folder: Path, name: str) -> Path:
    """A file of a folder; by its whole path or its address, one that is elsewhere.

    >>> join_path(Path("model"), "a.pt"), join_path(RemotePath("s3://bucket/model"), "/data/b.pt")
    (PosixPath('model/a.pt'), PosixPath('/data/b.pt'))
    """
    if "://" in name and _ADDRESS.fullmatch(name):
        return RemotePath(name)
    return Path(name) if name.startswith("/") else folder / name


def map_paths(read: Callable[[Path], Found], paths: Iterable[Path]) -> Iterator[Found]:
    """What is read of each path, in their order; of places, of several at a time.

    Of this machine each is read when it is asked for. Raises what `read` does.

    >>> list(map_paths(len, map(Path, []))), list(map_paths(str, [Path("a"), Path("b")]))
    ([], ['a', 'b'])
    """
    listed = [*paths]
    if not any(isinstance(path, RemotePath) for path in listed):
        yield from map(read, listed)
        return
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        yield from threads.map(read, listed)


def walk_folder(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each folder from one on, with the names of the folders and of the other files in it, sorted.

    Only those folders are entered that are left in the list. Raises OSError.
    """
    if not isinstance(folder, RemotePath):
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
