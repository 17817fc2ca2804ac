"""The format `torch-dcp`: PyTorch's distributed checkpoints, `.metadata` and files of archives.

`metadata` reads and writes `.metadata`; `reader` binds tensors to the archives of their chunks, and
`packed_archives` decompresses archives when they are read; `writer` plans new checkpoints.
Megatron's `torch_dist` and FSDP formats build on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest
from reshard.errors import CheckpointError

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding

FORMAT_NAME = "torch-dcp"
METADATA_NAME = ".metadata"
SUFFIX = ".distcp"
_FILE_NAME = r"__(\d+)_(\d+)\.distcp"


def data_file_name(rank: int) -> str:
    """Return the name of a rank's file.

    >>> data_file_name(3)
    '__3_0.distcp'
    """
    # PyTorch numbers the files of a rank from 0.
    return f"__{rank}_0{SUFFIX}"


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a data file, or None if it is another file.

    >>> rank_of_file("__12_1.distcp"), rank_of_file("weights.distcp")
    (12, None)
    """
    match = re.fullmatch(_FILE_NAME, name)
    # A layout has a slot for each rank up to the highest, so a long number would exhaust memory.
    return int(match[1]) if match and len(match[1]) < 8 else None


_NAME = r"__(0|[1-9]\d{0,6})\.metadata"


def is_rank_metadata(name: str) -> bool:
    """Return whether a file name belongs to a single rank's metadata.

    >>> is_rank_metadata("__12.metadata"), is_rank_metadata(".metadata")
    (True, False)
    """
    return re.fullmatch(_NAME, name) is not None


def rank_metadata_names(folder: Path) -> tuple[str, ...]:
    """Return the metadata files of single ranks in a folder, in the order of ranks; often none.

    Raises:
        CheckpointError: the file of a rank is missing, but a higher rank has a file.
    """
    names = [path.name for path in folder.glob("__*.metadata")]
    ranks = sorted(int(match[1]) for name in names if (match := re.fullmatch(_NAME, name)))
    for expected, rank in enumerate(ranks):
        if rank != expected:
            raise CheckpointError(
                f"{folder / f'__{expected}.metadata'} is missing, while there is "
                f"__{rank}.metadata; without collectives every rank writes its own. Fetch it "
                "again, the checkpoint is incomplete"
            )
    return tuple(f"__{rank}.metadata" for rank in ranks)


class TorchDcpFormat(CheckpointFormat):
    """A folder with `.metadata`, or with a metadata file of each rank, and files of archives."""

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
    # Megatron's `common.pt` is part of its checkpoints, and is carried along.
    carries_weights = True
    takes_source_sharding = True

    def detect(self, listing: Listing) -> bool:
        """Return whether the path has metadata, or is a metadata file."""
        names = listing.names if listing.is_folder else (listing.path.name,)
        return METADATA_NAME in names or any(map(is_rank_metadata, names))

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint by its metadata."""
        from reshard.checkpoint.formats.torch_dcp.reader import read

        return read(path if path.is_dir() else path.parent)

    def open_sharded(self, path: Path, sharding: SourceSharding) -> Checkpoint:
        """Open a save without collectives whose metadata lack a mesh axis that `sharding` has."""
        from reshard.checkpoint.formats.torch_dcp.reader import read

        return read(path if path.is_dir() else path.parent, sharding)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint in the layouts of the manifest."""
        from reshard.checkpoint.formats.torch_dcp.reader import bind_to_manifest

        return bind_to_manifest(self.open(folder), manifest)

    def drops_copies(self, checkpoint: Checkpoint) -> bool:
        """Return whether the save used collectives: PyTorch then stores equal chunks once."""
        folder = checkpoint.folder
        return (folder / METADATA_NAME).exists() and not (folder / MANIFEST_NAME).exists()

    def has_file(self, name: str) -> bool:
        """Return whether `name` belongs to a file of archives, or to a rank's metadata."""
        return super().has_file(name) or is_rank_metadata(name)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the metadata files of single ranks, if `.metadata` is missing."""
        has_metadata = (checkpoint.folder / METADATA_NAME).exists()
        return () if has_metadata else rank_metadata_names(checkpoint.folder)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of chunks for each rank; items and plain values go into the first rank's."""
        from reshard.checkpoint.formats.torch_dcp.writer import add_values, plan_chunks

        return add_values(plan_chunks(new), new.values, new.paths)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield `.metadata`, which lists the location of every chunk and item."""
        from reshard.checkpoint.formats.torch_dcp.writer import metadata_bytes, with_value_items

        yield METADATA_NAME, metadata_bytes(with_value_items(write_plan))


FORMAT = TorchDcpFormat()
