"""Supposed elements: functions that read elements, carried out without any.

So are the types of their results found. What only elements decide is supposed even then: each
expert is chosen as often as another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_supposed: ContextVar[bool] = ContextVar("is_supposed", default=False)


@contextmanager
def supposed_elements() -> Iterator[None]:
    """What reads elements supposes them inside, where there are none.

    >>> with supposed_elements():
    ...     supposes_elements()
    True
    """
    token = _is_supposed.set(True)
    try:
        yield
    finally:
        _is_supposed.reset(token)


def supposes_elements() -> bool:
    """Whether elements may be supposed here."""
    return _is_supposed.get()
