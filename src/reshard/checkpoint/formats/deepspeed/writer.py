"""Planning a new checkpoint of ZeRO: its files, and their values in DeepSpeed's classes.

1. Parameters are placed in flat buffers, in the order of their groups (`training_parts`).
2. Every rank has a file with its partitions. Weights and values are in a file of rank 0 (stages 1
   and 2), or values in a file of every rank (stage 3).
3. Values that a source lacks, such as the version, get DeepSpeed's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.checkpoint.formats.deepspeed import flat_buffers
from reshard.checkpoint.formats.deepspeed.saved_states import SCALER_CLASS
from reshard.checkpoint.formats.deepspeed.training_parts import (
    CONFIG,
    MAX_SHOWN,
    FlatPlan,
    TrainingParts,
    find_parts,
    is_flat,
    plan_flat,
    plan_own,
)
from reshard.checkpoint.formats.optimizer_states import (
    GROUPS,
    MASTER,
    find_keys,
    split_state_name,
    state_name,
)
from reshard.checkpoint.formats.torch_files.building import (
    NewTensor,
    TorchFilesBuilder,
    ordered,
    size_of,
)
from reshard.checkpoint.formats.torch_files.nested_states import (
    StatePath,
    settle_paths,
    unflatten_state,
)
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, UsageError
from reshard.mesh import DeviceMesh
from reshard.text import count_text, first_text

#: The axis of a mesh along which ranks share out experts.
EXPERT_AXIS = "ep"
_FLOAT32 = as_dtype("float32")
Shape = tuple[int, ...]


def find_low(parts: TrainingParts, dtypes: Mapping[str, DType], values: Mapping[str, Any]) -> DType:
    """Return the dtype in which the model computes: of its weights, or from the configuration.

    If the source has only float32 weights, the configuration may specify another type.
    """
    low = dtypes[parts.weights[0]] if parts.weights else _FLOAT32
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if low is _FLOAT32 and values.get(f"{CONFIG}.{key}.enabled") is True:
            return as_dtype(name)
    return low


def find_copies(
    tensors: Mapping[str, tuple[Shape, DType]], values: Mapping[str, Any], *, has_weights: bool
) -> dict[str, tuple[str, DType]]:
    """Return the weights that a source lacks, each with the tensor to copy and its dtype.

    Float32 weights are exact copies of the model's; the model's weights are copies of float32
    weights, for a target that `has_weights`.
    """
    copies: dict[str, tuple[str, DType]] = {}
    for parameter, keys in find_keys(tensors).items():
        if MASTER not in keys and parameter in tensors:
            copies[state_name(parameter, MASTER)] = parameter, _FLOAT32
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    shapes |= {name: shapes[source] for name, (source, _) in copies.items()}
    parts = find_parts(shapes, values)
    if has_weights:
        low = find_low(parts, {name: dtype for name, (_, dtype) in tensors.items()}, values)
        owner_of = {name: name for name in parts.shapes} | dict(parts.shared)
        for name, owner in owner_of.items():
            if name not in tensors or (tensors[name][1] is _FLOAT32 and low is not _FLOAT32):
                copies[name] = state_name(owner, MASTER), low
    return copies


class SavePlanner:
    """A new checkpoint while it is planned: its parts, its nested values, and its files so far."""

    def __init__(self, new: NewCheckpoint) -> None:
        self.new = new
        shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in new.tensors.items()}
        self.parts = find_parts(shapes, new.values)
        self.parts.expect_state(new.allow)
        self.low = find_low(self.parts, dtypes, new.values)
        own = {name: value for name, value in new.values.items() if name not in _OWN_VALUES}
        self._optimizer = {
            name.removeprefix(_OPTIMIZER): value
            for name, value in own.items()
            if name.startswith(_OPTIMIZER)
        }
        self._rest = {n: v for n, v in own.items() if not n.startswith(_OPTIMIZER)}
        self._paths = {name: path for name, path in new.paths.items() if name in self._rest}
        self.plain_states = find_plain_states(new.values)
        self.parts.expect_equal_states(self.plain_states)
        steps = self._rest.get("global_steps")
        self.tag = f"global_step{steps if type(steps) is int and steps >= 0 else 0}"
        self.files = TorchFilesBuilder(new.tensors)

    def _plan(self, format_name: str, notes: Iterable[str], *, with_clipping: bool) -> WritePlan:
        """Return the plan of the files that were written."""
        return WritePlan(
            format_name,
            self.new.mesh,
            self.files.bind(),
            tuple(self.files.files),
            tuple(notes),
            values=self._held(with_clipping=with_clipping),
        )

    def _put_others(self, slot: int) -> tuple[dict[str, NewTensor], dict[str, Any]]:
        """Put the tensors of a user's state into a file; return them and their paths."""
        others = {name: self.files.put_whole(name, slot) for name in self.parts.others}
        return others, {name: self.new.paths.get(name, (name,)) for name in others}

    def describe_missing(self) -> list[str]:
        """Describe the counters and the scheduler of DeepSpeed that the source does not have."""
        notes = []
        if "global_steps" not in self._rest:
            notes.append(
                "the source has no global_steps: DeepSpeed counts from 0, for names of saves and "
                "its logs; optimizers have steps of their own"
            )
        if all(name.partition(".")[0] != "lr_scheduler" for name in self._rest):
            notes.append(
                "the source has no state of a learning rate scheduler of DeepSpeed: an engine that "
                "has a scheduler loads this with load_lr_scheduler_states=False"
            )
        return notes

    def model_state(
        self,
        stage: int,
        ranks: int,
        groups: Iterable[Iterable[str]],
        module: Mapping[str, NewTensor],
        fragments: Mapping[str, NewTensor] | None,
        others: Mapping[str, NewTensor],
        paths: Mapping[str, StatePath],
    ) -> dict[str, Any]:
        """Return the value of a file of weights; `groups` are in the order of flat buffers."""
        parts, leaves = self.parts, {**self._rest, **others}
        prefix = f"{CONFIG}."
        # A name without a path is split into a path if DeepSpeed expects a dict.
        known_paths: dict[str, StatePath] = {
            name: tuple(name.split("."))
            for name in leaves
            if name.startswith((prefix, "lr_scheduler."))
        }
        known_paths |= {
            name: path for name, path in {**self._paths, **paths}.items() if name in leaves
        }
        nested = unflatten_state(leaves, settle_paths(leaves, known_paths))
        experts = flat_buffers.list_layers(parts.experts)
        config = nested.get(CONFIG)
        config = dict(config) if isinstance(config, dict) else {}
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
        return {
            "module": ordered(module),
            "buffer_names": [*parts.buffers],
            "optimizer": None,
            "param_shapes": [
                ordered({name: size_of(parts.shapes[name]) for name in names}) for names in groups
            ],
            "frozen_param_shapes": (
                ordered({name: size_of(shape) for name, shape in parts.frozen.items()})
                if fragments is not None
                else None
            ),
            "shared_params": dict(parts.shared),
            "frozen_param_fragments": ordered(fragments) if fragments is not None else None,
            **_FIRST,
            "ds_version": VERSION,
            **({"num_experts": [*map(len, experts.values())]} if experts else {}),
            **nested,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            CONFIG: config,
        }

    def _held(self, *, with_clipping: bool) -> dict[str, Any]:
        """Return the values of a checkpoint that its new files can store."""
        has_scaler = any(name.startswith(f"{_SCALER}.") for name in self._optimizer)
        stored = {"dynamic_loss_scale", "overflow", *(["clip_grad"] if with_clipping else [])}
        if not has_scaler and _CURRENT_SCALE in self._optimizer:
            stored |= {*_NEW_SCALER}
        unheld = {
            f"{_OPTIMIZER}{name}"
            for name in self._optimizer
            if name not in stored and not name.startswith((f"{_SCALER}.", "state."))
        }
        return {name: value for name, value in self.new.values.items() if name not in unheld}

    def optimizer_state(self, *, with_clipping: bool) -> dict[str, Any]:
        """Return the values of an optimizer: its loss scaler, and other values."""
        scaler = {
            name.removeprefix(f"{_SCALER}."): value
            for name, value in self._optimizer.items()
            if name.startswith(f"{_SCALER}.")
        }
        if not scaler and _CURRENT_SCALE in self._optimizer:
            # Optimizers without partitions have these in their state.
            own = {key: self._optimizer[key] for key in _NEW_SCALER if key in self._optimizer}
            is_dynamic = bool(self._optimizer.get("dynamic_loss_scale", True))
            first = _NEW_SCALER if is_dynamic else {}
            scaler = {**first, **own, "dynamic": is_dynamic}
        is_half = self.low.name == "float16"
        if not scaler:
            scaler = dict(_NEW_SCALER) if is_half else {"cur_scale": 1.0, "dynamic": False}
        kind = scaler.pop(SCALER_CLASS, None)
        if kind not in ("LossScaler", "DynamicLossScaler"):
            kind = "DynamicLossScaler" if scaler.get("dynamic") else "LossScaler"
        if isinstance(scaler.get("dtype"), str):
            scaler["dtype"] = _as_type(scaler["dtype"], self.low)
        state = {
            _SCALER: Call(Global(_SCALERS, kind), (), scaler, is_new=True),
            "dynamic_loss_scale": self._optimizer.get("dynamic_loss_scale", kind != "LossScaler"),
            "overflow": bool(self._optimizer.get("overflow", False)),
        }
        if with_clipping and "clip_grad" in self._optimizer:
            state["clip_grad"] = self._optimizer["clip_grad"]
        return state


