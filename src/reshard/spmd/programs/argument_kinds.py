"""Kinds of arguments: what programs are kept by, and the arrays that they are run with."""

from __future__ import annotations

from typing import Any

from reshard.errors import UsageError
from reshard.spmd.array_type import ArrayType
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.tracing.graph_recording import type_of


def read_kind(tree: Any, key: list[Any], arrays: list[Any]) -> None:
    """Adds what a tree of arguments is to a key, and its arrays to a list.

    Raises UsageError for an array without elements, and for what cannot be compared.

    >>> import reshard.spmd as sp
    >>> key, arrays = [], []
    >>> read_kind({"x": sp.array([1.0]), "count": 3}, key, arrays)
    >>> key, len(arrays)
    ([(<class 'dict'>, ('x', 'count')), ArrayType(float64[1]), (<class 'int'>, 3)], 1)
    """
    if isinstance(tree, ShardedArray):
        key.append(tree.type)
        arrays.append(tree)
    elif isinstance(tree, dict):
        key.append((dict, tuple(tree)))
        for value in tree.values():
            read_kind(value, key, arrays)
    elif isinstance(tree, list | tuple):
        key.append((type(tree), len(tree)))
        for value in tree:
            read_kind(value, key, arrays)
    else:
        _read_leaf(tree, key, arrays)


def _read_leaf(leaf: Any, key: list[Any], arrays: list[Any]) -> None:
    if isinstance(leaf, ArrayType):
        raise UsageError(
            f"sp.jit of {leaf!r}, which has no elements; call it with arrays, or see what it does "
            "with f.trace(...)"
        )
    kind = type_of(leaf)
    if kind is not None:
        key.append(kind)
        arrays.append(leaf)
        return
    if isinstance(leaf, float | complex):
        # By text: no number that is none equals itself, and 0.0 equals -0.0.
        key.append((type(leaf), repr(leaf)))
        return
    try:
        hash(leaf)
    except TypeError as error:
        raise UsageError(
            f"sp.jit with the argument {leaf!r}, a {type(leaf).__name__} that cannot be compared; "
            "give arrays, and numbers, texts and the like"
        ) from error
    key.append((type(leaf), leaf))
