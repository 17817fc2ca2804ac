"""The files of a save: in a folder that all ranks share, or sent to an object store.

In a folder, the coordinator creates all files, and renames the new checkpoint at the end
(`FolderSave`)::

    step-1000/                       the target: the old checkpoint, or nothing
    .step-1000.reshard-saving/       the new checkpoint until it replaces the target

To an object store, each rank uploads the files that it alone writes (`OwnFiles`, `RankUpload`)::

    rank 0   __0_0.distcp  staged on its host --parts-->
    rank 1   __1_0.distcp  staged on its host --parts-->  .reshard/...       not readable yet
    the coordinator        values, .metadata, manifest -->  step-1000/         all of it

Files that several ranks write, such as those of `safetensors`, are staged on a host that these
ranks share, and uploaded by the coordinator (`AddressSave`).

A rank uploads parts while it still writes::

    file     |head|..... w .....|tail|head|......... b .........|tail|
    parts    |------A------|------B------|------C------|------D------|

    w and b are written  -->  a part is complete  -->  a thread uploads it, and frees its space

1. The heads are written at the beginning. Missing bytes are counted for every part.
2. Tails contain checksums of the preceding data. A thread iterates over each file's tails, and
   writes a tail as soon as all ranges of its checksums are written.
3. At the end, parts with bytes that are never written are uploaded too.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from reshard.checkpoint.blocks.block_io import OpenFiles
from reshard.checkpoint.conversion.staging import is_checkpoint_file
from reshard.checkpoint.formats.opening import has_checkpoint
from reshard.checkpoint.formats.write_plan import NewFile, WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.checkpoint.storage import filesystem
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.checkpoint.storage.permissions import NO_LIMITS, restrict_modes
from reshard.checkpoint.storage.range_checksums import RangeChecksums
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.uploads import (
    PartSender,
    SentFile,
    Upload,
    local_target,
    rank_save_folder,
)
from reshard.errors import RunError, UsageError
from reshard.log import LOGGER
from reshard.system import exchange_names, name_host
from reshard.torch.storage.places import RankPlaces


class FolderSave:
    """The coordinator's part in a save into a folder.

    Attributes:
        folder: the folder in which files are created.
        files: the files that the coordinator creates there, and completes.
    """

    def __init__(self, target: Path, write_plan: WritePlan, *, sync_files: bool) -> None:
        self._target, self._sync_files = target.absolute(), sync_files
        self.folder = rank_save_folder(self._target)
        self._replaced = self._target.with_name(f".{self._target.name}.reshard-replaced")
        self.files = write_plan.files

    def begin(self) -> None:
        """Create the files. Raises RunError.

        An old checkpoint is first renamed back if a save was killed between its two renames.
        """
        with filesystem.translate_os_errors(
            "look at the folder of a new checkpoint", self._replaced
        ):
            if self._replaced.is_dir() and not os.path.lexists(self._target):
                self._replaced.rename(self._target)
        make_files(self.folder, self.files)

    def commit(self) -> None:
        """Rename the new checkpoint to its final name. Raises RunError."""
        with filesystem.translate_os_errors("finish a new checkpoint", self.folder):
            if self._sync_files:
                filesystem.sync_folders_under(self.folder)
            self._replace()

    def _replace(self) -> None:
        target, folder = self._target, self.folder
        restrict_modes(folder, NO_LIMITS, target)
        if not os.path.lexists(target):
            folder.rename(target)
            filesystem.sync_folder(target.parent)
            return
        old = self._replaced
        filesystem.remove_folder(old)
        if exchange_names(folder, target):
            # After the exchange, `folder` has the old checkpoint.
            folder.rename(old)
        else:
            target.rename(old)
            try:
                folder.rename(target)
            except OSError:
                old.rename(target)
                raise
            LOGGER.warning("%s", filesystem.describe_two_renames(target))
        filesystem.sync_folder(target.parent)
        # Keep files that do not belong to the old checkpoint.
        for path in sorted(old.iterdir()):
            if not (path.is_file() and is_checkpoint_file(path.name)) and not os.path.lexists(
                target / path.name
            ):
                shutil.move(path, target / path.name)
        filesystem.remove_folder(old)


def expect_free(path: Path) -> None:
    """Raise UsageError if a folder contains a checkpoint."""
    if has_checkpoint(path) if path.is_dir() else path.exists():
        raise UsageError(f"there is a checkpoint at {path}; give overwrite=True")


def make_files(folder: Path, files: Iterable[NewFile], *, is_sparse: bool = False) -> None:
    """Create a new folder, with files of their full size and the bytes that are already known.

    Sparse files take up space only as they are written.

    Raises RunError, for example on a full disk.
    """
    with filesystem.translate_os_errors("make the folder of a new checkpoint", folder):
        filesystem.remove_folder(folder)
        folder.mkdir(parents=True)
        for file in files:
            path = folder / file.stored.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                raise RunError(
                    f"{path} is the file of another name already, on this file system, which "
                    "ignores case; choose a target on another disk, or other names"
                )
            with TargetFile(path, file.stored.size_bytes, is_sparse=is_sparse) as target:
                for offset, content in file.known_bytes():
                    target.write(memoryview(bytearray(content)), offset)


_REQUESTS = 16


class RankUpload(filesystem.Closing):
    """The upload of the files that a rank alone writes.

    Args:
        upload: of the files; closed with this object.
        files: created in the folder, with their full size and the bytes that are already known.
        folder: the folder in which they are staged.

    Raises RunError for files that cannot be created.
    """

    def __init__(self, upload: Upload, files: Sequence[NewFile], folder: Path) -> None:
        self._upload, self._files, self._folder = upload, tuple(files), folder
        self._numbers = {file.stored.name: number for number, file in enumerate(files)}
        sizes = {file.stored.name: file.stored.size_bytes for file in files}
        # Sparse files, since the space of uploaded parts is released while others are written.
        self.targets: OpenFiles[TargetFile] = OpenFiles(
            lambda name: TargetFile(folder / name, sizes[name], is_sparse=True)
        )
        grid = upload.grid
        self._left = [stop - start for _, start, stop in map(grid.range_of, range(grid.count))]
        self._checksums = RangeChecksums({file.stored.name: file.checked_ranges for file in files})
        self._awaited: dict[tuple[str, int], Future[int]] = {
            (file.stored.name, start): Future()
            for file in files
            for start, _ in file.checked_ranges
        }
        self._lock = threading.Lock()
        self._sender = PartSender(self._send, _REQUESTS)
        self._closing = ThreadPoolExecutor(1, "reshard-close")
        make_files(folder, files, is_sparse=True)
        for file in files:
            for start, content in file.known_bytes():
                self.wrote(file.stored.name, start, start + len(content))
        # A thread of its own, since it waits for checksums that the writing threads contribute.
        self._closed = self._closing.submit(self._write_closing_bytes)

    def wrote(self, file: str, start_bytes: int, stop_bytes: int) -> None:
        """Record that a range of a file is written, and upload the parts that it completes.

        Raises RunError if a part could not be uploaded, or a range is written twice.
        """
        self._sender.check()
        whole = []
        number = self._numbers[file]
        first = self._upload.grid.parts_of(number).start
        part_bytes = int(self._upload.grid.part_bytes[number])
        with self._lock:
            for part in range(start_bytes // part_bytes, -(-stop_bytes // part_bytes)):
                low, high = part * part_bytes, (part + 1) * part_bytes
                self._left[first + part] -= min(stop_bytes, high) - max(start_bytes, low)
                if self._left[first + part] < 0:
                    raise RunError(
                        f"bytes {start_bytes}:{stop_bytes} of {file} were written twice; expected "
                        "a plan with each box once: is it from a planner of your own?"
                    )
                # An empty range completes no part; the part that it is in may have been uploaded
                # already.
                if not self._left[first + part] and start_bytes < stop_bytes:
                    whole.append(first + part)
        # Outside the lock, since a full queue of the sender blocks.
        for part in whole:
            self._sender.put(part)

    def contribute(self, file: str, start_bytes: int, checksum: int, seen_bytes: int) -> None:
        """Add a box's contribution to the checksum of the range at `start_bytes`."""
        key = (file, start_bytes)
        if key not in self._awaited:
            return
        self._checksums.contribute(file, start_bytes, checksum, seen_bytes)
        complete = self._checksums.of(file, start_bytes)
        # Two threads that write the last boxes of a range may both see its complete checksum.
        with self._lock:
            if complete is not None and not self._awaited[key].done():
                self._awaited[key].set_result(complete)

    def finish(self) -> None:
        """Wait until everything is written and uploaded.

        Raises RunError if a range was not written, or the store rejects a part.
        """
        for (name, start), future in self._awaited.items():
            if not future.done():
                future.set_exception(
                    RunError(f"the rank did not write {name} from byte {start} on; save again")
                )
        self._closed.result()
        for part, missing_bytes in enumerate(self._left):
            if missing_bytes:
                self._sender.put(part)
        self._sender.finish()

    def _write_closing_bytes(self) -> None:
        for file in self._files:
            name = file.stored.name
            for start, content in file.closing_bytes(partial(self._await_checksum, name)):
                self.targets[name].write(memoryview(bytearray(content)), start)
                self.wrote(name, start, start + len(content))

    def _await_checksum(self, file: str, start_bytes: int, size_bytes: int) -> int:
        # No rank contributes to an empty range.
        return self._awaited[file, start_bytes].result() if size_bytes else 0

    def _send(self, part: int) -> None:
        number, start, stop = self._upload.grid.range_of(part)
        self._upload.send(part, self._folder, None)
        self.targets[self._files[number].stored.name].release(start, stop)

    def close(self) -> None:
        """Stop the threads, and close files and connections. Uploaded parts stay."""
        for future in self._awaited.values():
            # The closing thread may wait for a checksum, and would never end.
            future.cancel()
        self._closing.shutdown(cancel_futures=True)
        self._sender.close()
        self.targets.close()
        self._upload.close()


