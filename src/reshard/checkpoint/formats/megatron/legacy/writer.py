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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.checkpoint.formats.megatron import (
    TRACKER_NAME,
    common_state,
    iteration_name,
    legacy,
    modules,
    rank_blocks,
)
from reshard.checkpoint.formats.megatron.rank_blocks import RankParameter
from reshard.checkpoint.formats.megatron.rank_layouts import RankPlace, StageLayouts
from reshard.checkpoint.formats.optimizer_states import split_state_name
from reshard.checkpoint.formats.torch_files.building import NewTensor, TorchFilesBuilder
from reshard.checkpoint.formats.torch_files.pickles import Global
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    WritePlan,
    check_values,
)
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError

_FLAT_KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# The key of Transformer Engine's state among the parameters of a linear layer; None if absent.
_EXTRA = "_extra_state"


class RankFoldersPlanner:
    """A planner of a folder for each model-parallel rank.

    Raises:
        RecipeError: a model that the ranks do not divide; parameters in an unknown order.
        UsageError: a type that PyTorch does not have.
    """

    def __init__(self, new: NewCheckpoint) -> None:
        check_values(new.tensors)
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
        iteration = new.values.get("iteration", 0)
        # Names of folders have 7 digits.
        is_usual = type(iteration) is int and 0 <= iteration < 10**7
        self.folder = iteration_name(iteration if is_usual else 0)

    def plan_files(self) -> WritePlan:
        """Return all files, and the location of each tensor in them."""
        has_state = any(len(own) > 1 for own in self.of.values())
        ordered = self._sort(has_state)
        dtypes = {name: self.new.tensors[own[""]].dtype for name, own in self.of.items()}
        if has_state:
            self._expect_state(dtypes)
        for place, slots in self.stages.folders.items():
            parameters = self.stages.parameters(ordered, place, dtypes)
            self._write_rank(place, slots, parameters, has_state)
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

    def _expect_state(self, dtypes: Mapping[str, DType]) -> None:
        """Raise RecipeError unless the parameters have state as a reader, which counts them,
        expects it.
        """
        has_masters = any("master" in own for own in self.of.values())
        for name, own in self.of.items():
            if modules.is_buffer(name):
                continue
            if len(own) == 1:
                raise RecipeError(
                    f"{name!r} has no optimizer state, and others have; Megatron finds state by "
                    "the order of all parameters, so convert to torch-dist, or leave optimizer "
                    "state out (--exclude 'optimizer.*')"
                )
            expected = has_masters and dtypes[name].name in rank_blocks.NARROW
            if not self.is_distributed and ("master" in own) != expected:
                raise RecipeError(
                    f"{name!r} of {dtypes[name].name} has {'no' if expected else 'a'} master; an "
                    "optimizer that is not distributed has those of all 16-bit parameters, in "
                    "their order, and no others. Convert to torch-dist, or leave all out "
                    "(--exclude 'optimizer.state.*.master')"
                )

    def _write_rank(
        self,
        place: RankPlace,
        slots: Sequence[int],
        parameters: Sequence[RankParameter],
        has_state: bool,
    ) -> None:
        """Write the files of a rank; `slots` has the number of each of its chunks."""
        path = f"{self.folder}/{self.stages.sizes.folder_name(place)}"
        state = self._common()
        for number, slot in enumerate(slots):
            # Chunks of virtual stages share the file of their rank.
            key = "model" if len(slots) == 1 else f"model{number}"
            own = [parameter for parameter in parameters if parameter.chunk == number]
            state[key] = self._model_state(place._replace(vp=number), slot, own)
        if has_state and self.is_distributed:
            state["optimizer"] = self._groups()
        elif has_state:
            state["optimizer"] = self._number_state(slots, parameters)
        self.builder.write(f"{path}/{legacy.MODEL_NAMES[0]}", state, slots[0])
        if has_state and self.is_distributed:
            flat = self._flat_state(place, slots, parameters)
            if flat is not None:
                self.builder.write(f"{path}/{legacy.OPTIMIZER_NAME}", flat, slots[0])

    def _model_state(
        self, place: RankPlace, slot: int, parameters: Iterable[RankParameter]
    ) -> dict[str, Any]:
        model: dict[str, Any] = {}
        for parameter in parameters:
            own = self.stages.rank_name(parameter.name, place)
            own = modules.local_name(own) if self.is_local else own
            own = modules.grouped_name(own) if self.is_grouped else own
            model[own] = self.builder.put_new(self.of[parameter.name][""], slot, parameter.shape)
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

    def _split(self, parameters: Iterable[RankParameter]) -> list[list[RankParameter]]:
        """Return the parameters of each optimizer of the chain."""
        own = [parameter for parameter in parameters if len(self.of[parameter.name]) > 1]
        return rank_blocks.split_chain(own, 2 if self.stages.has_expert_optimizer else 1)

    def _groups(self) -> Any:
        """Return the state of a distributed optimizer without its buffers."""
        chain = [False, True] if self.stages.has_expert_optimizer else [False]
        states = [common_state.optimizer_state(self.values, of_experts=flag) for flag in chain]
        return states if len(states) > 1 else states[0]

    def _flat_state(
        self, place: RankPlace, slots: Sequence[int], parameters: Iterable[RankParameter]
    ) -> Any:
        """Return the flat buffers of a distributed optimizer."""
        states: list[Any] = []
        for number, own in enumerate(self._split(parameters)):
            # All expert-parallel ranks have the dense parameters: the first saves them.
            if number == 0 and self.stages.has_expert_optimizer and place.ep > 0:
                states.append(None)
                continue
            states.append(self._buffers(place, slots, own))
        return states if len(states) > 1 else states[0]

    def _buffers(
        self, place: RankPlace, slots: Sequence[int], parameters: Sequence[RankParameter]
    ) -> dict[Any, Any]:
        is_shared = self.stages.sizes.pp > 1 and self.stages.is_tied
        # Without this key Megatron expects the layout of before 2024, with separate buckets.
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(
            rank_blocks.list_buffers(parameters, is_embedding_shared=is_shared)
        ):
            chunk = buffer[0].chunk
            bucket_elements = self._bucket_size(place._replace(vp=chunk))
            plan = rank_blocks.plan_buffer(buffer, bucket_elements).coalesced()
            (length,), wide = plan.lengths, as_dtype("float32")
            flat_tensors = {key: NewTensor.of(wide, (length,)) for key in _FLAT_KEYS.values()}
            # The types of parameters and gradients: Megatron reduces those of bfloat16 in float32.
            types = (Global("torch", buffer[0].dtype.name), Global("torch", "float32"))
            # Megatron compares this length with its own, and ends if they differ.
            state[number] = {types: {**flat_tensors, "numel_unpadded": length}}
            for buffered, _, start in plan.places:
                state_names = self.of[buffered.name]
                for key, flat in _FLAT_KEYS.items():
                    if key not in state_names:
                        # Megatron would load zeros, for `master` as the weight itself.
                        raise RecipeError(
                            f"{buffered.name!r} has no {key}, which the buffers of a distributed "
                            "optimizer hold for every parameter; convert to torch-dist, or leave "
                            "optimizer state out (--exclude 'optimizer.*')"
                        )
                    self._expect_wide(state_names[key])
                    self.builder.put(state_names[key], slots[chunk], flat_tensors[flat], start)
        return state

    def _expect_wide(self, name: str) -> None:
        dtype = self.new.tensors[name].dtype
        if dtype.name != "float32":
            raise RecipeError(
                f"{name!r} is {dtype.name}, and a distributed optimizer's buffers are of float32; "
                "convert to torch-dist"
            )

    def _bucket_size(self, place: RankPlace) -> int | None:
        # Megatron divides buffers into buckets only in the first chunk of the first stage, where
        # the backward pass ends and ranks wait for the last reduction. Elsewhere the reduction of a
        # whole buffer overlaps with the compute of other stages and chunks.
        is_first = (place.pp, place.vp) == (0, 0)
        if not self.arguments.get("overlap_grad_reduce") or not is_first:
            return None
        return rank_blocks.bucket_sizes(self.arguments)[0]

    def _number_state(self, slots: Sequence[int], parameters: Iterable[RankParameter]) -> Any:
        """Return the state of an optimizer that is not distributed, by numbers of parameters."""
        chain = []
        for flag, of_optimizer in enumerate(self._split(parameters)):
            groups = common_state.split_groups(self.values, of_experts=bool(flag))
            in_group: list[list[RankParameter]] = [[] for _ in groups]
            for parameter in of_optimizer:
                # If several groups fit, the first is taken.
                numbers = common_state.find_groups(groups, parameter.name, parameter.shape)
                for number in numbers[:1]:
                    in_group[number].append(parameter)
            state: dict[int, dict[str, Any]] = {}
            masters: list[list[NewTensor]] = []
            kept_groups = []
            for group, members in zip(groups, in_group, strict=True):
                first = len(state)
                masters.append([])
                for parameter in members:
                    slot = slots[parameter.chunk]
                    state[len(state)] = self._state_of(parameter, slot, masters[-1])
                kept_groups.append({**group, "params": [*range(first, len(state))]})
            # Megatron does not make groups without parameters.
            filled = [n for n, members in enumerate(in_group) if members]
            chain.append(
                {
                    "optimizer": {"state": state, "param_groups": [kept_groups[n] for n in filled]},
                    "fp32_from_fp16_params": [masters[n] for n in filled],
                    **common_state.scaler_state(self.values),
                }
            )
        return chain if len(chain) > 1 else chain[0]

    def _state_of(
        self, parameter: RankParameter, slot: int, masters: list[NewTensor]
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, name in self.of[parameter.name].items():
            if not key:
                continue
            # A step is a scalar.
            shape = parameter.shape if self.new.tensors[name].layout.shape else ()
            tensor = self.builder.put_new(name, slot, shape)
            if key == "master":
                masters.append(tensor)
            else:
                state[key] = tensor
        return state


def final_files(write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
    """Yield the file that names the last step."""
    iteration = write_plan.values.get("iteration", 0)
    yield TRACKER_NAME, str(iteration if type(iteration) is int else 0).encode()
