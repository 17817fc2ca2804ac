"""Supposed elements: data-dependent functions, executed without element values.

This finds the types of their results. Choices that only elements decide are supposed to be even:
each expert is chosen as often as another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from reshard._contexts import set_context

_is_supposed: ContextVar[bool] = ContextVar("is_supposed", default=False)


def abstract_values() -> AbstractContextManager[None]:
    """Suppose elements inside, where there are none.

    >>> with abstract_values():
    ...     uses_abstract_values()
    True
    """
    return set_context(_is_supposed, True)


def uses_abstract_values() -> bool:
    """Whether elements may be supposed here."""
    return _is_supposed.get()
