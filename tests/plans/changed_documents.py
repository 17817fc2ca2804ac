"""JSON documents with a changed value, for tests of readers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield path
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from places(value[key], (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path; without it where that is Ellipsis."""
    if not path:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


STRANGE = [..., None, True, -1, 0, 1, 7, 2.5, 1 << 40, 1 << 70, "x", [], [[]], [[0, 1, 2]], {}]
