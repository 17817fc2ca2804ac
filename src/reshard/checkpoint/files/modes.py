"""How open new files and folders are: never more than their source, or than what they replace.

A new file has the bits that the umask leaves, of those the bits that its source has, and of those
the bits of the file that it replaces. Its owner can always read and write it. A folder that takes
the place of another gets its mode, its group and, for root, its owner. Objects of stores have no
modes: the umask decides.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.system import sync

_ALL = 0o777


@dataclass(frozen=True, slots=True)
class OpenBits:
    """The most bits that the mode of a new folder, and of the files in it, may have.

    `of_file` is for the files, by their names, that have a source of their own.
    """

    folder: int = _ALL
    files: int = _ALL
    of_file: Mapping[str, int] = field(default_factory=dict)


ALL_BITS = OpenBits()


def find_open_bits(
    folder: Path, files: Iterable[Path], copied: Mapping[str, Path] | None = None
) -> OpenBits:
    """Return the bits of a source: its folder, its files, and the files that are copied.

    >>> find_open_bits(Path("/nowhere"), [])
    OpenBits(folder=511, files=511, of_file={})
    """
    of_file = {name: _bits(path) for name, path in (copied or {}).items()}
    return OpenBits(_bits(folder), common_bits(files), of_file)


def common_bits(paths: Iterable[Path]) -> int:
    """The bits that all files have; those that are not there do not count."""
    bits = _ALL
    for path in paths:
        bits &= _bits(path)
    return bits


def restrict_modes(folder: Path, bits: OpenBits, replaced: Path) -> None:
    """Make a new folder, and all in it, no more open than `bits` and than what it replaces.

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
        take_mode(folder, replaced)
    else:
        restrict_mode(folder, bits.folder, 0o700)


def restrict_file_mode(path: Path, bits: OpenBits, replaced: Path) -> None:
    """Make a new file no more open than `bits` and than the file that it replaces, if any.

    It gets that file's owner and group; without its group, the bits of the group are none. Raises
    OSError.
    """
    allowed = bits.of_file.get(path.name, bits.files) & _bits(replaced)
    if replaced.exists():
        old = replaced.stat()
        try:
            os.chown(path, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except PermissionError:
            allowed &= 0o707
    restrict_mode(path, allowed, 0o600)


def restrict_mode(path: Path, allowed: int, least: int = 0o600) -> None:
    """Take the bits of a mode away that are not `allowed`, nor among the `least` of its owner.

    Raises OSError.
    """
    mode = stat.S_IMODE(path.lstat().st_mode)
    new = mode & ~(_ALL & ~(allowed | least))
    if new != mode:
        path.chmod(new)
        # The mode is as durable as the name that a folder is about to get.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def take_mode(folder: Path, replaced: Path) -> None:
    """Give a new folder, and the files in it, the owner and group of the one that it replaces.

    The folder gets its mode too. Who may not give them away keeps them: without its group, the
    group's bits are those of others. Raises OSError.
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
        # A bit that this file system or user may not set is not worth failing for.
        with contextlib.suppress(PermissionError):
            folder.chmod(mode | 0o700)


def _bits(path: Path) -> int:
    """The bits of a file or folder, all of them where there is none, or it is in a store."""
    if isinstance(path, PlacePath):
        return _ALL
    try:
        return stat.S_IMODE(path.stat().st_mode) & _ALL
    except OSError:
        return _ALL
