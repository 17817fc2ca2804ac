"""Plain values of a pickle: numbers, text, None, and lists, tuples, dicts and sizes of such.

They mean the same wherever they are read. An object of a class means what its class does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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


def is_plain(value: Any) -> bool:
    """Whether a value is plain. NaN is, though no attribute: it is not equal to itself.

    >>> is_plain([float("nan"), {"loss": 0.5}]), is_plain(Global("os", "system"))
    (True, False)
    """
    return _is_plain(value, [_MOST_VALUES], _MOST_DEPTH, has_nan=True)


def _is_plain(value: Any, budget: list[int], depth: int, *, has_nan: bool = False) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        return False

    def are_plain(parts: Iterable[Any]) -> bool:
        return all(_is_plain(one, budget, depth - 1, has_nan=has_nan) for one in parts)

    kind = type(value)
    if kind in _SIMPLE:
        return has_nan or kind is not float or not math.isnan(value)
    if kind is Call:
        is_size = value.function == _SIZE and value.state is None and not value.is_new
        return is_size and are_plain([value.arguments])
    if kind is dict:
        return are_plain(value) and are_plain(value.values())
    if kind in (list, tuple):
        return are_plain(value)
    return False
