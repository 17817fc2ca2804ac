"""Terms of records: numbers of a config.json, and conditions on it and on a name's first number.

::

    head_dim|hidden_size//num_attention_heads      a number, as in `reshard.recipes.expressions`
    attention_bias                                 a condition on the config, as there
    num_heads<>kv_heads, a==b                      two numbers of the config compared
    n>=first_k_dense_replace, n<max_window_layers  the first number of a name, compared
    (n+1)%decoder_sparse_step=0                    its remainder
    n in mlp_only_layers, n not in ...             whether a list has it
    layer_types[n]=full_attention                  the entry of a list or a text for it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from reshard.errors import RecipeError
from reshard.recipes.expressions import Key, parse_condition, parse_expression

Config = Mapping[str, Any]
_COMPARED = re.compile(r"(?P<left>[^<>=!]+)(?P<sign><>|==|>=|<)(?P<right>[^<>=!]+)")
_REMAINDER = re.compile(r"\(n\+(?P<plus>\d+)\)%(?P<by>[^=!]+)(?P<sign>!?=)(?P<rest>.+)")
_MEMBER = re.compile(r"n (?P<is_not>not )?in (?P<key>.+)")
_ENTRY = re.compile(r"(?P<key>.+)\[n\](?P<sign>!?=)(?P<value>.+)")


def find_number(text: str, config: Config) -> int | None:
    """Return the value of an expression; None where the config does not have its keys.

    >>> find_number("head_dim|hidden_size//heads", {"hidden_size": 64, "heads": 4})
    16
    """
    try:
        return parse_expression(text).value(config)
    except (RecipeError, ZeroDivisionError):
        return None


def holds(term: str, config: Config, numbers: Sequence[int] = ()) -> bool:
    """Return whether a term holds for a config and the numbers of a name.

    >>> config = {"layer_types": ["full", "linear"], "first": 1}
    >>> [holds("layer_types[n]=full", config, (n,)) for n in (0, 1)]
    [True, False]
    >>> [holds("n>=first", config, (n,)) for n in (0, 1)]
    [False, True]
    """
    kind, found = _read_term(term)
    if kind == "config":
        return parse_condition(term).holds(config)
    first = numbers[0] if numbers else 0
    if kind == "compared":
        left = first if found["left"] == "n" else find_number(found["left"], config)
        right = find_number(found["right"], config)
        if found["sign"] in ("<>", "=="):
            return (left == right) is (found["sign"] == "==")
        if left is None or right is None:
            return False
        return left >= right if found["sign"] == ">=" else left < right
    if kind == "remainder":
        by, rest = find_number(found["by"], config), find_number(found["rest"], config)
        is_so = bool(by) and (first + int(found["plus"])) % (by or 1) == rest
        return is_so is (found["sign"] == "=")
    values = _find_list(found["key"], config)
    if kind == "member":
        return (first in values) is not bool(found["is_not"])
    entry = str(values[first]) if first < len(values) else None
    return (entry == found["value"]) is (found["sign"] == "=")


def is_about_config(term: str) -> bool:
    """Return whether a term is a condition on the config alone.

    >>> is_about_config("attention_bias"), is_about_config("n>=first")
    (True, False)
    """
    return _read_term(term)[0] == "config"


@lru_cache(maxsize=4096)
def _read_term(term: str) -> tuple[str, Mapping[str, Any]]:
    for kind, pattern in (
        ("remainder", _REMAINDER),
        ("member", _MEMBER),
        ("entry", _ENTRY),
        ("compared", _COMPARED),
    ):
        found = pattern.fullmatch(term)
        if found is not None:
            return kind, found.groupdict()
    return "config", {}


def _find_list(text: str, config: Config) -> Sequence[Any]:
    """Return the list or the text of a key, empty where there is none."""
    key = Key.parse(text)
    found = key.find(config) if key is not None else None
    return found if isinstance(found, list | tuple | str) else ()
