"""The recipes that come with reshard or with plug-ins, and how to find the recipe of a model.

By name, by path, or by the model's type. A plug-in's are those of its entry points
`reshard.recipes` (`reshard.plugins`): a package or folder of TOML files, the path of a file, or a
`Recipe`. For a model that has both, a plug-in's recipe is taken.

A model of an unknown type may still have the tensors of a known model. The recipe that it
resembles is found by its parameter names: the recipe whose rules match most of them, whose counts
its config.json has, that most others extend, and with the fewest rules left over.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from reshard.errors import RecipeError
from reshard.plugins import RECIPES, Plugin, describe_broken, load_plugins
from reshard.recipes.expressions import Config, parse_expression
from reshard.recipes.recipe import Recipe
from reshard.recipes.recipe_file import read_recipe
from reshard.recipes.rules import Rule
from reshard.text import near_text

# The files of this folder are the recipes; they are not listed elsewhere.
SHIPPED: Any = resources.files("reshard.recipes") / "shipped"
# In errors: recipes that a model resembles, and rules for kinds of its tensors.
_MAX_NEAR = _MAX_SUGGESTED = 3


def shipped_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that come with reshard, sorted: the files of its folder
    `shipped`.

    >>> "llama" in shipped_recipes()
    True
    """
    return tuple(_list_shipped(SHIPPED))


@cache
def _read_shipped(file: Any) -> str:
    text: str = file.read_text(encoding="utf-8")
    return text


def _list_files(folder: Traversable) -> dict[str, Traversable]:
    """Return the recipe files of a folder by the names of the recipes, sorted."""
    try:
        files = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    except OSError as error:
        raise RecipeError(f"cannot read the recipes in {folder}: {error.strerror}") from error
    return {entry.name.removesuffix(".toml"): entry for entry in sorted(files, key=str)}


@cache
def _list_shipped(folder: Any) -> dict[str, Any]:
    return {**_list_files(folder)}


def known_recipes() -> tuple[str, ...]:
    """Return the names of all recipes: those of plug-ins, then the shipped recipes.

    >>> set(shipped_recipes()) <= set(known_recipes())
    True
    """
    return (*_load_added()[0], *shipped_recipes())


@cache
def _load_added() -> tuple[dict[str, Recipe], tuple[Plugin, ...]]:
    """Return the recipes of plug-ins, by name, and the plug-ins that are left out."""
    added: dict[str, Recipe] = {}
    broken = []
    for plugin in load_plugins(RECIPES):
        problem = plugin.problem
        if not problem:
            try:
                recipes = _read_added(plugin.value)
            except RecipeError as error:
                recipes, problem = {}, str(error)
            # A name stands for one recipe, whichever package is installed first.
            taken = sorted({*recipes} & {*added, *shipped_recipes()})
            if taken:
                problem = f"there is a recipe {taken[0]!r} already"
        if problem:
            broken.append(Plugin(plugin.name, plugin.package, problem=problem))
        else:
            added |= recipes
    return added, tuple(broken)


def _read_added(value: Any) -> dict[str, Recipe]:
    """Return the recipes of a plug-in, by name."""
    if isinstance(value, Recipe):
        return {value.name: value}
    if isinstance(value, ModuleType):
        value = resources.files(value)
    elif isinstance(value, str):
        value = Path(value)
    if not isinstance(value, Traversable):
        raise RecipeError(
            f"{value!r} is neither a recipe, nor a package, folder or path of TOML files"
        )
    files = {value.name.removesuffix(".toml"): value}
    if value.is_dir():
        files = _list_files(value)
        if not files:
            raise RecipeError(f"there are no files `*.toml` in {value}")
    return {name: read_recipe(file, file.name, _load_extended) for name, file in files.items()}


