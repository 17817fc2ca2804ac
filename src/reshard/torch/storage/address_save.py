"""A save to an object store: each rank uploads the files that it alone writes (`rank_upload`).

::

    rank 0   __0_0.distcp  staged on its host --parts-->
    rank 1   __1_0.distcp  staged on its host --parts-->  .reshard/...       not readable yet
    the coordinator        values, .metadata, manifest -->  step-1000/         all of it

Files that several ranks write, such as those of `safetensors`, are staged on a host that these
ranks share, and uploaded by the coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reshard.checkpoint.conversion.staging import is_checkpoint_file
from reshard.checkpoint.formats.write_plan import NewFile, WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.checkpoint.storage.filesystem import remove_folder, translate_os_errors
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.uploads import Upload, local_target, rank_save_folder
from reshard.errors import RunError, UsageError
from reshard.system import name_host
from reshard.torch.storage.folder_save import make_files
from reshard.torch.storage.places import RankPlaces
from reshard.torch.storage.rank_upload import RankUpload, as_sent


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
        return frozenset(one.stored.name for one in self.own)

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
        for one in places:
            for place in one.places:
                if place is not None:
                    writers.setdefault(place.file, set()).add(one.rank)
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
        with translate_os_errors("delete staged files", self.folder):
            remove_folder(self.folder)

    def close(self) -> None:
        """Close connections. Uploaded parts stay until another save aborts their uploads."""
        self._upload.close()
