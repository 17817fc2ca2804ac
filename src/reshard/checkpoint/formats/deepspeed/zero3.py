"""DeepSpeed's checkpoints of ZeRO stage 3."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.arrangement import Arrangement, NewCheckpoint
from reshard.checkpoint.formats.deepspeed.arrangements.zero import ZeroArranger
from reshard.checkpoint.formats.deepspeed.files import SavedFiles, find_files, find_tag_folder
from reshard.checkpoint.formats.deepspeed.format import CutByRanks
from reshard.checkpoint.formats.deepspeed.reader import SaveReader


class DeepSpeedZero3Format(CutByRanks):
    """Float32 weights and optimizer state, each parameter cut over the ranks by itself."""

    name = "deepspeed-zero3"
    stage = 3
    has_weights = False
    evidence = "zero_pp_rank_0_mp_rank_00_model_states.pt, as DeepSpeed saves"

    def is_own(self, saved: SavedFiles) -> bool:
        """Whether weights are cut over data-parallel ranks."""
        return not saved.is_universal and bool(saved.model_partitions)

    def open(self, path: Path) -> Checkpoint:
        """Describe the save that `latest` names, or that of the folder."""
        return SaveReader(path, find_files(find_tag_folder(path)), self.name).read()

    def arrange(self, new: NewCheckpoint) -> Arrangement:
        """Files of weights, and a file of each rank's partitions."""
        return ZeroArranger(new, stage=3).arrange(self.name)


FORMAT = DeepSpeedZero3Format()
