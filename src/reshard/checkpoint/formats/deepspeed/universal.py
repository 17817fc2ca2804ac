"""DeepSpeed's universal checkpoints, read and written: a file for each state of each parameter.

::

    zero/lm_head.weight/fp32.pt              float32 weights, whole
    zero/lm_head.weight/exp_avg.pt           state of the optimizer
    zero/lm_head.weight/step.pt              a number, or a tensor without dimensions
    zero/optimizer_state.pt                  hyper-parameters, the loss scaler
    mp_rank_00_model_states.pt               values; 16-bit weights of stages 1 and 2
    zero_pp_rank_0_mp_rank_00_model_states.pt    the same for stage 3

A file has the tensor, or a dict with the tensor and its sharded dimension (`cat_dim`). Tensors of
stage 3 are flat; their shapes are in the files of weights.

DeepSpeed reads the same folder under every stage: values that stage 3 expects elsewhere, such as
the number of steps in `optimizer_state.pt`, are written to both places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.deepspeed import (
    UNIVERSAL_FOLDER,
    UNIVERSAL_STATE,
    SavedFiles,
    saved_states,
)
from reshard.checkpoint.formats.deepspeed.stored_tensors import Stored, TensorCollector
from reshard.checkpoint.formats.deepspeed.writer import VERSION, SavePlanner, stage_member
from reshard.checkpoint.formats.optimizer_states import GROUPS, MASTER, STEP, state_name
from reshard.checkpoint.formats.torch_files.building import NewTensor
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.reading import read_torch_file
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain, is_tensor_call
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.checkpoint.storage.remote_paths import map_paths, walk_folder
from reshard.errors import CheckpointError, FormatError
from reshard.geometry.regions import Region
from reshard.mesh import DeviceMesh

_SUFFIX = ".pt"


class UniversalReader:
    """A reader of a universal checkpoint; names of files are relative to `folder`."""

    def __init__(self, folder: Path, saved: SavedFiles, format_name: str) -> None:
        self.folder, self.saved, self.format_name = folder, saved, format_name
        self.prefix = f"{saved.folder.name}/" if saved.folder != folder else ""
        self.collector = TensorCollector(saved.folder, 1, self.prefix)
        self.values = PlainValues()
        self.unreadable: dict[str, str] = {}
        self.files: list[str] = []

    def read(self) -> Checkpoint:
        """Describe the checkpoint.

        Raises:
            CheckpointError: files that are missing.
            FormatError: files that are damaged.
        """
        saved = self.saved
        names = [*saved.models.values(), *saved.model_partitions.values()]
        if not names:
            raise CheckpointError(
                f"{saved.folder} has no file mp_rank_00_model_states.pt, which a universal "
                "checkpoint has for its values; fetch it"
            )
        models = [saved_states.read_model_state(saved.folder, name) for name in names]
        self.files += names
        shapes = {name: shape for model in models for name, shape in model.shapes.items()}
        for model in models:
            for name, archived in (model.module or {}).items():
                is_partitioned = name in shapes and not math.prod(archived.shape)
                if not is_partitioned:
                    self.collector.add_first(name, model.file, archived)
        listed = [*self._list_parameters()]
        trained = {name for model in models for group in model.groups for name in group}
        missing = sorted(trained.difference(listed))
        if missing:
            raise CheckpointError(
                f"{saved.folder / UNIVERSAL_FOLDER / missing[0]} is missing, and {len(missing)} of "
                f"{len(trained)} folders of parameters in all; fetch them, or run ds_to_universal "
                "again"
            )
        self._expect_all_states(sorted(trained))
        self._add_parameters(listed, shapes)
        saved_states.add_model_values(self.values, models[0], self.collector.add_first)
        self._add_optimizer(models[0])
        size = {name: (saved.folder / name).stat().st_size for name in self.files}
        return Checkpoint(
            self.folder,
            self.format_name,
            self.collector.tensors,
            tuple(StoredFile(self.prefix + name, size[name], 0) for name in self.files),
            DeviceMesh.of(dp=1),
            paths=self.values.paths,
            checksums=self.collector.checksums,
            values=self.values.values,
            unread=tuple(self.values.unread),
            unreadable=self.unreadable,
        )

    def _list_parameters(self) -> Iterator[str]:
        """Yield the folders of parameters, at any depth; a name may have slashes."""
        top = self.saved.folder / UNIVERSAL_FOLDER
        for parent, _, files in walk_folder(top):
            if parent != top and any(name.endswith(_SUFFIX) for name in files):
                yield parent.relative_to(top).as_posix()

    def _expect_all_states(self, trained: list[str]) -> None:
        """Raise CheckpointError for a parameter that has some of the files of another, not all."""
        top = self.saved.folder / UNIVERSAL_FOLDER
        # A folder that was copied in part lacks files that other parameters have.
        kinds: dict[frozenset[str], str] = {}
        for name in trained:
            own = frozenset(_list_states(top / name))
            kinds.setdefault(own, name)
        for own, name in kinds.items():
            for more, other in kinds.items():
                if own < more:
                    raise CheckpointError(
                        f"{top / name / min(more - own)} is missing, which {other!r} has; fetch "
                        "it, or run ds_to_universal again"
                    )

    def _add_parameters(self, names: list[str], shapes: Mapping[str, saved_states.Shape]) -> None:
        top = self.saved.folder / UNIVERSAL_FOLDER
        files: list[tuple[str, str]] = []
        for name in names:
            entries = [
                state for state in _list_states(top / name) if (top / name / state).is_file()
            ]
            self.files += [f"{UNIVERSAL_FOLDER}/{name}/{entry}" for entry in entries]
            # Tensors without an optimizer, such as buffers, are there as float32 too; their values
            # are in the file of weights.
            if not shapes or name in shapes or name not in self.collector.tensors:
                files += [(name, entry) for entry in entries]
        values = map_paths(read_torch_file, [top / name / entry for name, entry in files])
        for (name, entry), value in zip(files, values, strict=True):
            self._add_value(name, entry, value, shapes.get(name))

    def _add_value(
        self, name: str, entry: str, value: Any, shape: saved_states.Shape | None
    ) -> None:
        """Add the contents of a file in a parameter's folder."""

        key = entry.removesuffix(_SUFFIX)
        own = state_name(name, MASTER if key == MASTER_FILE else key)
        file = f"{UNIVERSAL_FOLDER}/{name}/{entry}"
        if isinstance(value, dict):
            value = value.get(PARAMETER)
        if isinstance(value, ArchivedTensor):
            self._add_state(own, file, value, shape)
        elif is_tensor_call(value):
            self.unreadable[own] = explain(value)
            if key == MASTER_FILE:
                self.unreadable[name] = f"its 32-bit weight, {explain(value)}"
        elif type(value) in (int, float):
            self.values.add(own, value, ("optimizer", "state", name, key), file)
        else:
            raise FormatError(
                f"{self.saved.folder / file} has {shortened(explain(value))}, expected a "
                f"tensor, or a dict with one as {PARAMETER!r}"
            )

    def _add_state(
        self, name: str, file: str, archived: ArchivedTensor, shape: saved_states.Shape | None
    ) -> None:
        if shape is None or archived.shape == shape or not archived.shape:
            self.collector.add_whole(name, file, archived)
            return
        if archived.shape != (math.prod(shape),) or archived.view.strides != (1,):
            # The vocabulary's padding is cut off, and tensor-parallel parts are joined: the file of
            # the parameter has its shape.
            self.collector.add_whole(name, file, archived)
            return
        region = Region.dense(archived.shape, Stored(file, archived), archived.view.offset)
        self.collector.add_flat(name, shape, [(0, region)])

    def _add_optimizer(self, model: saved_states.ModelState) -> None:
        if not (self.saved.folder / UNIVERSAL_STATE).is_file():
            raise CheckpointError(
                f"{self.saved.folder / UNIVERSAL_STATE} is missing, which has the "
                "hyper-parameters; fetch it"
            )
        part = saved_states.read_file(self.saved.folder, UNIVERSAL_STATE)
        self.files.append(UNIVERSAL_STATE)
        rest = {
            key: value for key, value in part.value.items() if key not in saved_states.CUT_PARTS
        }
        add_tensor = self.collector.add_first
        self.values.add_state(
            saved_states.plain_scalers(rest), ("optimizer",), UNIVERSAL_STATE, add_tensor
        )
        groups = part.get("param_groups")
        if groups is None and isinstance(part.get("optimizer_state_dict"), dict):
            groups = part.within("optimizer_state_dict").get("param_groups")
        if groups is not None:
            groups = groups if isinstance(groups, list | tuple) else ()
            if not all(isinstance(group, dict) for group in groups):
                raise part.wrong("param_groups", groups, "a list of dicts")
            named = saved_states.name_members(groups, model.groups)
            self.values.add(GROUPS, named, label=UNIVERSAL_STATE)
        self._add_steps(part, model)

    def _add_steps(self, part: saved_states.SavedPart, model: saved_states.ModelState) -> None:
        """Add steps for parameters that lack them: in stage 3, only this file has steps."""
        base = part.get("optimizer_state_dict")
        states = base.get("state") if isinstance(base, dict) else None
        for number, group in enumerate(model.groups):
            state = states.get(number) if isinstance(states, dict) else None
            step = state.get(STEP) if isinstance(state, dict) else None
            for name in group:
                own = state_name(name, STEP)
                if isinstance(step, ArchivedTensor) and own not in self.values.values:
                    self.collector.add_first(own, UNIVERSAL_STATE, step)
                elif type(step) in (int, float) and own not in self.collector.tensors:
                    path = ("optimizer", "state", name, STEP)
                    self.values.add(own, step, path, UNIVERSAL_STATE)


