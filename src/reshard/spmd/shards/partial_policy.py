"""Settling: whether pending sums are reduced as in eager programs, or stay pending.

Programs of which a strategy places all values leave it to that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from reshard._contexts import set_context

_settles: ContextVar[bool] = ContextVar("settles", default=True)


def unsettled() -> AbstractContextManager[None]:
    """Values stay as operations make them: a strategy is to place them.

    >>> with unsettled():
    ...     settles()
    False
    """
    return set_context(_settles, False)


def settles() -> bool:
    """Whether values are placed at once."""
    return _settles.get()
