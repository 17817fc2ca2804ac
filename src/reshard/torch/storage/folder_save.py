"""A save into a folder that all ranks share: its files, and the replacement of an old checkpoint.

::

    step-1000/                       the target: the old checkpoint, or nothing
    .step-1000.reshard-saving/       the new checkpoint until it replaces the target
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from reshard.checkpoint.conversion.staging import is_checkpoint_file
from reshard.checkpoint.formats.opening import has_checkpoint
from reshard.checkpoint.formats.write_plan import NewFile, WritePlan
from reshard.checkpoint.storage.filesystem import (
    describe_two_renames,
    remove_folder,
    sync_folder,
    sync_folders_under,
    translate_os_errors,
)
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.checkpoint.storage.permissions import NO_LIMITS, restrict_modes
from reshard.checkpoint.storage.uploads import rank_save_folder
from reshard.errors import RunError, UsageError
from reshard.log import LOGGER
from reshard.system import exchange_names


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
        with translate_os_errors("look at the folder of a new checkpoint", self._replaced):
            if self._replaced.is_dir() and not os.path.lexists(self._target):
                self._replaced.rename(self._target)
        make_files(self.folder, self.files)

    def commit(self) -> None:
        """Rename the new checkpoint to its final name. Raises RunError."""
        with translate_os_errors("finish a new checkpoint", self.folder):
            if self._sync_files:
                sync_folders_under(self.folder)
            self._replace()

    def _replace(self) -> None:
        target, folder = self._target, self.folder
        restrict_modes(folder, NO_LIMITS, target)
        if not os.path.lexists(target):
            folder.rename(target)
            sync_folder(target.parent)
            return
        old = self._replaced
        remove_folder(old)
        if exchange_names(folder, target):
            folder.rename(old)
        else:
            target.rename(old)
            try:
                folder.rename(target)
            except OSError:
                old.rename(target)
                raise
            LOGGER.warning("%s", describe_two_renames(target))
        sync_folder(target.parent)
        # Keep files that do not belong to the old checkpoint.
        for path in sorted(old.iterdir()):
            if not (path.is_file() and is_checkpoint_file(path.name)) and not os.path.lexists(
                target / path.name
            ):
                shutil.move(path, target / path.name)
        remove_folder(old)


def expect_free(path: Path) -> None:
    """Raise UsageError if a folder contains a checkpoint."""
    if has_checkpoint(path) if path.is_dir() else path.exists():
        raise UsageError(f"there is a checkpoint at {path}; give overwrite=True")


def make_files(folder: Path, files: Iterable[NewFile], *, is_sparse: bool = False) -> None:
    """Create a new folder, with files of their full size and the bytes that are already known.

    Sparse files take up space only as they are written.

    Raises RunError, for example on a full disk.
    """
    with translate_os_errors("make the folder of a new checkpoint", folder):
        remove_folder(folder)
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
