"""Names of an architecture: which part of weights' names is a trainer's, and whose the rest are.

A trainer saves a model as a part of its own state, so that names have a prefix that the model's
have not. Several prefixes may fit some of the names; it is decided over all of them::

    model.model.layers.0.mlp.up_proj.weight      "model." of the trainer, and of the architecture
    model.lm_head.weight                         with "model.model." off, this would not fit

1. The prefixes are those that half of the names begin with, up to a dot.
2. The one counts that leaves most names matched by a recipe for config.json's model type: by its
   rules, or by its names in another convention, such as Megatron's.
3. Of several the longest that leaves the architecture's own prefix, if one does. Else the longest
   of words that trainers use. Else none is guessed: an error lists the choices.

Without a recipe, names are taken as a trainer's state says: as its optimizer has them, or as they
stood in the nested state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.naming.renaming import STACKED
from reshard.checkpoint.training.model_sets import (
    TRAINER_WORDS,
    expect_one_model,
    find_model_sets,
)
from reshard.checkpoint.training.state import shapes_without_state
from reshard.errors import RecipeError
from reshard.recipes.naming import compile_pattern
from reshard.recipes.recipe import Recipe

# What the base model of an architecture is called in its other classes, by its model type, where
# that is not `model`. Empty: by nothing, names are the same in all classes.
_BASES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "bloom", "falcon"), "transformer"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), "roberta"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "backbone"),
    **{name: name for name in ("bert", "electra", "distilbert", "gpt_neox", "vit")},
    "deberta-v2": "deberta",
    **dict.fromkeys(("t5", "mt5", "umt5", "clip", "clip_text_model", "clip_vision_model"), ""),
    **dict.fromkeys(("siglip", "siglip_text_model", "siglip_vision_model"), ""),
    **dict.fromkeys(("siglip2", "siglip2_text_model", "siglip2_vision_model"), ""),
}
_MOST_WORDS = 6
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WORD = re.compile(r"[A-Za-z]\w*")


class ModelNames(NamedTuple):
    """How weights are named: the prefix that is not the architecture's, and the convention.

    `convention` is that of the recipe's tables which the rest of a name is in, such as `megatron`;
    None for the architecture's own.
    """

    prefix: str
    convention: str | None = None
    notes: tuple[str, ...] = ()


def find_model_names(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    config: Mapping[str, Any],
    *,
    containers: Iterable[str] = (),
    keeps_prefix: bool = False,
) -> ModelNames:
    """How the weights of a checkpoint are named.

    Args:
        checkpoint: of weights alone, without wrappers in their names.
        recipe: for config.json's model type, if there is one.
        config: config.json.
        containers: prefixes that the trainer's own state shows.
        keeps_prefix: whether the user said what to take off, so that nothing else is.

    Raises:
        RecipeError: several prefixes that could be meant.
    """
    # Layers and experts repeat: names that differ in numbers only are looked at once.
    kinds = Counter(_NUMBER.sub("0", name) for name in checkpoint.tensors)
    prefixes = [""] if keeps_prefix else _list_prefixes(kinds)
    if recipe is None:
        return _take_as_saved(kinds, config, containers, keeps_prefix)
    is_own = _matcher_of(recipe)
    best, convention = _find_best(kinds, prefixes, is_own), None
    for name, patterns in recipe.names.items():
        if name == STACKED:
            continue
        # A table may list only names that differ from the recipe's, such as fused parameters.
        found = _find_best(kinds, prefixes, _matches_either(_matches_any(patterns), is_own))
        if found.matched > best.matched:
            best, convention = found, name
    if convention is not None:
        # In another program's names a shorter prefix cannot be told from none.
        prefix = max(best.prefixes, key=len)
    else:
        prefix = _choose(checkpoint, best.prefixes, kinds, config)
    return ModelNames(prefix, convention)


def expect_single_model(
    checkpoint: Checkpoint, recipe: Recipe | None, *, keeps_prefix: bool = False
) -> None:
    """Raise RecipeError for a checkpoint with several models under different prefixes.

    Args:
        checkpoint: with or without optimizer state.
        recipe: of the architecture, if there is one.
        keeps_prefix: whether names lose no prefix, so that only copies of names without one count.
    """
    shapes = shapes_without_state(checkpoint)
    if recipe is None:
        sets = find_model_sets(shapes)
    else:
        matchers = [_matcher_of(recipe), *map(_matches_any, recipe.names.values())]
        sets = find_model_sets(
            shapes,
            is_of_model=lambda name: any(matches(name) for matches in matchers),
            own_words=_list_own_words(recipe),
        )
    if not keeps_prefix or "" in sets:
        expect_one_model(checkpoint.folder, sets)


def _list_own_words(recipe: Recipe) -> frozenset[str]:
    """Return the words in the names of an architecture."""
    patterns = [rule.pattern for rule in recipe.rules]
    patterns += [pattern for names in recipe.names.values() for pattern in names]
    return frozenset(word for one in patterns for word in _WORD.findall(one)) - TRAINER_WORDS


class _PrefixMatch(NamedTuple):
    """How many names are matched at most, and the prefixes without which they are."""

    matched: int
    prefixes: list[str]


def _list_prefixes(kinds: Mapping[str, int]) -> list[str]:
    """The prefixes of half of the names, none included."""
    counts: Counter[str] = Counter()
    for name, count in kinds.items():
        at = -1
        for _ in range(_MOST_WORDS):
            at = name.find(".", at + 1)
            if at < 0:
                break
            counts[name[: at + 1]] += count
    total = sum(kinds.values())
    return ["", *(prefix for prefix, count in counts.items() if 2 * count >= total)]


def _find_best(
    kinds: Mapping[str, int], prefixes: list[str], matches: Callable[[str], bool]
) -> _PrefixMatch:
    matched = {
        prefix: sum(n for name, n in kinds.items() if matches(name.removeprefix(prefix)))
        for prefix in prefixes
    }
    most = max(matched.values())
    return _PrefixMatch(most, [prefix for prefix, count in matched.items() if count == most])


def _matcher_of(recipe: Recipe) -> Callable[[str], bool]:
    """Whether a name is one of the recipe's own, or of its stacked tensors."""
    stacked = _matches_any(recipe.names.get(STACKED, {}))
    # A rule for whatever is left over says nothing of names.
    rules = [rule for rule in recipe.rules if rule.pattern.strip("*")]
    known: dict[str, bool] = {}

    def matches(name: str) -> bool:
        if name not in known:
            known[name] = any(rule.matches(name) for rule in rules) or stacked(name)
        return known[name]

    return matches


