"""The format `rank-files`: bare files of ranks, each with the parts of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.rank_files.file_names import (
    FORMAT_NAME,
    MODEL,
    OPTIMIZER,
    find_rank_files,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding


class RankFilesFormat(CheckpointFormat):
    """One file of `torch.save` or safetensors for each rank, with nothing that joins them."""

    name = FORMAT_NAME
    evidence = "files of ranks, such as `model_world_size_8_rank_3.pt` or `rank3.safetensors`"

    capabilities = frozenset({Capability.SHARDS, Capability.VALUES})
    takes_source_sharding = True

    def detect(self, listing: Listing) -> bool:
        """Whether a folder has files of ranks with a model or an optimizer."""
        if not listing.is_folder:
            return False
        return any(file.kind in (MODEL, OPTIMIZER) for file in find_rank_files(listing.path))

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint of files that say themselves how tensors are cut."""
        from reshard.checkpoint.formats.rank_files.reader import read_rank_files

        return read_rank_files(path)

    def open_sharded(self, path: Path, cut: SourceSharding) -> Checkpoint:
        """Open files whose tensors are cut as the user specifies, where the files do not."""
        from reshard.checkpoint.formats.rank_files.reader import read_rank_files

        return read_rank_files(path, cut)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """A file of DTensors for each rank."""
        from reshard.checkpoint.formats.rank_files.arrangement import arrange_rank_files

        return arrange_rank_files(self.name, new)


FORMAT = RankFilesFormat()
