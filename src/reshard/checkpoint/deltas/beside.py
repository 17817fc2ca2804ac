"""What a delta says of values and files beside the tensors, as JSON.

JSON has fewer kinds of values than a state dict: tuples, bytes, dicts with other keys than text,
and numbers that are infinite or none are objects of one key that says what they are.

>>> decode_value(encode_value({"betas": (0.9, 0.95), "steps": [1, 2]}))
{'betas': (0.9, 0.95), 'steps': [1, 2]}
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

from reshard.checkpoint.manifest import MANIFEST_NAME, is_plain_name
from reshard.errors import FormatError, UsageError

_DEEPEST = 64


def encode_value(value: Any, depth: int = 0) -> Any:
    """A plain value as JSON takes it.

    Raises:
        UsageError: what is no plain value.
    """
    if depth > _DEEPEST:
        raise UsageError("a value nested too deeply for a delta")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        items = [encode_value(one, depth + 1) for one in value]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        pairs = [
            [encode_value(key, depth + 1), encode_value(one, depth + 1)]
            for key, one in value.items()
        ]
        return {"dict": pairs}
    raise UsageError(f"a value of type {kind.__name__}, for which a delta has no place")


def decode_value(content: Any, depth: int = 0) -> Any:
    """The value that `encode_value` wrote.

    Raises:
        FormatError: anything else.
    """
    if depth > _DEEPEST:
        raise FormatError("a value nested too deeply")
    if isinstance(content, list):
        return [decode_value(one, depth + 1) for one in content]
    if not isinstance(content, dict):
        return content
    if len(content) != 1:
        raise FormatError(f"a value with the keys {[*content][:5]}, expected one")
    ((kind, inner),) = content.items()
    try:
        if kind == "float":
            return float(inner)
        if kind == "bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "tuple":
            return tuple(decode_value(one, depth + 1) for one in inner)
        if kind == "dict":
            return {
                decode_value(key, depth + 1): decode_value(one, depth + 1) for key, one in inner
            }
    except (TypeError, ValueError, binascii.Error) as error:
        raise FormatError(f"a value that cannot be read: {error}") from error
    raise FormatError(f"a value of the unknown kind {kind!r}")


def is_plain_path(name: str) -> bool:
    """Whether the name of a file beside tensors stays inside its folder, and is not our own.

    >>> [is_plain_path(name) for name in ("config.json", "a/b.txt", "../a", ".metadata", "/a")]
    [True, True, False, False, False]
    """
    parts = name.split("/")
    return name != MANIFEST_NAME and all(
        is_plain_name(part) and not part.startswith(".") for part in parts
    )