def _matches_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [compile_pattern(one) for one in patterns]
    return lambda name: any(one.fullmatch(name) for one in compiled)


def _matches_either(
    first: Callable[[str], bool], second: Callable[[str], bool]
) -> Callable[[str], bool]:
    return lambda name: first(name) or second(name)


def _choose(
    checkpoint: Checkpoint,
    prefixes: list[str],
    kinds: Mapping[str, int],
    config: Mapping[str, Any],
) -> str:
    """The prefix of several that fit equally well. Raises RecipeError where none is to prefer."""
    # One that a part of the names has must have made more of them fit.
    prefixes = [one for one in prefixes if all(name.startswith(one) for name in kinds)] or prefixes
    base = base_prefix(config)
    full = [one for one in prefixes if any(name.startswith(one + base) for name in kinds)]
    if base and full:
        return max(full, key=len)
    trainers = [
        prefix for prefix in prefixes if {*prefix.split(".")[:-1]} <= TRAINER_WORDS and prefix
    ]
    if trainers:
        return max(trainers, key=len)
    if len(prefixes) == 1:
        return prefixes[0]
    choices = ", ".join(f"--strip-prefix {prefix}" for prefix in prefixes if prefix)
    none = " or --rename '*=*' for none" if "" in prefixes else ""
    raise RecipeError(
        f"the names in {checkpoint.folder}, such as {next(iter(checkpoint))!r}, fit the model type "
        f"{config.get('model_type')!r} without any of several prefixes: say which with {choices},"
        f"{none}"
    )


def base_prefix(config: Mapping[str, Any]) -> str:
    """What names of an architecture's base model begin with in its other classes; `""` for nothing.

    >>> base_prefix({"model_type": "gpt2"}), base_prefix({"model_type": "llama"})
    ('transformer.', 'model.')
    """
    base = _BASES.get(str(config.get("model_type")), "model")
    return f"{base}." if base else ""


def _take_as_saved(
    kinds: Mapping[str, int],
    config: Mapping[str, Any],
    containers: Iterable[str],
    keeps_prefix: bool,
) -> ModelNames:
    """Names of a model type without a recipe: without what the trainer's state shows as its own."""
    shown = [one for one in containers if one and all(name.startswith(one) for name in kinds)]
    prefix = "" if keeps_prefix or not shown else max(shown, key=len)
    what = f"without {prefix!r}, under which the trainer saved them" if prefix else "as they are"
    note = (
        f"no recipe is for the model type {config.get('model_type')!r}: names are taken {what}; "
        "--strip-prefix and --rename change them"
    )
    return ModelNames(prefix, notes=() if keeps_prefix else (note,))
