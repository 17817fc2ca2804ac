"""The files of a new checkpoint of ZeRO, and where in them each tensor goes.

1. Parameters are laid into flat buffers, in the order of their groups (`flat_plans`).
2. Every rank has a file with its partitions; weights and what is no tensor are a file of rank 0
   (stages 1 and 2), or one of every rank, without the weights (stage 3).
3. What a source does not have, such as the version, gets what DeepSpeed takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.deepspeed.arrangements.flat_plans import (
    FlatPlan,
    is_flat,
    plan_flat,
    plan_own,
)
from reshard.checkpoint.formats.deepspeed.arrangements.new_states import (
    VERSION,
    NewValues,
    fragment,
    ordered,
    stage_member,
)
from reshard.checkpoint.formats.deepspeed.arrangements.training_parts import (
    CONFIG,
    MAX_SHOWN,
    TrainingParts,
    find_parts,
)
from reshard.checkpoint.formats.deepspeed.parallel.experts import (
    ExpertRanks,
    list_layers,
    local_names,
)
from reshard.checkpoint.formats.deepspeed.partitions import own_pieces, part_size
from reshard.checkpoint.formats.torch_files.building import (
    NewTensor,
    NewTorchFile,
    new_torch_file,
)
from reshard.checkpoint.formats.torch_files.optimizer_states import (
    MASTER,
    find_keys,
    split_state_name,
    state_name,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, PlannedTensor, WritePlan
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.text import count_text, first_text

#: The axis of a mesh along which ranks share out experts.
EXPERT_AXIS = "ep"
_FLOAT32 = as_dtype("float32")
Shape = tuple[int, ...]
# Where a tensor goes: the file, and the place of its first element in a tensor of that file.
Place = tuple[str, NewTensor, int]


def find_low(parts: TrainingParts, dtypes: Mapping[str, DType], values: Mapping[str, Any]) -> DType:
    """The type that the model computes with: that of its weights, or what the source says.

    Where float32 weights are all that there is, they may stand in the place of others.
    """
    found = dtypes[parts.weights[0]] if parts.weights else _FLOAT32
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        if found is _FLOAT32 and values.get(f"{CONFIG}.{key}.enabled") is True:
            return as_dtype(name)
    return found


def find_copies(
    tensors: Mapping[str, tuple[Shape, DType]], values: Mapping[str, Any], *, has_weights: bool
) -> dict[str, tuple[str, DType]]:
    """Weights of one kind that a source has as the other kind alone, each with these and its type.

    Float32 ones are made where they are missing, exactly; those that the model computes with only
    for a target that `has_weights`.
    """
    found: dict[str, tuple[str, DType]] = {}
    for parameter, keys in find_keys(tensors).items():
        if MASTER not in keys and parameter in tensors:
            found[state_name(parameter, MASTER)] = parameter, _FLOAT32
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    shapes |= {name: shapes[source] for name, (source, _) in found.items()}
    parts = find_parts(shapes, values)
    if has_weights:
        low = find_low(parts, {name: dtype for name, (_, dtype) in tensors.items()}, values)
        wanted = {name: name for name in parts.shapes} | dict(parts.shared)
        for name, own in wanted.items():
            if name not in tensors or (tensors[name][1] is _FLOAT32 and low is not _FLOAT32):
                found[name] = state_name(own, MASTER), low
    return found


class FileSet:
    """New files by name, and the tensors of the checkpoint that go into them."""

    def __init__(self, tensors: Mapping[str, PlannedTensor]) -> None:
        self._tensors = tensors
        self._places: dict[str, dict[int, list[Place]]] = {}
        self._files: dict[str, NewTorchFile] = {}

    def put(self, name: str, slot: int, file: str, tensor: NewTensor, offset: int = 0) -> None:
        """A tensor, or the next piece of it, is in `file` from element `offset` of `tensor`."""
        self._places.setdefault(name, {}).setdefault(slot, []).append((file, tensor, offset))

    def write(self, file: str, value: Any, rank: int) -> None:
        """The value of a file, whose tensors were put."""
        self._files[file] = new_torch_file(file, value, rank)

    def arrange(
        self,
        format_name: str,
        mesh: DeviceMesh | None,
        values: Mapping[str, Any],
        notes: Iterable[str],
    ) -> WritePlan:
        """All files, with the tensors bound to them, and the values that are in them."""
        stored = {}
        for name, slots in self._places.items():
            planned = self._tensors[name]
            itemsize_bytes = planned.dtype.itemsize_bytes
            addresses = {}
            for slot, places in slots.items():
                # Pieces of one rank lie one behind the other, as cells do.
                file, tensor, offset = places[0]
                start = self._files[file].start_bytes(tensor) + offset * itemsize_bytes
                addresses[slot] = FileRange(file, start)
            binding = Binding(planned.layout, addresses, {})
            stored[name] = StoredTensor(name, planned.dtype, binding)
        return WritePlan(
            format_name,
            mesh,
            stored,
            tuple(self._files.values()),
            tuple(notes),
            values=values,
        )


class Arranger:
    """What goes into a new checkpoint, and its files so far."""

    def __init__(self, new: NewCheckpoint) -> None:
        self.new = new
        shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in new.tensors.items()}
        self.parts = find_parts(shapes, new.values)
        self.parts.expect_state(new.allow)
        self.low = find_low(self.parts, dtypes, new.values)
        self.values = NewValues(new.values, new.paths, self.low)
        self.plain_states = find_plain_states(new.values)
        self.tag = f"global_step{self.values.steps}"
        self.files = FileSet(new.tensors)

    def _tensor(self, name: str) -> NewTensor:
        tensor = self.new.tensors[name]
        return NewTensor.of(tensor.dtype, tensor.layout.shape)

    def _put_others(self, file: str, slot: int) -> tuple[dict[str, NewTensor], dict[str, Any]]:
        """Put the tensors of a user's state into a file; they, and their places in its state."""
        others = {name: self._tensor(name) for name in self.parts.others}
        for name, tensor in others.items():
            self.files.put(name, slot, file, tensor)
        return others, {name: self.new.paths.get(name, (name,)) for name in others}


