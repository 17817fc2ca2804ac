"""Argument trees: flattens lists, tuples and dictionaries of arrays, and rebuilds them.

Arguments and results are arrays, and lists, tuples and dictionaries of such, as deep as wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from reshard.errors import ReshardError, SpecError, UsageError
from reshard.sharding import ShardingSpec


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


def keyed_leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The same leaves, each with the keys and places under which it is.

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
    """The leaves of a tree in the places of another one's, and in its order.

    Entries of dictionaries belong together by their keys, in whatever order they are.

    Args:
        what: the tree is, for the message.

    Raises `error`, which names the places that only one of them has.

    >>> leaves_like({"b": 1, "a": [2]}, {"a": ["x"], "b": "y"}, "gradients")
    [2, 1]
    >>> try:
    ...     leaves_like({"b": 1}, {"b": "y", "c": "z"}, "gradients")
    ... except UsageError as error:
    ...     print(str(error).partition(";")[0])
    gradients at 1 places, where 2 were expected: 1 (['c']) have nothing, 0 are not expected
    """
    found, wanted = dict(leaves(tree)), [path for path, _ in leaves(like)]
    if found.keys() != set(wanted):
        lacking = [path for path in wanted if path not in found]
        more = [path for path in found if path not in set(wanted)]
        raise error(
            f"{what} at {len(found)} places, where {len(wanted)} were expected: {_say(lacking)} "
            f"have nothing, {_say(more)} are not expected; give the same lists, tuples and keys of "
            "dictionaries"
        )
    return [found[path] for path in wanted]


def _say(paths: list[str]) -> str:
    """How many places, and the first ones of them."""
    shown = ", ".join(path or "the whole" for path in paths[:3]) + ", ..." * (len(paths) > 3)
    return f"{len(paths)} ({shown})" if paths else "0"


def arranged_like(tree: Any, like: Any, what: str) -> Any:
    """The leaves of a tree in another one's lists, tuples and dictionaries. See `leaves_like`.

    >>> arranged_like({"b": 1, "a": [2]}, {"a": ("x",), "b": "y"}, "gradients")
    {'a': (2,), 'b': 1}
    """
    found = iter(leaves_like(tree, like, what))
    return replaced(like, lambda _: next(found))


def shardings_like(specs: Any, like: Any, what: str) -> list[ShardingSpec | None]:
    """A sharding, or None, for each leaf of a tree, in its order. See `leaves_like`.

    Raises SpecError for other places, and for values that are not shardings.
    """
    found = leaves_like(specs, like, what, SpecError)
    for one in found:
        if one is not None and not isinstance(one, ShardingSpec):
            raise SpecError(
                f"{what} with {one!r}, which is no sharding; give reshard.spec(mesh, 'x, -') for "
                "each parameter, or None for its own"
            )
    return found


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
