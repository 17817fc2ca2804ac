"""DeepSpeed's formats: ZeRO of all stages, experts, pipelines, and universal checkpoints.

A save is a folder, its *tag*, next to a file `latest` with its name::

    latest                                                      global_step100
    global_step100/mp_rank_00_model_states.pt                   weights, and values of the training
    global_step100/zero_pp_rank_3_mp_rank_00_optim_states.pt    a partition of ZeRO, of rank 3
    global_step100/zero_pp_rank_3_mp_rank_00_model_states.pt    its part of the weights, stage 3
    global_step100/layer_04-model_00-model_states.pt            a layer of a pipeline
    global_step100/layer_0_expert_5_mp_rank_00_model_states.pt  an expert
    global_step100/expp_rank_1_mp_rank_00_optim_states.pt       optimizer state of experts' ranks
    latest_universal                                            global_step100_universal
    global_step100_universal/zero/lm_head.weight/exp_avg.pt     a universal checkpoint

`mp_rank` numbers stages and tensor-parallel ranks, stages first. Partitions of 16-bit runs begin
with `bf16_`; old names lack the `_` before `optim_states`.

`reader` opens saves: `saved_states` are the contents of files, `flat_buffers` locates parameters in
the buffers of ranks, `tensor_parallel` assembles parts, and `stored_tensors` binds tensors to
files. `writer` plans new saves, by the `training_parts` of a source. `universal` does both for
universal checkpoints. DeepSpeed is not imported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    Listing,
    check_against_manifest,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError, ReshardError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.text import first_text

SUFFIXES = ("model_states.pt", "optim_states.pt")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
# Scripts that DeepSpeed and Accelerate copy next to checkpoints.
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
UNIVERSAL_FOLDER = "zero"
UNIVERSAL_STATE = "zero/optimizer_state.pt"
# The file contains the name of a folder, and names are limited to 255 bytes; more is another file.
_MAX_TAG_BYTES = 4096
_MAX_LISTED = 8

_NUMBER = r"(\d{1,7})"
_RANK = rf"zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}"
# The names of files by the field of `SavedFiles` that has them. Patterns are compiled when a folder
# has files that end as DeepSpeed's do.
_NAMES = {
    "partitions": rf"(?:bf16_|fp16_)?{_RANK}_?optim_states\.pt",
    "model_partitions": rf"{_RANK}_model_states\.pt",
    "models": rf"mp_rank_{_NUMBER}_model_states\.pt",
    "layers": rf"layer_{_NUMBER}(?:-model_{_NUMBER})?-model_states\.pt",
    "experts": rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt",
    "expert_optimizers": rf"expp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt",
}


class SavedFiles(NamedTuple):
    """The files of a save by their contents; names are relative to its folder.

    Attributes:
        folder: the folder of the tag.
        is_universal: whether it has a file of each parameter's state.
        models: weights by `mp_rank`.
        model_partitions: weights of stage 3 by `(mp_rank, rank)`.
        partitions: optimizer state by `(mp_rank, rank)`.
        layers: of a pipeline, by `(layer, tensor-parallel rank)`.
        experts: by `(layer, expert, mp_rank)`; the layer is -1 if names lack it.
        expert_optimizers: by `(rank, mp_rank)`.
    """

    folder: Path
    is_universal: bool
    models: Mapping[int, str]
    model_partitions: Mapping[tuple[int, int], str]
    partitions: Mapping[tuple[int, int], str]
    layers: Mapping[tuple[int, int], str]
    experts: Mapping[tuple[int, int, int], str]
    expert_optimizers: Mapping[tuple[int, int], str]

    @property
    def mp_ranks(self) -> int:
        """The number of stages times the number of tensor-parallel ranks."""
        numbers = {*self.models}
        numbers.update(mp for mp, _ in (*self.model_partitions, *self.partitions))
        return max(numbers, default=0) + 1


def _match_name(name: str) -> tuple[str, Any] | None:
    """Return the kind of a file of DeepSpeed and its key, or None for other names."""
    if not name.endswith(SUFFIXES):
        return None
    for kind, pattern in _NAMES.items():
        if match := re.fullmatch(pattern, name):
            # Names of layers and experts may lack a number.
            absent = {"layers": 0, "experts": -1}.get(kind)
            numbers = tuple(absent if n is None else int(n) for n in match.groups())
            if kind == "models":
                return kind, numbers[0]
            # Names of partitions begin with the data-parallel rank, keys with `mp_rank`.
            return kind, numbers[::-1] if kind.endswith("partitions") else numbers
    return None


def find_files(folder: Path) -> SavedFiles:
    """Return the files of a save in the folder of its tag.

    Raises:
        FormatError: two files for the same part.
    """
    files: dict[str, dict[Any, str]] = {kind: {} for kind in _NAMES}
    for name in sorted(path.name for path in folder.iterdir() if path.is_file()):
        if (match := _match_name(name)) is None:
            continue
        kind, key = match
        if key in files[kind]:
            raise FormatError(
                f"{folder} has {files[kind][key]} and {name}, which are for the same part; one of "
                "them is left over from another save, take it out of the folder"
            )
        files[kind][key] = name
    return SavedFiles(folder, (folder / UNIVERSAL_FOLDER).is_dir(), **files)


def has_saved_files(folder: Path) -> bool:
    """Return whether a folder has a file whose name only DeepSpeed gives.

    Files of layers do not count: other programs have such names.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    kinds = (match[0] for name in names if (match := _match_name(name)) is not None)
    return any(kind != "layers" for kind in kinds)


