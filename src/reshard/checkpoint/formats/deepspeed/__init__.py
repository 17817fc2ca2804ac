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
with `bf16_`; old names have no `_` before `optim_states`.

`reader` opens saves: `saved_states` are the contents of files, `flat_buffers` locates parameters in
the buffers of ranks, `tensor_parallel` joins parts, `unpartitioned` reads optimizers of stage 0,
and `stored_tensors` binds tensors to files. `writer` plans new saves, by the `training_parts` of a
source. `universal` does both for universal checkpoints. DeepSpeed is not imported.
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
_MAX_TAG_BYTES = 4096
_MAX_LISTED = 8

_NUMBER = r"(\d{1,7})"
_RANK = rf"zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}"
_PARTITION = re.compile(rf"(?:bf16_|fp16_)?{_RANK}_?optim_states\.pt")
_MODEL_PARTITION = re.compile(rf"{_RANK}_model_states\.pt")
_MODEL = re.compile(rf"mp_rank_{_NUMBER}_model_states\.pt")
_LAYER = re.compile(rf"layer_{_NUMBER}(?:-model_{_NUMBER})?-model_states\.pt")
_EXPERT = re.compile(rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(rf"expp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt")


@dataclass(frozen=True)
class SavedFiles:
    """The files of a save by their contents; names are relative to its folder.

    Attributes:
        folder: the folder of the tag.
        models: weights by `mp_rank`.
        model_partitions: weights of stage 3 by `(mp_rank, rank)`.
        partitions: optimizer state by `(mp_rank, rank)`.
        layers: of a pipeline, by `(layer, tensor-parallel rank)`.
        experts: by `(layer, expert, mp_rank)`; the layer is -1 if names lack it.
        expert_optimizers: by `(rank, mp_rank)`.
        is_universal: whether it has a file of each parameter's state.
    """

    folder: Path
    models: Mapping[int, str] = field(default_factory=dict)
    model_partitions: Mapping[tuple[int, int], str] = field(default_factory=dict)
    partitions: Mapping[tuple[int, int], str] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    is_universal: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is none of them."""
        found = (self.models, self.model_partitions, self.partitions, self.layers, self.experts)
        return not any(found) and not self.is_universal

    @property
    def mp_ranks(self) -> int:
        """The number of stages times that of tensor-parallel ranks."""
        numbers = {*self.models}
        numbers.update(mp for mp, _ in (*self.model_partitions, *self.partitions))
        return max(numbers, default=0) + 1

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks with files."""
        return max((rank for _, rank in (*self.model_partitions, *self.partitions)), default=0) + 1


def find_files(folder: Path) -> SavedFiles:
    """Return the files of a save in the folder of its tag.

    Raises:
        FormatError: two files for the same part.
    """
    models: dict[int, str] = {}
    model_partitions: dict[tuple[int, int], str] = {}
    partitions: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int, int], str] = {}
    expert_optimizers: dict[tuple[int, int], str] = {}

    def add(found: dict, key: object, name: str) -> None:  # type: ignore[type-arg]
        if key in found:
            raise FormatError(
                f"{folder} has {found[key]} and {name}, which are for the same part; one of them "
                "is left over from another save, take it out of the folder"
            )
        found[key] = name

    for name in sorted(path.name for path in folder.iterdir() if path.is_file()):
        if match := _PARTITION.fullmatch(name):
            add(partitions, (int(match[2]), int(match[1])), name)
        elif match := _MODEL_PARTITION.fullmatch(name):
            add(model_partitions, (int(match[2]), int(match[1])), name)
        elif match := _MODEL.fullmatch(name):
            add(models, int(match[1]), name)
        elif match := _LAYER.fullmatch(name):
            add(layers, (int(match[1]), int(match[2] or 0)), name)
        elif match := _EXPERT.fullmatch(name):
            layer = -1 if match[1] is None else int(match[1])
            add(experts, (layer, int(match[2]), int(match[3])), name)
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            add(expert_optimizers, (int(match[1]), int(match[2])), name)
    universal = (folder / UNIVERSAL_FOLDER).is_dir()
    return SavedFiles(
        folder, models, model_partitions, partitions, layers, experts, expert_optimizers, universal
    )


def has_saved_files(folder: Path) -> bool:
    """Return whether a folder has a file whose name only DeepSpeed gives.

    Files of layers do not count: other programs have such names.
    """
    patterns = (_PARTITION, _MODEL_PARTITION, _MODEL, _EXPERT, _EXPERT_OPTIMIZER)
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def read_tag(folder: Path) -> str | None:
    """Return the tag in `latest` of a folder, or else in `latest_universal`, or None."""
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            with (folder / name).open("rb") as file:
                content = file.read(_MAX_TAG_BYTES + 1)
            tag = content.decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        is_one = len(content) <= _MAX_TAG_BYTES and tag.isprintable()
        if tag and is_one and "/" not in tag and tag not in (".", ".."):
            return tag
    return None


