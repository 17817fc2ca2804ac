"""New files of ranks: for each rank a state of DTensors, which `torch.load` reads there.

    model_world_size_N_rank_R.pt          tensors: DTensors, or plain if no axis shards them
    optim_world_size_N_rank_R.pt          {"state": {parameter: {key: ...}}, "param_groups": [...]}
    extra_state_world_size_N_rank_R.pt    values, and states with the prefix `rank_R.`

Every rank has a copy of replicated tensors. Parameters of the optimizer have the numbers that
`optimizer.load_state_dict` expects if the order of the model's parameters determines them, and
names otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.binding import View
from reshard.checkpoint.formats.optimizer_states import (
    GROUPS,
    OPTIMIZER_PREFIX,
    find_state_names,
    split_state_name,
)
from reshard.checkpoint.formats.rank_files import (
    EXTRA,
    FORMAT_NAME,
    MODEL,
    OPTIMIZER,
    split_rank_name,
)
from reshard.checkpoint.formats.torch_files import building
from reshard.checkpoint.formats.torch_files.nested_states import unflatten_state
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    PlannedTensor,
    WritePlan,
    check_values,
)
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import NotationError, RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.sharding import ShardingSpec
from reshard.sharding import spec as parse_sharding

_BEGINNINGS = {MODEL: "model", OPTIMIZER: "optim", EXTRA: "extra_state"}
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_TYPES = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_LAYOUT = "torch.distributed._mesh_layout"


def _keep_states_whole(new: NewCheckpoint, mesh: DeviceMesh) -> tuple[NewCheckpoint, list[str]]:
    """Make states of single ranks whole; return the checkpoint and the names that were sharded.

    Only its own rank has such a state in its files, so no other rank can hold a part of it.
    """
    tensors, names = dict(new.tensors), []
    for name, tensor in new.tensors.items():
        if name.startswith(OPTIMIZER_PREFIX) or split_rank_name(name) is None:
            continue
        shape = tensor.layout.shape
        whole = parse_sharding(mesh, "...", ndim=len(shape))
        if tensor.spec != str(whole):
            tensors[name] = PlannedTensor(tensor.dtype, whole.layout(shape), str(whole))
            names.append(name)
    return dataclasses.replace(new, tensors=tensors), names


# The sharding of a tensor and its placements, or None if no axis shards it.
_Cut = tuple[ShardingSpec, tuple[dtensor.Placement, ...]] | None


def _find_cuts(tensors: Mapping[str, PlannedTensor], mesh: DeviceMesh) -> dict[str, _Cut]:
    cuts: dict[str, _Cut] = {}
    cuts_of: dict[tuple[str | None, Layout], _Cut] = {}
    for name, tensor in tensors.items():
        key = (tensor.spec, tensor.layout)
        if key not in cuts_of:
            cuts_of[key] = _find_cut(name, tensor, mesh)
        cuts[name] = cuts_of[key]
    return cuts


def _find_cut(name: str, tensor: PlannedTensor, mesh: DeviceMesh) -> _Cut:
    """Return the sharding and the placements of a tensor, or None if no axis shards it."""
    shape = tensor.layout.shape
    if tensor.spec is None:
        if any(tensor.layout.local_shape(rank) != shape for rank in tensor.layout.holders):
            raise RecipeError(
                f"tensor {name!r} is laid out by a strategy, which no DTensor can express; give "
                "rules or a recipe over a mesh"
            )
        return None
    sharding = parse_sharding(mesh, tensor.spec, ndim=len(shape))
    if not any(dim.levels for dim in sharding.dim_specs):
        return None
    try:
        placements = dtensor.find_placements(sharding, shape)
    except NotationError as error:
        raise RecipeError(f"tensor {name!r}: {error}") from error
    # torch shards by ceil, axis by axis, which may give other parts of uneven shapes.
    placed = dtensor.sharding_of_placements(mesh, placements, len(shape)).layout(shape)
    if placed is not tensor.layout and any(
        placed.boxes(rank) != tensor.layout.boxes(rank) for rank in mesh.devices
    ):
        raise RecipeError(
            f"tensor {name!r} of {list(shape)}, cut by `{tensor.spec}`: DTensor's "
            f"{', '.join(map(str, placements))} cuts it elsewhere; choose the format torch-dcp "
            "or sharded-safetensors"
        )
    return sharding, placements


def _list_parameters(cuts: Mapping[str, Any]) -> list[str]:
    """Return the names of the model's DTensors, which a reader numbers in this order."""
    return [
        name for name, cut in cuts.items() if cut is not None and split_state_name(name) is None
    ]