def _list_states(folder: Path) -> list[str]:
    """Return the names of the files of a parameter: its weight and its states."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(_SUFFIX))
    return [name for name in names if not is_attribute_file(name)]


MASTER_FILE = "fp32"
PARAMETER = "param"
_WEIGHTS = "mp_rank_00_model_states.pt"
# Stage 3 restores these keys, with the hyper-parameters of the first group for all.
_OF_STAGE3 = frozenset({MASTER, "exp_avg", "exp_avg_sq", STEP})


class UniversalPlanner(SavePlanner):
    """A planner of a universal checkpoint."""

    def __init__(self, new: NewCheckpoint) -> None:
        super().__init__(new)
        self.parts.expect_no_experts("universal checkpoints")
        self.tag = f"{self.tag}_universal"

    def plan_files(self, format_name: str) -> WritePlan:
        """Return the files of weights, of each parameter, and of the optimizer."""
        self._write_weights()
        for name, keys in self.parts.states.items():
            for key in keys:
                tensor = self.files.put_whole(state_name(name, key), 0)
                value = tensor if key == STEP else {PARAMETER: tensor, "cat_dim": 0}
                self.files.write(self._state_file(name, key), value, 0)
            for key, value in self.plain_states.get(name, {}).items():
                self.files.write(self._state_file(name, key), value, 0)
        self._write_optimizer()
        notes = [*self.parts.notes, *self._notes(), *self.describe_missing()]
        return self._plan(format_name, notes, with_clipping=True)

    def _notes(self) -> list[str]:
        notes = []
        if len(self.parts.groups) > 1:
            notes.append(
                f"there are {len(self.parts.groups)} groups of parameters: stage 3 of DeepSpeed "
                "gives all of them the hyper-parameters of the first one when it loads this"
            )
        counted = {key for state in self.plain_states.values() for key in state}
        if STEP not in {*self.parts.keys, *counted}:
            notes.append("stage 3 of DeepSpeed does not load this without a number of steps")
        others = [key for key in self.parts.keys if key not in _OF_STAGE3]
        if others:
            notes.append(f"stage 3 of DeepSpeed does not load {', '.join(others)} from this")
        if self.parts.buffers or self.parts.frozen:
            notes.append(
                "DeepSpeed does not load buffers and frozen parameters from a universal "
                f"checkpoint; they are in {_WEIGHTS}"
            )
        return notes

    def _write_weights(self) -> None:
        parts, file = self.parts, f"{self.tag}/{_WEIGHTS}"
        names = (*parts.buffers, *parts.weights, *parts.shared, *parts.frozen)
        module = {name: self.files.put_whole(name, 0) for name in names if name in self.new.tensors}
        others, paths = self._put_others(0)
        is_listed = parts.are_frozen_listed
        fragments = {name: module[name] for name in parts.frozen} if is_listed else None
        groups = [group.names for group in parts.groups]
        state = self.model_state(1, 1, groups, module, fragments, others, paths)
        self.files.write(file, state, 0)
        # Stage 3 expects its own file of rank 0, for a user's state and values.
        file = f"{self.tag}/zero_pp_rank_0_{_WEIGHTS}"
        empty = {name: NewTensor.of(self.low, (0,)) for name in parts.shapes}
        others, paths = self._put_others(1)
        state = self.model_state(3, 1, groups, empty, None, others, paths)
        self.files.write(file, state, 0)

    def _state_file(self, name: str, key: str) -> str:
        return f"{self.tag}/zero/{name}/{MASTER_FILE if key == MASTER else key}.pt"

    def _write_optimizer(self) -> None:
        file = f"{self.tag}/zero/optimizer_state.pt"
        groups = [
            {**group.hyper, "params": [number]} for number, group in enumerate(self.parts.groups)
        ]
        first = self.parts.groups[0].names[0]
        state: dict[str, Any] = dict(self.plain_states.get(first, {}))
        own = state_name(first, STEP)
        if own in self.new.tensors:
            state[STEP] = self.files.put_whole(own, 1)
        value = {
            **self.optimizer_state(with_clipping=True),
            "zero_stage": stage_member(1),
            "ds_version": VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
        }
        self.files.write(file, value, 0)
