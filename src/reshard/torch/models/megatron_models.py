"""Megatron's models: what their configs, process groups and parameter attributes specify.

1. A `TransformerConfig` has the numbers of a config.json: query groups, experts. Some settings have
   no counterpart on the Hub, where weights of these names are used in another way. Such a model is
   moved only to a Megatron model with the same settings, since its tensors would fit.
2. Each rank reads the ranks of its process groups, counts the layers of its model chunks, and sends
   both to all ranks (`model_pairs`). Each rank assembles the grids (`reshard.megatron.ranks`) and
   the layers of each pipeline stage, by which local names become global. The number of experts of
   the full model is in its config, or an argument of the refit.
3. Parameters have attributes. `GroupedMLP` multiplies by weights that are not transposed, with the
   experts concatenated in memory. A transposed view of each expert is the weight of other modules::

       experts.weight1  [hidden, experts x 2 ffn]  -> [experts, hidden, 2 ffn] -> [e].T  linear_fc1
       experts.weight2  [experts x ffn, hidden]    -> [experts, ffn, hidden]   -> [e].T  linear_fc2

Sources: `TransformerConfig` and `GroupedMLP.forward` of Megatron-core 0.16.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.dtypes import dtype as as_dtype
from reshard.errors import NotationError, ReshardError, UsageError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter
from reshard.megatron.ranks import GROUP_AXES, MegatronGrids, places_along
from reshard.recipes.naming import Fusion
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.model_inputs import MegatronModel, list_chunks, tensors_of

# By the names of config.json.
_NUMBERS = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "num_experts": "num_moe_experts",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
}
# Alternative names in configs on the Hub.
_ALSO = {"num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts")}
# Settings under which weights of the same names and shapes are used in another way.
_REFUSED = {
    "layernorm_zero_centered_gamma": "its norms add 1 to their weights",
    "rotary_interleaved": "rotary positions turn neighbouring elements, not halves",
    "attention_output_gate": "queries have gates beside them in linear_qkv",
}
_UNGATED = "gated_linear_unit"


@dataclass(frozen=True, slots=True)
class MegatronConfig:
    """The properties of a Megatron model specified by its configs and its user.

    Attributes:
        numbers: by the names of config.json.
        config: values that the user gave.
        is_tied: whether its output layer is its embedding.
        unlike: how its weights differ in meaning from those of their names on the Hub.
    """

    numbers: Mapping[str, Any]
    config: Mapping[str, Any]
    is_tied: bool
    unlike: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int | None:
        """The number of experts in a layer of the full model, or None if unknown."""
        return _number_of(self.numbers, "num_experts") or _number_of(self.config, "num_experts")

    @property
    def vocabulary(self) -> int | None:
        """The length of the vocabulary without padding, or None if not given."""
        return _number_of(self.config, "vocab_size")


def read_config(model: MegatronModel) -> MegatronConfig | None:
    """Return what a Megatron model specifies, or None without any config.

    Raises:
        UsageError: an invalid config, or a config that contradicts the model.
    """
    config = _read_given(model.config)
    chunks = list_chunks(model)
    inner = chunks[0] if chunks else None
    if inner is not None:
        *_, inner = unwrap(inner)
    module_config = getattr(inner, "config", None)
    if not hasattr(module_config, "num_attention_heads") or not hasattr(module_config, _UNGATED):
        return (
            MegatronConfig({}, config, bool(config.get("tie_word_embeddings"))) if config else None
        )
    values = {ours: getattr(module_config, theirs, None) for ours, theirs in _NUMBERS.items()}
    # The type itself, since a bool is an int, too.
    numbers = {name: number for name, number in values.items() if type(number) is int}
    numbers["multi_latent_attention"] = int(
        bool(getattr(module_config, "multi_latent_attention", False))
    )
    for name, number in numbers.items():
        given_number = _number_of(config, name)
        if given_number not in (None, number):
            raise UsageError(
                f"the config says {name}={given_number}, but the model has {number}; give the "
                "config of this model"
            )
    is_tied = getattr(inner, "share_embeddings_and_output_weights", False)
    return MegatronConfig(numbers, config, bool(is_tied), _find_unlike(module_config))


def unwrap(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and the modules that it wraps, for 16 bits or to reduce gradients.

    >>> wrapped = torch.nn.Module()
    >>> wrapped.module = torch.nn.Linear(2, 2)
    >>> list(unwrap(wrapped))[1]
    Linear(in_features=2, out_features=2, bias=True)
    """
    yield module
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
        yield module


