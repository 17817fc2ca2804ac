"""The files of a new checkpoint in the folders of Megatron's ranks.

    latest_checkpointed_iteration.txt
    iter_0002000/mp_rank_01_003/model_optim_rng.pt, distrib_optim.pt

1. Each model-parallel place has a folder, with the names and numbers that its rank uses
   (`stage_layouts`), in Transformer Engine's layers or local ones, by `args.transformer_impl`.
2. Optimizer state is put in the order of the modules, in which Megatron finds it: by number, or
   in the flat buffers of a distributed optimizer, by `args.use_distributed_optimizer`. Those have
   one bucket, but for an embedding that two stages share; gradients that are reduced while others
   are computed have more, of `args.ddp_bucket_size`.
3. Every file is one of `torch.save`, whose tensors are filled in (`torch_files.building`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.megatron import TRACKER_NAME, iteration_name
from reshard.checkpoint.formats.megatron.common_state import (
    DEFAULTS,
    arguments_of,
    describe_decay,
    find_groups,
    groups_of,
    has_stacked_experts,
    held_values,
    is_expert,
    nest_values,
    scaler_state,
    split_groups,
    step_of,
    with_parallelism,
    without_steps,
)
from reshard.checkpoint.formats.megatron.legacy.rank_folders import (
    FORMAT_NAME,
    MODEL_NAMES,
    OPTIMIZER_NAME,
    RankPlace,
)
from reshard.checkpoint.formats.megatron.legacy.rank_optimizers import (
    RankParameter,
    bucket_sizes,
    list_buffers,
)
from reshard.checkpoint.formats.megatron.legacy.stage_layouts import RankGrid, StageLayouts
from reshard.checkpoint.formats.megatron.parameters import (
    expect_mixers,
    grouped_name,
    local_name,
    order_key,
)
from reshard.checkpoint.formats.megatron.rank_blocks import plan_buffer
from reshard.checkpoint.formats.torch_files.building import NewTensor, new_torch_file
from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name
from reshard.checkpoint.formats.torch_files.pickles import Global
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    WritePlan,
    check_values,
)
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError
from reshard.layout import Layout

_FLAT_KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# What a linear layer has among its parameters: state of Transformer Engine, or nothing.
_EXTRA = "_extra_state"


@dataclass
class _ChunkParts:
    """What a rank's files have of a chunk: parameters by name there, in the order of modules."""

    place: RankPlace
    slot: int
    parameters: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _PartPlace(NamedTuple):
    """Where a rank's part of a tensor is: `offset` elements behind the first of a new one."""

    name: str
    slot: int
    made: NewTensor
    offset: int = 0


# A parameter of a rank: its chunk, and its name there.
_Own = tuple[_ChunkParts, str]


