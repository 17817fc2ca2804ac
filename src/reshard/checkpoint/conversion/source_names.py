"""The source of a conversion in two kinds of names: those rules match, and those of the target.

    source's names  --source_names-->  the recipe's names  --target_names-->  the target's names

Rules and recipes are for the recipe's names; files are written in the target's. Without tables both
are the source's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.naming.renaming import (
    NameTable,
    find_stacked_names,
    in_names_of,
    in_recipe_names,
    names_of,
)
from reshard.checkpoint.options import AUTO, NO_RECIPE, ConversionRequest
from reshard.errors import UsageError
from reshard.recipes.library import choose_recipe, describe_unknown_model, load_recipe
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe, parse_options


@dataclass(frozen=True)
class NamedSource:
    """A checkpoint in the names of the target, and what each of them is to a recipe.

    Attributes:
        checkpoint: in the target's names.
        by_recipe: the same in the recipe's names, in which rules match.
        recipe: which one, with its options; None where none was asked for.
        recipe_names: for each of the target's names the recipe's, that of the first member where
            it is fused.
        fused: what is fused in the target, by its name.
        from_names, to_names: the tables that were used.
    """

    checkpoint: Checkpoint
    by_recipe: Checkpoint
    recipe: Recipe | None
    recipe_names: Mapping[str, str]
    fused: Mapping[str, Fusion] = field(default_factory=dict)
    from_names: NameTable | None = None
    to_names: NameTable | None = None

    def replaced_by(self, checkpoint: Checkpoint) -> NamedSource:
        """The same with another checkpoint: other elements, and perhaps other tensors."""
        if self.to_names is not None:
            return dataclasses.replace(self, checkpoint=checkpoint)
        names = {name: name for name in checkpoint}
        return dataclasses.replace(
            self, checkpoint=checkpoint, by_recipe=checkpoint, recipe_names=names
        )


def name_source(request: ConversionRequest, checkpoint: Checkpoint) -> NamedSource:
    """A checkpoint in the names that a request asks for.

    Raises:
        RecipeError: no such recipe; tables that do not fit the tensors.
        UsageError: `auto` without a config.json that a recipe fits.
    """
    asked = AUTO if request.is_by_recipe else request.recipe
    recipe = find_recipe(asked, checkpoint, request.options)
    config = read_config(checkpoint) if recipe is not None else None
    from_names = names_of("source_names", request.source_names, recipe, config)
    to_names = names_of("target_names", request.target_names, recipe, config)
    # Other names are told for the recipe's, which a source with stacked experts does not have.
    if from_names is None and isinstance(request.target_names, str):
        from_names = find_stacked_names(checkpoint, recipe, config)
    by_recipe = checkpoint
    if from_names is not None:
        by_recipe = in_recipe_names(checkpoint, from_names.table)
    if to_names is None:
        names = {name: name for name in by_recipe}
        return NamedSource(by_recipe, by_recipe, recipe, names, from_names=from_names)
    checkpoint, names, fused = in_names_of(by_recipe, to_names.table)
    return NamedSource(checkpoint, by_recipe, recipe, names, fused, from_names, to_names)


def find_recipe(
    recipe: str | os.PathLike[str] | Recipe | None,
    checkpoint: Checkpoint,
    options: Mapping[str, str] | Iterable[str] = (),
) -> Recipe | None:
    """The recipe of a name or a path, with options; `auto` is what the config.json says, `none` no
    recipe.

    Raises:
        RecipeError: no such recipe, or one that cannot be read; options that it has not.
        UsageError: `auto` without a config.json, or with one that no shipped recipe fits; options
            without a recipe.
    """
    found = _load(recipe, checkpoint)
    parsed = parse_options(options)
    if found is not None:
        return found.with_options(parsed)
    if parsed:
        raise UsageError(
            f"the option {next(iter(parsed))!r} without a recipe that has it; name the recipe"
        )
    return None


def _load(recipe: str | os.PathLike[str] | Recipe | None, checkpoint: Checkpoint) -> Recipe | None:
    if recipe is None or recipe == NO_RECIPE:
        return None
    if isinstance(recipe, Recipe):
        return recipe
    if recipe != AUTO:
        return load_recipe(os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe)
    config = read_config(checkpoint)
    if config is None:
        raise UsageError(
            f"recipe 'auto' looks in config.json, and {checkpoint.folder} has none; name a recipe"
        )
    found = choose_recipe(config)
    if found is None:
        raise UsageError(describe_unknown_model(config, checkpoint.tensors))
    return found
