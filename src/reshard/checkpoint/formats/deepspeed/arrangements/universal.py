"""The files of a new universal checkpoint: one for each thing that is kept of each parameter.

DeepSpeed reads the same folder under every stage: what stage 3 looks for elsewhere, such as the
number of steps in `optimizer_state.pt`, is in both places.
"""

from __future__ import annotations

from typing import Any

from reshard.checkpoint.formats.deepspeed.arrangements.new_states import VERSION, stage_member
from reshard.checkpoint.formats.deepspeed.arrangements.zero import Arranger
from reshard.checkpoint.formats.torch_files.building import NewTensor
from reshard.checkpoint.formats.torch_files.optimizer_states import MASTER, STEP, state_name
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan

MASTER_FILE = "fp32"
PARAMETER = "param"
_WEIGHTS = "mp_rank_00_model_states.pt"
# Stage 3 restores these keys, with the hyper-parameters of the first group for all.
_OF_STAGE3 = frozenset({MASTER, "exp_avg", "exp_avg_sq", STEP})


class UniversalArranger(Arranger):
    """Arranges one universal checkpoint."""

    def __init__(self, new: NewCheckpoint) -> None:
        super().__init__(new)
        self.parts.expect_no_experts("universal checkpoints")
        self.tag = f"{self.tag}_universal"

    def arrange(self, format_name: str) -> WritePlan:
        """The files of weights, of each parameter, and of the optimizer."""
        self._write_weights()
        for name, keys in self.parts.states.items():
            for key in keys:
                self._write_state(name, key)
            for key, value in self.plain_states.get(name, {}).items():
                self.files.write(self._state_file(name, key), value, 0)
        self._write_optimizer()
        values = self.values.held(self.new.values, with_clipping=True)
        notes = [*self.parts.notes, *self._notes(), *self.values.describe_missing()]
        return self.files.arrange(format_name, self.new.mesh, values, notes)

    def _notes(self) -> list[str]:
        notes = []
        if len(self.parts.groups) > 1:
            notes.append(
                f"there are {len(self.parts.groups)} groups of parameters: stage 3 of DeepSpeed "
                "gives all of them the hyper-parameters of the first one when it loads this"
            )
        counted = {key for kept in self.plain_states.values() for key in kept}
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
        module = {name: self._tensor(name) for name in names if name in self.new.tensors}
        for name, tensor in module.items():
            self.files.put(name, 0, file, tensor)
        others, paths = self._put_others(file, 0)
        is_listed = parts.are_frozen_listed
        fragments = {name: module[name] for name in parts.frozen} if is_listed else None
        groups = [group.names for group in parts.groups]
        state = self.values.model_state(parts, 1, 1, groups, module, fragments, others, paths)
        self.files.write(file, state, 0)
        # Stage 3 looks for its own file of rank 0, for a user's state and what is no tensor.
        file = f"{self.tag}/zero_pp_rank_0_{_WEIGHTS}"
        empty = {name: NewTensor.of(self.low, (0,)) for name in parts.shapes}
        others, paths = self._put_others(file, 1)
        state = self.values.model_state(parts, 3, 1, groups, empty, None, others, paths)
        self.files.write(file, state, 0)

    def _state_file(self, name: str, key: str) -> str:
        return f"{self.tag}/zero/{name}/{MASTER_FILE if key == MASTER else key}.pt"

    def _write_state(self, name: str, key: str) -> None:
        own = state_name(name, key)
        file, tensor = self._state_file(name, key), self._tensor(own)
        self.files.put(own, 0, file, tensor)
        self.files.write(file, tensor if key == STEP else {PARAMETER: tensor, "cat_dim": 0}, 0)

    def _write_optimizer(self) -> None:
        file = f"{self.tag}/zero/optimizer_state.pt"
        groups = [
            {**group.hyper, "params": [number]} for number, group in enumerate(self.parts.groups)
        ]
        first = self.parts.groups[0].names[0]
        state: dict[str, Any] = dict(self.plain_states.get(first, {}))
        own = state_name(first, STEP)
        if own in self.new.tensors:
            state[STEP] = self._tensor(own)
            self.files.put(own, 1, file, state[STEP])
        value = {
            **self.values.optimizer_state(with_clipping=True),
            "zero_stage": stage_member(1),
            "ds_version": VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
        }
        self.files.write(file, value, 0)
