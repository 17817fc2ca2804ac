"""Both models of a refit on a rank, with the names found for Megatron's.

A rank knows only part of a Megatron model, and ranks of the other side know nothing of it. All
ranks therefore exchange a small message:

1. a rank with a Megatron model sends its groups and layers, and what its config specifies
   (`megatron_models`);
2. a rank with another model sends its names without numbers, and the length of its vocabulary.

All ranks then know the same: the names of layers and experts in the full model, their names on the
Hub, whether the output layer is tied to the embedding, and where the padding of a vocabulary
begins. If both sides are Megatron's, or names are given, names are used as they are.

A recipe's `[names.megatron]` map Megatron's parameters to those of checkpoints on the Hub, with
query groups and gated layers separated; its `[names.stacked]` list those that transformers stacks
in one tensor. A config determines the recipe, or the names of the other side do: numbers in names
become `*`, and the recipe that knows most of the names is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from reshard.errors import NotationError, ReshardError, ShardError, UsageError
from reshard.layout import Layout
from reshard.megatron.names import EMBEDDING, OUTPUT, MegatronNames
from reshard.recipes.library import choose_recipe, load_recipe
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.text import first_text
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.models import megatron_models
from reshard.torch.models.local_tensors import LocalTensors
from reshard.torch.models.model_inputs import MegatronModel, Model, list_chunks, tensors_of
from reshard.torch.models.naming import Naming, find_entry, renamed, resolve_name
from reshard.torch.models.parameters import list_tensors

_MEGATRON, _STACKED = "megatron", "stacked"
# A recipe for each set of names; among those that know equally many names, the first is used.
_RECIPES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4", "minimax_m2")
_LATENT_RECIPES = ("deepseek_v3",)
# Whole parts of a name: not the digits of `w1` or `linear_fc1`.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Prefixes that show names to be Megatron's.
_MEGATRONS = ("decoder.layers.*.", "embedding.word_embeddings.", "output_layer.")


@dataclass(frozen=True, slots=True)
class HubNames:
    """The names of both sides' tensors.

    Attributes:
        recipe: the name of the recipe.
        megatron: from Megatron's names to those of the Hub.
        others: from the other side's names to those of the Hub, where they differ.
        stacks: the other side's stacked tensors, as in `refit`.
    """

    recipe: str
    megatron: Mapping[str, str | Fusion]
    others: Mapping[str, str | Fusion]
    stacks: Mapping[str, str]

    @property
    def ties(self) -> dict[str, str]:
        """The output layer, as another name of the embedding."""
        names = (self.megatron.get(OUTPUT), self.megatron.get(EMBEDDING))
        return {names[0]: names[1]} if all(isinstance(name, str) for name in names) else {}  # type: ignore[dict-item]

    def list_unnamed(self, names: Iterable[str]) -> list[str]:
        """Return those of a Megatron model's names that have no name on the Hub."""
        return [name for name in names if resolve_name(name, self.megatron) == name]


def find_hub_names(
    config: Mapping[str, Any], numbers: Mapping[str, Any], patterns: Collection[str]
) -> HubNames:
    """Return the names for a Megatron model.

    Args:
        config: known values of the config on the Hub; its `model_type` determines the recipe.
        numbers: what the Megatron model specifies, by the names of config.json.
        patterns: the other side's names, see `name_pattern`.

    Raises:
        UsageError: a model type without a recipe.
        RecipeError: a recipe without Megatron's names, or an unknown number.

    >>> numbers = {"num_attention_heads": 8, "num_key_value_heads": 2}
    >>> found = find_hub_names({}, numbers, ["model.layers.*.block_sparse_moe.gate.weight"])
    >>> found.recipe, found.megatron["decoder.layers.*.mlp.router.weight"]
    ('mixtral', 'model.layers.*.block_sparse_moe.gate.weight')
    """
    values = {**numbers, **config}
    recipe = _choose(values, patterns)
    others, stacks = _unstack(recipe)
    return HubNames(recipe.name, recipe.naming(_MEGATRON, values), others, stacks)


def name_pattern(name: str) -> str:
    """Return a name with `*` for each of its numbers.

    >>> name_pattern("model.layers.11.mlp.experts.3.w1.weight")
    'model.layers.*.mlp.experts.*.w1.weight'
    """
    return _NUMBER.sub("*", name)


