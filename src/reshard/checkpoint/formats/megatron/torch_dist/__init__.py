"""The format `torch-dist`: checkpoints of Megatron-core's `dist_checkpointing`.

They are distributed checkpoints of PyTorch (`torch_dcp`) in which layers and experts are stacked
(`stacked_names`), and optimizer state may be in buckets (`bucket_space`). `reader` opens them,
`writer` plans new checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.megatron import MegatronFormat
from reshard.checkpoint.formats.torch_dcp import METADATA_NAME, SUFFIX
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest

FORMAT_NAME = "torch-dist"
BACKEND = "torch_dist"
CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"
_LARGEST_CONFIG_BYTES = 1 << 20


def backend_of(folder: Path) -> str | None:
    """Return the backend in `metadata.json`, or None if it is not a file of Megatron."""
    path = folder / CONFIG_NAME
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    return backend if isinstance(backend, str) else None


class TorchDistFormat(MegatronFormat):
    """A folder with `metadata.json` of Megatron and a distributed checkpoint of PyTorch."""

    name = FORMAT_NAME
    evidence = f"`{CONFIG_NAME}` of Megatron and `{METADATA_NAME}`"
    suffixes = (SUFFIX,)
    capabilities = frozenset(
        {
            Capability.WHOLE,
            Capability.SHARDS,
            Capability.ITEMS,
            Capability.ATTRIBUTES,
            Capability.VALUES,
        }
    )

    def detect_step(self, folder: Path) -> bool:
        """Return whether Megatron wrote a distributed checkpoint in the folder of a step."""
        has_metadata = (folder / METADATA_NAME).exists()
        return backend_of(folder) is not None or (has_metadata and (folder / COMMON_NAME).exists())

    def read_step(self, folder: Path) -> Checkpoint:
        """Describe the distributed checkpoint, and the state without tensors."""
        from reshard.checkpoint.formats.megatron.torch_dist.reader import read

        return read(folder)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint in the layouts of the manifest."""
        from reshard.checkpoint.formats.torch_dcp.reader import bind_to_manifest

        return bind_to_manifest(self.open(folder), manifest)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the files of states without tensors."""
        return (COMMON_NAME, CONFIG_NAME)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of chunks for each rank."""
        from reshard.checkpoint.formats.megatron.torch_dist.writer import plan_files

        return plan_files(new)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield the states without tensors, and `.metadata`."""
        from reshard.checkpoint.formats.megatron.torch_dist.writer import list_final_files

        return list_final_files(write_plan)


FORMAT = TorchDistFormat()
