"""DeepSpeed's checkpoints of ZeRO stage 3."""

from __future__ import annotations

from reshard.checkpoint.formats.deepspeed.files import SavedFiles
from reshard.checkpoint.formats.deepspeed.format import CutByRanks


class DeepSpeedZero3Format(CutByRanks):
    """Float32 weights and optimizer state, each parameter cut over the ranks by itself."""

    name = "deepspeed-zero3"
    stage = 3
    has_weights = False
    evidence = "zero_pp_rank_0_mp_rank_00_model_states.pt, as DeepSpeed saves"

    def is_own(self, saved: SavedFiles) -> bool:
        """Whether weights are cut over data-parallel ranks."""
        return not saved.is_universal and bool(saved.model_partitions)


FORMAT = DeepSpeedZero3Format()
