"""Local files and folders whose content survives a crash and that no link redirects.

Data is safe once its file is synced; a *name* is safe once the folder that contains it is synced.
This module has the operations on names that a crash-proof commit consists of, and translates the
operating system's errors into errors of this package.

Staging folders, locks, journals and drafts have predictable names, and may be in a folder that
other users can write to. Everything that this package writes in place, truncates, locks or deletes
under such a name is opened here:

1. A folder is created with mode 0700. An existing path must be a folder, not a link, and must
   belong to this user.
2. A file is opened with `O_NOFOLLOW`. Before a byte of it is changed, it must be a regular file
   without other hard links, owned by this user or by the owner of its folder.
3. The owner that a file system assigns to new files may differ from this process's user: NFS with
   squashed root, mounts with a fixed owner. If the owners differ, a temporary file shows which
   owner new files get.

A folder is locked, so that only a single process at a time works in it. The kernel releases the
lock when its holder ends in any way, so a killed run never has to be cleaned up by hand:

1. Create the folder and a file `lock` in it, and lock that file without waiting.
2. If another process holds the lock, report that process: the holder wrote its host and process id
   into the file.
3. If the locked file is no longer the file with that name, the earlier holder has just removed its
   folder: start again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from reshard.errors import CheckpointError, FormatError, RunError
from reshard.system import MAX_CALL_BYTES, sync
from reshard.text import parse_json

# Smaller requests are not compared with the size of the file, since they take little memory.
_UNCHECKED_BYTES = 1 << 20
# More than any config of a model has.
MAX_JSON_BYTES = 1 << 26

CONTINUES = "run the same command again, it continues"


def read_up_to(file: BinaryIO, max_bytes: int) -> bytes:
    """Read at most `max_bytes` of an open file from its position.

    Python allocates the memory of a whole request before it reads. So a request beyond the end of
    the file, such as for a size in damaged metadata, is limited to the size of the file.
    """
    if max_bytes > _UNCHECKED_BYTES:
        position = file.tell()
        max_bytes = min(max_bytes, max(0, file.seek(0, os.SEEK_END) - position))
        file.seek(position)
    return file.read(max_bytes)


def read_whole(path: Path) -> bytes:
    """Read a file up to its size.

    A device has size 0, so nothing is read from it. `Path.read_bytes` reads a link to `/dev/zero`
    until memory is exhausted.

    Raises OSError.
    """
    with path.open("rb") as file:
        return read_up_to(file, sys.maxsize)


def read_range(file: BinaryIO, start_bytes: int, size_bytes: int) -> bytes:
    """Read a range of an open file; return fewer bytes only where the file ends.

    The system may return less than requested, so the call is repeated. A file without a descriptor,
    such as an object of a store, must be read by a single thread. Memory is limited as in
    `read_up_to`.
    """
    try:
        descriptor = file.fileno()
    except OSError:
        file.seek(start_bytes)
        return read_up_to(file, size_bytes)
    if size_bytes > _UNCHECKED_BYTES:
        size_bytes = min(size_bytes, max(0, os.fstat(descriptor).st_size - start_bytes))
    content = b""
    while more := os.pread(
        descriptor, min(size_bytes - len(content), MAX_CALL_BYTES), start_bytes + len(content)
    ):
        content += more
    return content


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of metadata, which is read as a whole.

    Raises:
        CheckpointError: a file that is missing, or cannot be read.
        FormatError: a file of more than `max_bytes`.
    """
    with _reading(path) as file:
        content = read_up_to(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise FormatError(
            f"{path} has more than {max_bytes} bytes, which no such file has; it is damaged"
        )
    return content


def read_file_range(path: Path, start_bytes: int, size_bytes: int, max_bytes: int) -> bytes:
    """Return a range of a file, whose size is declared in another file.

    Raises:
        CheckpointError: a file that is missing, or cannot be read.
        FormatError: a range of more than `max_bytes`, or beyond the end of the file.
    """
    if size_bytes > max_bytes:
        raise FormatError(
            f"{path}: {size_bytes} bytes should be read at once, {max_bytes} are the most; the "
            "file is damaged"
        )
    with _reading(path) as file:
        file.seek(start_bytes)
        content = read_up_to(file, size_bytes)
    if len(content) != size_bytes:
        raise FormatError(
            f"{path} ends at byte {start_bytes + len(content)}, {size_bytes} bytes at "
            f"{start_bytes} were expected; it was cut off, or belongs to another save"
        )
    return content


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a file of JSON, whose keys differ.

    Raises as `read_file`, also for other content.
    """
    return _read_object(path, max_bytes, parse_json)


def _read_object(path: Path, max_bytes: int, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = read_file(path, max_bytes)
    try:
        content = parse(text.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not a JSON object, but a {type(content).__name__}")
    return content


def read_json_file(path: Path) -> dict[str, Any] | None:
    """Return the object in a config of a model or an adapter, or None if the file is missing.

    If a key appears twice, the last value is used, as in transformers: people edit these files.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: a file that is not a JSON object, or has more than `MAX_JSON_BYTES`.
    """
    try:
        return _read_object(path, MAX_JSON_BYTES, json.loads)
    except CheckpointError:
        if path.exists():
            raise
        return None


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is not complete") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error


def close_descriptor(descriptor: int) -> int:
    """Close a descriptor if it is open, and return -1, which stands for closed."""
    if descriptor >= 0:
        os.close(descriptor)
    return -1


def reason(error: OSError) -> str:
    """Return the system's message for an error."""
    return error.strerror or str(error)


def describe_free_space(path: Path) -> str | None:
    """Return the free space of a full disk as text, in bytes or inodes, or None if unknown.

    `path` is a file or folder that could not be created or written; it need not exist.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    # File systems without a fixed number of inodes report a total of 0.
    if state.f_files and not state.f_favail and state.f_bavail:
        return "no inode is free, and every file needs one: delete files that are not needed"
    return f"{state.f_bavail * state.f_frsize} bytes are free"


class Closing:
    """A base class of context managers that call `close()` on exit.

    >>> class Connection(Closing):
    ...     def close(self):
    ...         print("closed")
    >>> with Connection():
    ...     pass
    closed
    """

    __slots__ = ()

    def close(self) -> None:
        """Release all resources. Closing again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Links, and pipes without a reader; macOS reports another error for sockets.
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file that belongs to this user, or create it (`O_CREAT`), and return its descriptor.

    `flags` are flags of `os.open`, without `O_TRUNC`: a caller truncates the open descriptor.

    Raises:
        RunError: a link, a pipe or device, a file with another name, a file of another user.
        OSError: another failure of the file system.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait. No effect on regular files.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in _NOT_REGULAR and (problem := _find_problem(path)):
            raise _refuse(path, problem) from error
        raise
    try:
        state = os.fstat(descriptor)
        problem = _describe_file(state)
        if problem is None and state.st_uid != os.geteuid():
            # Some file systems assign the same owner to all files. The folder was checked before.
            owner = os.stat(path.parent).st_uid
            problem = None if state.st_uid == owner else f"of another user, {state.st_uid}"
        if problem is not None:
            raise _refuse(path, problem)
        # O_NONBLOCK was only for opening.
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_new(path: Path, mode: int = 0o666) -> int:
    """Open an empty file of this user for writing, and return its descriptor.

    Raises as `open_own`.
    """
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        # Only now: O_TRUNC would empty the file before its owner is checked.
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> bytes:
    """Read a file that belongs to this user. Raises as `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def make_own_folder(folder: Path) -> os.stat_result:
    """Create a folder that only this user can enter, or check it if it exists; return its state.

    Raises as `check_own_folder`.

    >>> with tempfile.TemporaryDirectory() as parent:
    ...     oct(make_own_folder(Path(parent) / "staging").st_mode & 0o777)
    '0o700'
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    return check_own_folder(folder)


def check_own_folder(folder: Path) -> os.stat_result:
    """Return the state of a folder that this user owns, without following a link.

    Raises:
        RunError: a link, a file, a folder of another user.
        OSError: another failure of the file system, such as a folder that does not exist.
    """
    state = os.lstat(folder)
    problem = None if stat.S_ISDIR(state.st_mode) else _describe_file(state) or "a file"
    if problem is None and state.st_uid not in (os.geteuid(), _owner_of_new_files(folder)):
        problem = f"of another user, {state.st_uid}"
    if problem is not None:
        raise _refuse(folder, problem)
    return state


def is_exclusive(state: os.stat_result) -> bool:
    """Return whether only the owner of a folder can list it and write there."""
    return not state.st_mode & _OTHERS and state.st_uid == os.geteuid()


def _owner_of_new_files(folder: Path) -> int | None:
    """Return the owner of new files in the parent of `folder`, or None if unknown."""
    if os.lstat(folder).st_uid == os.geteuid():
        return None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".reshard-owner-", dir=folder.parent)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name)


