"""Both models of a refit as a rank has them, with the names that are found for Megatron's.

What one rank knows of a Megatron model is not all of it, and ranks of the other side know nothing
of it. So ranks tell each other, in one small gather of all of them:

1. a rank with a Megatron model: its groups and layers (`megatron_groups`), and what its config says
   (`megatron_configs`);
2. a rank with another model: its names without their numbers, and how long its vocabulary is.

Then each has the same: the names of layers and experts over the whole model, those on the Hub
(`hub_names`), that a tied output layer is its embedding, and where the padding of a vocabulary
begins. Where both sides are Megatron's, or somebody gave names, they are called as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from reshard.errors import NotationError, ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames
from reshard.text import first_text
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models.given_models import MegatronModel, Model, chunks_of
from reshard.torch.models.hub_names import (
    EMBEDDING,
    OUTPUT,
    HubNames,
    are_megatrons,
    find_hub_names,
    pattern_of,
)
from reshard.torch.models.megatron.megatron_configs import MegatronSelf, read_config
from reshard.torch.models.megatron.megatron_groups import (
    describe_groups,
    find_groups,
    find_names,
    read_groups,
)
from reshard.torch.models.megatron.megatron_parameters import list_parameters
from reshard.torch.models.memory import LocalTensors
from reshard.torch.models.module_memory import tensors_of
from reshard.torch.models.naming import Naming, fitting, renamed
from reshard.torch.models.parameters import list_tensors

_SIDES = ("source", "target")
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class GivenNames:
    """What a refit was told of names, on this rank; or what it found where it was told nothing."""

    source: Naming | None = None
    target: Naming | None = None
    stacks: Mapping[str, str] | None = None
    ties: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SideModel:
    """A model of one side on this rank, and how its names become common ones."""

    model: Model
    naming: Naming | None
    stacks: Mapping[str, str] | None


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
        """What all ranks must know of any: whether a model is Megatron's."""
        return (int(any(map(is_megatrons, (self.source, self.target)))),)

    def list_tensors(
        self,
        notes: Sequence[int],
        group: RankGroup,
        naming: GivenNames,
        offsets: tuple[int | None, int | None] = (None, None),
        takes_samples: bool = False,
    ) -> tuple[LocalTensors, LocalTensors, GivenNames]:
        """What this rank has of both models, and the names of these. All ranks call this.

        Args:
            notes: the greatest of all ranks.
            group: of all ranks.
            naming: as it was given.
            offsets: see `list_tensors`; of the source, and of the target.
            takes_samples: of the source.

        Raises:
            UsageError: on every rank, a number of experts for models that have no use for it.
            ShardError: on every rank, groups that make no grids, layers that cannot be counted, or
                a model whose names on the Hub cannot be told.
            RunError: a rank that does not answer.
        """
        sides = [
            SideModel(model, of, naming.stacks)
            for model, of in ((self.source, naming.source), (self.target, naming.target))
        ]
        ties = naming.ties or {}
        if notes[0]:
            sides, ties = self._name(sides, naming, group)
        elif self.num_experts is not None:
            raise UsageError(
                f"num_experts={self.num_experts}, but no rank has a MegatronModel; experts of "
                "other models have their numbers in the whole model, or get them by names"
            )
        before, after = (
            list_tensors(
                one.model, one.naming, one.stacks, offset, group=group, takes_samples=takes
            )
            for one, offset, takes in zip(sides, offsets, (takes_samples, False), strict=True)
        )
        # Stacks are of a side that is not Megatron's, as the target is where weights are handed on.
        of_source, of_target = (one.naming for one in sides)
        return before, after, GivenNames(of_source, of_target, sides[1].stacks, ties)

    def _name(
        self, sides: Sequence[SideModel], naming: GivenNames, group: RankGroup
    ) -> tuple[list[SideModel], Mapping[str, str]]:
        """The sides with all that their names need, and the ties."""
        told = _gather_sides([_describe_side(side, group) for side in sides], group)
        problems: list[str] = []
        names = [
            _find_names(side, of, self.num_experts, problems)
            for side, of in zip(_SIDES, told, strict=True)
        ]
        _compare_meaning(told, problems)
        hub = _find_hub(told, naming.stacks, problems) if not problems else None
        if problems:
            raise ShardError("nothing was written: " + "\n  ".join(problems))
        found = [
            _name_side(side, names[n], hub, told[1 - n], self.num_experts)
            for n, side in enumerate(sides)
        ]
        if hub is not None and naming.ties is None and any(of.is_tied for of in told):
            return found, hub.ties
        if naming.ties is None and told[0].is_tied and all(of.config is not None for of in told):
            # Stages of a pipeline have an output layer of their own, and one stage has none.
            return found, {OUTPUT: EMBEDDING}
        return found, naming.ties or {}


