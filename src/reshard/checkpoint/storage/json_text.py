"""JSON with one meaning: an object that gives a key twice is an error, as it is two statements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from reshard.errors import FormatError


def parse_json(text: str) -> Any:
    """The values of a JSON text.

    Raises:
        FormatError: a key that appears twice in one object.
        ValueError, RecursionError: no JSON.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    reshard.errors.FormatError: the key 'a' appears twice
    """
    return json.loads(text, object_pairs_hook=_take_unique_keys)


def _take_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise FormatError(f"the key {first_duplicate(key for key, _ in pairs)!r} appears twice")
    return content


def first_duplicate(names: Iterable[str]) -> str:
    """The first of the names that appears more than once."""
    return next(name for name, times in Counter(names).items() if times > 1)