def are_megatron_names(patterns: Collection[str]) -> bool:
    """Return whether names are Megatron's own.

    >>> are_megatron_names(["decoder.layers.*.mlp.linear_fc1.weight"])
    True
    """
    return any(pattern.startswith(_MEGATRONS) for pattern in patterns)


def _choose(values: Mapping[str, Any], patterns: Collection[str]) -> Recipe:
    if "model_type" in values:
        recipe = choose_recipe(values)
        if recipe is None:
            raise UsageError(
                f"no recipe is for the model type {values['model_type']!r}; give the refit a "
                "table of names"
            )
        return recipe
    names = _LATENT_RECIPES if values.get("multi_latent_attention") else _RECIPES
    return max(map(load_recipe, names), key=lambda recipe: len(_list_known(recipe, patterns)))


def _list_known(recipe: Recipe, patterns: Collection[str]) -> set[str]:
    """Return the names of the other side that a recipe maps from Megatron's."""
    names: set[str] = set()
    for entry in recipe.names[_MEGATRON].values():
        names.update(entry.members if isinstance(entry, Fusion) else [entry])
    others, stacks = _unstack(recipe)
    # Recipes begin such names with `*`, for models inside of others.
    names.update({name.replace("*layers", "model.layers") for name in (*others, *stacks)})
    return names & set(patterns)


def _unstack(recipe: Recipe) -> tuple[dict[str, str | Fusion], dict[str, str]]:
    """Return names of stacked tensors in transformers, whose members may be fused."""
    names: dict[str, str | Fusion] = {}
    stacks: dict[str, str] = {}
    for pattern, entry in recipe.names.get(_STACKED, {}).items():
        if not isinstance(entry, Fusion):
            names[pattern] = entry
            continue
        # Views of a stack are not transposed; such names stay, and are not found.
        if entry.transposed or not entry.stacked:
            continue
        if len(entry.members) == 1:
            stacks[pattern] = entry.members[0]
            continue
        # Each member of the stack is a fused tensor without another name.
        before, _, last = pattern.rpartition(".")
        stacks[pattern] = f"{before}.{{}}.{last}"
        members = tuple(member.replace("{}", "*") for member in entry.members)
        names[f"{before}.*.{last}"] = Fusion(members, entry.shares, entry.groups, entry.dimension)
    return names, stacks


_SIDES = ("source", "target")
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NameOptions:
    """The naming options of a refit on this rank, or the names found without options."""

    source: Naming | None = None
    target: Naming | None = None
    stacks: Mapping[str, str] | None = None
    ties: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SideModel:
    """A model of a side on this rank, and the mapping to common names."""

    model: Model
    naming: Naming | None
    stacks: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Both models on this rank, with the problem that prevents a refit, if any."""

    source: Model
    target: Model
    num_experts: int | None
    problem: str | None = None

    @classmethod
    def of(cls, source: Model, target: Model, num_experts: int | None) -> ModelPair:
        """Return both models, with the number of experts if their names lack it."""
        try:
            both = [
                _set_num_experts(_read_module(model), num_experts) for model in (source, target)
            ]
        except ReshardError as error:
            return cls(source, target, num_experts, str(error))
        return cls(both[0], both[1], num_experts)

    @property
    def notes(self) -> tuple[int, ...]:
        """Values that all ranks need of any: whether a model is Megatron's."""
        both = self.source, self.target
        return (int(any(isinstance(model, MegatronModel) for model in both)),)

    def list_tensors(
        self,
        notes: Sequence[int],
        group: RankGroup,
        naming: NameOptions,
        offsets: tuple[int | None, int | None] = (None, None),
        takes_samples: bool = False,
    ) -> tuple[LocalTensors, LocalTensors, NameOptions]:
        """Return this rank's tensors of both models, and their names. Collective.

        Args:
            notes: the maximum over all ranks.
            group: all ranks.
            naming: the naming options.
            offsets: see `parameters.list_tensors`; of the source and the target.
            takes_samples: whether to sample the source.

        Raises:
            UsageError: on every rank, a number of experts for models that do not need it.
            ShardError: on every rank, groups that form no grid, layers that cannot be counted, or
                a model without known names on the Hub.
            RunError: a rank that does not answer.
        """
        sides = [
            SideModel(model, side_naming, naming.stacks)
            for model, side_naming in ((self.source, naming.source), (self.target, naming.target))
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
                side.model, side.naming, side.stacks, offset, group=group, takes_samples=takes
            )
            for side, offset, takes in zip(sides, offsets, (takes_samples, False), strict=True)
        )
        # Stacks belong to a side that is not Megatron's, like the target of relayed weights.
        of_source, of_target = (side.naming for side in sides)
        return before, after, NameOptions(of_source, of_target, sides[1].stacks, ties)

    def _name(
        self, sides: Sequence[SideModel], naming: NameOptions, group: RankGroup
    ) -> tuple[list[SideModel], Mapping[str, str]]:
        """Return the sides with complete names, and the ties."""
        descriptions = _gather_sides([_describe_side(side, group) for side in sides], group)
        problems: list[str] = []
        names = [
            _find_names(side, description, self.num_experts, problems)
            for side, description in zip(_SIDES, descriptions, strict=True)
        ]
        _compare_meaning(descriptions, problems)
        hub = _find_hub(descriptions, naming.stacks, problems) if not problems else None
        if problems:
            raise ShardError("nothing was written: " + "\n  ".join(problems))
        named = [
            _name_side(side, names[n], hub, descriptions[1 - n], self.num_experts)
            for n, side in enumerate(sides)
        ]
        if (
            hub is not None
            and naming.ties is None
            and any(description.is_tied for description in descriptions)
        ):
            return named, hub.ties
        if (
            naming.ties is None
            and descriptions[0].is_tied
            and all(description.config is not None for description in descriptions)
        ):
            # Stages of a pipeline have a separate output layer, unlike a single stage.
            return named, {OUTPUT: EMBEDDING}
        return named, naming.ties or {}


