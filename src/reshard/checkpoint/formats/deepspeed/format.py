"""What DeepSpeed's formats have in common: how a folder is known, and what is beside its files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.deepspeed.files import (
    LATEST,
    LATEST_UNIVERSAL,
    SCRIPTS,
    SUFFIXES,
    SavedFiles,
    find_files,
    find_tag_folder,
    is_save,
)
from reshard.checkpoint.formats.format import CheckpointFormat
from reshard.errors import ReshardError


class DeepSpeedFormat(CheckpointFormat):
    """A folder that DeepSpeed saved: that of a tag, or one with `latest` beside tags."""

    suffixes = SUFFIXES
    #: Whether it is asked to open folders whose save is not found.
    is_default: ClassVar[bool] = False

    def detect(self, path: Path) -> bool:
        """Whether DeepSpeed saved it, in this format's way."""
        if not path.is_dir() or not is_save(path):
            return False
        # Where no save can be found the first of these formats says so when it opens the folder.
        try:
            saved = find_files(find_tag_folder(path))
        except ReshardError:
            return self.is_default
        return self.is_own(saved)

    @abstractmethod
    def is_own(self, saved: SavedFiles) -> bool:
        """Whether the files of a save are of this format."""

    def own_files(self, checkpoint: Checkpoint) -> Collection[str]:
        """Pointers to saves, and the scripts that DeepSpeed copies beside them."""
        return (LATEST, LATEST_UNIVERSAL, *SCRIPTS)
