"""The recipes that come with reshard, and how one is found: by name, by path, by model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from reshard.errors import RecipeError
from reshard.recipes.recipe import Recipe
from reshard.recipes.recipe_file import read_recipe

# A file here is a recipe: nothing else lists them.
SHIPPED = resources.files("reshard.recipes") / "shipped"


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with reshard, sorted: the files of its folder `shipped`.

    >>> "llama" in shipped_recipes()
    True
    """
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in SHIPPED.iterdir()
            if entry.name.endswith(".toml")
        )
    )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """The recipe of a shipped name, or of a TOML file.

    Text is a path when it ends in `.toml` or holds a `/`; a `Path` always is one.

    Raises:
        RecipeError: an unknown name, a file that cannot be read, is not TOML, or has keys that
            are unknown, missing or of the wrong type.

    >>> load_recipe("llama").model_types
    ('llama',)
    """
    if not isinstance(name_or_path, str | Path):
        raise RecipeError(f"a recipe {name_or_path!r}; give a name, or the path of a TOML file")
    if isinstance(name_or_path, Path) or _is_path(name_or_path):
        return _load_file(Path(name_or_path), ())
    if name_or_path not in shipped_recipes():
        raise RecipeError(_describe_unknown(name_or_path))
    return _load_shipped(name_or_path)


def _is_path(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def _load_file(path: Path, extended_by: tuple[Path, ...]) -> Recipe:
    """The recipe of a file. What it extends is a shipped name, or a path from its folder."""
    # The chain of files so far, so that a circle is an error and no endless recursion.
    if path in extended_by:
        raise RecipeError(f"recipe file {path} extends itself; take `extends` out of one file")

    def load_extended(name: str) -> Recipe:
        if _is_path(name):
            return _load_file(path.parent / name, (*extended_by, path))
        return load_recipe(name)

    return read_recipe(path, str(path), load_extended)


def choose_recipe(config: Mapping[str, object]) -> Recipe | None:
    """The shipped recipe for a model, by the `model_type` of its config.json, or None.

    >>> choose_recipe({"model_type": "bert"}).name
    'bert'
    """
    for name in shipped_recipes():
        recipe = _load_shipped(name)
        if config.get("model_type") in recipe.model_types:
            return recipe
    return None


@cache
def _load_shipped(name: str) -> Recipe:
    return read_recipe(SHIPPED / f"{name}.toml", f"{name}.toml", load_recipe)


def _describe_unknown(name: str) -> str:
    shipped = shipped_recipes()
    near = difflib.get_close_matches(name.casefold(), shipped)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown recipe {name!r}; {hint}The shipped recipes are {', '.join(shipped)}; write the "
        "path of a file of your own with its ending .toml"
    )
