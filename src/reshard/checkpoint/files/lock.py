"""Who may work in this folder now?

One process at a time. The kernel drops the lock when its holder ends, however it ends, so a
killed run never has to be cleaned up by hand.

1. Make the folder and a file `lock` in it, and lock that file without waiting.
2. Where somebody holds it, say who: the holder wrote its host and process into the file.
3. Where the file that got locked is no longer the one with that name, the earlier holder was
   just removing its folder: begin again.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from reshard.checkpoint.files.closing import Closing
from reshard.checkpoint.files.durability import refusals_explained, write_all
from reshard.errors import RunError

_LOCK_NAME = "lock"
_ATTEMPTS = 100


class FolderLock(Closing):
    """The exclusive right to work in `folder`, for this process and those it forks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = Path(parent) / "staging"
    ...     with FolderLock.acquire(folder):
    ...         folder.is_dir()
    True
    """

    __slots__ = ("_descriptor", "folder")

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Lock `folder`, made if it is not there (its parent must be).

        Raises `RunError` where another process holds it, naming that process, and where the
        folder cannot be made or locked.
        """
        with refusals_explained("lock the folder", folder):
            for _ in range(_ATTEMPTS):
                folder.mkdir(exist_ok=True)
                try:
                    descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
                except FileNotFoundError:
                    continue  # removed by its earlier holder since the line above
                try:
                    if _locked(descriptor, folder):
                        return cls(folder, descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        raise RunError(
            f"cannot lock the folder: {folder}: it is removed as often as it is made\n"
            "another process uses the same folder: wait for it to end, then run this again"
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
        """Give the right up and leave the folder as it is. Doing it again does nothing."""
        if self._descriptor is not None:
            # Closing, not unlocking: an unlock in a forked child would unlock its parent too.
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int, folder: Path) -> bool:
    """Lock the open file and sign it; False where its name has gone to another file."""
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
        named = os.stat(folder / _LOCK_NAME)
    except FileNotFoundError:
        return False
    if not os.path.samestat(os.fstat(descriptor), named):
        return False
    os.ftruncate(descriptor, 0)
    write_all(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True
