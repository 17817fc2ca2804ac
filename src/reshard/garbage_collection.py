"""Garbage collection: how to make very many objects without looking through them all the time.

Python's collector looks for objects that refer to each other in circles, again after every few
hundred that were made. Where many are made and hardly any refer to each other, that takes up to a
third of the time and finds nothing, so it can wait until the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_freezing = False
"""Whether this process was seen to keep objects from the collector."""


@contextmanager
def paused_collection(*, are_kept: bool = False) -> Iterator[None]:
    """Collect no garbage within a block, unless it is asked for there.

    The collector is that of the whole process: a block within another one, or in a process that
    has turned it off, leaves it off.

    Args:
        are_kept: whether most objects that are made within are kept for long. They count as old
            then, and are not looked through behind the block.

    >>> with paused_collection():
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
        if are_kept and not _has_frozen_objects():
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _has_frozen_objects() -> bool:
    """Return whether `gc.unfreeze` could return objects to the collector that others froze.

    `gc.get_freeze_count` walks over all frozen objects, 100 ms for a million: so a process in
    which it was positive once is not asked again.
    """
    global _freezing
    _freezing = _freezing or gc.get_freeze_count() > 0
    return _freezing
