"""Context managers: a context variable's value, and a pause of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_freezing = False
"""Whether somebody in this process has frozen objects."""


@contextmanager
def set_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable in this thread or task, and restore its previous value on exit.

    >>> unit = ContextVar("unit", default="bytes")
    >>> with set_context(unit, "elements"):
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


@contextmanager
def pause_gc(*, freeze: bool = False) -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block.

    The collector runs after every few hundred allocations. If many objects are allocated and
    hardly any are part of a cycle, it takes up to a third of the time and frees nothing. It is
    process wide: if it is disabled already, it stays disabled on exit.

    Args:
        freeze: move the objects allocated in the block to the oldest generation on exit, so that
            later collections rarely scan them.

    >>> with pause_gc():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if freeze and not _has_frozen_objects():
            # `freeze` moves every object to the permanent generation, and `unfreeze` all of that to
            # the oldest generation.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _has_frozen_objects() -> bool:
    """Return whether `gc.unfreeze` would also release objects frozen by others.

    `gc.get_freeze_count` walks over all frozen objects, 100 ms for a million. A process in which
    it was positive once is therefore not asked again.
    """
    global _freezing
    _freezing = _freezing or gc.get_freeze_count() > 0
    return _freezing
