"""Context variables that have a value inside a `with` block, and the one of before behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def set_inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has the value inside, in this thread or task.

    >>> unit = ContextVar("unit", default="bytes")
    >>> with set_inside(unit, "elements"):
    ...     unit.get()
    'elements'
    >>> unit.get()
    'bytes'
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
