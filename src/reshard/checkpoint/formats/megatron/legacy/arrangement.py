"""The files of a new checkpoint in the folders of Megatron's ranks.

    latest_checkpointed_iteration.txt
    iter_0002000/mp_rank_01_003/model_optim_rng.pt, distrib_optim.pt

1. Each model-parallel place has a folder, with the names and numbers that its rank uses
   (`stage_layouts`), in Transformer Engine's layers or local ones, by `args.transformer_impl`.
2. Optimizer state is put in the order of the modules, in which Megatron finds it: by number, or
   in the flat buffers of a distributed optimizer, by `args.use_distributed_optimizer`. Those have
   one bucket, but for an embedding that two stages share; gradients that are reduced while others
   are computed have more, of `args.ddp_bucket_size`.
3. Every file is one of `torch.save`, whose tensors are filled in (`torch_files.new_files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.arrangement import (
    Arrangement,
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    check_values,
)
from reshard.checkpoint.formats.megatron.buckets import plan_buffer
from reshard.checkpoint.formats.megatron.common_state import (
    arguments_of,
    find_groups,
    groups_of,
    is_expert,
    nest_values,
    split_groups,
    step_of,
    with_parallelism,
)
from reshard.checkpoint.formats.megatron.iterations import TRACKER_NAME, iteration_name
from reshard.checkpoint.formats.megatron.legacy.rank_folders import (
    MODEL_NAMES,
    OPTIMIZER_NAME,
    RankPlace,
)
from reshard.checkpoint.formats.megatron.legacy.rank_optimizers import (
    RankParameter,
    bucket_sizes,
    list_buffers,
)
from reshard.checkpoint.formats.megatron.legacy.reader import FORMAT_NAME
from reshard.checkpoint.formats.megatron.legacy.stage_layouts import RankGrid, StageLayouts
from reshard.checkpoint.formats.megatron.module_names import grouped_name, local_name
from reshard.checkpoint.formats.megatron.module_order import order_key
from reshard.checkpoint.formats.megatron.optimizer_names import split_common_name
from reshard.checkpoint.formats.torch_files.new_files import NewTensor, new_torch_file
from reshard.checkpoint.formats.torch_files.pickle_terms import Global
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError
from reshard.layout import Layout

_FLAT_KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# What a linear layer has among its parameters: state of Transformer Engine, or nothing.
_EXTRA = "_extra_state"


@dataclass
class _RankParts:
    """What one rank's files have: parameters by name there, in the order of the modules."""

    place: RankPlace
    slot: int
    parameters: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


# Where a cell of a tensor is: of which new tensor, and how many elements behind its first.
_Target = tuple[NewTensor, int]


def arrange(new: NewCheckpoint) -> Arrangement:
    """A folder for each model-parallel place, with its rank's files.

    Raises:
        RecipeError: a model that the ranks do not divide; parameters in an unknown order.
        UsageError: a type that PyTorch does not have.
    """
    check_values(new.tensors)
    return _Arranger(new).arrange()