def read_tag(folder: Path) -> str | None:
    """Return the tag in `latest` of a folder, or else in `latest_universal`, or None."""
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            with (folder / name).open("rb") as file:
                content = file.read(_MAX_TAG_BYTES + 1)
            tag = content.decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        is_short = len(content) <= _MAX_TAG_BYTES and tag.isprintable()
        if tag and is_short and "/" not in tag and tag not in (".", ".."):
            return tag
    return None


def is_save(folder: Path) -> bool:
    """Return whether a folder belongs to a tag, or has `latest` and folders of tags."""
    if has_saved_files(folder):
        return True
    tag = read_tag(folder)
    return tag is not None and (
        has_saved_files(folder / tag) or any(map(has_saved_files, _list_folders(folder)))
    )


def find_tag_folder(folder: Path) -> Path:
    """Return the folder with the files: the folder in `latest`, or `folder` itself.

    Raises:
        CheckpointError: the folder in `latest` is missing, or lacks such files.
    """
    if has_saved_files(folder):
        return folder
    tag = read_tag(folder)
    if tag is None:
        raise CheckpointError(
            f"{folder} has no file {LATEST} that names the folder of a save; give the path of one, "
            f"such as {folder / 'global_step100'}"
        )
    if has_saved_files(folder / tag):
        return folder / tag
    others = [path.name for path in _list_folders(folder) if has_saved_files(path)]
    what = "is not there" if not (folder / tag).is_dir() else "has none of DeepSpeed's files"
    raise CheckpointError(
        f"{folder / LATEST} names {tag!r}, and {folder / tag} {what}; "
        f"{first_text(others, _MAX_LISTED) or 'no other folder there'} "
        f"{'has' if len(others) < 2 else 'have'} DeepSpeed's files. Give the path of the one you "
        "mean, or fetch the missing one"
    )


