"""How does a change of names in a folder survive a crash?

Data is safe once its file is synced; a *name* is safe once the folder that holds it is synced.
This module has the few operations on names that a crash-proof commit is made of, and one place
where the operating system's refusals become errors of this package.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reshard.errors import RunError

_AT_CURRENT_FOLDER = -100
_RENAME_EXCHANGE = 2
_EXCHANGE_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
_FOLDER_SYNC_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP}


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
        raise RunError(f"cannot {action}: {exact}: {reason}") from error


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`, however many calls it takes. Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining, offset)
        remaining = remaining[written:]
        offset += written


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a crash. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
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


def exchange_folders(first: Path, second: Path) -> bool:
    """Swap two existing names in one step; nobody ever sees either of them missing.

    Answers False, with nothing changed, where the kernel, the C library or the file system
    cannot do it. Any other refusal raises `OSError`.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    status = rename(
        _AT_CURRENT_FOLDER,
        ctypes.c_char_p(os.fsencode(first)),
        _AT_CURRENT_FOLDER,
        ctypes.c_char_p(os.fsencode(second)),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in _EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def remove_folder(folder: Path) -> None:
    """Delete `folder` and all in it; a folder that is not there is fine. Raises `OSError`."""
    if os.path.lexists(folder):
        shutil.rmtree(folder)