@dataclass(frozen=True, slots=True)
class _SideTold:
    """What the ranks say of one side's model."""

    by_rank: Mapping[int, Mapping[str, Any]]

    @property
    def config(self) -> MegatronSelf | None:
        """What a Megatron model says of itself: as its first rank does, and unlike as any says."""
        said = [one["config"] for one in self.by_rank.values() if one.get("config") is not None]
        if not said:
            return None
        unlike = dict.fromkeys(what for one in said for what in one["unlike"])
        return MegatronSelf(**{**said[0], "unlike": tuple(unlike)})

    @property
    def is_tied(self) -> bool:
        """Whether a Megatron model's output layer is its embedding."""
        return self.config is not None and self.config.is_tied

    @property
    def patterns(self) -> set[str]:
        """The names of a model that is not Megatron's, without their numbers."""
        return {pattern for one in self.by_rank.values() for pattern in one.get("patterns", ())}

    @property
    def is_named(self) -> bool:
        """Whether somebody said what the names are."""
        return any(one.get("is_named") for one in self.by_rank.values())

    @property
    def vocabulary(self) -> int | None:
        """How long the vocabulary is, by the model itself or its user."""
        if self.config is not None:
            return self.config.vocabulary
        return next((one["vocabulary"] for one in self.by_rank.values() if one["vocabulary"]), None)


def _read_module(model: Model) -> Model:
    """A module that has Megatron's process groups is Megatron's."""
    if isinstance(model, torch.nn.Module) and find_groups(model) is not None:
        return MegatronModel(model)
    return model


def is_megatrons(model: Model) -> bool:
    """Whether a model is Megatron's: said to be one, or a module with its process groups.

    >>> is_megatrons(torch.nn.Linear(2, 2))
    False
    """
    return isinstance(_read_module(model), MegatronModel)


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


def _describe_side(side: SideModel, group: RankGroup) -> dict[str, Any] | None:
    """What this rank says of one side, also where it is a problem: the other ranks wait for it."""
    model = side.model
    if model is None:
        return None
    found: dict[str, Any] = {"problem": "", "is_named": side.naming is not None}
    try:
        if not isinstance(model, MegatronModel):
            return found | _describe_others(tensors_of(model), side.naming)
        if model.names is None:
            found["groups"] = asdict(describe_groups(model, group))
            found["problem"] = found["groups"]["problem"]
        config = read_config(model) if not found["problem"] else None
        # Names that were given are of models that need not be like any on the Hub.
        found["config"] = None if config is None else asdict(config)
    except ReshardError as error:
        if side.naming is None:
            found["problem"] = str(error)
    except Exception as error:
        # What is no model at all is reported with what else does not fit.
        found["problem"] = f"{type(error).__name__}: {error}"
    return found


def _describe_others(tensors: Iterable[tuple[str, Any]], naming: Naming | None) -> dict[str, Any]:
    patterns: set[str] = set()
    vocabulary = None
    for name, value in tensors:
        common = renamed(name, naming)
        patterns.add(pattern_of(common))
        if vocabulary is None and common.endswith(_ENDS):
            is_laid = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Layout)
            shape = value[1].shape if is_laid else getattr(value, "shape", ())
            vocabulary = int(shape[0]) if shape else None
    return {"patterns": sorted(patterns), "vocabulary": vocabulary}


def _gather_sides(
    described: Sequence[Mapping[str, Any] | None], group: RankGroup
) -> tuple[_SideTold, _SideTold]:
    every = gather(json.dumps(described).encode(), group).values
    found: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for rank, message in every.items():
        try:
            both = json.loads(message)
            for side, one in zip(found, both, strict=True):
                if one is not None:
                    side[rank] = {**one, "problem": str(one["problem"])}
        except (TypeError, KeyError, ValueError) as error:
            raise NotationError(f"{message[:80]!r} does not say what models a rank has") from error
    return _SideTold(found[0]), _SideTold(found[1])


