"""DeepSpeed's checkpoints of ZeRO stages 1 and 2, and of none."""

from __future__ import annotations

from reshard.checkpoint.formats.deepspeed.files import SavedFiles
from reshard.checkpoint.formats.deepspeed.format import CutByRanks


class DeepSpeedZero1Format(CutByRanks):
    """Whole weights, and optimizer state in flat partitions; stages 1 and 2 have the same files."""

    name = "deepspeed-zero1"
    stage = 1
    evidence = "mp_rank_00_model_states.pt, as DeepSpeed saves"
    is_default = True

    def is_own(self, saved: SavedFiles) -> bool:
        """Whether weights are not cut over data-parallel ranks."""
        return not saved.is_universal and not saved.model_partitions


FORMAT = DeepSpeedZero1Format()
