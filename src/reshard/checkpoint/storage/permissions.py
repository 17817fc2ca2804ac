"""Permissions of new files, and links that may be followed.

A converted checkpoint never exposes more than its source. A new file has the mode bits that the
umask leaves, restricted to the bits of its source and of the file that it replaces. Its owner can
always read and write it. A folder that replaces another gets its mode, its group and, if the
process runs as root, its owner. Objects of stores do not have modes, so only the umask applies.

A downloaded folder must not decide which files of this machine are copied into a new checkpoint. A
link is followed only if its target is in the folder or, in a snapshot of the Hugging Face cache, in
the folder of the same repository, where all files of a snapshot are links to `blobs`::

    models--meta--llama/blobs/0f3c...
    models--meta--llama/snapshots/c0ffee/config.json -> ../../blobs/0f3c...
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from reshard._records import Record
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.system import sync

_ALL = 0o777


class ModeLimits(Record):
    """Limits on the mode bits of a new folder and of the files in it.

    `of_file` has the limits of copied files, by name.
    """

    folder: int = _ALL
    files: int = _ALL
    of_file: Mapping[str, int] = {}


NO_LIMITS = ModeLimits()


def find_mode_limits(
    folder: Path, files: Iterable[Path], copied: Mapping[str, Path] | None = None
) -> ModeLimits:
    """Return the mode bits of a source: its folder, its files, and the files that are copied.

    >>> find_mode_limits(Path("/nowhere"), [])
    ModeLimits(folder=511, files=511, of_file={})
    """
    of_file = {name: _bits(path) for name, path in (copied or {}).items()}
    return ModeLimits(_bits(folder), common_mode_bits(files), of_file)


def common_mode_bits(paths: Iterable[Path]) -> int:
    """Return the mode bits that all existing files in `paths` have in common."""
    bits = _ALL
    for path in paths:
        bits &= _bits(path)
    return bits


def restrict_modes(folder: Path, bits: ModeLimits, replaced: Path) -> None:
    """Restrict the modes of a new folder and its content to `bits` and the modes it replaces.

    Raises OSError.
    """
    for parent, folders, files in os.walk(folder):
        for name in files:
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            allowed = bits.of_file.get(relative, bits.files) & _bits(replaced / relative)
            restrict_mode(path, allowed, 0o600)
        for name in folders:
            path = Path(parent, name)
            allowed = bits.folder & _bits(replaced / path.relative_to(folder))
            restrict_mode(path, allowed, 0o700)
    if replaced.is_dir():
        copy_ownership(folder, replaced)
    else:
        restrict_mode(folder, bits.folder, 0o700)


def restrict_file_mode(path: Path, bits: ModeLimits, replaced: Path) -> None:
    """Restrict the mode of a new file to `bits` and to the mode of a file that it replaces.

    The file gets the replaced file's owner and group. If the group cannot be set, the group's bits
    are cleared. Raises OSError.
    """
    allowed = bits.of_file.get(path.name, bits.files) & _bits(replaced)
    if replaced.exists():
        old = replaced.stat()
        try:
            # Only root may change the owner of a file.
            os.chown(path, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except PermissionError:
            allowed &= 0o707
    restrict_mode(path, allowed, 0o600)


def restrict_mode(path: Path, allowed: int, minimum: int = 0o600) -> None:
    """Clear the mode bits that are neither in `allowed` nor in `minimum`, the owner's bits.

    Raises OSError.
    """
    mode = stat.S_IMODE(path.lstat().st_mode)
    new = mode & ~(_ALL & ~(allowed | minimum))
    if new != mode:
        path.chmod(new)
        # The mode must be as durable as the name that the folder is about to get.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def copy_ownership(folder: Path, replaced: Path) -> None:
    """Set owner and group of a new folder and its files, and its mode, as in the replaced folder.

    Without permission to do so, owner and group stay. If the group cannot be set, the group's bits
    become those of others. Raises OSError.
    """
    old, new = replaced.stat(), folder.stat()
    mode = stat.S_IMODE(old.st_mode)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        owner = old.st_uid if os.geteuid() == 0 else -1
        paths = [folder, *folder.rglob("*")]
        try:
            for path in paths:
                os.chown(path, owner, old.st_gid, follow_symlinks=False)
        except PermissionError:
            if old.st_gid != new.st_gid:
                mode &= ~0o070 | (mode & 0o007) << 3
    if mode | 0o700 != stat.S_IMODE(folder.stat().st_mode):
        # Ignore bits that the file system does not support or the user may not set.
        with contextlib.suppress(PermissionError):
            folder.chmod(mode | 0o700)


def _bits(path: Path) -> int:
    """Return the mode bits of a file or folder, or all of them if it does not exist or is in a
    store.
    """
    if isinstance(path, RemotePath):
        return _ALL
    try:
        return stat.S_IMODE(path.stat().st_mode) & _ALL
    except OSError:
        return _ALL


_REPOSITORIES = ("models--", "datasets--", "spaces--")


def describe_foreign_link(path: Path, folder: Path) -> str | None:
    """Return why a link in a checkpoint's folder is not followed, or None if it may be read.

    >>> describe_foreign_link(Path("/nowhere/config.json"), Path("/nowhere")) is None
    True
    """
    # Objects of stores are never links.
    if not path.is_symlink():
        return None
    # Path.resolve raises RuntimeError for a loop before Python 3.13.
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        return "a link that leads back to itself"
    if any(target.is_relative_to(parent) for parent in _allowed_folders(folder.resolve())):
        return None
    return f"a link to {os.readlink(path)}, outside the folder"


def _allowed_folders(folder: Path) -> tuple[Path, ...]:
    """Return the folders that links in a resolved folder may lead into.

    >>> [path.name for path in _allowed_folders(Path("/hub/models--a--b/snapshots/c0ffee"))]
    ['c0ffee', 'models--a--b']
    """
    repository = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and repository.name.startswith(_REPOSITORIES)
    return (folder, repository) if is_snapshot else (folder,)
