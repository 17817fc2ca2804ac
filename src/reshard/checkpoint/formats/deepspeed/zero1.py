"""DeepSpeed's checkpoints of ZeRO stages 1 and 2, and of none."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.arrangement import Arrangement, NewCheckpoint
from reshard.checkpoint.formats.deepspeed.arrangements.zero import ZeroArranger
from reshard.checkpoint.formats.deepspeed.files import SavedFiles, find_files, find_tag_folder
from reshard.checkpoint.formats.deepspeed.format import CutByRanks
from reshard.checkpoint.formats.deepspeed.reader import SaveReader


class DeepSpeedZero1Format(CutByRanks):
    """Whole weights, and optimizer state in flat partitions; stages 1 and 2 have the same files."""

    name = "deepspeed-zero1"
    stage = 1
    evidence = "mp_rank_00_model_states.pt, as DeepSpeed saves"
    is_default = True

    def is_own(self, saved: SavedFiles) -> bool:
        """Whether weights are not cut over data-parallel ranks."""
        return not saved.is_universal and not saved.model_partitions

    def open(self, path: Path) -> Checkpoint:
        """Describe the save that `latest` names, or that of the folder."""
        return SaveReader(path, find_files(find_tag_folder(path)), self.name).read()

    def arrange(self, new: NewCheckpoint) -> Arrangement:
        """Files of weights, and a file of each rank's partitions."""
        return ZeroArranger(new, stage=1).arrange(self.name)


FORMAT = DeepSpeedZero1Format()