def expect_complete(saved: SavedFiles, ranks: int, mp_ranks: int) -> None:
    """Raise CheckpointError if files of some ranks are missing, and list them.

    `ranks` is the number of data-parallel ranks that the files imply.
    """
    missing = []
    if saved.model_partitions:
        keys = product(range(mp_ranks), range(ranks))
        gaps = [key for key in keys if key not in saved.model_partitions]
        missing += [f"zero_pp_rank_{r}_mp_rank_{mp:02d}_model_states.pt" for mp, r in gaps]
    else:
        missing += [
            f"mp_rank_{mp:02d}_model_states.pt" for mp in range(mp_ranks) if mp not in saved.models
        ]
    if saved.partitions:
        prefix = next(iter(saved.partitions.values())).partition("zero_pp_rank_")[0]
        keys = product(range(mp_ranks), range(ranks))
        gaps = [key for key in keys if key not in saved.partitions]
        missing += [f"{prefix}zero_pp_rank_{r}_mp_rank_{mp:02d}_optim_states.pt" for mp, r in gaps]
    if missing:
        raise CheckpointError(
            f"{saved.folder} is incomplete: it is of {ranks} data-parallel "
            f"{'rank' if ranks == 1 else 'ranks'}"
            f"{f' and {mp_ranks} model-parallel ones' if mp_ranks > 1 else ''}, and "
            f"{first_text(missing, _MAX_LISTED)} {'is' if len(missing) == 1 else 'are'} missing. "
            f"Fetch {'it' if len(missing) == 1 else 'them'} from the machine that saved"
        )


def _list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


if TYPE_CHECKING:
    from reshard.checkpoint.formats.deepspeed.training_parts import TrainingParts


def _name_format(folder: Path) -> str:
    """Return the name of the format of a save."""
    try:
        saved = find_files(find_tag_folder(folder))
    except ReshardError:
        # The first of the formats raises the error when it opens the folder.
        return ZERO1.name
    if saved.is_universal:
        return UNIVERSAL.name
    return ZERO3.name if saved.model_partitions else ZERO1.name


class DeepSpeedFormat(CheckpointFormat):
    """ZeRO of a stage, sharded over data-parallel ranks: a folder of a tag, or of several tags.

    Stages 1 and 2 have the same files: whole weights, and optimizer state in flat partitions.
    Stage 3 has float32 weights and optimizer state, each parameter sharded by itself.
    """

    suffixes = SUFFIXES
    training = "reshard"
    capabilities = frozenset({Capability.SHARDS, Capability.WHOLE, Capability.VALUES})
    #: The file that names a save.
    pointer: ClassVar[str] = LATEST

    def __init__(self, name: str, evidence: str, stage: int) -> None:
        self.name, self.evidence, self.stage = name, evidence, stage

    def detect(self, listing: Listing) -> bool:
        """Return whether DeepSpeed saved the path in this format."""
        path = listing.path
        return listing.is_folder and is_save(path) and _name_format(path) == self.name

    def open(self, path: Path) -> Checkpoint:
        """Describe the save that `latest` names, or the save in the folder itself."""
        from reshard.checkpoint.formats.deepspeed.reader import SaveReader

        return SaveReader(path, find_files(find_tag_folder(path)), self.name).read()

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe a checkpoint that reshard wrote, with the digests of its manifest.

        Flat buffers have state of all parameters, whether the source had it or not.
        """
        checkpoint = self.open(folder)
        recorded = {
            name: tensor for name, tensor in checkpoint.tensors.items() if name in manifest.tensors
        }
        checked = check_against_manifest(
            dataclasses.replace(checkpoint, tensors=recorded), manifest
        )
        return dataclasses.replace(checked, tensors={**checkpoint.tensors, **checked.tensors})

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield the file that names the save."""
        tag = write_plan.files[0].stored.name.partition("/")[0]
        yield self.pointer, tag.encode()

    def is_own_value(self, name: str, value: Any) -> bool:
        """Return whether a value is the stage, or a default of files before the first step."""
        from reshard.checkpoint.formats.deepspeed.writer import is_own_value

        return is_own_value(name, value)

    def own_files(self, checkpoint: Checkpoint) -> Collection[str]:
        """Return the files that name saves, and the scripts that DeepSpeed copies next to them."""
        return (LATEST, LATEST_UNIVERSAL, *SCRIPTS)

    def copies(self, checkpoint: Checkpoint) -> Mapping[str, tuple[str, DType]]:
        """Return the weights that the source lacks: of float32, or of the model's type."""
        from reshard.checkpoint.formats.deepspeed.writer import find_copies

        tensors = {
            name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()
        }
        # In stage 3 the weights are made from the float32 weights.
        return find_copies(tensors, checkpoint.values, has_weights=self.stage != 3)

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout] | None:
        """Return flat pieces of parameters and state; other tensors are whole on ranks with files.

        Raises:
            UsageError: a mesh with several axes besides the axis of experts, or a state that ZeRO
                does not keep.
        """
        from reshard.checkpoint.formats.deepspeed.training_parts import find_parts, place_parts
        from reshard.checkpoint.formats.deepspeed.writer import (
            EXPERT_AXIS,
            count_expert_sets,
            find_low,
            plan_partitions,
        )

        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        parts = find_parts(shapes, checkpoint.values)
        if mesh is not None and not _is_own(mesh, parts):
            raise UsageError(
                f"{self.name} is cut over data-parallel ranks alone, not over {mesh.text}; give "
                f"--to dp={ranks}, or of a model with experts --to dp=D,{EXPERT_AXIS}=E, where E "
                "ranks share them out"
            )
        dtypes = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        low = find_low(parts, dtypes, checkpoint.values)
        sets = count_expert_sets(mesh)
        plan = plan_partitions(parts, self.stage, ranks, sets, checkpoint.values, low)
        return place_parts(parts, plan, shapes, is_stage3=self.stage == 3)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan files of weights, and a file of each rank's partitions."""
        from reshard.checkpoint.formats.deepspeed.writer import ZeroPlanner

        return ZeroPlanner(new, self.stage).plan_files(self.name)