def _check_names(new: NewCheckpoint, cuts: Mapping[str, Any]) -> None:
    """Raise UsageError for state that is read under another name than it has."""
    shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
    state = {name: shape for name, shape in shapes.items() if name.startswith(OPTIMIZER_PREFIX)}
    # Where no tensor is a DTensor, a reader takes all of the model for parameters.
    names = _list_parameters(cuts) or [name for name in shapes if name not in state]
    parameters = [(name, shapes[name]) for name in names]
    read_names, _ = find_state_names(parameters, state, new.values.get(GROUPS))
    if read_names:
        name, read = next(iter(read_names.items()))
        raise UsageError(
            f"{name!r} has the number of a parameter; format {FORMAT_NAME} numbers parameters "
            f"itself, and this is read as {read!r}. Give --training reshard, or, if that leaves "
            f"numbers, --rename {name}={read}, or another --format"
        )


def _find_numbers(new: NewCheckpoint, cuts: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of parameters, if a reader can find their names by these."""
    groups = new.values.get(GROUPS)
    parameters = _list_parameters(cuts)
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
        return {}
    if list(groups[0].get("params") or ()) != parameters:
        return {}
    return {name: number for number, name in enumerate(parameters)}


def _find_alike(values: Mapping[str, Any], ranks: int) -> frozenset[str]:
    """Return the states that are equal on all ranks: bare names would lose their rank."""
    texts_of: dict[str, list[str]] = {}
    for name, value in values.items():
        split = split_rank_name(name)
        if split is not None and split[0] < ranks:
            texts_of.setdefault(split[1], []).append(repr(value))
    return frozenset(
        own for own, texts in texts_of.items() if len(texts) == ranks and len({*texts}) == 1
    )


class RankFilesPlanner:
    """A planner of the files of all ranks.

    Raises:
        UsageError: no mesh, or no tensor that is sharded over it; a type that PyTorch lacks;
            optimizer state under the numbers of parameters.
        RecipeError: a sharding that DTensors cannot express.
    """

    def __init__(self, new: NewCheckpoint) -> None:
        mesh = new.mesh
        if mesh is None or sorted(mesh.devices) != list(range(len(mesh.devices))):
            raise UsageError(
                f"format {FORMAT_NAME} writes DTensors, which are sharded over a mesh by rules; "
                "give --to a mesh, such as fsdp=8, and rules or a recipe"
            )
        check_values(new.tensors)
        new, self._kept_whole = _keep_states_whole(new, mesh)
        self.new, self.mesh = new, mesh
        self.cuts = _find_cuts(new.tensors, mesh)
        if len(mesh.devices) > 1 and all(cut is None for cut in self.cuts.values()):
            raise UsageError(
                f"no tensor is cut over the mesh {mesh.text}: ranks' files of copies do not "
                "identify them. Give rules, or --to full with another --format"
            )
        _check_names(new, self.cuts)
        self.builder = building.TorchFilesBuilder(new.tensors)
        self._numbers = _find_numbers(new, self.cuts)
        self._alike = _find_alike(new.values, len(mesh.devices))
        self._kinds = {self._find_kind(name) for name in (*new.tensors, *new.values)}

    def plan_files(self) -> WritePlan:
        """Return the files of all ranks, and the offset of each part in them."""
        for rank in sorted(self.mesh.devices):
            self._write_rank(rank)
        bound = self.builder.bind(has_specs=True)
        notes: tuple[str, ...] = ()
        if self._kept_whole:
            notes = (
                f"{len(self._kept_whole)} tensors are states of single ranks, which have them "
                f"whole, whatever rules say (first: {self._kept_whole[0]})",
            )
        return WritePlan(
            FORMAT_NAME,
            self.mesh,
            {name: bound[name] for name in self.new.tensors},
            tuple(self.builder.files),
            notes,
            values=self.new.values,
        )

    def _write_rank(self, rank: int) -> None:
        """Add the files of a rank."""
        states: dict[str, dict[str, Any]] = {MODEL: {}, OPTIMIZER: {}, EXTRA: {}}
        paths: dict[str, tuple[str | int, ...]] = {}
        mesh = self._describe_mesh(rank)
        layouts = {tensor.layout for tensor in self.new.tensors.values()}
        local_shapes = {layout: layout.local_shape(rank) for layout in layouts}
        for name, tensor in self.new.tensors.items():
            kind, path = self._find_place(name, rank, is_tensor=True)
            cut, local = self.cuts[name], local_shapes[tensor.layout]
            if path is None or (local is None and cut is None):
                continue
            if local is not None:
                part = self.builder.put_new(name, rank, local)
            else:
                # A rank without elements has an empty part: 0 in the dimensions that are sharded.
                dims = cut[0].dim_specs if cut is not None else ()
                pairs = zip(tensor.layout.shape, dims, strict=True)
                empty = tuple(0 if dim.levels else size for size, dim in pairs)
                part = building.NewTensor.of(tensor.dtype, empty)
            states[kind][name] = part if cut is None else _wrap(tensor, part, cut[1], mesh)
            paths[name] = path
        for name, value in self.new.values.items():
            kind, path = self._find_place(name, rank, is_tensor=False)
            if path is not None:
                if name == GROUPS and self._numbers:
                    value = [{**group, "params": [*self._numbers.values()]} for group in value]
                states[kind][name] = value
                paths[name] = path
        for kind, state in states.items():
            # All ranks have files of the same kinds, since readers expect them of every rank.
            if kind not in self._kinds:
                continue
            ranks = len(self.mesh.devices)
            nested = unflatten_state(state, paths)
            if kind == OPTIMIZER and self._numbers:
                numbered = {self._numbers[key]: entry for key, entry in nested["state"].items()}
                nested = {**nested, "state": numbered}
            name = f"{_BEGINNINGS[kind]}_world_size_{ranks}_rank_{rank}.pt"
            self.builder.write(name, nested, rank)

    def _find_kind(self, name: str) -> str:
        """Return the kind of file that has a tensor or a value."""
        if name.startswith(OPTIMIZER_PREFIX):
            return OPTIMIZER
        is_of_rank = split_rank_name(name) is not None
        return EXTRA if is_of_rank or name in self.new.values else MODEL

    def _find_place(
        self, name: str, of_rank: int, *, is_tensor: bool
    ) -> tuple[str, tuple[str | int, ...] | None]:
        """Return the kind of file and the path in its state, or None if another rank has it."""
        kind = self._find_kind(name)
        if kind == OPTIMIZER:
            split = split_state_name(name)
            if split is not None:
                return kind, ("state", *split)
            return kind, (name.removeprefix(OPTIMIZER_PREFIX),)
        named = split_rank_name(name)
        if kind == MODEL or named is None:
            return kind, (name,)
        rank, own = named
        if not is_tensor and own in self._alike:
            own = name
        if rank >= len(self.mesh.devices):
            return kind, (name,) if of_rank == 0 else None
        return kind, (own,) if of_rank == rank else None

    def _describe_mesh(self, rank: int) -> Call:
        """Return a `DeviceMesh` on a rank, as PyTorch 2.13 pickles it."""
        mesh = self.mesh
        strides = View.row_major(mesh.shape).strides
        axes = tuple(
            building.new_object(_LAYOUT, "_FlatLayout", {"shape": (size,), "stride": (stride,)})
            if size > 1
            else building.new_object(_LAYOUT, "_FlatLayout", {"shape": (), "stride": ()})
            for size, stride in zip(mesh.shape, strides, strict=True)
        )
        nameless = tuple(f"dim{number}" for number in range(len(mesh.shape)))
        content = np.array(mesh.devices, dtype=np.int32).tobytes()
        int32 = as_dtype("int32")
        count = len(mesh.devices)
        ranks = building.NewTensor.of(int32, (count,), building.NewStorage(int32, count, content))
        place = np.unravel_index(list(mesh.devices).index(rank), mesh.shape)
        state = {
            "_device_type": "cpu",
            "_layout": building.new_object(_LAYOUT, "_MeshLayout", {"axes": axes}),
            "_rank_map": ranks,
            # The names that reading gives the axes of a mesh without names.
            "_mesh_dim_names": None if mesh.axis_names == nameless else tuple(mesh.axis_names),
            "_root_mesh": None,
            "_flatten_rank_map": tuple(mesh.devices),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_rank": rank,
            "_coordinate_on_dim": tuple(int(index) for index in place),
            "_hash": None,
        }
        if len(mesh.shape) == 1 and list(mesh.devices) == sorted(mesh.devices):
            # The name of the group of all ranks; the names of other groups depend on the program.
            state["_dim_group_names"] = ["0"]
        return building.new_object("torch.distributed.device_mesh", "DeviceMesh", state)


def _wrap(
    tensor: PlannedTensor,
    local: building.NewTensor,
    placements: tuple[dtensor.Placement, ...],
    mesh: Call,
) -> building.NewWrapper:
    """Return a DTensor around a local tensor."""
    dtype, shape = tensor.dtype, tensor.layout.shape
    return building.NewWrapper(
        (dtype, shape, placements),
        local,
        lambda: _describe(dtype, shape, local, placements, mesh),
    )


def _describe(
    dtype: DType,
    shape: tuple[int, ...],
    local: building.NewTensor,
    placements: tuple[dtensor.Placement, ...],
    mesh: Call,
) -> Call:
    """Return a DTensor, as PyTorch 2.13 pickles it."""
    strides = View.row_major(shape).strides
    meta = Call(Global(_SPEC, "TensorMeta"), (building.size_of(shape), strides, dtype), is_new=True)
    state = {
        "mesh": mesh,
        "placements": tuple(_describe_placement(placement) for placement in placements),
        "tensor_meta": meta,
        "shard_order": _describe_order(placements),
        "use_strided_shard_as_shard_order": any(
            isinstance(p, dtensor.StridedShard) for p in placements
        ),
        "_hash": None,
    }
    # `torch.load` allows these names with `weights_only`, its default since PyTorch 2.6.
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    device = Call(Global("torch", "device"), ("cpu",))
    arguments = (_DTENSOR, dtype, shape, strides, 0, layout, device, False)
    own = {"_local_tensor": local, "_spec": building.new_object(_SPEC, "DTensorSpec", state)}
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (wrapper, _DTENSOR, arguments, (None, own)),
    )


def _describe_placement(placement: dtensor.Placement) -> Call:
    if isinstance(placement, dtensor.StridedShard):
        state = {"dim": placement.dim, "split_factor": placement.split_factor}
        return building.new_object(_TYPES, "_StridedShard", state)
    if isinstance(placement, dtensor.Shard):
        return building.new_object(_TYPES, "Shard", {"dim": placement.dim})
    return Call(Global(_TYPES, "Replicate"), (), is_new=True)


def _describe_order(placements: tuple[dtensor.Placement, ...]) -> tuple[Call, ...] | None:
    """Return the axes that cut each dimension, in the order of the mesh."""
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, dtensor.Shard | dtensor.StridedShard):
            by_dim.setdefault(placement.dim, []).append(axis)
    if any(isinstance(placement, dtensor.StridedShard) for placement in placements):
        return None
    return tuple(
        Call(Global(_SPEC, "ShardOrderEntry"), (dim, tuple(axes)), is_new=True)
        for dim, axes in sorted(by_dim.items())
    )