@dataclass(frozen=True, slots=True)
class _SideDescription:
    """All ranks' descriptions of a side's model."""

    by_rank: Mapping[int, Mapping[str, Any]]

    @property
    def config(self) -> megatron_models.MegatronConfig | None:
        """The specification of a Megatron model by its first rank, with the `unlike` of all."""
        configs = [
            description["config"]
            for description in self.by_rank.values()
            if description.get("config") is not None
        ]
        if not configs:
            return None
        unlike = dict.fromkeys(
            difference for description in configs for difference in description["unlike"]
        )
        return megatron_models.MegatronConfig(**{**configs[0], "unlike": tuple(unlike)})

    @property
    def is_tied(self) -> bool:
        """Whether a Megatron model's output layer is its embedding."""
        return self.config is not None and self.config.is_tied

    @property
    def patterns(self) -> set[str]:
        """The names of a model that is not Megatron's, without numbers."""
        return {
            pattern
            for description in self.by_rank.values()
            for pattern in description.get("patterns", ())
        }

    @property
    def is_named(self) -> bool:
        """Whether names are given."""
        return any(description.get("is_named") for description in self.by_rank.values())

    @property
    def vocabulary(self) -> int | None:
        """The length of the vocabulary, from the model or its user."""
        if self.config is not None:
            return self.config.vocabulary
        return next(
            (
                description["vocabulary"]
                for description in self.by_rank.values()
                if description["vocabulary"]
            ),
            None,
        )


def _read_module(model: Model) -> Model:
    """Return a module with Megatron's process groups as a MegatronModel."""
    if isinstance(model, torch.nn.Module) and megatron_models.find_groups(model) is not None:
        return MegatronModel(model)
    return model


def is_megatron(model: Model) -> bool:
    """Return whether a model is a MegatronModel or a module with its process groups.

    >>> is_megatron(torch.nn.Linear(2, 2))
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
    """Return this rank's description of a side; errors become its problem."""
    model = side.model
    if model is None:
        return None
    description: dict[str, Any] = {"problem": "", "is_named": side.naming is not None}
    try:
        if not isinstance(model, MegatronModel):
            return description | _describe_others(tensors_of(model), side.naming)
        if model.names is None:
            description["groups"] = asdict(megatron_models.describe_groups(model, group))
            description["problem"] = description["groups"]["problem"]
        config = megatron_models.read_config(model) if not description["problem"] else None
        # Given names belong to models that need no counterpart on the Hub.
        description["config"] = None if config is None else asdict(config)
    except ReshardError as error:
        # If names are given, the Hub's are not needed, and this error is harmless.
        if side.naming is None:
            description["problem"] = str(error)
    except Exception as error:
        # An invalid model is reported with the other mismatches.
        description["problem"] = f"{type(error).__name__}: {error}"
    return description