def _load_extended(name: str) -> Recipe:
    """Return the recipe that a plug-in's recipe extends."""
    if name not in shipped_recipes():
        raise RecipeError(f"it extends {name!r}, which is not a shipped recipe")
    return _load_shipped(name)


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Return the recipe of a name, shipped or of a plug-in, or of a TOML file.

    Text is a path if it ends in `.toml` or contains `/`; a `Path` always is a path.

    Raises:
        RecipeError: an unknown name, a file that cannot be read, is not TOML, or has keys that
            are unknown, missing or of the wrong type.

    >>> load_recipe("llama").axes
    ('tp', 'fsdp', 'pp', 'dp')
    """
    if not isinstance(name_or_path, str | Path):
        raise RecipeError(f"a recipe {name_or_path!r}; give a name, or the path of a TOML file")
    if isinstance(name_or_path, Path) or _is_path(name_or_path):
        return _load_file(Path(name_or_path), ())
    return _load_known(name_or_path)


def _is_path(text: str) -> bool:
    return text.endswith(".toml") or "/" in text


def _load_file(path: Path, extended_by: tuple[Path, ...]) -> Recipe:
    """Load the recipe of a file. It extends a shipped name, or a path relative to its folder."""
    # The chain of files so far, so that a circle is an error instead of endless recursion.
    if path in extended_by:
        raise RecipeError(f"recipe file {path} extends itself; remove `extends` from a file")

    def load_extended(name: str) -> Recipe:
        if _is_path(name):
            return _load_file(path.parent / name, (*extended_by, path))
        return load_recipe(name)

    return read_recipe(path, str(path), load_extended)


def choose_recipe(config: Mapping[str, object]) -> Recipe | None:
    """Return the recipe for a model, by the `model_type` of its config.json, or None.

    >>> choose_recipe({"model_type": "bert"}).name
    'bert'
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    for recipe in _load_added()[0].values():
        if model_type in recipe.model_types:
            return recipe
    # A file is parsed only if it contains the word, which is 20 times as fast as parsing all.
    for name, file in _list_shipped(SHIPPED).items():
        if (
            f'"{model_type}"' in _read_shipped(file)
            and model_type in _load_shipped(name).model_types
        ):
            return _load_shipped(name)
    return None


def rank_resembling(
    names: Iterable[str], config: Config
) -> list[tuple[Recipe, int, tuple[str, ...]]]:
    """Return the known recipes whose rules match any of a model's names, the nearest first.

    Returns:
        For each, the recipe, the number of names that its rules match, and the expressions of its
        counts that the model's config.json lacks.

    >>> names = [f"model.layers.{i}.mlp.{name}_proj.weight" for i in (0, 1) for name in ("up", "q")]
    >>> recipe, matched, missing = rank_resembling(names, {"num_hidden_layers": 2})[0]
    >>> recipe.name, matched, missing
    ('llama', 2, ('num_attention_heads', 'num_key_value_heads|num_attention_heads'))
    """
    # Layers and experts repeat: names that differ only in numbers are matched once.
    kinds = Counter(map(_write_kind, names))
    ranked: list[tuple[tuple[int, int, int, bool, int], tuple[Recipe, int, tuple[str, ...]]]] = []
    for name in known_recipes():
        recipe = _load_known(name)
        rules = [rule for rule in recipe.rules if _may_count(rule, config)]
        matched, used = 0, set()
        for kind, count in kinds.items():
            number = next((n for n, rule in enumerate(rules) if rule.matches(kind)), None)
            if number is not None:
                matched += count
                used.add(number)
        missing = _list_missing(recipe, config)
        idle = len(rules) - len(used)
        rank = (-matched, len(missing), -_extensions()[name], _extends(name), idle)
        if matched:
            ranked.append((rank, (recipe, matched, missing)))
    return [resembling for _, resembling in sorted(ranked, key=itemgetter(0))]


def _write_kind(name: str, number: str = "0") -> str:
    """Return a tensor's name with each number in it replaced."""
    return re.sub(r"(?<=\.)\d+(?=\.)", number, name)


@cache
def _extensions() -> dict[str, int]:
    """Return how many recipes have all rules of each."""
    rules = {name: frozenset(_load_known(name).rules) for name in known_recipes()}
    return {name: sum(own <= other for other in rules.values()) for name, own in rules.items()}


def _extends(name: str) -> bool:
    """Return whether a shipped recipe takes the rules of another."""
    return name in shipped_recipes() and "extends" in tomllib.loads(
        (SHIPPED / f"{name}.toml").read_text()
    )


def _may_count(rule: Rule, config: Config) -> bool:
    """Return whether a rule may apply to some layer of a model."""
    condition = rule.condition
    return condition is None or bool(condition.index_names) or condition.holds(config)


