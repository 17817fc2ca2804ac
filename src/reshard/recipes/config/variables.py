"""Variables: the numbers of a model's config that replace braces in a rule's spec.

A cut rule often depends on a number of the model, such as that of its key/value heads. A spec
refers to it by its name in the model's config.json, in an expression::

    tp@heads{num_key_value_heads|num_attention_heads}, -
            1. evaluate the expression (`reshard.recipes.config.expressions`)
            2. replace the braces by its value
    tp@heads8, -

A recipe may also define cut rules by name, `tp@{vocabulary}` or `tp@{heads.query}`, whose text
replaces the braces first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.errors import RecipeError
from reshard.recipes.config.expressions import (
    NO_NUMBERS,
    Config,
    Expression,
    Numbers,
    parse_expression,
)

_BRACES = re.compile(r"\{([^{}]*)\}")


def variables(spec: str) -> tuple[Expression, ...]:
    """The expressions of a spec's text, in order.

    Raises:
        RecipeError: braces that do not pair, or do not hold an expression.

    >>> [str(one) for one in variables("tp@heads{num_key_value_heads|num_attention_heads}, -")]
    ['num_key_value_heads|num_attention_heads']
    """
    found = []
    for braces in _BRACES.finditer(spec):
        try:
            found.append(parse_expression(braces[1]))
        except RecipeError as error:
            raise RecipeError(_describe_unreadable(spec, braces[0])) from error
    lone = re.search(r"[{}]", _BRACES.sub("", spec))
    if lone:
        raise RecipeError(_describe_unreadable(spec, lone[0]))
    return tuple(found)


def _describe_unreadable(spec: str, braces: str) -> str:
    return (
        f"cannot read {braces!r} in the spec `{spec}`; write a key of the model's config.json in "
        "braces, such as {num_attention_heads}, or numbers and keys with + - * // and parentheses, "
        "with `|` between alternatives"
    )


def fill_in(spec: str, config: Config | None, numbers: Numbers = NO_NUMBERS) -> str:
    """The spec's text with the numbers of `config` in place of its variables.

    Args:
        spec: with braces.
        config: of the model.
        numbers: of a tensor's name, for lists with an entry a layer.

    Raises:
        RecipeError: a variable that the config has not, or that is not a whole number.

    >>> fill_in("tp@heads{num_key_value_heads|num_attention_heads}", {"num_attention_heads": 12})
    'tp@heads12'
    """
    texts = iter([str(one.value(config, numbers)) for one in variables(spec)])
    return _BRACES.sub(lambda braces: next(texts), spec)


def expand(spec: str, words: Mapping[str, str]) -> str:
    """The spec's text with words in place of the braces that hold nothing but their names.

    The words may have braces of their own.

    >>> expand("tp@{vocabulary}, x@{heads.query}", {"heads.query": "heads{heads}"})
    'tp@{vocabulary}, x@heads{heads}'
    """
    return _BRACES.sub(lambda braces: words.get(braces[1].strip(), braces[0]), spec)
