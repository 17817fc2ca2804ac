"""Policy for partial sums: whether they are reduced as in eager programs, or stay pending.

If a strategy determines the shardings of all values of a program, it also decides this.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from reshard._contexts import set_context

_settles: ContextVar[bool] = ContextVar("settles", default=True)


def unsettled() -> AbstractContextManager[None]:
    """Leave values inside in the shardings that operations make, for a strategy to decide.

    >>> with unsettled():
    ...     settles()
    False
    """
    return set_context(_settles, False)


def settles() -> bool:
    """Return whether values get their final shardings at once."""
    return _settles.get()