class ZeroPlanner(SavePlanner):
    """A planner of a checkpoint of ZeRO."""

    def __init__(self, new: NewCheckpoint, stage: int) -> None:
        super().__init__(new)
        self.stage = stage
        if stage == 3:
            self.parts.expect_all_frozen()
        self.ranks = max(tensor.layout.slots for tensor in new.tensors.values())
        self.expert_sets = count_expert_sets(new.mesh)
        self.plan = plan_partitions(
            self.parts, stage, self.ranks, self.expert_sets, new.values, self.low
        )
        self.prefix = "bf16_" if self.low.name == "bfloat16" else ""

    def plan_files(self, format_name: str) -> WritePlan:
        """Return the files of weights and of partitions."""
        for rank in range(self.ranks if self.stage == 3 else 1):
            self._write_weights(rank)
        for rank in range(self.ranks):
            self._write_partition(rank)
        # Partitions contain no names.
        order = (
            "partitions are read by position: the optimizer that goes on must have its parameters "
            f"in these groups and this order, {self.parts.groups[0].names[0]!r} first "
            "(deepspeed-universal is read by names)"
        )
        notes = [*self.parts.notes, order, *self.describe_missing()]
        if self.parts.missing_frozen:
            notes.append(
                f"{count_text(len(self.parts.missing_frozen), 'frozen parameter')} "
                f"({first_text(self.parts.missing_frozen, MAX_SHOWN)}) are not in the source: "
                "DeepSpeed loads this with load_module_strict=False, and keeps the model's own"
            )
        if self.parts.experts:
            notes.append(
                f"experts are divided over {self.expert_sets} of {self.ranks} ranks (`ep` in "
                "--to): the resumed run must have that as its ep_size"
            )
        unwritten = [name for name in self.parts.weights if self.stage == 3]
        if unwritten:
            notes.append(
                f"not in the target: the {self.low} weights of {len(unwritten)} parameters, which "
                "DeepSpeed makes of the float32 ones under stage 3"
            )
        return self._plan(format_name, notes, with_clipping=self.stage != 3)

    # Files of weights.

    def _write_weights(self, rank: int) -> None:
        parts, is_stage3 = self.parts, self.stage == 3
        experts = {*parts.experts}
        name = "mp_rank_00_model_states.pt"
        if is_stage3:
            name = f"zero_pp_rank_{rank}_{name}"
        file = f"{self.tag}/{name}"
        module: dict[str, NewTensor] = {}
        fragments: dict[str, NewTensor] = {}
        for own in (*parts.buffers, *parts.shapes, *parts.shared, *parts.frozen):
            if is_stage3 and own not in parts.buffers:
                module[own] = NewTensor.of(self.low, (0,))
                continue
            if own in experts:
                continue
            module[own] = self.files.put_whole(own, rank)
            if own in parts.frozen:
                fragments[own] = module[own]
        for own, shape in parts.frozen.items() if is_stage3 else ():
            size = flat_buffers.part_size(math.prod(shape), self.ranks)
            fragments[own] = NewTensor.of(self.new.tensors[own].dtype, (size,))
            for piece in flat_buffers.own_pieces(math.prod(shape), self.ranks, 0):
                if piece.container == rank:
                    self.files.put(own, rank, fragments[own])
        others, paths = self._put_others(rank)
        # Stage 3 has the frozen parameters nowhere else.
        is_listed = parts.are_frozen_listed or (is_stage3 and bool(parts.frozen))
        frozen = fragments if is_listed else None
        names = [self.plan.names(buffer, rank) for buffer in range(len(self.plan.copies))]
        state = self.model_state(self.stage, self.ranks, names, module, frozen, others, paths)
        self.files.write(file, state, rank)
        if experts:
            self._write_experts()

    def _write_experts(self) -> None:
        """Write a file for the weights of each expert of each layer."""
        layers = flat_buffers.list_layers(self.parts.experts)
        for (layer, experts), expert in (
            (pair, expert) for pair in enumerate(layers.values()) for expert in sorted(pair[1])
        ):
            file = f"{self.tag}/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            tensors = {name: self.files.put_whole(name, 0) for name in experts[expert]}
            self.files.write(file, tensors, 0)

    # Partitions.

    def _write_partition(self, rank: int) -> None:
        name = f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = f"{self.tag}/{name}"
        masters = []
        states: dict[int, dict[str, Any]] = {}
        for buffer in range(len(self.plan.copies)):
            masters.append(self._put_flat(rank, buffer, MASTER))
            states[buffer] = self._states(rank, buffer)
        groups = self._hyper()
        base = {"state": states, "param_groups": groups}
        values = self.optimizer_state(with_clipping=self.stage != 3)
        if self.stage == 3:
            state = {
                "zero_stage": stage_member(3),
                **values,
                "partition_count": self.ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        else:
            buffers = range(len(self.plan.copies))
            state = {
                **values,
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "zero_stage": stage_member(self.stage),
                "group_paddings": [
                    self.plan.sizes[b] - self.plan.used(b, rank, self.parts.shapes) for b in buffers
                ],
                "param_alignment_paddings": [[*own] for own in self.plan.paddings],
                "partition_count": [len(self.plan.copy(b, rank).ranks) for b in buffers],
                "ds_version": VERSION,
                "param_slice_mappings": [self._fragments(rank, b) for b in buffers],
            }
        self.files.write(
            file,
            {"optimizer_state_dict": state, CONFIG: {}, "ds_version": VERSION},
            rank,
        )

    def _put_flat(self, rank: int, buffer: int, key: str) -> NewTensor:
        """Return a rank's flat buffer of the state under a key."""
        size = self.plan.sizes[buffer]
        # Stages 1 and 2 save float32 weights without the padding, and other state with it.
        if key == MASTER and self.stage != 3:
            size = self.plan.used(buffer, rank, self.parts.shapes)
        names = [n for n in self.plan.names(buffer, rank) if key in self.parts.states[n]]
        kinds = {self.new.tensors[state_name(name, key)].dtype for name in names}
        if len(kinds) != 1:
            raise UsageError(
                f"{key} of {names[0]!r} and parameters like it is of the types "
                f"{', '.join(sorted(str(kind) for kind in kinds))}; a flat buffer has one"
            )
        flat = NewTensor.of(kinds.pop(), (size,))
        pieces = self.plan.by_rank[rank]
        for name in names:
            if name in pieces:
                self.files.put(state_name(name, key), rank, flat, pieces[name].offset)
        return flat

    def _states(self, rank: int, buffer: int) -> dict[str, Any]:
        """Return the state of a flat buffer on a rank."""
        state: dict[str, Any] = {}
        names = self.plan.names(buffer, rank)
        for key in self.parts.keys:
            own = [name for name in names if key in self.parts.states[name]]
            if not own:
                continue
            shape = self.new.tensors[state_name(own[0], key)].layout.shape
            if is_flat(key, shape, self.parts.shapes[own[0]]):
                state[key] = self._put_flat(rank, buffer, key)
                continue
            state[key] = self.files.new_tensor(state_name(own[0], key))
            # The parameters of a buffer share a single number, since the optimizer steps the buffer
            # as one parameter: all of them are written there.
            for name in own:
                self.files.put(state_name(name, key), rank, state[key])
        for name in names:
            for key, value in self.plain_states.get(name, {}).items():
                state.setdefault(key, value)
        return state

    def _hyper(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group, with the numbers of its buffers."""
        owners = self.plan.owners
        hyper = []
        for number, group in enumerate(self.parts.groups):
            own = [buffer for buffer, owner in enumerate(owners) if owner == number]
            # DeepSpeed identifies groups of experts by these keys.
            mark = {"moe": True, "name": f"ep_size_{self.expert_sets}"}
            more = mark if group.is_of_experts else {}
            hyper.append({**group.hyper, **more, "params": own})
        return hyper

    def _fragments(self, rank: int, buffer: int) -> Any:
        """Return the positions of parameters' parts in a rank's partition, by name."""
        pieces = self.plan.by_rank[rank]
        (local,) = flat_buffers.local_names([self.plan.copy(buffer, rank)])
        own = {
            local[name]: pieces[name]
            for name in self.parts.groups[self.plan.owners[buffer]].names
            if name in local and name in pieces
        }
        return ordered(
            {name: fragment(piece.elements, piece.offset) for name, piece in own.items()}
        )


def find_plain_states(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the plain values of optimizer state, such as the number of steps, by parameter."""
    states: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if (split := split_state_name(name)) is not None:
            parameter, key = split
            states.setdefault(parameter, {})[key] = value
    return states


def count_expert_sets(mesh: DeviceMesh | None) -> int:
    """Return the size of the axis along which ranks share out experts."""
    sizes = {} if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return sizes.get(EXPERT_AXIS, 1)


def plan_partitions(
    parts: TrainingParts,
    stage: int,
    ranks: int,
    sets: int,
    values: Mapping[str, Any],
    low: DType,
) -> FlatPlan:
    """Return the flat buffers of a stage.

    Raises:
        UsageError: experts under stage 3, or that the ranks cannot share out.
    """
    prefix = f"{CONFIG}.zero_optimization."
    zero = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
    if stage == 3:
        parts.expect_no_experts("stage 3")
        return plan_own(parts, ranks, zero)
    is_data_first = values.get(f"{CONFIG}.use_data_before_expert_parallelism") is True
    members = flat_buffers.expert_sets(ranks, sets, is_data_first)
    return plan_flat(parts, ranks, members, zero, low.itemsize_bytes)


VERSION = "0.19.8"
_OPTIMIZER = "optimizer."
_SCALER = "loss_scaler"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
# Values that describe the sharding of a source, or that its reader added.
_OWN_VALUES = frozenset({"shared_params", "buffer_names", "frozen_params", GROUPS})
_CURRENT_SCALE = "cur_scale"
# The initial state of DeepSpeed's dynamic loss scaler.
_NEW_SCALER: dict[str, Any] = {
    "cur_scale": 2.0**16,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 1,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": "torch.float16",
}

# The values of a file of weights before the first step.
_FIRST: Mapping[str, Any] = {
    "lr_scheduler": None,
    "data_sampler": None,
    "random_ltd": None,
    "skipped_steps": 0,
    "global_steps": 0,
    "global_samples": 0,
}
_STAGE = f"{CONFIG}.zero_optimization.stage"
# The loss scaler of an optimizer that does not scale the loss.
_NO_SCALER: Mapping[str, Any] = {
    "optimizer.loss_scaler.class": "LossScaler",
    "optimizer.loss_scaler.cur_scale": 1.0,
    "optimizer.loss_scaler.dynamic": False,
    "optimizer.dynamic_loss_scale": False,
    "optimizer.overflow": False,
}


def is_own_value(name: str, value: Any) -> bool:
    """Return whether a plain value is DeepSpeed's own: of the stage, or a default of files.

    >>> is_own_value("global_steps", 0), is_own_value("global_steps", 7)
    (True, False)
    >>> is_own_value("ds_config.zero_optimization.stage", 3)
    True
    """
    defaults = {**_FIRST, **_NO_SCALER}
    is_default = name in defaults and repr(value) == repr(defaults[name])
    return is_default or name in (_STAGE, "ds_version") or name.split(".")[0] == "buffer_names"


def stage_member(stage: int) -> Call:
    """Return DeepSpeed's name for a stage of ZeRO."""
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def fragment(elements: int, start: int) -> Call:
    """Return the position of a parameter's part in a flat partition."""
    address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Call(address, (elements, start), is_new=True)


def _as_type(name: str, otherwise: DType) -> DType:
    try:
        return as_dtype(name.rpartition(".")[2])
    except ReshardError:
        return otherwise
