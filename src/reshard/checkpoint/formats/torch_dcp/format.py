"""The format `torch-dcp`: PyTorch's distributed checkpoint, also as Megatron's `torch_dist`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.torch_dcp.files import FORMAT_NAME, METADATA_NAME, SUFFIX
from reshard.checkpoint.formats.torch_dcp.rank_metadata import is_rank_metadata, rank_metadata_names
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding


class TorchDcpFormat(CheckpointFormat):
    """A folder with `.metadata`, or with that of each rank, and files of archives."""

    name = FORMAT_NAME
    evidence = f"`{METADATA_NAME}` of PyTorch"
    suffixes = (SUFFIX,)
    capabilities = frozenset(
        {
            Capability.WHOLE,
            Capability.SHARDS,
            Capability.ITEMS,
            Capability.VALUES,
            Capability.ATTRIBUTES,
        }
    )
    # Megatron's `common.pt` beside the archives is part of its checkpoints.
    carries_weights = True
    takes_source_sharding = True

    def detect(self, path: Path) -> bool:
        """Whether the metadata are there, or `path` is one of them."""
        if path.is_dir():
            return (path / METADATA_NAME).exists() or bool(rank_metadata_names(path))
        return path.name == METADATA_NAME or is_rank_metadata(path.name)

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint that the metadata describe."""
        from reshard.checkpoint.formats.torch_dcp.reader import read

        return read(path if path.is_dir() else path.parent)

    def open_sharded(self, path: Path, cut: SourceSharding) -> Checkpoint:
        """Open a save without collectives whose metadata lack an axis that `cut` has."""
        from reshard.checkpoint.formats.torch_dcp.reader import read

        return read(path if path.is_dir() else path.parent, cut)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """The checkpoint in the layouts of the manifest."""
        from reshard.checkpoint.formats.torch_dcp.reader import read_with_manifest

        return read_with_manifest(folder, manifest)

    def drops_copies(self, checkpoint: Checkpoint) -> bool:
        """Whether the ranks talked when they saved: PyTorch then keeps one of equal chunks."""
        folder = checkpoint.folder
        return (folder / METADATA_NAME).exists() and not (folder / MANIFEST_NAME).exists()

    def has_file(self, name: str) -> bool:
        """Whether it is a file of archives, or the metadata of a rank."""
        return super().has_file(name) or is_rank_metadata(name)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The metadata of ranks, where there are no others."""
        has_metadata = (checkpoint.folder / METADATA_NAME).exists()
        return () if has_metadata else rank_metadata_names(checkpoint.folder)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Chunks in one file a rank, and what is no tensor in the first."""
        from reshard.checkpoint.formats.torch_dcp.arrangement import arrange_chunks
        from reshard.checkpoint.formats.torch_dcp.new_values import add_values

        return add_values(arrange_chunks(new), new.values, new.paths)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """`.metadata`, which says where everything is."""
        from reshard.checkpoint.formats.torch_dcp.arrangement import metadata_bytes
        from reshard.checkpoint.formats.torch_dcp.new_values import with_value_items

        yield METADATA_NAME, metadata_bytes(with_value_items(write_plan))


FORMAT = TorchDcpFormat()