def is_save(folder: Path) -> bool:
    """Return whether a folder is that of a tag, or has `latest` and folders of tags."""
    if has_saved_files(folder):
        return True
    tag = read_tag(folder)
    return tag is not None and (
        has_saved_files(folder / tag) or any(map(has_saved_files, _list_folders(folder)))
    )


def find_tag_folder(folder: Path) -> Path:
    """Return the folder with the files: the folder in `latest`, or `folder` itself.

    Raises:
        CheckpointError: the folder in `latest` is missing, or has no such files.
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
        f"{_list_names(others) or 'no other folder there'} "
        f"{'has' if len(others) < 2 else 'have'} DeepSpeed's files. Give the path of the one you "
        "mean, or fetch the missing one"
    )


def expect_complete(saved: SavedFiles, ranks: int, mp_ranks: int) -> None:
    """Raise CheckpointError where files of some ranks are missing, naming them.

    `ranks` is the number of data-parallel ranks that the files speak of.
    """
    missing = []
    if saved.model_partitions:
        wanted = _product(mp_ranks, ranks)
        gaps = [key for key in wanted if key not in saved.model_partitions]
        missing += [f"zero_pp_rank_{r}_mp_rank_{mp:02d}_model_states.pt" for mp, r in gaps]
    else:
        missing += [
            f"mp_rank_{mp:02d}_model_states.pt" for mp in range(mp_ranks) if mp not in saved.models
        ]
    if saved.partitions:
        prefix = next(iter(saved.partitions.values())).partition("zero_pp_rank_")[0]
        gaps = [key for key in _product(mp_ranks, ranks) if key not in saved.partitions]
        missing += [f"{prefix}zero_pp_rank_{r}_mp_rank_{mp:02d}_optim_states.pt" for mp, r in gaps]
    if missing:
        raise CheckpointError(
            f"{saved.folder} is incomplete: it is of {ranks} data-parallel "
            f"{'rank' if ranks == 1 else 'ranks'}"
            f"{f' and {mp_ranks} model-parallel ones' if mp_ranks > 1 else ''}, and "
            f"{_list_names(missing)} {'is' if len(missing) == 1 else 'are'} missing. Fetch "
            f"{'it' if len(missing) == 1 else 'them'} from the machine that saved"
        )


def _product(mp_ranks: int, ranks: int) -> Iterable[tuple[int, int]]:
    return ((mp, rank) for mp in range(mp_ranks) for rank in range(ranks))


def _list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _list_names(names: list[str]) -> str:
    return first_text(names, _MAX_LISTED)


if TYPE_CHECKING:
    from reshard.checkpoint.formats.deepspeed.training_parts import TrainingParts


class DeepSpeedFormat(CheckpointFormat):
    """A folder that DeepSpeed saved: that of a tag, or of `latest` and several tags."""

    suffixes = SUFFIXES
    training = "reshard"
    #: Whether it opens folders whose save is not found.
    is_default: ClassVar[bool] = False

    def detect(self, listing: Listing) -> bool:
        """Return whether DeepSpeed saved it, in this format's way."""
        path = listing.path
        if not listing.is_folder or not is_save(path):
            return False
        # If no save is found, the first of these formats raises the error when it opens the folder.
        try:
            saved = find_files(find_tag_folder(path))
        except ReshardError:
            return self.is_default
        return self.is_own(saved)

    #: Whether it contains the weights of the model in addition to float32 ones.
    has_weights: ClassVar[bool] = True
    #: The file that names a save.
    pointer: ClassVar[str] = LATEST

    @abstractmethod
    def is_own(self, saved: SavedFiles) -> bool:
        """Return whether the files of a save are of this format."""

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe a checkpoint that reshard wrote, with the digests of its manifest.

        Flat buffers have state of all parameters, whether the source had it or not.
        """
        found = self.open(folder)
        known = {name: one for name, one in found.tensors.items() if name in manifest.tensors}
        checked = check_against_manifest(dataclasses.replace(found, tensors=known), manifest)
        return dataclasses.replace(checked, tensors={**found.tensors, **checked.tensors})

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield the file that names the save."""
        tag = write_plan.files[0].stored.name.partition("/")[0]
        yield self.pointer, tag.encode()

    def is_own_value(self, name: str, value: Any) -> bool:
        """Return whether it is the stage, or what files have before a first step."""
        from reshard.checkpoint.formats.deepspeed.writer import is_own_value

        return is_own_value(name, value)

    def own_files(self, checkpoint: Checkpoint) -> Collection[str]:
        """Return the files that name saves, and the scripts that DeepSpeed copies next to them."""
        return (LATEST, LATEST_UNIVERSAL, *SCRIPTS)

    def copies(self, checkpoint: Checkpoint) -> Mapping[str, tuple[str, DType]]:
        """Weights of float32, or of the model's type, where the source has the others alone."""
        from reshard.checkpoint.formats.deepspeed.writer import find_copies

        tensors = {
            name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()
        }
        return find_copies(tensors, checkpoint.values, has_weights=self.has_weights)


