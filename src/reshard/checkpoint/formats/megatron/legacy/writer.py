"""The files of a new checkpoint in the folders of Megatron's ranks.

    latest_checkpointed_iteration.txt
    iter_0002000/mp_rank_01_003/model_optim_rng.pt, distrib_optim.pt

1. Each model-parallel rank has a folder, with its rank's names and numbers (`StageLayouts`), for
   Transformer Engine's layers or local layers, by `args.transformer_impl`.
2. Optimizer state is in the order of the modules, as Megatron expects: by number, or in the flat
   buffers of a distributed optimizer, by `args.use_distributed_optimizer`. Buffers have a single
   bucket, except for an embedding that two stages share; with `args.overlap_grad_reduce` they have
   buckets of `args.ddp_bucket_size`.
3. Files have the format of `torch.save`; their tensors are written later (`torch_files.building`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from reshard.checkpoint.formats.megatron import (
    TRACKER_NAME,
    common_state,
    iteration_name,
    legacy,
    modules,
    rank_blocks,
)
from reshard.checkpoint.formats.megatron.rank_layouts import RankPlace, StageLayouts
from reshard.checkpoint.formats.torch_files.building import NewTensor, TorchFilesBuilder
from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name
from reshard.checkpoint.formats.torch_files.pickles import Global
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    WritePlan,
    check_values,
)
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError

_FLAT_KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# The key of Transformer Engine's state among the parameters of a linear layer; None if absent.
_EXTRA = "_extra_state"


class _ChunkParts(NamedTuple):
    """The parameters of a chunk on a rank, by their names there, in the order of modules."""

    place: RankPlace
    slot: int
    parameters: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


# A parameter of a rank: its chunk, and its name there.
_Own = tuple[_ChunkParts, str]


def arrange(new: NewCheckpoint) -> WritePlan:
    """Return a folder for each model-parallel place, with its rank's files.

    Raises:
        RecipeError: a model that the ranks do not divide; parameters in an unknown order.
        UsageError: a type that PyTorch does not have.
    """
    check_values(new.tensors)
    return _Arranger(new).arrange()


class _Arranger:
    """A new checkpoint while it is planned."""

    def __init__(self, new: NewCheckpoint) -> None:
        self.values = new.values
        self.arguments = common_state.arguments_of(new.values)
        self.is_distributed = bool(self.arguments.get("use_distributed_optimizer", True))
        self.new = new = common_state.without_steps(new) if self.is_distributed else new
        shapes = {name: tensor.layout.shape for name, tensor in new.tensors.items()}
        self.stages = StageLayouts(new.mesh, shapes, self.arguments)
        if self.stages.experts and common_state.has_stacked_experts(self.arguments):
            raise RecipeError(
                "by args.moe_grouped_gemm a layer's experts are one weight (GroupedMLP), "
                "which is not written; convert to torch-dist, which GroupedMLP loads"
            )
        modules.expect_mixers(new.tensors, in_parts=False)
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
        self.builder = TorchFilesBuilder(new.tensors)
        self.folder = iteration_name(self._iteration())

    def _iteration(self) -> int:
        iteration = self.values.get("iteration", 0)
        return iteration if type(iteration) is int and 0 <= iteration < 10**7 else 0

    def arrange(self) -> WritePlan:
        """Return all files, and the location of each tensor in them."""
        has_state = any(len(own) > 1 for own in self.of.values())
        ordered = self._sort(has_state)
        for place, slots in self.stages.folders.items():
            chunks = [
                self._parts(place._replace(vp=number), slot, ordered)
                for number, slot in enumerate(slots)
            ]
            self._write_rank(chunks, has_state)
        bound = self.builder.bind()
        # Tensors are listed in the order of the source, which differs from the ranks' files.
        return WritePlan(
            legacy.FORMAT_NAME,
            self.new.mesh,
            {name: bound[name] for name in self.new.tensors},
            tuple(self.builder.files),
            values=common_state.held_values(self.new),
            paths=dict(self.new.paths),
            notes=common_state.describe_decay(self.values, self.new.tensors),
        )

    def _sort(self, has_state: bool) -> list[str]:
        """Return the parameters in the order of the modules; as they are where none need it."""
        ordered, unknown = modules.sort_by_modules(self.of, self.arguments)
        unknown = [name for name in unknown if len(self.of[name]) > 1]
        if has_state and unknown:
            raise RecipeError(
                f"the place of {unknown[0]!r} among Megatron's modules is not known, and optimizer "
                "state has no names there; convert to torch-dist, or leave optimizer state out "
                "(--exclude 'optimizer.*')"
            )
        return ordered

    def _parts(self, place: RankPlace, slot: int, ordered: list[str]) -> _ChunkParts:
        parts = _ChunkParts(place, slot, {}, {})
        for name in self.stages.held(ordered, place):
            own = self.stages.rank_name(name, place)
            own = modules.local_name(own) if self.is_local else own
            own = modules.grouped_name(own) if self.is_grouped else own
            parts.parameters[own] = name
            whole = self.stages.weights.get(name)
            if whole is not None:
                parts.shapes[own] = self.stages.block(name, whole, place).block_shape
        return parts

    def _write_rank(self, chunks: list[_ChunkParts], has_state: bool) -> None:
        first = chunks[0]
        path = f"{self.folder}/{self.stages.sizes.folder_name(first.place)}"
        state = self._common()
        for number, chunk in enumerate(chunks):
            # Chunks of virtual stages share the file of their rank.
            key = "model" if len(chunks) == 1 else f"model{number}"
            state[key] = self._model_state(chunk)
        if has_state:
            make = self._groups if self.is_distributed else partial(self._number_state, chunks)
            state["optimizer"] = make()
        self.builder.write(f"{path}/{legacy.MODEL_NAMES[0]}", state, first.slot)
        if has_state and self.is_distributed:
            flat = self._flat_state(chunks)
            if flat is not None:
                self.builder.write(f"{path}/{legacy.OPTIMIZER_NAME}", flat, first.slot)

    def _model_state(self, chunk: _ChunkParts) -> dict[str, Any]:
        model: dict[str, Any] = {}
        for own, parameter in chunk.parameters.items():
            name = self.of[parameter].get("")
            if name is None:
                continue
            model[own] = self.builder.put_new(name, chunk.slot, chunk.shapes[own])
            module, _, last = own.rpartition(".")
            kind = module.rpartition(".")[2]
            # Transformer Engine's modules look up this key when they are loaded.
            if last == "weight" and (kind.startswith("linear_") or kind == "output_layer"):
                model[f"{module}.{_EXTRA}"] = None
        return model

    def _common(self) -> dict[str, Any]:
        sizes = self.stages.sizes
        chunks = sizes.vp if sizes.vp > 1 else None
        own = {"tp": sizes.tp, "pp": sizes.pp, "ep": sizes.ep, "etp": sizes.etp, "vp": chunks}
        return common_state.nest_values(self.values, self.new.paths, own)

    def _split(self, chunks: list[_ChunkParts]) -> list[list[_Own]]:
        """Return the parameters of each optimizer of the chain."""
        own = [
            (chunk, name)
            for chunk in chunks
            for name, known in chunk.parameters.items()
            if len(self.of[known]) > 1
        ]
        if not self.stages.has_expert_optimizer:
            return [own]
        return [
            [pair for pair in own if modules.is_expert(pair[1]) == flag] for flag in (False, True)
        ]

    def _groups(self) -> Any:
        """Return the state of a distributed optimizer without its buffers."""
        chain = [False, True] if self.stages.has_expert_optimizer else [False]
        states = [common_state.optimizer_state(self.values, of_experts=flag) for flag in chain]
        return states if len(states) > 1 else states[0]

    def _flat_state(self, chunks: list[_ChunkParts]) -> Any:
        """Return the flat buffers of a distributed optimizer."""
        states: list[Any] = []
        for number, own in enumerate(self._split(chunks)):
            # All expert-parallel ranks have the dense parameters: the first saves them.
            if number == 0 and self.stages.has_expert_optimizer and chunks[0].place.ep > 0:
                states.append(None)
                continue
            states.append(self._buffers(own))
        return states if len(states) > 1 else states[0]

    def _buffers(self, own: list[_Own]) -> dict[Any, Any]:
        parameters = []
        chunks = {chunk.place.vp: chunk for chunk, _ in own}
        for chunk, name in own:
            weight = self.of[chunk.parameters[name]].get("")
            if weight is None:
                raise RecipeError(
                    f"{chunk.parameters[name]!r} has optimizer state and no weight, whose type "
                    "determines the buffer; convert to torch-dist"
                )
            dtype = self.new.tensors[weight].dtype
            parameters.append(
                rank_blocks.RankParameter(chunk.place.vp, name, dtype, chunk.shapes[name])
            )
        is_shared = self.stages.sizes.pp > 1 and self.stages.is_tied
        # Without this mark Megatron takes the state for one of before 2024, with separate buckets.
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(
            rank_blocks.list_buffers(parameters, is_embedding_shared=is_shared)
        ):
            chunk = chunks[buffer[0].chunk]
            plan = rank_blocks.plan_buffer(buffer, self._bucket_size(chunk)).coalesced()
            (length,), wide = plan.lengths, as_dtype("float32")
            kept = {key: NewTensor.of(wide, (length,)) for key in _FLAT_KEYS.values()}
            # The types of parameters and gradients: Megatron reduces those of bfloat16 in float32.
            types = (Global("torch", buffer[0].dtype.name), Global("torch", "float32"))
            # Megatron compares this length with its own, and ends if they differ.
            state[number] = {types: {**kept, "numel_unpadded": length}}
            for buffered, _, start in plan.places:
                of = self.of[chunk.parameters[buffered.name]]
                for key, flat in _FLAT_KEYS.items():
                    if key in of:
                        self._expect_wide(of[key])
                        self.builder.put(of[key], chunk.slot, kept[flat], start)
        return state

    def _expect_wide(self, name: str) -> None:
        dtype = self.new.tensors[name].dtype
        if dtype.name != "float32":
            raise RecipeError(
                f"{name!r} is {dtype.name}, and a distributed optimizer's buffers are of float32; "
                "convert to torch-dist"
            )

    def _bucket_size(self, chunk: _ChunkParts) -> int | None:
        # Megatron divides buffers into buckets only in the first chunk of the first stage, where
        # the backward pass ends and ranks wait for the last reduction. Elsewhere the reduction of a
        # whole buffer overlaps with the compute of other stages and chunks.
        is_first = (chunk.place.pp, chunk.place.vp) == (0, 0)
        if not self.arguments.get("overlap_grad_reduce") or not is_first:
            return None
        return rank_blocks.bucket_sizes(self.arguments)[0]

    def _number_state(self, chunks: list[_ChunkParts]) -> Any:
        """Return the state of an optimizer that is not distributed, by numbers of parameters."""
        chain = []
        for flag, parameters in enumerate(self._split(chunks)):
            groups = common_state.split_groups(self.values, of_experts=bool(flag))
            in_group: list[list[_Own]] = [[] for _ in groups]
            for chunk, name in parameters:
                # If several groups fit, the first is taken.
                for number in common_state.find_groups(groups, name, chunk.shapes[name])[:1]:
                    in_group[number].append((chunk, name))
            state: dict[int, dict[str, Any]] = {}
            masters: list[list[NewTensor]] = []
            kept_groups = []
            for group, members in zip(groups, in_group, strict=True):
                first = len(state)
                masters.append([])
                for chunk, name in members:
                    state[len(state)] = self._state_of(chunk, name, masters[-1])
                kept_groups.append({**group, "params": [*range(first, len(state))]})
            # Megatron does not make groups without parameters.
            kept = [n for n, members in enumerate(in_group) if members]
            chain.append(
                {
                    "optimizer": {"state": state, "param_groups": [kept_groups[n] for n in kept]},
                    "fp32_from_fp16_params": [masters[n] for n in kept],
                    **common_state.scaler_state(self.values),
                }
            )
        return chain if len(chain) > 1 else chain[0]

    def _state_of(self, chunk: _ChunkParts, own: str, masters: list[NewTensor]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, name in self.of[chunk.parameters[own]].items():
            if not key:
                continue
            # A step is a scalar.
            shape = chunk.shapes[own] if self.new.tensors[name].layout.shape else ()
            made = self.builder.put_new(name, chunk.slot, shape)
            if key == "master":
                masters.append(made)
            else:
                state[key] = made
        return state


def final_files(write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
    """Yield the file that names the last step."""
    iteration = write_plan.values.get("iteration", 0)
    yield TRACKER_NAME, str(iteration if type(iteration) is int else 0).encode()