def _is_own(mesh: DeviceMesh, parts: TrainingParts) -> bool:
    """Return whether a mesh has data-parallel ranks, and expert-parallel ranks as its last axis."""
    from reshard.checkpoint.formats.deepspeed.writer import EXPERT_AXIS

    axes = [name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    if EXPERT_AXIS not in axes:
        return len(axes) < 2
    return bool(parts.experts) and axes.index(EXPERT_AXIS) == len(axes) - 1 and len(axes) < 3


class UniversalFormat(DeepSpeedFormat):
    """A file for the weights, and for each optimizer state, of each parameter."""

    capabilities = frozenset({Capability.WHOLE, Capability.VALUES})
    pointer = LATEST_UNIVERSAL

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint that `latest_universal` names, or the folder itself."""
        from reshard.checkpoint.formats.deepspeed.universal import UniversalReader

        return UniversalReader(path, find_files(find_tag_folder(path)), self.name).read()

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout] | None:
        """Return layouts of whole tensors, with a copy of tensors that stage 3 reads elsewhere."""
        from reshard.checkpoint.formats.deepspeed.training_parts import find_parts
        from reshard.checkpoint.formats.optimizer_states import STEP, state_name

        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        parts = find_parts(shapes, checkpoint.values)
        parts.expect_no_experts("universal checkpoints")
        twice = {state_name(parts.groups[0].names[0], STEP), *parts.others}
        return {
            name: Layout.replicated(shape, 2) if name in twice else Layout.whole(shape, [0], 2)
            for name, shape in shapes.items()
        }

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan files of every parameter's state."""
        from reshard.checkpoint.formats.deepspeed.universal import UniversalPlanner

        return UniversalPlanner(new).plan_files(self.name)


ZERO1 = DeepSpeedFormat("deepspeed-zero1", "mp_rank_00_model_states.pt, as DeepSpeed saves", 1)
ZERO3 = DeepSpeedFormat(
    "deepspeed-zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt, as DeepSpeed saves", 3
)
UNIVERSAL = UniversalFormat(
    "deepspeed-universal", "zero/optimizer_state.pt, as DeepSpeed's ds_to_universal makes", 0
)