def _find_problem(path: Path) -> str | None:
    try:
        return _describe_file(os.lstat(path))
    except OSError:
        return None


def _describe_file(state: os.stat_result) -> str | None:
    """Return why a file cannot belong to this package, or None if it can."""
    if stat.S_ISLNK(state.st_mode):
        return "a link"
    if not stat.S_ISREG(state.st_mode):
        return "not a regular file"
    return "a file with a second name (a hard link)" if state.st_nlink > 1 else None


def _refuse(path: Path, problem: str) -> RunError:
    return RunError(
        f"{path} is {problem}\n"
        "expected a file or folder created by reshard as this user: see who created it and remove "
        "it, or choose another target"
    )


_FOLDER_SYNC_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_LOCK_NAME = "lock"
# The number of attempts to lock a folder that earlier holders keep removing.
_ATTEMPTS = 100


@contextmanager
def translate_os_errors(action: str, path: Path) -> Iterator[None]:
    """Translate an OSError into a `RunError` that names the action, the path and the reason.

    >>> with translate_os_errors("read the notes", Path("/nowhere/notes")):
    ...     _ = Path("/nowhere/notes").read_bytes()
    Traceback (most recent call last):
    reshard.errors.RunError: cannot read the notes: /nowhere/notes: No such file or directory
    """
    try:
        yield
    except OSError as error:
        # Errors of calls on paths have the exact path; errors of calls on descriptors do not.
        exact = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = describe_free_space(Path(exact))
            reason += f" ({free})" if free is not None else ""
        raise RunError(f"cannot {action}: {exact}: {reason}") from error


