"""The format `megatron-legacy`: a folder for each model-parallel rank of Megatron-LM.

    iter_0002000/mp_rank_01_003_000/      tensor-parallel rank 1, stage 3, expert-parallel rank 0
        model_optim_rng.pt     weights, and the state of an optimizer that is not distributed
        distrib_optim.pt       the state of a distributed optimizer, of all data-parallel ranks

The stage is part of the name if there are several, and so is the expert-parallel rank: with two
numbers, the arguments in the files determine the meaning of the second.

`ranks` reads the parameters and the optimizer state of a rank, `reader` joins the ranks,
and `writer` plans new checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability, check_against_manifest
from reshard.checkpoint.formats.megatron import TRACKER_NAME, MegatronFormat, find_iteration
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.errors import CheckpointError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh

if TYPE_CHECKING:
    from reshard.checkpoint.formats.megatron.rank_layouts import Parallelism

FORMAT_NAME = "megatron-legacy"
# Old versions of Megatron call it `model_rng.pt` if the optimizer is in files of its own.
MODEL_NAMES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_NAME = "distrib_optim.pt"
# Megatron prints the tensor-parallel rank with two digits or more, the others with three.
_FOLDER = r"mp_rank_(\d{2,4})(?:_(\d{3}))?(?:_(\d{3}))?"


def list_rank_folders(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the folders of ranks, with the numbers in their names."""
    numbers = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = re.fullmatch(_FOLDER, path.name)
        if match is not None and path.is_dir():
            numbers[path.name] = tuple(int(number) for number in match.groups() if number)
    return numbers


def find_model_file(folder: Path) -> Path:
    """Return the file of a rank. Raises CheckpointError if it is missing."""
    for name in MODEL_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder / MODEL_NAMES[0]} is missing; this rank's part of the save is not there, fetch it"
    )


def check_complete(folder: Path, sizes: Parallelism) -> None:
    """Raise CheckpointError for ranks whose folders are missing, by their places."""
    there = list_rank_folders(folder)
    missing = [place for place in sizes.places() if sizes.folder_name(place) not in there]
    if missing:
        first = missing[0]
        raise CheckpointError(
            f"{folder / sizes.folder_name(first)} is missing, of tensor-parallel rank {first.tp}, "
            f"stage {first.pp}, expert-parallel rank {first.ep}"
            f"{f', and {len(missing) - 1} more' if missing[1:] else ''}; the arguments have "
            f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}. Fetch it, the checkpoint is incomplete"
        )
    names = [sizes.folder_name(place) for place in sizes.places()]
    # A save without a distributed optimizer has the file on no rank.
    without = [name for name in names if not (folder / name / OPTIMIZER_NAME).is_file()]
    if without and len(without) < len(names):
        raise CheckpointError(
            f"{folder / without[0] / OPTIMIZER_NAME} is missing, which {len(names) - len(without)} "
            "other ranks have; fetch it, or take it out of all of them for the weights alone"
        )


class MegatronLegacyFormat(MegatronFormat):
    """A folder with `mp_rank_XX`, or with such a folder for each step."""

    name = FORMAT_NAME
    evidence = f"`mp_rank_XX/{MODEL_NAMES[0]}` of Megatron"
    capabilities = frozenset({Capability.WHOLE, Capability.SHARDS, Capability.VALUES})

    def detect_step(self, folder: Path) -> bool:
        """Return whether there are folders of ranks with Megatron's files."""
        return any(
            (folder / name / file).exists()
            for name in list_rank_folders(folder)
            for file in MODEL_NAMES
        )

    def read_step(self, folder: Path) -> Checkpoint:
        """Describe the checkpoint in the folders of ranks."""
        from reshard.checkpoint.formats.megatron.legacy.reader import read

        return read(folder)

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout]:
        """Return the parts that Megatron's ranks have: a mesh of tp, pp and ep."""
        from reshard.checkpoint.formats.megatron.common_state import arguments_of
        from reshard.checkpoint.formats.megatron.rank_layouts import StageLayouts

        if mesh is None and ranks > 1:
            raise UsageError(
                f"{ranks} ranks for Megatron's folders; give a mesh, such as tp=2,pp=4"
            )
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        return StageLayouts(mesh, shapes, arguments_of(checkpoint.values)).layouts()

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Return a folder for each model-parallel rank."""
        from reshard.checkpoint.formats.megatron.legacy.writer import RankFoldersPlanner

        return RankFoldersPlanner(new).plan_files()

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Return the file that names the last step."""
        from reshard.checkpoint.formats.megatron.legacy.writer import final_files

        return final_files(write_plan)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the file that names the last step, if the folder of all steps was opened."""
        return (TRACKER_NAME,)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint as it was written, with the digests of the manifest."""
        from reshard.checkpoint.formats.megatron.legacy.reader import read

        step = find_iteration(folder) or folder
        inside = "" if step == folder else step.name
        return check_against_manifest(read(folder, inside), manifest)

    def has_file(self, name: str) -> bool:
        """Return whether a rank has a file of that name."""
        return name in (*MODEL_NAMES, OPTIMIZER_NAME)


FORMAT = MegatronLegacyFormat()
