"""Folders whose content survives a crash: names made durable, exchanged, and locked.

Data is safe once its file is synced; a *name* is safe once the folder that holds it is synced.
This module has the few operations on names that a crash-proof commit is made of, and one place
where the operating system's refusals become errors of this package.

One process at a time works in a folder that it has locked. The kernel drops the lock when its
holder ends, however it ends, so a killed run never has to be cleaned up by hand:

1. Make the folder and a file `lock` in it, and lock that file without waiting.
2. Where somebody holds it, say who: the holder wrote its host and process into the file.
3. Where the file that got locked is no longer the one with that name, the earlier holder was
   just removing its folder: begin again.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reshard.checkpoint.files.descriptors import Closing, describe_full
from reshard.checkpoint.files.own_files import is_exclusive, make_own_folder, open_new, open_own
from reshard.errors import RunError
from reshard.system import MAX_CALL_BYTES, sync

_FOLDER_SYNC_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_LOCK_NAME = "lock"
# A lock whose folder its earlier holder removes meanwhile is tried again so often.
_ATTEMPTS = 100


@contextmanager
def refusals_explained(action: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a `RunError` that names path and reason.

    >>> with refusals_explained("read the notes", Path("/nowhere/notes")):
    ...     _ = Path("/nowhere/notes").read_bytes()
    Traceback (most recent call last):
    reshard.errors.RunError: cannot read the notes: /nowhere/notes: No such file or directory
    """
    try:
        yield
    except OSError as error:
        # Some calls carry the exact path, those on descriptors carry none.
        exact = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = describe_full(Path(exact))
            reason += f" ({full})" if full is not None else ""
        raise RunError(f"cannot {action}: {exact}: {reason}") from error


def resolve_links(path: Path) -> Path:
    """Return a path with its symbolic links followed, whether or not the file exists.

    Raises:
        OSError: ELOOP for a link that leads back to itself. `Path.resolve` raises RuntimeError
            before Python 3.13, and later returns the path as it is.
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
    """Write all of `data` at `offset`, however many calls it takes. Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining[:MAX_CALL_BYTES], offset)
        remaining = remaining[written:]
        offset += written


def write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write files below a folder, or copy them from wherever they are, until they are on the disk.

    Raises `OSError`, and `RunError` for names that are links.
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
    """Make the names in `folder` survive a crash. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        # A file system that cannot sync folders says so with these; nothing else can be done.
        if error.errno not in _FOLDER_SYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def sync_folders_under(folder: Path) -> None:
    """Make every name in and under `folder` survive a crash. Raises `OSError`."""

    def refuse(error: OSError) -> None:
        raise error

    for path, _, _ in os.walk(folder, onerror=refuse):
        sync_folder(Path(path))


def is_attribute_file(name: str) -> bool:
    """Return whether a name is that of a file in which macOS keeps attributes of another file.

    It writes one for each file on disks that have no such attributes, and into archives.

    >>> is_attribute_file("._model.safetensors"), is_attribute_file("model.safetensors")
    (True, False)
    """
    return name.startswith("._")


def describe_two_renames(target: Path) -> str:
    """Return the note for a folder that was replaced where names cannot be swapped."""
    return (
        f"{target} was replaced by two renames, since this system or its file system cannot swap "
        "two names: between them no checkpoint had this name"
    )


def remove_folder(folder: Path) -> None:
    """Delete `folder` and its contents, if it exists. Raises `OSError`."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)


class FolderLock(Closing):
    """The exclusive right to work in `folder`, for this process and those it forks.

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

        Raises `RunError` where another process holds it, naming that process, where the folder
        or its lock is a link or another user's, and where they cannot be made or locked.
        """
        with refusals_explained("lock the folder", folder):
            for _ in range(_ATTEMPTS):
                try:
                    state = make_own_folder(folder)
                    descriptor = open_own(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
                except FileNotFoundError:
                    if not folder.parent.is_dir():
                        raise
                    continue  # removed by its earlier holder since the line above
                try:
                    if _lock_and_sign(descriptor, folder):
                        return cls(folder, state, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        raise RunError(
            f"cannot lock the folder: {folder}: it is removed as often as it is made\n"
            "another process uses the same folder: wait for it to end, then run this again"
        )

    @property
    def is_exclusive(self) -> bool:
        """Whether only this user could look into the folder and write there."""
        return is_exclusive(self._state)

    @property
    def inode(self) -> int:
        """The inode number of the folder."""
        return self._state.st_ino

    def expect_in_place(self) -> None:
        """Raise `RunError` where another folder, or a link, has the name of the folder by now."""
        if not os.path.samestat(os.lstat(self.folder), self._state):
            raise RunError(
                f"another folder took the place of {self.folder} during the run\n"
                "expected nobody else to rename it: see who can write to its parent folder, then "
                "run this again"
            )

    def remove_folder(self) -> None:
        """Remove the emptied folder, lock file and all, and release. Raises `OSError`."""
        (self.folder / _LOCK_NAME).unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError:
            # A process that came in between has made a lock file of its own: the folder is
            # its now, with all in it.
            if not (self.folder / _LOCK_NAME).exists():
                raise
        self.close()

    def close(self) -> None:
        """Release the lock and leave the folder as it is. A second call does nothing."""
        if self._descriptor is not None:
            # Closing, not unlocking: an unlock in a forked child would unlock its parent too.
            os.close(self._descriptor)
            self._descriptor = None


def _lock_and_sign(descriptor: int, folder: Path) -> bool:
    """Lock the open file and sign it; False if its name belongs to another file by then."""
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
        # The lock is on the open file; its name may belong to another one by now, which a third
        # process could lock.
        named = os.lstat(folder / _LOCK_NAME)
    except FileNotFoundError:
        return False
    if not os.path.samestat(os.fstat(descriptor), named):
        return False
    os.ftruncate(descriptor, 0)
    write_all(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True
