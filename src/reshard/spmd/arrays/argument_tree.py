"""Argument trees: flattens lists, tuples and dictionaries of arrays, and rebuilds them.

Arguments and results are arrays, or nested lists, tuples and dictionaries of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from reshard.errors import ReshardError, SpecError, UsageError
from reshard.sharding import ShardingSpec


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of lists, tuples and dictionaries, each with its path.

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


def keyed_leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the same leaves, each with its keys and indices.

    >>> list(keyed_leaves({"w": [1, 2]}))
    [(('w', 0), 1), (('w', 1), 2)]
    """
    # `leaves` goes by itself: it is asked for at each call, and paths of keys take nearly twice as
    # long.
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from keyed_leaves(value, (*keys, key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from keyed_leaves(value, (*keys, place))
    else:
        yield keys, tree


def leaves_like(
    tree: Any, like: Any, what: str, error: type[ReshardError] = UsageError
) -> list[Any]:
    """Return the leaves of a tree in the order of another tree with the same structure.

    Entries of dictionaries correspond by key, regardless of their order.

    Args:
        what: a description of the tree for the message.

    Raises `error`, which names the places that only one of the trees has.

    >>> leaves_like({"b": 1, "a": [2]}, {"a": ["x"], "b": "y"}, "gradients")
    [2, 1]
    >>> try:
    ...     leaves_like({"b": 1}, {"b": "y", "c": "z"}, "gradients")
    ... except UsageError as error:
    ...     print(str(error).partition(";")[0])
    gradients at 1 places, where 2 were expected: 1 (['c']) have nothing, 0 are not expected
    """
    by_path, paths = dict(leaves(tree)), [path for path, _ in leaves(like)]
    if by_path.keys() != set(paths):
        lacking = [path for path in paths if path not in by_path]
        more = [path for path in by_path if path not in set(paths)]
        raise error(
            f"{what} at {len(by_path)} places, where {len(paths)} were expected: {_say(lacking)} "
            f"have nothing, {_say(more)} are not expected; give the same lists, tuples and keys of "
            "dictionaries"
        )
    return [by_path[path] for path in paths]


def _say(paths: list[str]) -> str:
    """Return a text with the number of places, and the first places."""
    shown = ", ".join(path or "the whole" for path in paths[:3]) + ", ..." * (len(paths) > 3)
    return f"{len(paths)} ({shown})" if paths else "0"


def arranged_like(tree: Any, like: Any, what: str) -> Any:
    """Return the leaves of a tree in another tree's structure. See `leaves_like`.

    >>> arranged_like({"b": 1, "a": [2]}, {"a": ("x",), "b": "y"}, "gradients")
    {'a': (2,), 'b': 1}
    """
    values = iter(leaves_like(tree, like, what))
    return replaced(like, lambda _: next(values))


def shardings_like(specs: Any, like: Any, what: str) -> list[ShardingSpec | None]:
    """Return a sharding, or None, for each leaf of a tree, in its order. See `leaves_like`.

    Raises SpecError for other places, and for values that are not shardings.
    """
    shardings = leaves_like(specs, like, what, SpecError)
    for spec in shardings:
        if spec is not None and not isinstance(spec, ShardingSpec):
            raise SpecError(
                f"{what} with {spec!r}, which is not a sharding; give reshard.spec(mesh, 'x, -') "
                "for each parameter, or None for its own"
            )
    return shardings


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each leaf, in the order of `leaves`, and keep the structure.

    >>> replaced((1, [2, 3]), lambda leaf: leaf * 10)
    (10, [20, 30])
    """
    if isinstance(tree, dict):
        return {key: replaced(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, change) for value in tree]
    if isinstance(tree, tuple):
        entries = [replaced(value, change) for value in tree]
        # A named tuple takes its entries as separate arguments.
        return type(tree)(*entries) if hasattr(tree, "_fields") else tuple(entries)
    return change(tree)
