"""URLs of object stores as paths: `s3://bucket/model/config.json` with methods of `pathlib.Path`.

Formats look for names, read files and list folders by the methods of a `Path`. A `RemotePath` has
these methods, so every format reads from every store. Methods that would write raise
`PermissionError`.

    as_path("model")               a local path
    as_path("file:///data/model")  a local path
    as_path("s3://bucket/model")   a RemotePath
    as_path("org/model")           a model of the Hub, if neither this path nor `org` exists

Formats look for many names, such as an index, a config or a manifest. A folder is listed once, and
these names are looked up in the cached listing. Listings are dropped when the user names the store
again (`forget_store`), so a checkpoint that is opened later is read in its state at that time.
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
from pathlib import Path, PosixPath, PurePath
from typing import IO, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from reshard.checkpoint.storage.hub import open_hub
from reshard.checkpoint.storage.object_stores import (
    IN_FLIGHT,
    FolderListing,
    ObjectSource,
    ObjectState,
    SizedStream,
    open_bucket,
)
from reshard.errors import UsageError

# Enough for the header of a few thousand tensors in a single request.
_WINDOW_BYTES = 256 << 10
_SHORT_WINDOW_BYTES = 16 << 10


class RemoteStream(SizedStream):
    """An object as an open file, for headers: reads fetch a window of bytes.

    A read at the beginning, or a read that continues the previous window, fetches a long window. A
    read elsewhere, such as of a single tensor's record, fetches a short window. Reading raises
    OSError if the object has changed since its `state` was read.
    """

    def __init__(self, source: ObjectSource, key: str, state: ObjectState, name: str) -> None:
        super().__init__(state.size_bytes)
        self._source, self._key, self._state, self.name = source, key, state, name
        self._window, self._window_start = memoryview(b""), 0

    def _fill(self, view: memoryview, at: int) -> int:
        size, begin = len(view), at - self._window_start
        if not (begin >= 0 and begin + size <= len(self._window)):
            continues = not at or 0 <= begin <= len(self._window) + _WINDOW_BYTES
            window_bytes = _WINDOW_BYTES if continues else _SHORT_WINDOW_BYTES
            self._window = self.fetch(at, min(max(size, window_bytes), self.size_bytes - at))
            self._window_start, begin = at, 0
        view[:] = self._window[begin : begin + size]
        return size

    def fetch(self, start: int, size: int) -> memoryview:
        """Return bytes of the object by a separate request. Raises OSError."""
        content = memoryview(bytearray(size))
        try:
            state = self._source.read_into(self._key, start, content)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.name) from error
        if state != self._state:
            raise OSError(errno.ESTALE, "it was replaced while it was read", self.name)
        return content


# The number of parts of a URL that name the store: a bucket, a server, an organisation's model.
PARTS = {"s3": 1, "gs": 1, "az": 1, "http": 1, "https": 1, "hf": 2}
#: Aliases of schemes.
ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az"}


class CachedStore:
    """A store with cached listings of its folders.

    >>> class Shelf:
    ...     def head(self, key):
    ...         return ObjectState(3) if key == "a/x" else None
    ...
    ...     def list_folder(self, key):
    ...         return FolderListing({"x": ObjectState(3)} if key == "a" else {})
    >>> store = CachedStore(Shelf())
    >>> store.find("a/x")
    ObjectState(size_bytes=3, modified_s=0, tag=None, conversion_id=None)
    >>> [*store.find("a").objects], store.find("b") is None
    (['x'], True)
    """

    def __init__(self, source: ObjectSource) -> None:
        self.source = source
        # Reentrant: `find` lists folders while it holds the lock.
        self._lock = threading.RLock()
        self._folders: dict[str, FolderListing] = {}
        self._objects: dict[str, ObjectState | None] = {}

    def find(self, key: str) -> ObjectState | FolderListing | None:
        """Return the object or folder of a key, or None if neither exists. Raises OSError."""
        with self._lock:
            if key in self._folders:
                return self.list_folder(key)
            parent, _, name = key.rpartition("/")
            listed = self._folders.get(parent)
            if listed is not None:
                if name in listed.objects:
                    return listed.objects[name]
                if listed.is_complete:
                    return self.list_folder(key) if name in listed.folders else None
            if key and key not in self._objects:
                self._objects[key] = self.source.head(key)
            return self._objects.get(key) or self.list_folder(key)

    def list_folder(self, key: str) -> FolderListing | None:
        """List a folder, or return None if it does not exist. Raises OSError."""
        with self._lock:
            if key not in self._folders:
                self._folders[key] = self.source.list_folder(key)
            listing = self._folders[key]
            return listing if listing.objects or listing.folders else None


_stores: dict[tuple[str, ...], CachedStore] = {}
_lock = threading.Lock()


def find_store(root: Sequence[str]) -> CachedStore:
    """Return the store of a scheme and names, such as `("s3", "bucket")`, opened once.

    Raises:
        MissingExtraError: the package for such stores is not installed.
        OSError: the store cannot be reached.
    """
    with _lock:
        cached = _stores.get(tuple(root))
    if cached is not None:
        return cached
    # Without the lock, since opening a model of the Hub sends requests.
    scheme, name, *model = root
    source: ObjectSource
    source = open_hub(name, *model) if scheme == "hf" else open_bucket(scheme, name)
    with _lock:
        # If another thread has opened the store meanwhile, use its store.
        return _stores.setdefault(tuple(root), CachedStore(source))


def forget_store(root: Sequence[str]) -> None:
    """Close a store: it is opened again when next used, with the settings of that time."""
    with _lock:
        _stores.pop(tuple(root), None)


_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PLACE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
#: The name of a model of the Hub, and its revision.
HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}(@[\w./-]+)?")


Result = TypeVar("Result")


class RemotePath(PosixPath):
    """A path in a store; its text is its URL.

    >>> path = RemotePath("s3://bucket/model") / "config.json"
    >>> str(path), path.name, str(path.parent), path.root_parts, path.key
    ('s3://bucket/model/config.json', 'config.json', 's3://bucket/model', ('s3', 'bucket'), \
'model/config.json')
    >>> path.relative_to(path.parent).as_posix()
    'config.json'
    """

    # The parts are those of the path `/s3:/bucket/model/config.json`.

    def __new__(cls, *segments: str | os.PathLike[str]) -> RemotePath:
        return super().__new__(cls, *_split_addresses(segments))

    # Since Python 3.12, paths parse their arguments in `__init__`.
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
        # Pickle the text, since the internal parts of paths differ between versions of Python.
        return RemotePath, (str(self),)

    def as_posix(self) -> str:
        """Return the URL."""
        return str(self)

    @property
    def root_parts(self) -> tuple[str, ...]:
        """The parts that name the store: the scheme, and a bucket, a server, or two of the Hub."""
        scheme = self.parts[1].rstrip(":")
        return (scheme, *self.parts[2 : 2 + PARTS[scheme]])

    @property
    def key(self) -> str:
        """The key of the object or folder in its store."""
        return "/".join(self.parts[1 + len(self.root_parts) :])

    @property
    def store(self) -> CachedStore:
        """The store. Raises as `find_store`."""
        return find_store(self.root_parts)

    def look(self) -> ObjectState | FolderListing | None:
        """Return the object or folder, or None if neither exists. Raises OSError."""
        try:
            return self.store.find(self.key)
        except OSError as error:
            # Stores report keys instead of URLs.
            raise type(error)(error.errno, error.strerror, str(self)) from error

    def find(self) -> ObjectState | FolderListing:
        """Return the object or folder. Raises OSError."""
        entry = self.look()
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return entry

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size, time and identity. Raises OSError."""
        entry = self.find()
        if isinstance(entry, FolderListing):
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        return entry.stat_result()

    def lstat(self) -> os.stat_result:
        """Return `stat()`: stores do not have links."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object or a folder."""
        return self.look() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is a folder: longer keys that begin with this key."""
        return isinstance(self.look(), FolderListing)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object."""
        return isinstance(self.look(), ObjectState)

    def is_symlink(self) -> bool:
        """Return False: stores do not have links."""
        return False

    def is_mount(self) -> bool:
        """Return False."""
        return False

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return the path itself."""
        return self

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """Return the entries of the folder. Raises OSError."""
        entry = self.find()
        if not isinstance(entry, FolderListing):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self))
        return iter([self / name for name in sorted({*entry.objects, *entry.folders})])

    def glob(self, pattern: str, **options: Any) -> Generator[RemotePath]:
        """Yield the entries whose name matches a pattern without folders. Raises OSError."""
        if "/" in pattern or "**" in pattern:
            raise UsageError(f"the pattern {pattern!r} in {self}: expected a pattern of names")
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
        """Open the object for reading. Raises OSError."""
        if set(mode) - set("rbt"):
            self._refuse()
        entry = self.find()
        if isinstance(entry, FolderListing):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
        stream: Any = RemoteStream(self.store.source, self.key, entry, str(self))
        opened: IO[Any] = stream
        if "b" not in mode:
            opened = io.TextIOWrapper(io.BufferedReader(stream), encoding, errors, newline)
        return opened

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EROFS, "URLs can only be read; give a local path", str(self))

    mkdir = rmdir = unlink = rename = replace = touch = chmod = symlink_to = _refuse
    hardlink_to = _refuse


def _split_addresses(segments: tuple[str | os.PathLike[str], ...]) -> Iterator[Any]:
    """Yield segments of a path, the first of which may be a URL."""
    for segment in segments:
        address = None if isinstance(segment, PurePath) else _ADDRESS.fullmatch(str(segment))
        yield segment if address is None else f"/{address[1]}:/{address[2]}"


def check_path_text(location: str | os.PathLike[str]) -> str:
    r"""Return the text of a path.

    Raises:
        UsageError: a value that is not a path; a path with a null character.

    >>> check_path_text("model\0")
    Traceback (most recent call last):
    reshard.errors.UsageError: the path 'model\x00' has a null character; give one without it
    """
    if not isinstance(location, str | os.PathLike) or not isinstance(os.fspath(location), str):
        raise UsageError(f"a checkpoint at {location!r}: expected a path as a string or a Path")
    text = os.fspath(location)
    # Python's functions report a null character as different ValueErrors, or as a missing file.
    if "\0" in text:
        raise UsageError(f"the path {text!r} has a null character; give one without it")
    return text


def as_path(location: str | os.PathLike[str]) -> Path:
    """Return the local or remote path that a user gave.

    Raises:
        UsageError: a value that is not a path, or has a null character; a URL without a bucket or a
            model, or with a user name or a query.
        MissingExtraError: a URL whose package is not installed.

    >>> as_path("file:///data/my%20model"), as_path("gcs://bucket//model/")
    (PosixPath('/data/my model'), RemotePath('gs://bucket/model'))
    """
    if isinstance(location, RemotePath):
        forget_store(location.root_parts)
        return location
    text = check_path_text(location)
    address = _ADDRESS.fullmatch(text)
    if address is None:
        return _find_on_hub(text) or Path(location)
    scheme = ALIASES.get(address[1].lower(), address[1].lower())
    if scheme == "file":
        return _path_of_file(text)
    if scheme not in PARTS:
        return Path(location)
    names = [name for name in address[2].split("/") if name]
    if len(names) < PARTS[scheme]:
        what = {"hf": "hf://organisation/model", "az": "az://container/folder"}
        raise UsageError(
            f"the URL {text!r} is too short; give {what.get(scheme, scheme + '://name/folder')}"
        )
    if "@" in names[0] and scheme != "hf":
        raise UsageError(
            f"the URL of {names[0].rpartition('@')[2]} has a user name in it; give credentials as "
            "the store's own tools take them, such as by the environment"
        )
    if not _PLACE_NAME.fullmatch(names[0]) and scheme not in ("http", "https"):
        raise UsageError(
            f"the URL {text!r} has the name {names[0]!r}; names consist of letters, "
            "digits, `.`, `-` and `_`"
        )
    if any(character.isspace() for character in names[0]):
        raise UsageError(f"the URL {text!r} has a space in its host; give it without")
    if scheme in ("http", "https") and ("?" in text or "#" in text):
        raise UsageError(
            f"the URL {text.partition('?')[0]!r} has a query; give one without, or download the "
            "file and give its path"
        )
    if ".." in names or "." in names:
        raise UsageError(f"the URL {text!r} has `.` or `..` in it; give it without them")
    path = RemotePath(f"{scheme}://" + "/".join(names))
    forget_store(path.root_parts)
    return path


def _path_of_file(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"the URL {text!r} names the host {parts.netloc!r}; give a local path")
    return Path(check_path_text(unquote(parts.path)))


def _find_on_hub(text: str) -> RemotePath | None:
    """Return the model of a bare name, or None if it is, or may be meant as, a local path."""
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
    """Return the path of a file in a folder, or an absolute path or URL unchanged.

    >>> join_path(Path("model"), "a.pt"), join_path(RemotePath("s3://bucket/model"), "/data/b.pt")
    (PosixPath('model/a.pt'), PosixPath('/data/b.pt'))
    """
    if "://" in name and _ADDRESS.fullmatch(name):
        return RemotePath(name)
    return Path(name) if name.startswith("/") else folder / name


def map_paths(read: Callable[[Path], Result], paths: Iterable[Path]) -> Iterator[Result]:
    """Yield `read(path)` of each path, in order; remote paths are read several at a time.

    Local paths are read in sequence as the results are consumed. Raises as `read`.

    >>> list(map_paths(len, map(Path, []))), list(map_paths(str, [Path("a"), Path("b")]))
    ([], ['a', 'b'])
    """
    listed = [*paths]
    if not any(isinstance(path, RemotePath) for path in listed):
        yield from map(read, listed)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        yield from threads.map(read, listed)


def walk_folder(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder: yield each folder with the sorted names of its folders and of its files.

    Folders that the caller removes from the list are not entered. Raises OSError.
    """
    if not isinstance(folder, RemotePath):
        for parent, folders, files in os.walk(folder, onerror=_raise):
            folders.sort()
            yield Path(parent), folders, sorted(files)
        return
    listing = folder.find()
    if isinstance(listing, FolderListing):
        folders = sorted(listing.folders)
        yield folder, folders, sorted(listing.objects)
        for name in folders:
            yield from walk_folder(folder / name)


def _raise(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, which `os.walk` skips by default."""
    raise error
