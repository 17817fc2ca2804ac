"""The spool: where parts of files wait on this machine until a store has them.

A conversion to an address writes its files into a folder here, sparse ones, and gives the space of
each part back when the store has it. What was given back is noted first, durably: a later run whose
store has lost such a part does its blocks again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from reshard.checkpoint.files.descriptors import Closing, close_descriptor
from reshard.checkpoint.files.folders import refusals_explained, write_all
from reshard.checkpoint.files.own_files import open_own, read_own
from reshard.checkpoint.files.places.place_path import PlacePath
from reshard.system import sync_data

_FOLDER = ".reshard"
_RECORD = struct.Struct("<QQQ")


def spool_target(target: PlacePath, folder: str | os.PathLike[str] | None, host: int = 0) -> Path:
    """What stands for an address on this machine, in a folder that is made where it is missing.

    By default the folder is `reshard` in the user's cache folder (`XDG_CACHE_HOME`). Hosts of a run
    have numbers, since they may share such a folder. Raises RunError.

    >>> spool_target(PlacePath("s3://bucket/model"), "/tmp").name
    'model-70498e845ae8'
    """
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "reshard"
    digest = hashlib.blake2b(str(target).encode(), digest_size=6).hexdigest()
    with refusals_explained("make the folder for staged files", Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"{target.name[:60]}-{digest}{f'-host{host}' if host else ''}"


def spool_targets(target: PlacePath, folder: str | os.PathLike[str] | None) -> list[Path]:
    """What may stand for an address on this machine, of any host of a run. Raises RunError."""
    first = spool_target(target, folder)
    with refusals_explained("look for staged files", first.parent):
        # A staging folder is hidden, and has the name of its target in its own.
        found = {one.name for one in first.parent.glob(f".{glob.escape(first.name)}-host*")}
    names = [name.removeprefix(".").rpartition(".")[0] for name in sorted(found)]
    return [first, *(first.with_name(name) for name in names)]


def saving_folder(target: Path) -> Path:
    """Where a save by ranks makes the files of the checkpoint `target`.

    >>> saving_folder(Path("models/step-1000")).as_posix()
    'models/.step-1000.reshard-saving'
    """
    return target.with_name(f".{target.name}.reshard-saving")


class GivenBack(Closing):
    """The ranges of files whose space one process gave back, as they are noted."""

    def __init__(self, content: Path, rank: int) -> None:
        self._path = content / _FOLDER / f"given_back.{rank}"
        self._descriptor = -1
        with refusals_explained("note what was sent", self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT)
            size = os.fstat(self._descriptor).st_size
            self._end = size - size % _RECORD.size

    def note(self, file: int, start_bytes: int, stop_bytes: int) -> None:
        """Note a range of a file by its number, durably. Raises RunError."""
        with refusals_explained("note what was sent", self._path):
            record = _RECORD.pack(file, start_bytes, stop_bytes)
            write_all(self._descriptor, record, self._end)
            sync_data(self._descriptor)
            self._end += len(record)

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)


class SentChecksums(Closing):
    """The checksums that a store gave for the parts that one process sent, as they are noted.

    By them a later run finds out whether the store still has those bytes. They are durable before
    the space of a part is given back, since `GivenBack` is synced after them.
    """

    def __init__(self, content: Path, rank: int) -> None:
        self._path = content / _FOLDER / f"sent.{rank}"
        self._descriptor = -1
        with refusals_explained("note what was sent", self._path):
            self._path.parent.mkdir(exist_ok=True)
            self._descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, name: str, part: int, checksum: str) -> None:
        """Note the checksum of a file's part. Raises RunError."""
        with refusals_explained("note what was sent", self._path):
            os.write(self._descriptor, json.dumps([name, part, checksum]).encode() + b"\n")
            sync_data(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        self._descriptor = close_descriptor(self._descriptor)


def read_sent_checksums(content: Path) -> dict[tuple[str, int], str]:
    """Return the checksums that earlier runs noted, by file and part. Raises RunError."""
    found = {}
    with refusals_explained("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("sent.*")):
            for line in read_own(path).splitlines():
                # The last line may be torn.
                with contextlib.suppress(ValueError):
                    name, part, checksum = json.loads(line)
                    found[name, part] = checksum
    return found


def read_given_back(content: Path) -> Iterator[tuple[int, int, int]]:
    """The ranges of files that earlier runs noted: file, first byte and end. Raises RunError."""
    with refusals_explained("read what an earlier run sent", content):
        for path in sorted((content / _FOLDER).glob("given_back.*")):
            noted = read_own(path)
            for at in range(0, len(noted) - len(noted) % _RECORD.size, _RECORD.size):
                yield _RECORD.unpack_from(noted, at)


def staged_beside(content: Path, names: set[str]) -> list[str]:
    """The staged files that are none of `names`, in the order of their names. Raises RunError."""
    with refusals_explained("list the staged files", content):
        found = [
            (Path(parent) / name).relative_to(content).as_posix()
            for parent, folders, files in os.walk(content)
            for name in files
        ]
    return sorted(
        name for name in found if name not in names and not name.startswith(f"{_FOLDER}/")
    )
