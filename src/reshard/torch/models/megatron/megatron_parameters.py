"""Parameters of Megatron, where attributes do not say it all: grouped experts, fused members.

`GroupedMLP` multiplies by weights that are not transposed, one expert behind the other in
memory. What a view of it is for one expert, transposed, is what other modules call its weight::

    experts.weight1  [hidden, experts x 2 ffn]  -> [experts, hidden, 2 ffn] -> [e].T  linear_fc1
    experts.weight2  [experts x ffn, hidden]    -> [experts, ffn, hidden]   -> [e].T  linear_fc2

Source: `GroupedMLP.forward` of Megatron-core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import LocalParameter
from reshard.recipes.naming import Fusion
from reshard.torch.models.module_memory import tensors_of

_GROUPED = re.compile(r"(?P<experts>(?:.*\.)?experts)\.weight(?P<number>[12])")


def split_grouped(
    name: str, tensor: torch.Tensor, experts: int, is_cut: bool
) -> list[tuple[str, torch.Tensor, LocalParameter]] | None:
    """Each expert's weight, a view, by the name it has where experts are modules; None for others.

    Args:
        name: of the tensor in its module.
        tensor: of this rank.
        experts: how many this rank has; 0 where that is not known.
        is_cut: whether ranks share each expert.

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
    found = []
    for number, one in enumerate(whole):
        view = one.T
        parameter = LocalParameter(
            shape=tuple(view.shape),
            tensor_model_parallel=is_cut,
            partition_dim=0 if is_first else 1,
            is_expert=True,
            dtype=as_dtype(tensor.dtype).name,
        )
        own = f"{match['experts']}.local_experts.{number}.linear_fc{match['number']}.weight"
        found.append((own, view, parameter))
    return found


def find_gated(chunk: torch.nn.Module) -> frozenset[int]:
    """The parameters that have gate and up one behind the other, by their identity.

    Each rank has a part of both, also in versions of Megatron which do not say so by
    `partition_stride`; the config of the module that multiplies by them does. By identity, since
    what wraps a model leaves its own name out of those of the state.
    """
    found: set[int] = set()
    for module in chunk.modules():
        if getattr(getattr(module, "config", None), "gated_linear_unit", False) is not True:
            continue
        first = getattr(module, "linear_fc1", None)
        if isinstance(first, torch.nn.Module):
            found.update(map(id, first.parameters()))
        if isinstance(getattr(module, "weight1", None), torch.nn.Parameter):
            found.add(id(module.weight1))
    return frozenset(found)


def mark_gated(parameter: LocalParameter) -> LocalParameter:
    """A parameter of gate and up, of which each rank has a part.

    >>> fc1 = LocalParameter((12, 4), tensor_model_parallel=True)
    >>> mark_gated(fc1).partition_stride
    2
    """
    is_cut = parameter.tensor_model_parallel and parameter.partition_dim == 0
    says = (parameter.partition_sizes, parameter.heads, parameter.true_length)
    if not is_cut or parameter.partition_stride != 1 or says != (None, None, None):
        return parameter
    return replace(parameter, partition_stride=2)


def list_parameters(
    chunk: torch.nn.Module, names: MegatronNames
) -> Iterator[tuple[str, torch.Tensor, LocalParameter]]:
    """A chunk's tensors, with what Megatron says of them; experts of one tensor each by itself."""
    gated = find_gated(chunk)
    for name, value in tensors_of(chunk):
        grouped = split_grouped(name, value, names.experts_per_rank, names.ranks.expert_tp > 1)
        for own_name, own, parameter in grouped or [(name, value, LocalParameter.of(value))]:
            yield own_name, own, mark_gated(parameter) if id(value) in gated else parameter


def cut_members(parameter: LocalParameter, fusion: Fusion) -> LocalParameter:
    """A parameter whose members are each cut over all ranks, also where it does not say so.

    Not every version of Megatron marks gate and up by their `partition_stride`. Query, key and
    value have one group, too, where there is one key/value head, and ranks have stretches of it.
    """
    is_cut = parameter.tensor_model_parallel and parameter.partition_dim == fusion.dimension
    says = (parameter.partition_sizes, parameter.heads, parameter.true_length)
    is_gated = fusion.groups == 1 and len(set(fusion.shares)) == 1
    if not is_gated or not is_cut or says != (None, None, None):
        return parameter
    sizes = fusion.sizes(parameter.shape[fusion.dimension])
    return replace(parameter, partition_stride=1, partition_sizes=sizes)


def add_attributes(name: str, parameter: LocalParameter, says: Mapping[str, Any]) -> LocalParameter:
    """A parameter with what its attributes leave out.

    Raises:
        UsageError: a field that no parameter has.
    """
    known = {field.name for field in fields(LocalParameter)}
    if not set(says) <= known:
        raise UsageError(
            f"{sorted(set(says) - known)} of {name!r}; a parameter has {', '.join(sorted(known))}"
        )
    return replace(parameter, **says)