def _find_names(
    side: str, told: _SideTold, num_experts: int | None, problems: list[str]
) -> MegatronNames | None:
    """The names of a model that has groups, over all of it. Adds to the problems."""
    wrong = [f"rank {n}: {one['problem']}" for n, one in told.by_rank.items() if one["problem"]]
    groups = {n: one["groups"] for n, one in told.by_rank.items() if one.get("groups") is not None}
    found = None
    try:
        if groups and not wrong:
            read = {n: one for n, said in groups.items() if (one := read_groups(said)) is not None}
            own = told.config.num_experts if told.config is not None else None
            found = find_names(read, num_experts or own)
    except ReshardError as error:
        wrong.append(f"the {side}: {error}")
    problems += wrong
    return found


def _compare_meaning(told: Sequence[_SideTold], problems: list[str]) -> None:
    """Two models of Megatron's whose weights are multiplied in different ways are no pair."""
    configs = [of.config for of in told]
    if any(of is None or not of.numbers for of in configs) or any(of.is_named for of in told):
        return
    for side, own, other in zip(_SIDES, configs, configs[::-1], strict=True):
        more = sorted(set(own.unlike if own else ()) - set(other.unlike if other else ()))
        if more:
            problems.append(
                f"the {side}'s weights mean something else than the other's: {'; '.join(more)}; "
                "give both models one config, or the refit names, if they are meant as they are"
            )


def _find_hub(
    told: Sequence[_SideTold], stacks: Mapping[str, str] | None, problems: list[str]
) -> HubNames | None:
    """What the tensors are on the Hub; None where they are called as they are."""
    sides = [of for of in told if any("patterns" not in one for one in of.by_rank.values())]
    others = [of for of in told if of not in sides]
    if len(sides) != 1 or any(of.is_named for of in sides) or stacks:
        return None
    config, patterns = sides[0].config, others[0].patterns
    if config is None or not patterns or are_megatrons(patterns):
        return None
    if config.unlike:
        problems.append(
            f"a Megatron model that has no like on the Hub: {'; '.join(config.unlike)}. Give the "
            "refit a table of names, if its tensors are meant as they are"
        )
        return None
    try:
        return find_hub_names(config.config, config.numbers, patterns)
    except ReshardError as error:
        problems.append(str(error))
        return None


def _name_side(
    side: SideModel,
    names: MegatronNames | None,
    hub: HubNames | None,
    other: _SideTold,
    num_experts: int | None,
) -> SideModel:
    model = side.model
    if not isinstance(model, MegatronModel):
        if hub is None or model is None or side.naming is not None:
            return side
        return SideModel(model, hub.others or None, hub.stacks or None)
    if model.names is None:
        model = replace(model, names=names)
    elif model.names.num_experts is None and num_experts is None and hub is not None:
        config = read_config(model)
        own = None if config is None else config.num_experts
        model = replace(model, names=replace(model.names, num_experts=own))
    if hub is None:
        return replace(side, model=model)
    own_names = [
        name
        for chunk in chunks_of(model)
        for name, _, _ in (list_parameters(chunk, model.names) if model.names is not None else ())
    ]
    unnamed = hub.list_unnamed(own_names)
    problems = model.problems
    if unnamed:
        problems += (
            f"{first_text(unnamed, _SHOWN)}: no names on the Hub, by the recipe "
            f"{hub.recipe!r}; give the MegatronModel the config of its model, or the refit a table "
            "of names",
        )
    model = replace(model, parameters=_say_padding(model, own_names, other), problems=problems)
    return SideModel(model, hub.megatron, None)


def _say_padding(
    model: MegatronModel, own_names: Sequence[str], other: _SideTold
) -> Mapping[str, Mapping[str, Any]]:
    """What is known of parameters, with how long the vocabulary is where it may be padded."""
    config = read_config(model)
    length = (config.vocabulary if config is not None else None) or other.vocabulary
    if length is None or not isinstance(model.parameters, Mapping):
        return model.parameters
    said = {
        name: {"true_length": length}
        for name in own_names
        if name.endswith((EMBEDDING, OUTPUT)) and fitting(name, model.parameters) is None
    }
    return {**said, **model.parameters}
