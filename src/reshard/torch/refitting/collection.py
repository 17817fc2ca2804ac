"""Garbage collection while a refit is prepared.

Of a model of many tensors many objects are made and kept, and none of them is garbage. Python's
collector looks through all of them again and again meanwhile, for a third of the time that
preparing takes; so it waits until the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """No garbage is collected within, unless somebody asks for it.

    >>> with paused_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    # It is of the whole process: whoever finds it off leaves it off.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