def _list_missing(recipe: Recipe, config: Config) -> tuple[str, ...]:
    """Return the expressions of a recipe's counts for which a config lacks keys."""
    counts = [numbering.count for numbering in recipe.numbers.values()]
    counts += [count for coupling in recipe.coupled.values() for _, count in coupling.members]
    missing = []
    for count in dict.fromkeys(counts):
        expression = parse_expression(count)
        try:
            expression.value(config, dict.fromkeys(expression.index_names, 0))
        except RecipeError:
            missing.append(count)
    return tuple(missing)


def describe_unknown_model(config: Config | None, names: Iterable[str]) -> str:
    """Describe a model without a recipe: its type, and the recipes that it resembles.

    Without a config, the description is for a checkpoint without config.json.
    """
    # Iterated twice.
    names = list(names)
    if config is None:
        text = "there is no config.json to choose a recipe by; "
    else:
        text = f"no shipped recipe for the model type {config.get('model_type')!r}; "
    ranked = rank_resembling(names, config or {})[:_MAX_NEAR]
    if not ranked or 2 * ranked[0][1] < len(names):
        # Model types with similar names usually have similar tensors.
        kind = str((config or {}).get("model_type") or "")
        near = difflib.get_close_matches(kind.casefold(), known_recipes())
        near += [recipe.name for recipe, _, _ in ranked]
        there = f"the nearest are {', '.join(dict.fromkeys(near))}; " if near else ""
        return (
            f"{text}{there}`reshard recipe show` lists all {len(known_recipes())}; give rules, or "
            f"a recipe file{describe_broken(_load_added()[1])}"
        )
    (recipe, matched, missing), *others = ranked
    counts = "config.json has all of its counts"
    if missing and config is not None:
        counts = f"of its counts config.json lacks {', '.join(f'`{count}`' for count in missing)}"
    elif config is None:
        counts = "it takes the model's counts from config.json, so put that next to the weights"
    after = ", ".join(f"{other.name} ({count})" for other, count, _ in others)
    return (
        f"{text}by the names of its tensors it resembles {recipe.name}, whose rules match "
        f"{matched} of {len(names)}{f', then {after}' if after else ''}; {counts}. See `reshard "
        f"recipe show {recipe.name}`: if the model computes as that one does, take it with "
        f"--recipe {recipe.name}; or give rules, or a recipe file"
    )


def suggest_rules(shapes: Mapping[str, tuple[int, ...]], axis: str) -> list[str]:
    """Return rules that shard the largest kinds of tensors over an axis, and a rule for the others.

    Args:
        shapes: of the model's tensors, by name.
        axis: of the mesh.

    >>> suggest_rules({"layers.0.up": (8, 4), "layers.1.up": (8, 4), "norm": (4,)}, "tp")
    ['layers.*.up=tp, -', 'norm=tp', '*=...']
    """
    elements: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, shape in shapes.items():
        # A name with any other character would be read as a pattern.
        if shape and re.fullmatch(r"[\w./-]+", name):
            elements[_write_kind(name, "*"), shape] += math.prod(shape)
    ranked = sorted(elements, key=lambda kind: (-min(len(kind[1]), 2), -elements[kind]))
    chosen: dict[str, tuple[int, ...]] = {}
    for pattern, shape in ranked:
        chosen.setdefault(pattern, shape)
    rules = []
    for pattern, shape in [*chosen.items()][:_MAX_SUGGESTED]:
        # Rows, or columns for a tensor of a single row.
        sharded = next((d for d, size in enumerate(shape) if size > 1), 0)
        spec = ", ".join(axis if d == sharded else "-" for d in range(len(shape)))
        rules.append(f"{pattern}={spec}")
    return [*rules, "*=..."]


def _load_known(name: str) -> Recipe:
    added, _ = _load_added()
    if name in added:
        return added[name]
    if name not in shipped_recipes():
        raise RecipeError(_describe_unknown(name))
    return _load_shipped(name)


@cache
def _load_shipped(name: str) -> Recipe:
    return read_recipe(SHIPPED / f"{name}.toml", f"{name}.toml", load_recipe)


def _describe_unknown(name: str) -> str:
    names = known_recipes()
    return (
        f"unknown recipe {name!r}; {near_text(name, names)}The shipped recipes are "
        f"{', '.join(names)}; write the path of a file of your own with its ending "
        f".toml{describe_broken(_load_added()[1])}"
    )