class CutByRanks(DeepSpeedFormat):
    """ZeRO of a stage, which cuts over data-parallel ranks by itself."""

    stage: ClassVar[int]
    capabilities = frozenset({Capability.SHARDS, Capability.WHOLE, Capability.VALUES})

    def open(self, path: Path) -> Checkpoint:
        """Describe the save that `latest` names, or that of the folder."""
        from reshard.checkpoint.formats.deepspeed.reader import SaveReader

        return SaveReader(path, find_files(find_tag_folder(path)), self.name).read()

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout] | None:
        """Flat pieces of parameters and their state; what else there is, where its files are.

        Raises:
            UsageError: a mesh of several axes but that of experts, or a state that ZeRO does not
                keep.
        """
        from reshard.checkpoint.formats.deepspeed.training_parts import find_parts, place_parts
        from reshard.checkpoint.formats.deepspeed.writer import (
            EXPERT_AXIS,
            NewValues,
            find_low,
            plan_partitions,
            share_experts,
        )

        shapes = _list_shapes(checkpoint)
        parts = find_parts(shapes, checkpoint.values)
        if mesh is not None and not _is_own(mesh, parts):
            raise UsageError(
                f"{self.name} is cut over data-parallel ranks alone, not over {mesh.text}; give "
                f"--to dp={ranks}, or of a model with experts --to dp=D,{EXPERT_AXIS}=E, where E "
                "ranks share them out"
            )
        dtypes = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        low = find_low(parts, dtypes, checkpoint.values)
        values = NewValues(checkpoint.values, checkpoint.paths, low)
        shared = share_experts(ranks, mesh, values)
        plan = plan_partitions(parts, self.stage, shared, values, low)
        return place_parts(parts, plan, shapes, is_stage3=self.stage == 3)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Files of weights, and a file of each rank's partitions."""
        from reshard.checkpoint.formats.deepspeed.writer import ZeroArranger

        return ZeroArranger(new, self.stage).arrange(self.name)


def _is_own(mesh: DeviceMesh, parts: TrainingParts) -> bool:
    """Return whether a mesh has data-parallel ranks, and expert-parallel ranks as its last axis."""
    from reshard.checkpoint.formats.deepspeed.writer import EXPERT_AXIS

    axes = [name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    if EXPERT_AXIS not in axes:
        return len(axes) < 2
    return bool(parts.experts) and axes.index(EXPERT_AXIS) == len(axes) - 1 and len(axes) < 3


def _list_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in checkpoint.tensors.items()}


class DeepSpeedZero1Format(CutByRanks):
    """Whole weights, and optimizer state in flat partitions; stages 1 and 2 have the same files."""

    name = "deepspeed-zero1"
    stage = 1
    evidence = "mp_rank_00_model_states.pt, as DeepSpeed saves"
    is_default = True

    def is_own(self, saved: SavedFiles) -> bool:
        """Return whether weights are not cut over data-parallel ranks."""
        return not saved.is_universal and not saved.model_partitions


ZERO1 = DeepSpeedZero1Format()


class DeepSpeedZero3Format(CutByRanks):
    """Float32 weights and optimizer state, each parameter cut over the ranks by itself."""

    name = "deepspeed-zero3"
    stage = 3
    has_weights = False
    evidence = "zero_pp_rank_0_mp_rank_00_model_states.pt, as DeepSpeed saves"

    def is_own(self, saved: SavedFiles) -> bool:
        """Return whether weights are cut over data-parallel ranks."""
        return not saved.is_universal and bool(saved.model_partitions)


ZERO3 = DeepSpeedZero3Format()


class DeepSpeedUniversalFormat(DeepSpeedFormat):
    """A file for each parameter and each thing that an optimizer keeps of it."""

    name = "deepspeed-universal"
    evidence = "zero/optimizer_state.pt, as DeepSpeed's ds_to_universal makes"

    capabilities = frozenset({Capability.WHOLE, Capability.VALUES})
    pointer = LATEST_UNIVERSAL

    def is_own(self, saved: SavedFiles) -> bool:
        """Return whether there is a folder of parameters."""
        return saved.is_universal

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint that `latest_universal` names, or that of the folder."""
        from reshard.checkpoint.formats.deepspeed.universal import UniversalReader

        return UniversalReader(path, find_files(find_tag_folder(path)), self.name).read()

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout] | None:
        """Return every tensor whole; those that stage 3 looks for elsewhere in two files."""
        from reshard.checkpoint.formats.deepspeed.training_parts import find_parts
        from reshard.checkpoint.formats.torch_files.optimizer_states import STEP, state_name

        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        parts = find_parts(shapes, checkpoint.values)
        parts.expect_no_experts("universal checkpoints")
        twice = {state_name(parts.groups[0].names[0], STEP), *parts.others}
        return {
            name: Layout.replicated(shape, 2) if name in twice else Layout.whole(shape, [0], 2)
            for name, shape in shapes.items()
        }

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Files of every parameter's state."""

        from reshard.checkpoint.formats.deepspeed.universal import UniversalArranger

        return UniversalArranger(new).arrange(self.name)


UNIVERSAL = DeepSpeedUniversalFormat()
