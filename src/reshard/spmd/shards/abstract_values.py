"""Abstract values: data-dependent functions, executed without element values.

This determines the types of their results. Choices that depend on elements are assumed to be even:
every expert is chosen equally often.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from reshard._contexts import set_context

_is_supposed: ContextVar[bool] = ContextVar("is_supposed", default=False)


def abstract_values() -> AbstractContextManager[None]:
    """Assume element values inside, for arrays without elements.

    >>> with abstract_values():
    ...     uses_abstract_values()
    True
    """
    return set_context(_is_supposed, True)


def uses_abstract_values() -> bool:
    """Return whether element values may be assumed here."""
    return _is_supposed.get()
