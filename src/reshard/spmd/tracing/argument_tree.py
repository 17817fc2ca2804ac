"""Argument trees: the arrays in lists, tuples and dictionaries, and the same put together again.

Arguments and results are arrays, and lists, tuples and dictionaries of such, as deep as wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is in no list, tuple or dictionary further down, with its path.

    >>> list(leaves({"w": [1, 2], "b": 3}, "layer"))
    [("layer['w'][0]", 1), ("layer['w'][1]", 2), ("layer['b']", 3)]
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}[{place}]")
    else:
        yield path, tree


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dictionaries with `change` of each leaf, in the order of `leaves`.

    >>> replaced((1, [2, 3]), lambda leaf: leaf * 10)
    (10, [20, 30])
    """
    if isinstance(tree, dict):
        return {key: replaced(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, change) for value in tree]
    if isinstance(tree, tuple):
        made = [replaced(value, change) for value in tree]
        # A tuple with names takes its entries one by one.
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return change(tree)