class _Arranger:
    """One new checkpoint under way."""

    def __init__(self, new: NewCheckpoint) -> None:
        self.new = new
        self.values = new.values
        self.arguments = arguments_of(new.values)
        self.grid = RankGrid(new.mesh)
        shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
        self.stages = StageLayouts(self.grid, shapes, self.arguments)
        self.is_local = self.arguments.get("transformer_impl") == "local"
        self.is_grouped = bool(self.arguments.get("moe_grouped_gemm"))
        self.is_distributed = bool(self.arguments.get("use_distributed_optimizer", True))
        # The tensors of each parameter, by key; the weight under "".
        self.of: dict[str, dict[str, str]] = {}
        for name in new.tensors:
            state = split_common_name(name)
            own = self.of.setdefault(self.stages.parameter_of(name), {})
            own["" if state is None else state[1]] = name
        self.addresses: dict[str, dict[int, list[FileRange]]] = {name: {} for name in new.tensors}
        self.folder = iteration_name(self._iteration())

    def _iteration(self) -> int:
        found = self.values.get("iteration", 0)
        return found if type(found) is int and 0 <= found < 10**7 else 0

    def arrange(self) -> Arrangement:
        """All files, and where in them each tensor is."""
        has_state = any(len(own) > 1 for own in self.of.values())
        ordered = self._sort(has_state)
        files: list[NewFile] = []
        for place, slot in self.grid.folders.items():
            files += self._arrange_rank(self._parts(place, slot, ordered), has_state)
        tensors = {
            name: StoredTensor(
                name, tensor.dtype, Binding(tensor.layout, self._bind(name, tensor.layout), {})
            )
            for name, tensor in self.new.tensors.items()
        }
        return Arrangement(
            FORMAT_NAME,
            self.new.mesh,
            tensors,
            tuple(files),
            values=dict(self.new.values),
            paths=dict(self.new.paths),
        )

    def _bind(self, name: str, layout: Layout) -> dict[int, tuple[FileRange, ...]]:
        return {slot: tuple(places) for slot, places in self.addresses[name].items()}

    def _sort(self, has_state: bool) -> list[str]:
        """The parameters in the order of the modules; as they are where none need it."""
        keys = {
            name: order_key(name, is_local=self.is_local, is_grouped=self.is_grouped)
            for name in self.of
        }
        unknown = [name for name, key in keys.items() if key is None and len(self.of[name]) > 1]
        if has_state and unknown:
            raise RecipeError(
                f"the place of {unknown[0]!r} among Megatron's modules is not known, and optimizer "
                "state has no names there; convert to torch-dist, or leave optimizer state out "
                "(--exclude 'optimizer.*')"
            )
        last = (1 << 30,)
        return sorted(self.of, key=lambda name: keys[name] or last)

    def _parts(self, place: RankPlace, slot: int, ordered: list[str]) -> _RankParts:
        found = _RankParts(place, slot)
        for name in self.stages.held(ordered, place):
            own = self.stages.rank_name(name, place)
            own = local_name(own) if self.is_local else own
            own = grouped_name(own) if self.is_grouped else own
            found.parameters[own] = name
            whole = self.stages.weights.get(name)
            if whole is not None:
                found.shapes[own] = self.stages.block(name, whole, place).block_shape
        return found

    def _arrange_rank(self, rank: _RankParts, has_state: bool) -> Iterator[NewFile]:
        path = f"{self.folder}/{self.grid.sizes.folder_name(rank.place)}"
        model: dict[str, Any] = {}
        targets: list[tuple[str, _Target]] = []
        for own, parameter in rank.parameters.items():
            name = self.of[parameter].get("")
            if name is None:
                continue
            made = NewTensor.of(self.new.tensors[name].dtype, rank.shapes[own])
            model[own] = made
            targets.append((name, (made, 0)))
            module, _, last = own.rpartition(".")
            kind = module.rpartition(".")[2]
            if last == "weight" and (kind.startswith("linear_") or kind == "output_layer"):
                model[f"{module}.{_EXTRA}"] = None
        state = self._common()
        state["model"] = model
        flat: dict[Any, Any] | list[Any] | None = None
        if has_state and self.is_distributed:
            state["optimizer"] = self._groups()
            flat, flat_targets = self._flat_state(rank)
        elif has_state:
            state["optimizer"] = self._number_state(rank, targets)
        file = new_torch_file(f"{path}/{MODEL_NAMES[0]}", state, rank.slot)
        self._place(file, rank.slot, targets)
        yield file
        if flat is not None:
            file = new_torch_file(f"{path}/{OPTIMIZER_NAME}", flat, rank.slot)
            self._place(file, rank.slot, flat_targets)
            yield file

    def _place(self, file: Any, slot: int, targets: list[tuple[str, _Target]]) -> None:
        """Note where in a file the cells of tensors are."""
        for name, (made, offset) in targets:
            tensor: PlannedTensor = self.new.tensors[name]
            itemsize_bytes = tensor.dtype.itemsize_bytes
            at = file.start_bytes(made) + offset * itemsize_bytes
            places = self.addresses[name].setdefault(slot, [])
            for cell in tensor.layout.cells_of(slot):
                places.append(FileRange(file.stored.name, at))
                at += int(tensor.layout.cell_elements[cell]) * itemsize_bytes

    def _common(self) -> dict[str, Any]:
        values = {n: v for n, v in self.values.items() if not n.startswith("optimizer.")}
        sizes = self.grid.sizes
        own = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep, "etp": sizes.etp, "vp": None}
        state = nest_values(with_parallelism(values, own), self.new.paths)
        state.setdefault("checkpoint_version", 3.0)
        state.setdefault("iteration", 0)
        return state

    def _split(self, rank: _RankParts) -> list[list[str]]:
        """The parameters of each optimizer of the chain, by their names on the rank."""
        own = [name for name, known in rank.parameters.items() if len(self.of[known]) > 1]
        if not self.stages.has_expert_optimizer:
            return [own]
        return [[name for name in own if is_expert(name) == flag] for flag in (False, True)]

    def _all_groups(self, of_experts: bool) -> list[dict[str, Any]]:
        groups = groups_of(self.values)
        return split_groups(groups, step_of(self.values), of_experts=of_experts)

    def _groups(self) -> Any:
        """The state of a distributed optimizer beside its parameters."""
        chain = [False, True] if self.stages.has_expert_optimizer else [False]
        found = [{"optimizer": {"param_groups": self._all_groups(flag)}} for flag in chain]
        return found if len(found) > 1 else found[0]

    def _flat_state(self, rank: _RankParts) -> tuple[Any, list[tuple[str, _Target]]]:
        """The flat buffers of a distributed optimizer, and where in them each tensor is."""
        targets: list[tuple[str, _Target]] = []
        found: list[Any] = []
        for number, names in enumerate(self._split(rank)):
            # Dense parameters are those of all expert-parallel ranks: the first saves them.
            if number == 0 and self.stages.has_expert_optimizer and rank.place.ep > 0:
                found.append(None)
                continue
            found.append(self._buffers(rank, names, targets))
        return (found if len(found) > 1 else found[0]), targets

    def _buffers(
        self, rank: _RankParts, names: list[str], targets: list[tuple[str, _Target]]
    ) -> dict[Any, Any]:
        parameters = []
        for own in names:
            weight = self.of[rank.parameters[own]].get("")
            if weight is None:
                raise RecipeError(
                    f"{rank.parameters[own]!r} has optimizer state and no weight, whose type says "
                    "which buffer it is in; convert to torch-dist"
                )
            dtype = self.new.tensors[weight].dtype
            parameters.append(RankParameter(0, own, dtype, rank.shapes[own]))
        is_shared = self.grid.sizes.pp > 1 and self.stages.is_tied
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(list_buffers(parameters, is_embedding_shared=is_shared)):
            plan = plan_buffer([buffered for _, buffered in buffer], self._bucket_size(rank))
            wide = as_dtype("float32")
            kept = {
                key: NewTensor.of(wide, (plan.coalesced_length,)) for key in _FLAT_KEYS.values()
            }
            types = (Global("torch", buffer[0][0].dtype.name), Global("torch", "float32"))
            state[number] = {types: {**kept, "numel_unpadded": plan.coalesced_length}}
            for buffered, start in plan.coalesced():
                of = self.of[rank.parameters[buffered.name]]
                for key, flat in _FLAT_KEYS.items():
                    if key in of:
                        self._expect_wide(of[key])
                        targets.append((of[key], (kept[flat], start)))
        return state

    def _expect_wide(self, name: str) -> None:
        dtype = self.new.tensors[name].dtype
        if dtype.name != "float32":
            raise RecipeError(
                f"{name!r} is {dtype.name}, and a distributed optimizer's buffers are of float32; "
                "convert to torch-dist"
            )

    def _bucket_size(self, rank: _RankParts) -> int | None:
        # Only where it is so has a buffer several buckets: on the first stage.
        if not self.arguments.get("overlap_grad_reduce") or rank.place.pp > 0:
            return None
        return bucket_sizes(self.arguments)[0]

    def _number_state(self, rank: _RankParts, targets: list[tuple[str, _Target]]) -> Any:
        """The state of an optimizer that is not distributed, whose parameters have numbers."""
        chain = []
        for flag, names in enumerate(self._split(rank)):
            groups = self._all_groups(bool(flag))
            in_group: list[list[str]] = [[] for _ in groups]
            for own in names:
                for number in find_groups(groups, own, rank.shapes[own])[:1]:
                    in_group[number].append(own)
            state: dict[int, dict[str, Any]] = {}
            masters: list[list[NewTensor]] = []
            kept_groups = []
            for group, members in zip(groups, in_group, strict=True):
                first = len(state)
                masters.append([])
                for own in members:
                    state[len(state)] = self._state_of(rank, own, masters[-1], targets)
                kept_groups.append({**group, "params": [*range(first, len(state))]})
            # Megatron makes no group without parameters.
            kept = [n for n, members in enumerate(in_group) if members]
            chain.append(
                {
                    "optimizer": {"state": state, "param_groups": [kept_groups[n] for n in kept]},
                    "fp32_from_fp16_params": [masters[n] for n in kept],
                }
            )
        return chain if len(chain) > 1 else chain[0]

    def _state_of(
        self,
        rank: _RankParts,
        own: str,
        masters: list[NewTensor],
        targets: list[tuple[str, _Target]],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, name in self.of[rank.parameters[own]].items():
            if not key:
                continue
            tensor = self.new.tensors[name]
            shape = rank.shapes[own] if tensor.layout.shape else ()
            made = NewTensor.of(tensor.dtype, shape)
            targets.append((name, (made, 0)))
            if key == "master":
                masters.append(made)
            else:
                found[key] = made
        return found


def final_files(arrangement: Arrangement) -> Iterator[tuple[str, bytes]]:
    """The file that names the last step."""
    found = arrangement.values.get("iteration", 0)
    yield TRACKER_NAME, str(found if type(found) is int else 0).encode()


def place(
    tensors: Mapping[str, Any], values: Mapping[str, Any], grid: RankGrid
) -> dict[str, Layout]:
    """The layout of every tensor over the ranks of a grid."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return StageLayouts(grid, shapes, arguments_of(values)).layouts()