def resolve_links(path: Path) -> Path:
    """Return a path with its symbolic links resolved, whether or not the file exists.

    Raises:
        OSError: ELOOP for a link that leads back to itself. `Path.resolve` raises RuntimeError
            before Python 3.13, and returns the path unchanged since.
    """
    try:
        resolved = path.resolve(strict=True)
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        resolved = path.resolve()
    return resolved


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in as many calls as needed. Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining[:MAX_CALL_BYTES], offset)
        remaining = remaining[written:]
        offset += written


def write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write or copy files into a folder, and sync them.

    `files` has each file's content, or the path of the file to copy. Raises `OSError`, and
    `RunError` for names that are links.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            file = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
            opened.enter_context(file)
            copy = opened.enter_context(os.fdopen(open_new(path), "wb"))
            shutil.copyfileobj(file, copy)
            copy.flush()
            sync(copy.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        # File systems that cannot sync folders report these errors; there is no alternative.
        if error.errno not in _FOLDER_SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def sync_folders_under(folder: Path) -> None:
    """Make every name in and below `folder` durable. Raises `OSError`."""

    def refuse(error: OSError) -> None:
        raise error

    for path, _, _ in os.walk(folder, onerror=refuse):
        sync_folder(Path(path))


def is_attribute_file(name: str) -> bool:
    """Return whether macOS uses a file of this name for the attributes of another file.

    macOS writes such a file for each file on disks without attributes, and into archives.

    >>> is_attribute_file("._model.safetensors"), is_attribute_file("model.safetensors")
    (True, False)
    """
    return name.startswith("._")


def describe_two_renames(target: Path) -> str:
    """Return the note for a folder that was replaced by two renames instead of a swap."""
    return (
        f"{target} was replaced by two renames, since this system or its file system cannot swap "
        "two names: between the renames no checkpoint had this name"
    )


def remove_folder(folder: Path) -> None:
    """Delete `folder` and its contents if it exists. Raises `OSError`."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)


class FolderLock(Closing):
    """An exclusive lock on `folder`, held by this process and its forked children.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = Path(parent) / "staging"
    ...     with FolderLock.acquire(folder):
    ...         folder.is_dir()
    True
    """

    __slots__ = ("_descriptor", "_state", "folder")

    def __init__(self, folder: Path, state: os.stat_result, descriptor: int) -> None:
        self.folder = folder
        self._state = state
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Lock `folder`, which is created if missing (its parent must exist).

        Raises `RunError` if another process holds it, naming that process, if the folder or its
        lock is a link or another user's, and if they cannot be created or locked.
        """
        with translate_os_errors("lock the folder", folder):
            for _ in range(_ATTEMPTS):
                try:
                    state = make_own_folder(folder)
                    descriptor = open_own(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
                except FileNotFoundError:
                    if not folder.parent.is_dir():
                        raise
                    continue  # removed by its earlier holder meanwhile
                try:
                    if _lock_and_sign(descriptor, folder):
                        return cls(folder, state, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        raise RunError(
            f"cannot lock the folder: {folder}: it is removed as often as it is created\n"
            "another process uses the same folder: wait for it to end, then run this again"
        )

    @property
    def is_exclusive(self) -> bool:
        """Whether only this user could list the folder and write there."""
        return is_exclusive(self._state)

    @property
    def inode(self) -> int:
        """The inode number of the folder."""
        return self._state.st_ino

    def check_in_place(self) -> None:
        """Raise `RunError` if another folder, or a link, has the folder's name by now."""
        if not os.path.samestat(os.lstat(self.folder), self._state):
            raise RunError(
                f"{self.folder} was replaced by another folder during the run\n"
                "expected no other program to rename it: see who can write to its parent folder, "
                "then run this again"
            )

    def remove_folder(self) -> None:
        """Remove the lock file and the empty folder, and release the lock. Raises `OSError`."""
        (self.folder / _LOCK_NAME).unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError:
            # Another process has created its own lock file meanwhile: the folder with its content
            # belongs to that process now.
            if not (self.folder / _LOCK_NAME).exists():
                raise
        self.close()

    def close(self) -> None:
        """Release the lock and keep the folder. Closing again does nothing."""
        if self._descriptor is not None:
            # Close the file instead of unlocking it: an unlock in a forked child would also release
            # its parent's lock.
            os.close(self._descriptor)
            self._descriptor = None


def _lock_and_sign(descriptor: int, folder: Path) -> bool:
    """Lock the open file and sign it; return False if its name belongs to another file by now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip()
        raise RunError(
            f"the folder {folder} is in use by {holder or 'another process'}\n"
            "expected no other run for the same target: wait for it to end, or stop it, "
            "then run this again"
        ) from error
    try:
        # The lock is on the open file; the name may belong to another file by now, which a third
        # process could lock.
        named = os.lstat(folder / _LOCK_NAME)
    except FileNotFoundError:
        return False
    if not os.path.samestat(os.fstat(descriptor), named):
        return False
    import socket

    os.ftruncate(descriptor, 0)
    write_all(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True
