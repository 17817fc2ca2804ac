"""Megatron's ranks, found from the live process groups that a model comes with.

1. Each rank reads which ranks its groups have, and counts the layers of its model chunks;
2. all ranks tell each other, in one small gather of all of them (`model_pairs`);
3. each puts the same together: both grids (`reshard.megatron.ranks`), and how many layers each
   pipeline stage has, so that local names become those of the whole model.

No rank can count the experts of the whole model: its config says them, or the refit is told.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import NotationError, ReshardError, UsageError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.ranks import GROUP_AXES, MegatronGrids, places_along
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.given_models import MegatronModel, chunks_of
from reshard.torch.models.megatron.megatron_configs import unwrap
from reshard.torch.models.module_memory import tensors_of

# What Megatron calls the groups, by axis.
_CALLED = {"etp": "expt_tp", "edp": "expt_dp"}
# Where its modules keep them.
_ATTRIBUTE = "pg_collection"


@dataclass(frozen=True, slots=True)
class GroupsTold:
    """What one rank says of a model: its groups, and the layers of each chunk; or what is wrong."""

    groups: Mapping[str, tuple[int, ...]]
    layers: tuple[int, ...]
    stack: str
    problem: str = ""


def describe_groups(model: MegatronModel, group: RankGroup) -> GroupsTold:
    """What this rank says of a model, also where that is a problem."""
    try:
        found = {
            axis: tuple(map(group.find_rank, ranks)) for axis, ranks in _find_ranks(model).items()
        }
        return GroupsTold(found, tuple(_count_layers(model)), model.stack)
    except ReshardError as error:
        problem = str(error)
    except Exception as error:
        # Groups that cannot be read, or a chunk that is no module: the other ranks wait for this.
        problem = f"{type(error).__name__}: {error}"
    return GroupsTold({}, (), model.stack, problem)


def find_groups(module: torch.nn.Module) -> Any:
    """The process groups that a module comes with, or one that it wraps; None without any."""
    found = (getattr(one, _ATTRIBUTE, None) for one in unwrap(module))
    return next((groups for groups in found if groups is not None), None)


def read_groups(said: Any) -> GroupsTold | None:
    """What a rank said; None where its model has names. Raises NotationError for anything else."""
    if said is None:
        return None
    try:
        groups = {axis: tuple(map(int, of)) for axis, of in said["groups"].items()}
        layers = tuple(map(int, said["layers"]))
        return GroupsTold(groups, layers, str(said["stack"]), str(said["problem"]))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NotationError(f"{said!r} does not say which groups a rank is in") from error


def _find_ranks(model: MegatronModel) -> dict[str, tuple[int, ...]]:
    """The global ranks of each group of this rank, by axis."""
    groups = model.groups
    if groups is None:
        groups = find_groups(chunks_of(model)[0]) if chunks_of(model) else None
    if groups is None:
        raise UsageError(
            "a MegatronModel without names, process groups, or modules that have them "
            f"(`{_ATTRIBUTE}`); give names=MegatronNames(...), or groups={{'tp': ..., 'pp': ...}}"
        )
    known = {*GROUP_AXES, *_CALLED.values()}
    if isinstance(groups, Mapping) and not groups.keys() <= known:
        raise UsageError(
            f"groups {sorted(map(str, groups.keys() - known))}; they are along "
            f"{', '.join(GROUP_AXES)}"
        )
    found = {}
    for axis in GROUP_AXES:
        for called in (axis, _CALLED.get(axis, axis)):
            group = groups.get(called) if isinstance(groups, Mapping) else None
            if group is None:
                group = getattr(groups, called, None)
            if group is not None:
                found[axis] = _list_members(axis, group)
    if not found:
        raise UsageError(
            f"groups={groups!r} has none along {', '.join(GROUP_AXES)}; give torch's process "
            "groups, by these names"
        )
    return found


def _list_members(axis: str, group: Any) -> tuple[int, ...]:
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    try:
        found = tuple(operator.index(rank) for rank in group)
    except TypeError:
        found = ()
    if dist.get_rank() not in found:
        raise UsageError(
            f"the group along {axis} is {group!r}; give the torch process group that this rank is "
            f"in, or a list of its ranks, rank {dist.get_rank()} among them"
        )
    return found


def _count_layers(model: MegatronModel) -> list[int]:
    """How many layers of the stack each chunk has, which it counts from 0."""
    pattern = re.compile(rf"(?:^|\.){re.escape(model.stack)}\.(\d+)(?=\.|$)")
    found = []
    for number, chunk in enumerate(chunks_of(model)):
        names = [name for name, _ in tensors_of(chunk)]
        layers = {int(match[1]) for match in map(pattern.search, names) if match}
        if layers != set(range(len(layers))):
            raise UsageError(
                f"chunk {number} has the layers {_abbreviate(sorted(layers))} of {model.stack!r}; "
                "Megatron counts them from 0 in each, and a model that does not has names of its "
                "own: give names=MegatronNames(...)"
            )
        found.append(len(layers))
    return found


def _abbreviate(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def find_names(described: Mapping[int, GroupsTold], num_experts: int | None) -> MegatronNames:
    """What all ranks together say of a model."""
    first_rank, first = next(iter(described.items()))
    for rank, one in described.items():
        if (len(one.layers), one.stack) != (len(first.layers), first.stack):
            raise UsageError(
                f"rank {first_rank} has {len(first.layers)} chunks of {first.stack!r}, rank {rank} "
                f"{len(one.layers)} of {one.stack!r}; all ranks have equally many of one stack"
            )
    grids = MegatronGrids.from_groups({rank: one.groups for rank, one in described.items()})
    stages = places_along(grids.dense, "pp")
    by_stage: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, one in described.items():
        other, layers = by_stage.setdefault(stages[rank], (rank, one.layers))
        if layers != one.layers:
            raise UsageError(
                f"ranks {other} and {rank} are on pipeline stage {stages[rank]}, and one has "
                f"{list(layers)} layers of {first.stack!r} by chunk, the other {list(one.layers)}"
            )
    # A model of one chunk counts over the whole model.
    # By chunk and stage: virtual pipelining deals each stage several chunks of layers.
    counts = [by_stage[stage][1] for stage in range(grids.pp)]
    is_whole = grids.pp == 1 and len(first.layers) == 1
    layers_of = None if is_whole else PipelineLayers(tuple(zip(*counts, strict=True)))
    return MegatronNames(grids, layers_of, num_experts, first.stack)