def _read_given(config: Any) -> dict[str, Any]:
    """Return the relevant values of a given config."""
    if config is None:
        return {}
    values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if not isinstance(values, Mapping) or not isinstance(values.get("model_type"), str):
        raise UsageError(
            f"config={config!r} has no model_type; give the content of config.json, or "
            "transformers' config"
        )
    return {
        name: value for name, value in values.items() if isinstance(value, str | int | float | None)
    }


def _find_unlike(config: Any) -> tuple[str, ...]:
    reasons = [f"{name}: {why}" for name, why in _REFUSED.items() if getattr(config, name, False)]
    if not getattr(config, _UNGATED):
        reasons.append(f"no {_UNGATED}: linear_fc1 is one layer, and not gate above up")
    return tuple(reasons)


def _number_of(values: Mapping[str, Any], name: str) -> int | None:
    for called in (name, *_ALSO.get(name, ())):
        if type(values.get(called)) is int:
            return int(values[called])
    return None


# Megatron's names of the groups, by axis.
_CALLED = {"etp": "expt_tp", "edp": "expt_dp"}
# The attribute of modules that holds them.
_ATTRIBUTE = "pg_collection"


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A rank's groups and the layers of its chunks, or a problem."""

    groups: Mapping[str, tuple[int, ...]]
    layers: tuple[int, ...]
    stack: str
    problem: str = ""


def describe_groups(model: MegatronModel, group: RankGroup) -> GroupDescription:
    """Return this rank's description of a model; errors become its problem."""
    try:
        groups = {
            axis: tuple(map(group.find_rank, ranks)) for axis, ranks in _find_ranks(model).items()
        }
        return GroupDescription(groups, tuple(_count_layers(model)), model.stack)
    except ReshardError as error:
        problem = str(error)
    except Exception as error:
        # Unreadable groups, or a chunk that is not a module: report it, since other ranks wait.
        problem = f"{type(error).__name__}: {error}"
    return GroupDescription({}, (), model.stack, problem)


def find_groups(module: torch.nn.Module) -> Any:
    """Return the process groups of a module or of a module that it wraps, or None."""
    candidates = (getattr(wrapped, _ATTRIBUTE, None) for wrapped in unwrap(module))
    return next((groups for groups in candidates if groups is not None), None)


