"""Settling: whether contributions that wait are combined where eager programs do, or left.

Programs of which a strategy places all values leave it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_settles: ContextVar[bool] = ContextVar("settles", default=True)


@contextmanager
def unsettled() -> Iterator[None]:
    """Values stay as operations make them: a strategy is to place them.

    >>> with unsettled():
    ...     settles()
    False
    """
    token = _settles.set(False)
    try:
        yield
    finally:
        _settles.reset(token)


def settles() -> bool:
    """Whether values are placed at once."""
    return _settles.get()
