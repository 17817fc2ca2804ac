"""Variables: the numbers of a model's config for which braces in a rule's spec stand.

A cut often follows a number that only the model knows, such as its key/value heads. A spec
names it as the model's config.json does, with fallbacks for configs that are older than the
key::

    tp@heads{num_key_value_heads|num_attention_heads}, -
            1. take the first of the names that the config has; null counts as absent
            2. write its number in place of the braces
    tp@heads8, -

A recipe may also have cuts of its own under a name, `tp@{vocabulary}`, whose text is written
in place of the braces and which a user may replace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.errors import RecipeError

_BRACES = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NO_CUTS: Mapping[str, str] = {}


def variables(spec: str) -> tuple[tuple[str, ...], ...]:
    """The variables of a spec's text in order, each with its alternatives.

    Raises:
        RecipeError: braces that do not pair, or do not hold names.

    >>> variables("tp@heads{num_key_value_heads|num_attention_heads}, -")
    (('num_key_value_heads', 'num_attention_heads'),)
    """
    found = []
    for braces in _BRACES.finditer(spec):
        names = tuple(name.strip() for name in braces[1].split("|"))
        if not all(_NAME.fullmatch(name) for name in names):
            raise RecipeError(_describe_unreadable(spec, braces[0]))
        found.append(names)
    lone = re.search(r"[{}]", _BRACES.sub("", spec))
    if lone:
        raise RecipeError(_describe_unreadable(spec, lone[0]))
    return tuple(found)


def _describe_unreadable(spec: str, braces: str) -> str:
    return (
        f"cannot read {braces!r} in the spec `{spec}`; write a key of the model's config.json in "
        "braces, such as {num_attention_heads}, with `|` between alternatives"
    )


def fill_in(
    spec: str, config: Mapping[str, object] | None, cuts: Mapping[str, str] = _NO_CUTS
) -> str:
    """The spec's text with the numbers of `config`, or cuts, in place of its variables.

    Raises:
        RecipeError: a variable that the config has not, or that is not a whole number.

    >>> fill_in("tp@heads{num_key_value_heads|num_attention_heads}", {"num_attention_heads": 12})
    'tp@heads12'
    >>> fill_in("tp@{vocabulary}, -", None, {"vocabulary": "pad128"})
    'tp@pad128, -'
    """
    text = spec
    for names in variables(spec):
        value = cuts[names[0]] if names[0] in cuts else str(number_in(config, names))
        # One at a time, from the left: a value has no braces, so the next match is the next one.
        text = _BRACES.sub(value, text, count=1)
    return text


def number_in(config: Mapping[str, object] | None, names: tuple[str, ...]) -> int:
    """The number of the first of `names` that the config has.

    Raises:
        RecipeError: none of them, or no whole number.
    """
    wanted = " or ".join(f"`{name}`" for name in names)
    remedy = "put the model's config.json beside the checkpoint, or write the number in the rule"
    if config is None:
        raise RecipeError(f"{wanted} of the model's config is needed and there is none; {remedy}")
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RecipeError(
                f"`{name}` of the model's config is {value!r}, a whole number of at least 0 was "
                f"expected; {remedy}"
            )
        return value
    raise RecipeError(f"{wanted} is not in the model's config; {remedy}")
