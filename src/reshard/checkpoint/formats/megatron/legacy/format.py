"""The format `megatron-legacy`: a folder for each model-parallel rank of Megatron-LM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    Listing,
    check_against_manifest,
)
from reshard.checkpoint.formats.megatron import TRACKER_NAME, find_iteration
from reshard.checkpoint.formats.megatron.legacy.rank_folders import (
    FORMAT_NAME,
    MODEL_NAMES,
    OPTIMIZER_NAME,
    list_rank_folders,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh


class MegatronLegacyFormat(CheckpointFormat):
    """A folder with `mp_rank_XX`, or with one such folder for each step."""

    name = FORMAT_NAME
    training = "megatron"
    evidence = f"`mp_rank_XX/{MODEL_NAMES[0]}` of Megatron"

    def detect(self, listing: Listing) -> bool:
        """Whether there are folders of ranks with Megatron's files."""
        folder = find_iteration(listing.path)
        if folder is None or not folder.is_dir():
            return False
        return any(
            (folder / name / file).exists()
            for name in list_rank_folders(folder)
            for file in MODEL_NAMES
        )

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint of the step that is asked for, or of the last one."""
        from reshard.checkpoint.formats.megatron.legacy.reader import read

        return read(find_iteration(path) or path)

    capabilities = frozenset({Capability.WHOLE, Capability.SHARDS, Capability.VALUES})

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout]:
        """The parts that Megatron's ranks have: a mesh of tp, pp and ep."""
        from reshard.checkpoint.formats.megatron.legacy.stage_layouts import RankGrid

        if mesh is None and ranks > 1:
            raise UsageError(
                f"{ranks} ranks for Megatron's folders; give a mesh, such as tp=2,pp=4"
            )
        from reshard.checkpoint.formats.megatron.legacy import arrangement as new_files

        return new_files.place(checkpoint.tensors, checkpoint.values, RankGrid(mesh))

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """A folder for each model-parallel rank."""
        from reshard.checkpoint.formats.megatron.legacy import arrangement as new_files

        return new_files.arrange(new)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """The file that names the last step."""
        from reshard.checkpoint.formats.megatron.legacy import arrangement as new_files

        return new_files.final_files(write_plan)

    def find_read_names(self, names: Collection[str]) -> Mapping[str, str]:
        """Name norms and experts as the reader does, by whichever layers they were written."""
        from reshard.checkpoint.formats.megatron.parameters import find_read_names

        return find_read_names(names)

    def is_own_value(self, name: str, value: Any) -> bool:
        """Whether Megatron's files have such a value of their own."""
        from reshard.checkpoint.formats.megatron.common_state import is_own_value

        return is_own_value(name, value)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The file that names the last step, where the folder of all steps was opened."""
        return (TRACKER_NAME,)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """The checkpoint as it was written, with the digests of the manifest."""
        from reshard.checkpoint.formats.megatron.legacy.reader import read

        step = find_iteration(folder) or folder
        inside = "" if step == folder else step.name
        return check_against_manifest(read(folder, inside), manifest)

    def has_file(self, name: str) -> bool:
        """Whether a rank has a file of that name."""
        return name in (*MODEL_NAMES, OPTIMIZER_NAME)


FORMAT = MegatronLegacyFormat()