def arrange(new: NewCheckpoint) -> WritePlan:
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
        self.values = new.values
        self.arguments = arguments_of(new.values)
        self.is_distributed = bool(self.arguments.get("use_distributed_optimizer", True))
        self.new = new = without_steps(new) if self.is_distributed else new
        self.grid = RankGrid(new.mesh)
        shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
        self.stages = StageLayouts(self.grid, shapes, self.arguments)
        if self.stages.experts and has_stacked_experts(self.arguments):
            raise RecipeError(
                "args.moe_grouped_gemm says that a layer's experts are one weight (GroupedMLP), "
                "which is not written; convert to torch-dist, which GroupedMLP loads"
            )
        expect_mixers(new.tensors, in_parts=False)
        self.is_local = self.arguments.get("transformer_impl") == "local"
        self.is_grouped = bool(self.arguments.get("moe_grouped_gemm"))
        # The tensors of each parameter, by key; the weight under "".
        self.of: dict[str, dict[str, str]] = {}
        for name in new.tensors:
            _, key = split_state_name(name) or (name, "")
            if key and self.is_distributed and key not in _FLAT_KEYS:
                raise RecipeError(
                    f"{name!r} has no place among {', '.join(_FLAT_KEYS)}, which a distributed "
                    "optimizer's buffers are of; convert to torch-dist, or leave it out with "
                    "--exclude"
                )
            self.of.setdefault(self.stages.parameter_of(name), {})[key] = name
        self.addresses: dict[str, dict[int, list[FileRange]]] = {name: {} for name in new.tensors}
        self.folder = iteration_name(self._iteration())

    def _iteration(self) -> int:
        found = self.values.get("iteration", 0)
        return found if type(found) is int and 0 <= found < 10**7 else 0

    def arrange(self) -> WritePlan:
        """All files, and where in them each tensor is."""
        has_state = any(len(own) > 1 for own in self.of.values())
        ordered = self._sort(has_state)
        files: list[NewFile] = []
        for place, slots in self.grid.folders.items():
            chunks = [
                self._parts(place._replace(vp=number), slot, ordered)
                for number, slot in enumerate(slots)
            ]
            files += self._arrange_rank(chunks, has_state)
        tensors = {
            name: StoredTensor(
                name, tensor.dtype, Binding(tensor.layout, self._bind(name, tensor.layout), {})
            )
            for name, tensor in self.new.tensors.items()
        }
        return WritePlan(
            FORMAT_NAME,
            self.new.mesh,
            tensors,
            tuple(files),
            values=held_values(self.new),
            paths=dict(self.new.paths),
            notes=describe_decay(self.values, self.new.tensors),
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

    def _parts(self, place: RankPlace, slot: int, ordered: list[str]) -> _ChunkParts:
        found = _ChunkParts(place, slot)
        for name in self.stages.held(ordered, place):
            own = self.stages.rank_name(name, place)
            own = local_name(own) if self.is_local else own
            own = grouped_name(own) if self.is_grouped else own
            found.parameters[own] = name
            whole = self.stages.weights.get(name)
            if whole is not None:
                found.shapes[own] = self.stages.block(name, whole, place).block_shape
        return found

    def _arrange_rank(self, chunks: list[_ChunkParts], has_state: bool) -> Iterator[NewFile]:
        first = chunks[0]
        path = f"{self.folder}/{self.grid.sizes.folder_name(first.place)}"
        targets: list[_PartPlace] = []
        state = self._common()
        for number, chunk in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{number}"
            state[key] = self._model_state(chunk, targets)
        flat: dict[Any, Any] | list[Any] | None = None
        flat_targets: list[_PartPlace] = []
        if has_state and self.is_distributed:
            state["optimizer"] = self._groups()
            flat = self._flat_state(chunks, flat_targets)
        elif has_state:
            state["optimizer"] = self._number_state(chunks, targets)
        file = new_torch_file(f"{path}/{MODEL_NAMES[0]}", state, first.slot)
        self._place(file, targets)
        yield file
        if flat is not None:
            file = new_torch_file(f"{path}/{OPTIMIZER_NAME}", flat, first.slot)
            self._place(file, flat_targets)
            yield file

    def _model_state(self, chunk: _ChunkParts, targets: list[_PartPlace]) -> dict[str, Any]:
        model: dict[str, Any] = {}
        for own, parameter in chunk.parameters.items():
            name = self.of[parameter].get("")
            if name is None:
                continue
            made = NewTensor.of(self.new.tensors[name].dtype, chunk.shapes[own])
            model[own] = made
            targets.append(_PartPlace(name, chunk.slot, made))
            module, _, last = own.rpartition(".")
            kind = module.rpartition(".")[2]
            if last == "weight" and (kind.startswith("linear_") or kind == "output_layer"):
                model[f"{module}.{_EXTRA}"] = None
        return model

    def _place(self, file: Any, targets: list[_PartPlace]) -> None:
        """Note where in a file the cells of tensors are."""
        for name, slot, made, offset in targets:
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
        chunks = sizes.vp if sizes.vp > 1 else None
        own = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep, "etp": sizes.etp, "vp": chunks}
        state = nest_values(with_parallelism(values, own), self.new.paths)
        return {**state, **{n: v for n, v in DEFAULTS.items() if n not in state}}

    def _split(self, chunks: list[_ChunkParts]) -> list[list[_Own]]:
        """The parameters of each optimizer of the chain."""
        own = [
            (chunk, name)
            for chunk in chunks
            for name, known in chunk.parameters.items()
            if len(self.of[known]) > 1
        ]
        if not self.stages.has_expert_optimizer:
            return [own]
        return [[one for one in own if is_expert(one[1]) == flag] for flag in (False, True)]

    def _all_groups(self, of_experts: bool) -> list[dict[str, Any]]:
        groups = groups_of(self.values)
        return split_groups(groups, step_of(self.values), of_experts=of_experts)

    def _groups(self) -> Any:
        """The state of a distributed optimizer beside its parameters."""
        chain = [False, True] if self.stages.has_expert_optimizer else [False]
        found = [
            {"optimizer": {"param_groups": self._all_groups(flag)}, **scaler_state(self.values)}
            for flag in chain
        ]
        return found if len(found) > 1 else found[0]

    def _flat_state(self, chunks: list[_ChunkParts], targets: list[_PartPlace]) -> Any:
        """The flat buffers of a distributed optimizer, and in `targets` where each tensor is."""
        found: list[Any] = []
        for number, own in enumerate(self._split(chunks)):
            # Dense parameters are those of all expert-parallel ranks: the first saves them.
            if number == 0 and self.stages.has_expert_optimizer and chunks[0].place.ep > 0:
                found.append(None)
                continue
            found.append(self._buffers(own, targets))
        return found if len(found) > 1 else found[0]

    def _buffers(self, own: list[_Own], targets: list[_PartPlace]) -> dict[Any, Any]:
        parameters = []
        chunks = {chunk.place.vp: chunk for chunk, _ in own}
        for chunk, name in own:
            weight = self.of[chunk.parameters[name]].get("")
            if weight is None:
                raise RecipeError(
                    f"{chunk.parameters[name]!r} has optimizer state and no weight, whose type "
                    "says which buffer it is in; convert to torch-dist"
                )
            dtype = self.new.tensors[weight].dtype
            parameters.append(RankParameter(chunk.place.vp, name, dtype, chunk.shapes[name]))
        is_shared = self.grid.sizes.pp > 1 and self.stages.is_tied
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(list_buffers(parameters, is_embedding_shared=is_shared)):
            chunk = chunks[buffer[0][0].chunk]
            plan = plan_buffer([buffered for _, buffered in buffer], self._bucket_size(chunk))
            wide = as_dtype("float32")
            kept = {
                key: NewTensor.of(wide, (plan.coalesced_length,)) for key in _FLAT_KEYS.values()
            }
            types = (Global("torch", buffer[0][0].dtype.name), Global("torch", "float32"))
            state[number] = {types: {**kept, "numel_unpadded": plan.coalesced_length}}
            for buffered, start in plan.coalesced():
                of = self.of[chunk.parameters[buffered.name]]
                for key, flat in _FLAT_KEYS.items():
                    if key in of:
                        self._expect_wide(of[key])
                        targets.append(_PartPlace(of[key], chunk.slot, kept[flat], start))
        return state

    def _expect_wide(self, name: str) -> None:
        dtype = self.new.tensors[name].dtype
        if dtype.name != "float32":
            raise RecipeError(
                f"{name!r} is {dtype.name}, and a distributed optimizer's buffers are of float32; "
                "convert to torch-dist"
            )

    def _bucket_size(self, chunk: _ChunkParts) -> int | None:
        # Only where it is so has a buffer several buckets: in the first chunk of the first stage.
        is_first = (chunk.place.pp, chunk.place.vp) == (0, 0)
        if not self.arguments.get("overlap_grad_reduce") or not is_first:
            return None
        return bucket_sizes(self.arguments)[0]

    def _number_state(self, chunks: list[_ChunkParts], targets: list[_PartPlace]) -> Any:
        """The state of an optimizer that is not distributed, whose parameters have numbers."""
        chain = []
        for flag, parameters in enumerate(self._split(chunks)):
            groups = self._all_groups(bool(flag))
            in_group: list[list[_Own]] = [[] for _ in groups]
            for chunk, name in parameters:
                for number in find_groups(groups, name, chunk.shapes[name])[:1]:
                    in_group[number].append((chunk, name))
            state: dict[int, dict[str, Any]] = {}
            masters: list[list[NewTensor]] = []
            kept_groups = []
            for group, members in zip(groups, in_group, strict=True):
                first = len(state)
                masters.append([])
                for chunk, name in members:
                    state[len(state)] = self._state_of(chunk, name, masters[-1], targets)
                kept_groups.append({**group, "params": [*range(first, len(state))]})
            # Megatron makes no group without parameters.
            kept = [n for n, members in enumerate(in_group) if members]
            chain.append(
                {
                    "optimizer": {"state": state, "param_groups": [kept_groups[n] for n in kept]},
                    "fp32_from_fp16_params": [masters[n] for n in kept],
                    **scaler_state(self.values),
                }
            )
        return chain if len(chain) > 1 else chain[0]

    def _state_of(
        self, chunk: _ChunkParts, own: str, masters: list[NewTensor], targets: list[_PartPlace]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, name in self.of[chunk.parameters[own]].items():
            if not key:
                continue
            tensor = self.new.tensors[name]
            shape = chunk.shapes[own] if tensor.layout.shape else ()
            made = NewTensor.of(tensor.dtype, shape)
            targets.append(_PartPlace(name, chunk.slot, made))
            if key == "master":
                masters.append(made)
            else:
                found[key] = made
        return found


def final_files(write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
    """The file that names the last step."""
    found = write_plan.values.get("iteration", 0)
    yield TRACKER_NAME, str(found if type(found) is int else 0).encode()


def place(
    tensors: Mapping[str, Any], values: Mapping[str, Any], grid: RankGrid
) -> dict[str, Layout]:
    """The layout of every tensor over the ranks of a grid."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return StageLayouts(grid, shapes, arguments_of(values)).layouts()