def as_sent(files: Sequence[NewFile]) -> tuple[SentFile, ...]:
    """Return the names and sizes of files for an upload."""
    return tuple(SentFile(file.stored.name, file.stored.size_bytes) for file in files)


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files that a rank alone writes, as the coordinator describes them to the rank.

    `uploads` are the store's identifiers of the uploads, by file name; `part_bytes` are the sizes
    of the parts of each file.
    """

    target: RemotePath
    save_id: str
    own: tuple[NewFile, ...]
    uploads: Mapping[str, str]
    part_bytes: tuple[int, ...]
    staging: str | None

    @property
    def names(self) -> frozenset[str]:
        """The names of the files."""
        return frozenset(file.stored.name for file in self.own)

    def folder_of(self, rank: int) -> Path:
        """Return the folder in which the rank stages them. Raises RunError."""
        return rank_save_folder(local_target(self.target, self.staging)) / f"rank-{rank}"

    def begin(self, folder: Path) -> RankUpload:
        """Create the files in a folder, and start to upload them as they are written.

        Raises RunError.
        """
        upload = Upload(self.target, self.save_id, as_sent(self.own), MANIFEST_NAME)
        try:
            upload.join((dict(self.uploads), list(self.part_bytes), b""))
            return RankUpload(upload, self.own, folder)
        except BaseException:
            upload.close()
            raise


class AddressSave:
    """The coordinator's part in a save to an address.

    Args:
        target: the address.
        save_id: of the save.
        write_plan: its files.
        staging: the folder for staged files on each host; the user's cache folder when None.

    Attributes:
        folder: the folder on the coordinator's host in which it creates files.
        files: the files that several ranks write.

    Raises the errors of `Upload`.
    """

    def __init__(
        self,
        target: RemotePath,
        save_id: str,
        write_plan: WritePlan,
        staging: str | os.PathLike[str] | None,
    ) -> None:
        self._target, self._save_id = target, save_id
        self._staging = None if staging is None else str(Path(staging).absolute())
        self._all = write_plan.files
        self._sent = as_sent(write_plan.files)
        self.folder = rank_save_folder(local_target(target, self._staging)) / "coordinator"
        self.files: tuple[NewFile, ...] = ()
        # Files that do not belong to the old checkpoint are kept, as in a folder.
        self._upload = Upload(target, save_id, self._sent, MANIFEST_NAME, is_checkpoint_file)

    def begin(
        self, places: Sequence[RankPlaces], hosts: Sequence[object], *, overwrite: bool
    ) -> list[OwnFiles]:
        """Begin the upload, create the files of several ranks, and describe each rank's own files.

        Unfinished uploads of earlier saves to the address are aborted.

        Args:
            places: of each rank.
            hosts: a value for each rank that identifies its host.
            overwrite: whether to replace an existing checkpoint.

        Raises:
            UsageError: an existing checkpoint; a file with ranks of several hosts.
            RunError: an error of the store; files that cannot be created.
        """
        writers: dict[str, set[int]] = {}
        for of_rank in places:
            for place in of_rank.places:
                if place is not None:
                    writers.setdefault(place.file, set()).add(of_rank.rank)
        own: list[list[NewFile]] = [[] for _ in places]
        common = []
        for file in self._all:
            ranks = writers.get(file.stored.name, set())
            if len(ranks) == 1:
                own[ranks.pop()].append(file)
                continue
            far = [rank for rank in sorted(ranks) if hosts[rank] != name_host()]
            if far:
                raise UsageError(
                    f"{file.stored.name} would be written by ranks {sorted(ranks)}, of which "
                    f"{far[0]} is on another host than the coordinator; save to {self._target} "
                    "with format='torch-dcp' or 'sharded-safetensors', where each rank writes its "
                    "own files"
                )
            common.append(file)
        self._upload.find_target(overwrite=overwrite, restart=True, is_resumed=False)
        self._upload.begin()
        self.files = tuple(common)
        make_files(self.folder, self.files)
        uploads, part_bytes, _ = self._upload.state()
        bytes_of = dict(zip((file.name for file in self._sent), part_bytes, strict=True))
        return [
            OwnFiles(
                self._target,
                self._save_id,
                tuple(files),
                {name: uploads[name] for name in names if name in uploads},
                tuple(bytes_of[name] for name in names),
                self._staging,
            )
            for files in own
            for names in [[file.stored.name for file in files]]
        ]

    def commit(self) -> None:
        """Upload the remaining files, and make the checkpoint visible. Raises RunError."""
        # Ask the store which parts the ranks uploaded, so that they are known to be there.
        self._upload.begin()
        common = {file.stored.name for file in self.files}
        own = np.zeros(self._upload.grid.count, dtype=bool)
        for number, file in enumerate(self._sent):
            parts = self._upload.grid.parts_of(number)
            own[parts.start : parts.stop] = file.name in common
        self._upload.send_rest(self.folder, own)
        lost = np.flatnonzero(~self._upload.sent)
        if len(lost):
            number, start, stop = self._upload.grid.range_of(int(lost[0]))
            raise RunError(
                f"the store does not have bytes {start}:{stop} of {self._sent[number].name}, which "
                "a rank sent; does something else write to that address? Save again"
            )
        self._upload.commit(self.folder)
        self.close()
        with filesystem.translate_os_errors("delete staged files", self.folder):
            filesystem.remove_folder(self.folder)

    def close(self) -> None:
        """Close connections. Uploaded parts stay until another save aborts their uploads."""
        self._upload.close()
