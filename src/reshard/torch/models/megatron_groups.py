"""Megatron's ranks, found from the live process groups that a model comes with.

1. Each rank reads which ranks its groups have, and counts the layers of its model chunks;
2. all ranks tell each other, in one small gather of all of them;
3. each puts the same together: both grids (`reshard.megatron.groups`), and how many layers each
   pipeline stage has, so that local names become those of the whole model.

No rank can count the experts of the whole model: they are `num_experts` of the refit.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import NotationError, ReshardError, ShardError, UsageError
from reshard.megatron.groups import GROUP_AXES, MegatronGrids
from reshard.megatron.layers import PipelineLayers
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import places_along
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.parameters import MegatronModel, Model, chunks_of, tensors_of

# What Megatron calls the groups, by axis.
_CALLED = {"etp": "expt_tp", "edp": "expt_dp"}
# Where its modules keep them.
_ATTRIBUTE = "pg_collection"


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Both models as this rank has them, and why that cannot be; None where it can."""

    source: Model
    target: Model
    num_experts: int | None
    problem: str | None = None

    @classmethod
    def of(cls, source: Model, target: Model, num_experts: int | None) -> ModelPair:
        """Both, with the number of experts where their names lack it."""
        try:
            both = [
                _set_num_experts(_read_module(model), num_experts) for model in (source, target)
            ]
        except ReshardError as error:
            return cls(source, target, num_experts, str(error))
        return cls(both[0], both[1], num_experts)

    @property
    def notes(self) -> tuple[int, ...]:
        """What all ranks must know of any: whether a model lacks names, and is Megatron's."""
        both = [one for one in (self.source, self.target) if isinstance(one, MegatronModel)]
        return int(any(one.names is None for one in both)), int(bool(both))

    def named(self, notes: Sequence[int], group: RankGroup) -> tuple[Model, Model]:
        """Both models, with names also where they have process groups. All ranks call this.

        Args:
            notes: the greatest of all ranks.
            group: of all ranks.

        Raises:
            UsageError: on every rank, a number of experts for models that have no use for it.
            ShardError: on every rank, groups that make no grids, or layers that cannot be counted.
            RunError: a rank that does not answer.
        """
        lacks_names, is_megatrons = notes
        if self.num_experts is not None and not is_megatrons:
            raise UsageError(
                f"num_experts={self.num_experts}, but no rank has a MegatronModel; experts of "
                "other models have their numbers in the whole model, or get them by names"
            )
        if not lacks_names:
            return self.source, self.target
        return _gather_names(self.source, self.target, self.num_experts, group)


def _read_module(model: Model) -> Model:
    """A module that has Megatron's process groups is Megatron's."""
    if isinstance(model, torch.nn.Module) and getattr(model, _ATTRIBUTE, None) is not None:
        return MegatronModel(model)
    return model


def _set_num_experts(model: Model, num_experts: int | None) -> Model:
    names = model.names if isinstance(model, MegatronModel) else None
    if names is not None and not isinstance(names, MegatronNames):
        raise UsageError(f"a MegatronModel with names={names!r}; give MegatronNames, or groups")
    if names is not None and isinstance(model, MegatronModel) and model.groups is not None:
        raise UsageError(
            "a MegatronModel with names and groups; give one of them, and num_experts to the refit"
        )
    if num_experts is None:
        return model
    if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
        raise UsageError(f"num_experts={num_experts!r}; give how many the whole model has")
    if names is None or not isinstance(model, MegatronModel):
        return model
    if names.num_experts not in (None, num_experts):
        raise UsageError(
            f"num_experts={num_experts}, but the model's names are of {names.num_experts}; leave "
            "one of them out"
        )
    return replace(model, names=replace(names, num_experts=num_experts))


@dataclass(frozen=True, slots=True)
class _RankGroups:
    """What one rank says of a model: its groups, and the layers of each chunk; or what is wrong."""

    groups: Mapping[str, tuple[int, ...]]
    layers: tuple[int, ...]
    stack: str
    problem: str = ""


def _gather_names(
    source: Model, target: Model, num_experts: int | None, group: RankGroup
) -> tuple[Model, Model]:
    described = [
        asdict(_describe_groups(model, group))
        if isinstance(model, MegatronModel) and model.names is None
        else None
        for model in (source, target)
    ]
    every = gather(json.dumps(described).encode(), group).values
    told = {rank: [_read_groups(one) for one in json.loads(of)] for rank, of in every.items()}
    found, problems = [], []
    for number, (side, model) in enumerate((("source", source), ("target", target))):
        of = {rank: one for rank, both in told.items() if (one := both[number]) is not None}
        # Problems of both models are collected, so that people see all of them at once.
        wrong = [f"rank {rank}: {one.problem}" for rank, one in of.items() if one.problem]
        names = None
        try:
            names = _find_names(of, num_experts) if of and not wrong else None
        except ReshardError as error:
            wrong.append(f"the {side}: {error}")
        problems += wrong
        found.append(
            replace(model, names=names)
            if isinstance(model, MegatronModel) and model.names is None
            else model
        )
    if problems:
        raise ShardError("nothing was written: " + "\n  ".join(problems))
    return found[0], found[1]


def _describe_groups(model: MegatronModel, group: RankGroup) -> _RankGroups:
    try:
        found = {
            axis: tuple(map(group.find_rank, ranks)) for axis, ranks in _find_ranks(model).items()
        }
        return _RankGroups(found, tuple(_count_layers(model)), model.stack)
    except ReshardError as error:
        problem = str(error)
    except Exception as error:
        # Groups that cannot be read, or a chunk that is no module: the other ranks wait for this.
        problem = f"{type(error).__name__}: {error}"
    return _RankGroups({}, (), model.stack, problem)


def _read_groups(said: Any) -> _RankGroups | None:
    """What a rank said; None where its model has names. Raises NotationError for anything else."""
    if said is None:
        return None
    try:
        groups = {axis: tuple(map(int, of)) for axis, of in said["groups"].items()}
        layers = tuple(map(int, said["layers"]))
        return _RankGroups(groups, layers, str(said["stack"]), str(said["problem"]))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NotationError(f"{said!r} does not say which groups a rank is in") from error


def _find_ranks(model: MegatronModel) -> dict[str, tuple[int, ...]]:
    """The global ranks of each group of this rank, by axis."""
    groups = model.groups
    if groups is None:
        groups = getattr(chunks_of(model)[0], _ATTRIBUTE, None) if chunks_of(model) else None
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


def _find_names(described: Mapping[int, _RankGroups], num_experts: int | None) -> MegatronNames:
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
