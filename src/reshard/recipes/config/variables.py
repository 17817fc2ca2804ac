"""Variables: the numbers of a model's config for which braces in a rule's spec stand.

A cut often follows a number that only the model knows, such as its key/value heads. A spec
names it as the model's config.json does, in an expression::

    tp@heads{num_key_value_heads|num_attention_heads}, -
            1. evaluate the expression (`reshard.recipes.config.expressions`)
            2. write its number in place of the braces
    tp@heads8, -

A recipe may also have cuts of its own under a name, `tp@{vocabulary}`, whose text is written
in place of the braces and which a user may replace.
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
_NO_WORDS: Mapping[str, str] = {}


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


def fill_in(
    spec: str,
    config: Config | None,
    words: Mapping[str, str] = _NO_WORDS,
    numbers: Numbers = NO_NUMBERS,
) -> str:
    """The spec's text with the numbers of `config`, or words, in place of its variables.

    Args:
        spec: with braces.
        config: of the model.
        words: texts by name, for braces that hold nothing but the name.
        numbers: of a tensor's name, for lists with an entry a layer.

    Raises:
        RecipeError: a variable that the config has not, or that is not a whole number.

    >>> fill_in("tp@heads{num_key_value_heads|num_attention_heads}", {"num_attention_heads": 12})
    'tp@heads12'
    >>> fill_in("tp@{vocabulary}, -", None, {"vocabulary": "pad128"})
    'tp@pad128, -'
    """

    def say(expression: Expression) -> str:
        if expression.text in words:
            return words[expression.text]
        return str(expression.value(config, numbers))

    texts = iter([say(expression) for expression in variables(spec)])
    return _BRACES.sub(lambda braces: next(texts), spec)