class ZeroArranger(Arranger):
    """Arranges one checkpoint of ZeRO."""

    def __init__(self, new: NewCheckpoint, stage: int) -> None:
        super().__init__(new)
        self.stage = stage
        if stage == 3:
            self.parts.expect_all_frozen()
        self.ranks = max(tensor.layout.slots for tensor in new.tensors.values())
        self.shared = share_experts(self.ranks, new.mesh, self.values)
        self.plan = plan_partitions(self.parts, stage, self.shared, self.values, self.low)
        self.prefix = "bf16_" if self.low.name == "bfloat16" else ""

    def arrange(self, format_name: str) -> WritePlan:
        """The files of weights and of partitions."""
        for rank in range(self.ranks if self.stage == 3 else 1):
            self._write_weights(rank)
        for rank in range(self.ranks):
            self._write_partition(rank)
        notes = [*self.parts.notes, *describe_order(self.parts), *self.values.describe_missing()]
        if self.parts.missing_frozen:
            notes.append(
                f"{count_text(len(self.parts.missing_frozen), 'frozen parameter')} "
                f"({first_text(self.parts.missing_frozen, MAX_SHOWN)}) are not in the source: "
                "DeepSpeed loads this with load_module_strict=False, and keeps the model's own"
            )
        if self.parts.experts:
            notes.append(
                f"experts are shared out over {self.shared.sets} of {self.ranks} ranks (`ep` in "
                "--to): the run that goes on must have that as its ep_size"
            )
        unwritten = [name for name in self.parts.weights if self.stage == 3]
        if unwritten:
            notes.append(
                f"not in the target: the {self.low} weights of {len(unwritten)} parameters, which "
                "DeepSpeed makes of the float32 ones under stage 3"
            )
        values = self.values.held(self.new.values, with_clipping=self.stage != 3)
        return self.files.arrange(format_name, self.new.mesh, values, notes)

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
            module[own] = self._tensor(own)
            self.files.put(own, rank, file, module[own])
            if own in parts.frozen:
                fragments[own] = module[own]
        for own, shape in parts.frozen.items() if is_stage3 else ():
            size = part_size(math.prod(shape), self.ranks)
            fragments[own] = NewTensor.of(self.new.tensors[own].dtype, (size,))
            for piece in own_pieces(math.prod(shape), self.ranks, 0):
                if piece.rank == rank:
                    self.files.put(own, rank, file, fragments[own])
        others, paths = self._put_others(file, rank)
        # Stage 3 has the frozen parameters nowhere else.
        is_listed = parts.are_frozen_listed or (is_stage3 and bool(parts.frozen))
        frozen = fragments if is_listed else None
        names = [self.plan.names(buffer, rank) for buffer in range(len(self.plan.copies))]
        state = self.values.model_state(
            parts, self.stage, self.ranks, names, module, frozen, others, paths
        )
        self.files.write(file, state, rank)
        if experts:
            self._write_experts()

    def _write_experts(self) -> None:
        """A file for the weights of each expert of each layer."""
        layers = list_layers(self.parts.experts)
        for (layer, experts), expert in (
            (pair, expert) for pair in enumerate(layers.values()) for expert in sorted(pair[1])
        ):
            file = f"{self.tag}/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            tensors = {name: self._tensor(name) for name in experts[expert]}
            for name, tensor in tensors.items():
                self.files.put(name, 0, file, tensor)
            self.files.write(file, tensors, 0)

    # Partitions.

    def _write_partition(self, rank: int) -> None:
        name = f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = f"{self.tag}/{name}"
        masters = []
        states: dict[int, dict[str, Any]] = {}
        for buffer in range(len(self.plan.copies)):
            masters.append(self._put_flat(file, rank, buffer, MASTER))
            states[buffer] = self._states(file, rank, buffer)
        groups = self._hyper()
        base = {"state": states, "param_groups": groups}
        values = self.values.optimizer_state(with_clipping=self.stage != 3)
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

    def _put_flat(self, file: str, rank: int, buffer: int, key: str) -> NewTensor:
        """A rank's flat buffer of what is kept under a key."""
        size = self.plan.sizes[buffer]
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
                self.files.put(state_name(name, key), rank, file, flat, pieces[name].offset)
        return flat

    def _states(self, file: str, rank: int, buffer: int) -> dict[str, Any]:
        """What a rank's optimizer keeps of a flat buffer."""
        found: dict[str, Any] = {}
        names = self.plan.names(buffer, rank)
        for key in self.parts.keys:
            own = [name for name in names if key in self.parts.states[name]]
            if not own:
                continue
            shape = self.new.tensors[state_name(own[0], key)].layout.shape
            if is_flat(key, shape, self.parts.shapes[own[0]]):
                found[key] = self._put_flat(file, rank, buffer, key)
                continue
            found[key] = self._tensor(state_name(own[0], key))
            # One number for all parameters of a buffer: all of them are written there.
            for name in own:
                self.files.put(state_name(name, key), rank, file, found[key])
        for name in names:
            for key, value in self.plain_states.get(name, {}).items():
                found.setdefault(key, value)
        return found

    def _hyper(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group, with the numbers of its buffers."""
        owners = self.plan.owners
        found = []
        for number, group in enumerate(self.parts.groups):
            own = [buffer for buffer, owner in enumerate(owners) if owner == number]
            # By these DeepSpeed knows groups of experts.
            mark = {"moe": True, "name": f"ep_size_{self.shared.sets}"}
            more = mark if group.is_of_experts else {}
            found.append({**group.hyper, **more, "params": own})
        return found

    def _fragments(self, rank: int, buffer: int) -> Any:
        """Where the parts of parameters lie in a rank's partition, by name."""
        pieces = self.plan.by_rank[rank]
        (local,) = local_names([self.plan.copy(buffer, rank)])
        own = {
            local[name]: pieces[name]
            for name in self.parts.groups[self.plan.owners[buffer]].names
            if name in local and name in pieces
        }
        return ordered(
            {name: fragment(one.stop - one.start, one.offset) for name, one in own.items()}
        )


def find_plain_states(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What is kept of parameters as plain values, such as the number of steps, by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if (split := split_state_name(name)) is not None:
            parameter, key = split
            found.setdefault(parameter, {})[key] = value
    return found


def share_experts(ranks: int, mesh: DeviceMesh | None, values: NewValues) -> ExpertRanks:
    """Which ranks have the same experts: those of one index along the axis `ep` of the mesh."""
    sizes = {} if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return ExpertRanks(ranks, sizes.get(EXPERT_AXIS, 1), values.is_data_first)


def plan_partitions(
    parts: TrainingParts, stage: int, shared: ExpertRanks, values: NewValues, low: DType
) -> FlatPlan:
    """The flat buffers of a stage.

    Raises:
        UsageError: experts under stage 3, or that the ranks cannot share out.
    """
    if stage == 3:
        parts.expect_no_experts("stage 3")
        return plan_own(parts, shared.ranks, values.zero)
    return plan_flat(parts, shared, values.zero, low.itemsize_bytes)


def describe_order(parts: TrainingParts) -> list[str]:
    """What a user must know of partitions, which have no names in them."""
    first = parts.groups[0].names[0]
    return [
        f"partitions are read by position: the optimizer that goes on must have its parameters in "
        f"these groups and this order, {first!r} first (deepspeed-universal is read by names)"
    ]