def read_groups(description: Any) -> GroupDescription | None:
    """Return a rank's description, or None if its model has names."""
    if description is None:
        return None
    try:
        groups = {axis: tuple(map(int, ranks)) for axis, ranks in description["groups"].items()}
        layers = tuple(map(int, description["layers"]))
        return GroupDescription(
            groups, layers, str(description["stack"]), str(description["problem"])
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NotationError(f"{description!r} does not say which groups a rank is in") from error


def _find_ranks(model: MegatronModel) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group of this rank, by axis."""
    groups = model.groups
    if groups is None:
        groups = find_groups(list_chunks(model)[0]) if list_chunks(model) else None
    if groups is None:
        raise UsageError(
            "a MegatronModel without names, process groups, or modules that have them "
            f"(`{_ATTRIBUTE}`); give names=MegatronNames(...), or groups={{'tp': ..., 'pp': ...}}"
        )
    axes = {*GROUP_AXES, *_CALLED.values()}
    if isinstance(groups, Mapping) and not groups.keys() <= axes:
        raise UsageError(
            f"groups {sorted(map(str, groups.keys() - axes))}; they are along "
            f"{', '.join(GROUP_AXES)}"
        )
    ranks_by_axis = {}
    for axis in GROUP_AXES:
        for called in (axis, _CALLED.get(axis, axis)):
            group = groups.get(called) if isinstance(groups, Mapping) else None
            if group is None:
                # A collection of Megatron is an object, and a table of the user a mapping.
                group = getattr(groups, called, None)
            if group is not None:
                ranks_by_axis[axis] = _list_members(axis, group)
    if not ranks_by_axis:
        raise UsageError(
            f"groups={groups!r} has none along {', '.join(GROUP_AXES)}; give torch's process "
            "groups, by these names"
        )
    return ranks_by_axis


def _list_members(axis: str, group: Any) -> tuple[int, ...]:
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    try:
        ranks = tuple(operator.index(rank) for rank in group)
    except TypeError:
        ranks = ()
    if dist.get_rank() not in ranks:
        raise UsageError(
            f"the group along {axis} is {group!r}; give the torch process group that this rank is "
            f"in, or a list of its ranks, rank {dist.get_rank()} among them"
        )
    return ranks


def _count_layers(model: MegatronModel) -> list[int]:
    """Return the number of layers of the stack in each chunk, counted from 0."""
    pattern = re.compile(rf"(?:^|\.){re.escape(model.stack)}\.(\d+)(?=\.|$)")
    counts = []
    for number, chunk in enumerate(list_chunks(model)):
        names = [name for name, _ in tensors_of(chunk)]
        layers = {int(match[1]) for match in map(pattern.search, names) if match}
        if layers != set(range(len(layers))):
            raise UsageError(
                f"chunk {number} has the layers {_abbreviate(sorted(layers))} of {model.stack!r}; "
                "Megatron counts them from 0 in each, and a model that does not has names of its "
                "own: give names=MegatronNames(...)"
            )
        counts.append(len(layers))
    return counts


def _abbreviate(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def find_names(described: Mapping[int, GroupDescription], num_experts: int | None) -> MegatronNames:
    """Return the names of a model from the descriptions of all ranks."""
    first_rank, first = next(iter(described.items()))
    for rank, other in described.items():
        if (len(other.layers), other.stack) != (len(first.layers), first.stack):
            raise UsageError(
                f"rank {first_rank} has {len(first.layers)} chunks of {first.stack!r}, rank {rank} "
                f"{len(other.layers)} of {other.stack!r}; all ranks have equally many of one stack"
            )
    grids = MegatronGrids.from_groups({rank: other.groups for rank, other in described.items()})
    stages = places_along(grids.dense, "pp")
    by_stage: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, other in described.items():
        peer, layers = by_stage.setdefault(stages[rank], (rank, other.layers))
        if layers != other.layers:
            raise UsageError(
                f"ranks {peer} and {rank} are on pipeline stage {stages[rank]}, and one has "
                f"{list(layers)} layers of {first.stack!r} by chunk, the other {list(other.layers)}"
            )
    # A model with a single chunk counts its layers globally. With virtual pipelining each stage has
    # several chunks.
    counts = [by_stage[stage][1] for stage in range(grids.pp)]
    is_whole = grids.pp == 1 and len(first.layers) == 1
    layers_of = None if is_whole else PipelineLayers(tuple(zip(*counts, strict=True)))
    return MegatronNames(grids, layers_of, num_experts, first.stack)


_GROUPED = re.compile(r"(?P<experts>(?:.*\.)?experts)\.weight(?P<number>[12])")


def split_grouped(
    name: str, tensor: torch.Tensor, experts: int, is_cut: bool
) -> list[tuple[str, torch.Tensor, LocalParameter]] | None:
    """Return a view of each expert's weight, named as in a module, or None for other tensors.

    Args:
        name: the tensor's name in its module.
        tensor: the tensor of this rank.
        experts: the number of experts on this rank, or 0 if unknown.
        is_cut: whether each expert is sharded over ranks.

    >>> found = split_grouped("mlp.experts.weight2", torch.arange(12.0).view(6, 2), 3, False)
    >>> [(name, view.tolist()) for name, view, _ in found][1]
    ('mlp.experts.local_experts.1.linear_fc2.weight', [[4.0, 6.0], [5.0, 7.0]])
    >>> split_grouped("mlp.linear_fc1.weight", torch.ones(2, 2), 3, False) is None
    True
    """
    match = _GROUPED.fullmatch(name)
    if match is None or not experts or tensor.ndim != 2 or tensor.numel() % experts:
        return None
    is_first = match["number"] == "1"
    hidden = tensor.shape[0 if is_first else 1]
    local = tensor.detach()
    whole = local.view((experts, hidden, -1) if is_first else (experts, -1, hidden))
    experts_found = []
    for number, weight in enumerate(whole):
        view = weight.T
        parameter = LocalParameter(
            shape=tuple(view.shape),
            tensor_model_parallel=is_cut,
            partition_dim=0 if is_first else 1,
            is_expert=True,
            dtype=as_dtype(tensor.dtype).name,
        )
        expert_name = f"{match['experts']}.local_experts.{number}.linear_fc{match['number']}.weight"
        experts_found.append((expert_name, view, parameter))
    return experts_found


def find_gated(chunk: torch.nn.Module) -> frozenset[int]:
    """Return the ids of parameters that concatenate gate and up.

    Each rank has a part of both, also in versions of Megatron without `partition_stride`; the
    config of the module specifies it. Ids are used because wrappers remove their names from the
    state dict.
    """
    ids: set[int] = set()
    for module in chunk.modules():
        if getattr(getattr(module, "config", None), "gated_linear_unit", False) is not True:
            continue
        first = getattr(module, "linear_fc1", None)
        if isinstance(first, torch.nn.Module):
            ids.update(map(id, first.parameters()))
        if isinstance(getattr(module, "weight1", None), torch.nn.Parameter):
            ids.add(id(module.weight1))
    return frozenset(ids)


def mark_gated(parameter: LocalParameter) -> LocalParameter:
    """Return a sharded parameter of gate and up with its partition stride.

    >>> fc1 = LocalParameter((12, 4), tensor_model_parallel=True)
    >>> mark_gated(fc1).partition_stride
    2
    """
    is_cut = parameter.tensor_model_parallel and parameter.partition_dim == 0
    says = (parameter.partition_sizes, parameter.heads, parameter.true_length)
    if not is_cut or parameter.partition_stride != 1 or says != (None, None, None):
        return parameter
    # The stride counts the matrices that are concatenated: gate and up.
    return replace(parameter, partition_stride=2)


def list_parameters(
    chunk: torch.nn.Module, names: MegatronNames
) -> Iterator[tuple[str, torch.Tensor, LocalParameter]]:
    """Yield a chunk's tensors with their attributes; grouped experts as separate tensors."""
    gated = find_gated(chunk)
    for name, value in tensors_of(chunk):
        grouped = split_grouped(name, value, names.experts_per_rank, names.ranks.expert_tp > 1)
        for own_name, tensor, parameter in grouped or [(name, value, LocalParameter.of(value))]:
            yield own_name, tensor, mark_gated(parameter) if id(value) in gated else parameter


def cut_members(parameter: LocalParameter, fusion: Fusion) -> LocalParameter:
    """Return a parameter whose members are each sharded over all ranks.

    Some versions of Megatron do not set `partition_stride` of gate and up. Query, key and value
    also form a single group if there is a single key/value head, split into a range for each rank.
    """
    is_cut = parameter.tensor_model_parallel and parameter.partition_dim == fusion.dimension
    says = (parameter.partition_sizes, parameter.heads, parameter.true_length)
    is_gated = fusion.groups == 1 and len(set(fusion.shares)) == 1
    if not is_gated or not is_cut or says != (None, None, None):
        return parameter
    sizes = fusion.sizes(parameter.shape[fusion.dimension])
    return replace(parameter, partition_stride=1, partition_sizes=sizes)


def add_attributes(name: str, parameter: LocalParameter, says: Mapping[str, Any]) -> LocalParameter:
    """Return a parameter with additional attributes.

    Raises:
        UsageError: a field that no parameter has.
    """
    accepted = {field.name for field in fields(LocalParameter)}
    if not set(says) <= accepted:
        raise UsageError(
            f"{sorted(set(says) - accepted)} of {name!r}; a parameter has "
            f"{', '.join(sorted(accepted))}"
        )
    return replace(parameter, **says)
