"""Names on the Hub for a Megatron model and the model at its other side, by recipe.

A recipe's `[names.megatron]` say what Megatron's parameters are in checkpoints of the Hub, with
query groups and gated layers taken apart; its `[names.stacked]` which of these transformers stacks
in one tensor. Which recipe it is, a config says, or the names of the other side:

1. the numbers in names become `*`, so that a model has few different ones, whatever its size;
2. of the recipes that have Megatron's names, it is the one that knows most of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.errors import UsageError
from reshard.recipes.library import choose_recipe, load_recipe
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.torch.models.naming import meaning

_MEGATRON, _STACKED = "megatron", "stacked"
# Recipes of all sets of names that there are; of those that know as many, the first one.
_RECIPES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4", "minimax_m2")
_LATENT_RECIPES = ("deepseek_v3",)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# What Megatron calls the vocabulary's two ends.
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_MEGATRONS = ("decoder.layers.*.", "embedding.word_embeddings.", "output_layer.")


@dataclass(frozen=True, slots=True)
class HubNames:
    """What both sides call their tensors.

    Attributes:
        recipe: the name of the recipe.
        megatron: from Megatron's names to those of the Hub.
        others: from the other side's names to those of the Hub, where they differ.
        stacks: the other side's stacked tensors, as `refit` takes them.
    """

    recipe: str
    megatron: Mapping[str, str | Fusion]
    others: Mapping[str, str | Fusion]
    stacks: Mapping[str, str]

    @property
    def ties(self) -> dict[str, str]:
        """The output layer, as the embedding's other name."""
        names = (self.megatron.get(OUTPUT), self.megatron.get(EMBEDDING))
        return {names[0]: names[1]} if all(isinstance(one, str) for one in names) else {}  # type: ignore[dict-item]

    def list_unnamed(self, names: Iterable[str]) -> list[str]:
        """Those of a Megatron model's names that are none on the Hub."""
        return [name for name in names if meaning(name, self.megatron) == name]


def find_hub_names(
    config: Mapping[str, Any], numbers: Mapping[str, Any], patterns: Collection[str]
) -> HubNames:
    """The names for a Megatron model.

    Args:
        config: of the model on the Hub, as far as it is known: its `model_type` chooses the recipe.
        numbers: what the Megatron model says of itself, by the names of config.json.
        patterns: the other side's names, see `pattern_of`.

    Raises:
        UsageError: a model type that no recipe is for.
        RecipeError: a recipe without Megatron's names, or a number that nobody says.

    >>> numbers = {"num_attention_heads": 8, "num_key_value_heads": 2}
    >>> found = find_hub_names({}, numbers, ["model.layers.*.block_sparse_moe.gate.weight"])
    >>> found.recipe, found.megatron["decoder.layers.*.mlp.router.weight"]
    ('mixtral', 'model.layers.*.block_sparse_moe.gate.weight')
    """
    values = {**numbers, **config}
    recipe = _choose(values, patterns)
    others, stacks = _unstack(recipe)
    return HubNames(recipe.name, recipe.naming(_MEGATRON, values), others, stacks)


def pattern_of(name: str) -> str:
    """A name with `*` for each of its numbers.

    >>> pattern_of("model.layers.11.mlp.experts.3.w1.weight")
    'model.layers.*.mlp.experts.*.w1.weight'
    """
    return _NUMBER.sub("*", name)


def are_megatrons(patterns: Collection[str]) -> bool:
    """Whether names are Megatron's own, and nobody's on the Hub.

    >>> are_megatrons(["decoder.layers.*.mlp.linear_fc1.weight"])
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
    """The names of the other side that a recipe has for Megatron's."""
    known: set[str] = set()
    for entry in recipe.names[_MEGATRON].values():
        known.update(entry.members if isinstance(entry, Fusion) else [entry])
    others, stacks = _unstack(recipe)
    known.update({one.replace("*layers", "model.layers") for one in (*others, *stacks)})
    return known & set(patterns)


def _unstack(recipe: Recipe) -> tuple[dict[str, str | Fusion], dict[str, str]]:
    """Names of what transformers stacks: a stack is of members, which may be fused themselves."""
    names: dict[str, str | Fusion] = {}
    stacks: dict[str, str] = {}
    for pattern, entry in recipe.names.get(_STACKED, {}).items():
        if not isinstance(entry, Fusion):
            names[pattern] = entry
            continue
        # What is transposed, too, views of a stack are not; its names stay, and are not found.
        if entry.transposed or not entry.stacked:
            continue
        if len(entry.members) == 1:
            stacks[pattern] = entry.members[0]
            continue
        # Each member of the stack is a fused tensor, which nobody else has by a name.
        before, _, last = pattern.rpartition(".")
        stacks[pattern] = f"{before}.{{}}.{last}"
        members = tuple(member.replace("{}", "*") for member in entry.members)
        names[f"{before}.*.{last}"] = Fusion(members, entry.shares, entry.groups, entry.dimension)
    return names, stacks
