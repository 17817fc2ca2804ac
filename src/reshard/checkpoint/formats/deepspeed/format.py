"""What DeepSpeed's formats have in common: how a folder is known, and what is beside its files."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.deepspeed.files import (
    LATEST,
    LATEST_UNIVERSAL,
    SCRIPTS,
    SUFFIXES,
    SavedFiles,
    find_files,
    find_tag_folder,
    is_save,
)
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    Listing,
    check_against_manifest,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.dtypes import DType
from reshard.errors import ReshardError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh

if TYPE_CHECKING:
    from reshard.checkpoint.formats.deepspeed.arrangements.training_parts import TrainingParts


class DeepSpeedFormat(CheckpointFormat):
    """A folder that DeepSpeed saved: that of a tag, or one with `latest` beside tags."""

    suffixes = SUFFIXES
    training = "reshard"
    #: Whether it is asked to open folders whose save is not found.
    is_default: ClassVar[bool] = False

    def detect(self, listing: Listing) -> bool:
        """Whether DeepSpeed saved it, in this format's way."""
        path = listing.path
        if not listing.is_folder or not is_save(path):
            return False
        # Where no save can be found the first of these formats says so when it opens the folder.
        try:
            saved = find_files(find_tag_folder(path))
        except ReshardError:
            return self.is_default
        return self.is_own(saved)

    #: Whether weights that the model computes with are in it, beside float32 ones.
    has_weights: ClassVar[bool] = True
    #: The file that names a save.
    pointer: ClassVar[str] = LATEST

    @abstractmethod
    def is_own(self, saved: SavedFiles) -> bool:
        """Whether the files of a save are of this format."""

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe a checkpoint that reshard wrote, with the digests of its manifest.

        Flat buffers have state of all parameters, whether the source had it or not.
        """
        found = self.open(folder)
        known = {name: one for name, one in found.tensors.items() if name in manifest.tensors}
        checked = check_against_manifest(dataclasses.replace(found, tensors=known), manifest)
        return dataclasses.replace(checked, tensors={**found.tensors, **checked.tensors})

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """The file that names the save."""
        tag = write_plan.files[0].stored.name.partition("/")[0]
        yield self.pointer, tag.encode()

    def is_own_value(self, name: str, value: Any) -> bool:
        """Whether it is the stage, or what files have before a first step."""
        from reshard.checkpoint.formats.deepspeed.arrangements.new_states import is_own_value

        return is_own_value(name, value)

    def own_files(self, checkpoint: Checkpoint) -> Collection[str]:
        """Pointers to saves, and the scripts that DeepSpeed copies beside them."""
        return (LATEST, LATEST_UNIVERSAL, *SCRIPTS)

    def copies(self, checkpoint: Checkpoint) -> Mapping[str, tuple[str, DType]]:
        """Weights of float32, or of the model's type, where the source has the others alone."""
        from reshard.checkpoint.formats.deepspeed.arrangements.zero import find_copies

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
        from reshard.checkpoint.formats.deepspeed.arrangements.flat_plans import place_parts
        from reshard.checkpoint.formats.deepspeed.arrangements.new_states import NewValues
        from reshard.checkpoint.formats.deepspeed.arrangements.training_parts import find_parts
        from reshard.checkpoint.formats.deepspeed.arrangements.zero import (
            EXPERT_AXIS,
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
        from reshard.checkpoint.formats.deepspeed.arrangements.zero import ZeroArranger

        return ZeroArranger(new, self.stage).arrange(self.name)


def _is_own(mesh: DeviceMesh, parts: TrainingParts) -> bool:
    """Whether a mesh is of data-parallel ranks, and of those that share out experts behind."""
    from reshard.checkpoint.formats.deepspeed.arrangements.zero import EXPERT_AXIS

    axes = [name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    if EXPERT_AXIS not in axes:
        return len(axes) < 2
    return bool(parts.experts) and axes.index(EXPERT_AXIS) == len(axes) - 1 and len(axes) < 3


def _list_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
