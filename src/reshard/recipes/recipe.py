"""How are the tensors of a kind of model cut?

A recipe is a list of rules under a name, kept as data in a TOML file::

    name = "bert"
    description = "BERT and its kin"       optional
    model_types = ["bert", "roberta"]      optional: `model_type` of the models it is for
    axes = ["tp"]                          mesh axes its rules may name

    [[rules]]                              the first that matches a tensor decides it
    pattern = "*.output.dense.weight"
    spec = "-, tp"

A mesh may lack an axis of the recipe: it then counts as one of size 1. So one recipe serves
every mesh, and an axis it knows nothing of holds copies.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from reshard.errors import MeshError, RecipeError
from reshard.mesh import DeviceMesh
from reshard.recipes.rules import Rule

_REQUIRED_KEYS = ("name", "axes", "rules")
_OPTIONAL_KEYS = ("description", "model_types")
_RULE_KEYS = ("pattern", "spec")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules for the tensors of a kind of model.

    Args:
        name: for people and messages.
        description: one line on what it is for.
        model_types: the `model_type` in config.json of the models it is for.
        axes: the mesh axes its rules may name.
        rules: in order; the first that matches a tensor decides it.

    Raises:
        RecipeError: no name, no rules, or axes that cannot be.

    >>> Recipe("rows", "", (), ("tp",), (Rule("*", "tp, ..."),)).axes
    ('tp',)
    """

    name: str
    description: str
    model_types: tuple[str, ...]
    axes: tuple[str, ...]
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise RecipeError(f"the recipe name {self.name!r} is empty; give the recipe a name")
        if not self.rules:
            raise RecipeError(
                f"recipe {self.name!r} has no rules; give at least one, such as pattern `*` with "
                "spec `...`"
            )
        try:
            DeviceMesh(self.name, [1] * len(self.axes), self.axes)
        except MeshError as error:
            raise RecipeError(f"axes of recipe {self.name!r}: {error}") from error


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with reshard, sorted.

    >>> shipped_recipes()
    ('bert', 'llama')
    """
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in resources.files("reshard.recipes").iterdir()
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
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path:
        return _read(Path(name_or_path), str(name_or_path))
    if name_or_path not in shipped_recipes():
        raise RecipeError(_unknown(name_or_path))
    return _load_shipped(name_or_path)


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
    return _read(resources.files("reshard.recipes") / f"{name}.toml", f"{name}.toml")


def _unknown(name: str) -> str:
    shipped = shipped_recipes()
    near = difflib.get_close_matches(name.casefold(), shipped)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown recipe {name!r}; {hint}The shipped recipes are {', '.join(shipped)}; write the "
        "path of a file of your own with its ending .toml"
    )


class _ReadableFile(Protocol):
    def read_bytes(self) -> bytes: ...


def _read(file: _ReadableFile, where: str) -> Recipe:
    """The recipe in `file`; `where` names the file in errors."""
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe file {where}: {error.strerror}; give a shipped name "
            f"({', '.join(shipped_recipes())}) or the path of a TOML file"
        ) from error
    except ValueError as error:
        raise RecipeError(f"recipe file {where} is not TOML: {error}; correct it there") from error
    _check_keys(table, _REQUIRED_KEYS, _OPTIONAL_KEYS, where)
    name = _text(table["name"], "name", where)
    description = _text(table.get("description", ""), "description", where)
    model_types = _texts(table.get("model_types", []), "model_types", where)
    axes = _texts(table["axes"], "axes", where)
    rules = _rules(table["rules"], where)
    try:
        return Recipe(name, description, model_types, axes, rules)
    except RecipeError as error:
        raise RecipeError(f"recipe file {where}: {error}") from error


def _rules(value: object, where: str) -> tuple[Rule, ...]:
    if not isinstance(value, list):
        raise RecipeError(_wrong("rules", value, "tables, each beginning with [[rules]]", where))
    rules = []
    for number, table in enumerate(value, start=1):
        key = f"rules[{number}]"
        if not isinstance(table, dict):
            raise RecipeError(_wrong(key, table, "a table with `pattern` and `spec`", where))
        _check_keys(table, _RULE_KEYS, (), where, f"{key}.")
        pattern, spec = (_text(table[word], f"{key}.{word}", where) for word in _RULE_KEYS)
        try:
            rules.append(Rule(pattern, spec))
        except RecipeError as error:
            raise RecipeError(f"recipe file {where}, {key}: {error}") from error
    return tuple(rules)


def _check_keys(
    table: dict[str, Any],
    required: tuple[str, ...],
    optional: tuple[str, ...],
    where: str,
    prefix: str = "",
) -> None:
    known = required + optional
    for key in table:
        if key not in known:
            raise RecipeError(
                f"recipe file {where}: unknown key `{prefix}{key}`; the keys are {', '.join(known)}"
            )
    for key in required:
        if key not in table:
            raise RecipeError(f"recipe file {where}: the key `{prefix}{key}` is missing; add it")


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise RecipeError(_wrong(key, value, "text in quotes", where))
    return value


def _texts(value: object, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RecipeError(_wrong(key, value, 'a list of texts such as ["tp"]', where))
    return tuple(value)


def _wrong(key: str, value: object, expected: str, where: str) -> str:
    return f"recipe file {where}: `{key}` is {value!r}, {expected} was expected"