def _describe_others(tensors: Iterable[tuple[str, Any]], naming: Naming | None) -> dict[str, Any]:
    patterns: set[str] = set()
    vocabulary = None
    for name, value in tensors:
        common = renamed(name, naming)
        patterns.add(name_pattern(common))
        if vocabulary is None and common.endswith(_ENDS):
            is_laid = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Layout)
            shape = value[1].shape if is_laid else getattr(value, "shape", ())
            vocabulary = int(shape[0]) if shape else None
    return {"patterns": sorted(patterns), "vocabulary": vocabulary}


def _gather_sides(
    described: Sequence[Mapping[str, Any] | None], group: RankGroup
) -> tuple[_SideDescription, _SideDescription]:
    # Every rank sends what it knows of both sides, since none knows which ranks the other side has.
    messages = gather(json.dumps(described).encode(), group)
    by_side: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for rank, message in messages.items():
        try:
            both = json.loads(message)
            for side, description in zip(by_side, both, strict=True):
                if description is not None:
                    # A message of another rank is validated here, since its problem is shown.
                    side[rank] = {**description, "problem": str(description["problem"])}
        except (TypeError, KeyError, ValueError) as error:
            raise NotationError(f"{message[:80]!r} does not say what models a rank has") from error
    return _SideDescription(by_side[0]), _SideDescription(by_side[1])


def _find_names(
    side: str, description: _SideDescription, num_experts: int | None, problems: list[str]
) -> MegatronNames | None:
    """Return the names of a model with groups, over the full model; append to `problems`."""
    own_problems = [
        f"rank {n}: {item['problem']}" for n, item in description.by_rank.items() if item["problem"]
    ]
    groups = {
        n: item["groups"]
        for n, item in description.by_rank.items()
        if item.get("groups") is not None
    }
    names = None
    try:
        if groups and not own_problems:
            read = {
                n: item
                for n, described in groups.items()
                if (item := megatron_models.read_groups(described)) is not None
            }
            own = description.config.num_experts if description.config is not None else None
            names = megatron_models.find_names(read, num_experts or own)
    except ReshardError as error:
        own_problems.append(f"the {side}: {error}")
    problems += own_problems
    return names


def _compare_meaning(descriptions: Sequence[_SideDescription], problems: list[str]) -> None:
    """Append a problem if two Megatron models use their weights in different ways."""
    configs = [description.config for description in descriptions]
    if any(config is None or not config.numbers for config in configs) or any(
        description.is_named for description in descriptions
    ):
        return
    for side, own, other in zip(_SIDES, configs, configs[::-1], strict=True):
        more = sorted(set(own.unlike if own else ()) - set(other.unlike if other else ()))
        if more:
            problems.append(
                f"the {side}'s weights mean something else than the other's: {'; '.join(more)}; "
                "give both models one config, or the refit names, if they are meant as they are"
            )


def _find_hub(
    descriptions: Sequence[_SideDescription], stacks: Mapping[str, str] | None, problems: list[str]
) -> HubNames | None:
    """Return the names on the Hub, or None if names are used as they are."""
    sides = [
        side
        for side in descriptions
        if any("patterns" not in description for description in side.by_rank.values())
    ]
    others = [side for side in descriptions if side not in sides]
    # Between two Megatron models, names are compared as they are.
    if len(sides) != 1 or any(side.is_named for side in sides) or stacks:
        return None
    config, patterns = sides[0].config, others[0].patterns
    if config is None or not patterns or are_megatron_names(patterns):
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
    other: _SideDescription,
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
        config = megatron_models.read_config(model)
        own = None if config is None else config.num_experts
        model = replace(model, names=replace(model.names, num_experts=own))
    if hub is None:
        return replace(side, model=model)
    own_names = [
        name
        for chunk in list_chunks(model)
        for name, _, _ in (
            megatron_models.list_parameters(chunk, model.names) if model.names is not None else ()
        )
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
    model: MegatronModel, own_names: Sequence[str], other: _SideDescription
) -> Mapping[str, Mapping[str, Any]]:
    """Return the given parameters, with the vocabulary's length if it may be padded."""
    config = megatron_models.read_config(model)
    length = (config.vocabulary if config is not None else None) or other.vocabulary
    if length is None or not isinstance(model.parameters, Mapping):
        return model.parameters
    lengths = {
        name: {"true_length": length}
        for name in own_names
        if name.endswith((EMBEDDING, OUTPUT)) and find_entry(name, model.parameters) is None
    }
    # Given parameters take precedence.
    return {**lengths, **model.parameters}
