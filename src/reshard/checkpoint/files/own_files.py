"""Files and folders of this user's own: links are never followed, other owners are refused.

Staging folders, locks, journals and drafts have names that anybody can guess, and may be in a
folder that others can write to. Everything of this package that is written in place, truncated,
locked or deleted by such a name is opened here:

1. A folder is made with mode 0700. One that exists must be a folder, not a link to one, and this
   user must own it.
2. A file is opened with `O_NOFOLLOW`. It must be a regular file with one name, owned by this user
   or by the owner of its folder, before a byte of it is changed.
3. The owner that a file system gives to new files may be another than this process's user: NFS
   with squashed root, mounts with one fixed owner. Where the owners differ, a file that is made
   and removed again shows which owner new files get.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from reshard.errors import RunError

# Links, and pipes without a reader; macOS answers differently for sockets.
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file that this user made, or make it (`O_CREAT`), and return its descriptor.

    `flags` are as for `os.open`, without `O_TRUNC`: a caller truncates the open descriptor.

    Raises:
        RunError: a link, a pipe or device, a file with another name, a file of another user.
        OSError: the file system refuses.
    """
    try:
        # O_NONBLOCK: a pipe without a writer would wait. It does nothing for regular files.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in _NOT_REGULAR and (problem := _find_problem(path)):
            raise _refuse(path, problem) from error
        raise
    try:
        state = os.fstat(descriptor)
        problem = _describe_file(state)
        if problem is None and state.st_uid != os.geteuid():
            # The folder was checked before: on some file systems all owners are alike.
            owner = os.stat(path.parent).st_uid
            problem = None if state.st_uid == owner else f"of another user, {state.st_uid}"
        if problem is not None:
            raise _refuse(path, problem)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_new(path: Path, mode: int = 0o666) -> int:
    """Open a file of this user's own for writing, empty, and return its descriptor.

    Raises as `open_own`.
    """
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> bytes:
    """Read a file that this user made. Raises as `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def make_own_folder(folder: Path) -> os.stat_result:
    """Make a folder that only this user can enter, or check one that exists, and return its state.

    Raises as `expect_own_folder`.

    >>> with tempfile.TemporaryDirectory() as parent:
    ...     oct(make_own_folder(Path(parent) / "staging").st_mode & 0o777)
    '0o700'
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    return expect_own_folder(folder)


def expect_own_folder(folder: Path) -> os.stat_result:
    """Return the state of a folder that this user owns, without following a link.

    Raises:
        RunError: a link, a file, a folder of another user.
        OSError: the file system refuses, such as where nothing is.
    """
    state = os.lstat(folder)
    problem = None if stat.S_ISDIR(state.st_mode) else _describe_file(state) or "a file"
    if problem is None and state.st_uid not in (os.geteuid(), _owner_of_new_files(folder)):
        problem = f"of another user, {state.st_uid}"
    if problem is not None:
        raise _refuse(folder, problem)
    return state


def is_exclusive(state: os.stat_result) -> bool:
    """Whether only the owner of a folder can look into it and write there."""
    return not state.st_mode & _OTHERS and state.st_uid == os.geteuid()


def _owner_of_new_files(folder: Path) -> int | None:
    """The owner that new files get in the folder that has `folder` in it; None if unknown."""
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
    """Return why a file cannot be this package's own; None if it can."""
    if stat.S_ISLNK(state.st_mode):
        return "a link"
    if not stat.S_ISREG(state.st_mode):
        return "not a regular file"
    return "a file with a second name (a hard link)" if state.st_nlink > 1 else None


def _refuse(path: Path, problem: str) -> RunError:
    return RunError(
        f"{path} is {problem}\n"
        "expected a name that only reshard uses, made by this user: see who made it and remove it, "
        "or choose another target"
    )
