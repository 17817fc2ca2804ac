"""What differs between the plain values of two checkpoints.

1. Lists and dicts are taken apart: formats keep them as one value, or each of what is in them.
2. Values are compared by their texts: a NaN is equal to itself, and True is not 1.
3. What a format says of itself (`CheckpointFormat.is_own_value`) is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.registry import find_format


def differing_values(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, str]]:
    """The plain values that differ, each with how."""
    left, right = dict(_list_leaves(a.values)), dict(_list_leaves(b.values))
    formats = [one for one in (find_format(a.format), find_format(b.format)) if one is not None]
    for name in [*left, *(name for name in right if name not in left)]:
        found = [side[name] for side in (left, right) if name in side]
        if len({*map(repr, found)}) == len(found) - 1:
            continue
        if any(all(one.is_own_value(name, value) for value in found) for one in formats):
            continue
        if len(found) == 2:
            yield name, f"is {found[0]!r} and {found[1]!r}"
        else:
            yield name, f"is only in {(a if name in left else b).folder}"


def _list_leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What lists and dicts have in them, by its path; empty ones are values themselves."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, list | tuple) and value:
            yield from _list_leaves(dict(enumerate(value)), f"{path}.")
        elif isinstance(value, dict) and value:
            yield from _list_leaves(value, f"{path}.")
        else:
            yield path, value
