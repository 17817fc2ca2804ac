"""Plain values of a pickle: numbers, text, None, and lists, tuples, dicts and sizes of such.

They mean the same wherever they are read. An object of a class means what its class does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global

# A pickle can hold a list in itself, or one list in very many places.
_MOST_DEPTH = 16
_MOST_VALUES = 1_000_000
_SIMPLE = (str, int, float, bool, type(None))
_SIZE = Global("torch", "Size")


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the attributes whose values are plain.

    >>> plain_attributes({"shapes": {"w": (8, 4)}, "owner": Global("os", "system")})
    {'shapes': {'w': (8, 4)}}
    """
    # One budget for all of them: shared lists are walked once for each place they are in.
    budget = [_MOST_VALUES]
    return {
        name: value
        for name, value in attributes.items()
        if name.isidentifier() and name.isascii() and _is_plain(value, budget, _MOST_DEPTH)
    }


def _is_plain(value: Any, budget: list[int], depth: int) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        return False
    kind = type(value)
    if kind in _SIMPLE:
        return kind is not float or not math.isnan(value)
    if kind is Call:
        is_size = value.function == _SIZE and value.state is None and not value.is_new
        return is_size and _is_plain(value.arguments, budget, depth - 1)
    if kind is dict:
        keys = all(_is_plain(key, budget, depth - 1) for key in value)
        return keys and all(_is_plain(one, budget, depth - 1) for one in value.values())
    if kind in (list, tuple):
        return all(_is_plain(one, budget, depth - 1) for one in value)
    return False
