"""Carried values: checks of the trees that loops carry, and that branches return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import UsageError
from reshard.spmd.arrays.argument_tree import arranged_like, leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import library_of
from reshard.spmd.programs.traced_function import arrays_of
from reshard.spmd.shards.pending_sums import settled


def check_functions(name: str, *functions: object) -> None:
    """Raises UsageError for what is no function."""
    for one in functions:
        if not callable(one):
            raise UsageError(
                f"sp.{name} with {one!r}, a {type(one).__name__}; a function was expected"
            )


def as_arrays(name: str, tree: Any) -> Any:
    """The tree with arrays in shards for all arrays and numbers in it."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, ShardedArray):
            return leaf
        if library_of(leaf) is None and not isinstance(leaf, bool | int | float | complex):
            raise UsageError(
                f"sp.{name} with {leaf!r}, a {type(leaf).__name__}; arrays were expected, and "
                "lists, tuples and dictionaries of them"
            )
        return array(leaf)

    return replaced(tree, convert)


def types_of(tree: Any) -> Any:
    """The tree with the types of its arrays, without contributions that wait."""
    return replaced(
        tree, lambda leaf: settled(leaf.type) if isinstance(leaf, ShardedArray) else leaf
    )


def check_predicate(name: str, value: Any) -> None:
    """Raises UsageError for what is not one truth value."""
    if isinstance(value, bool):
        return
    is_array = isinstance(value, ShardedArray)
    if not is_array or value.type.shape != () or value.type.dtype.name != "bool":
        said = str(value.type) if is_array else f"{value!r}, a {type(value).__name__}"
        raise UsageError(
            f"sp.{name} that is decided by {said}; one truth value was expected, an array of bool "
            "without dimensions: x > 0, sp.any(x), sp.all(x)"
        )


def read_predicate(name: str, value: Any) -> bool:
    """What a predicate says. Raises UsageError for what is none."""
    check_predicate(name, value)
    return bool(value if isinstance(value, bool) else value.to_dense())


def split_pair(name: str, returned: Any) -> tuple[Any, Any]:
    """What a body carries on, and what it collects. Raises UsageError for no such pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(
            f"sp.{name} of a body that returned a {type(returned).__name__}; a pair of what is "
            "carried on and what is collected was expected"
        )
    return returned


def read_like(name: str, what: str, like: Any, given: Any) -> Any:
    """A tree as arrays, arranged as another one of arrays. Raises UsageError unless they are alike.

    Args:
        what: the trees are, for the message.
    """
    found = arranged_like(as_arrays(name, given), like, f"sp.{name}: {what}")
    said = [[leaf.type for leaf in arrays_of(tree)] for tree in (like, found)]
    check_same(name, what, like, said[0], found, said[1])
    return found


def check_same(
    name: str,
    what: str,
    one: Any,
    types: Sequence[ArrayType],
    other: Any,
    other_types: Sequence[ArrayType],
) -> None:
    """Raises UsageError for trees of the same places with other shapes or element types in them."""
    paths = [path for path, _ in leaves(one)]
    kinds = [_types_at_leaves(one, types), _types_at_leaves(other, other_types)]
    if kinds[0] != kinds[1]:
        where = ", ".join(path or "one place" for path in paths)
        said = [", ".join(text) for text in kinds]
        raise UsageError(
            f"sp.{name}: {what} {said[0]} at {where}, and then {said[1]}; the same shapes and "
            "element types were expected: cast with sp.astype"
        )


def _types_at_leaves(tree: Any, types: Sequence[ArrayType]) -> list[str]:
    """What is at each leaf: the next one of the arrays' types, or None."""
    left = iter(types)
    return ["None" if leaf is None else str(next(left)) for _, leaf in leaves(tree)]
