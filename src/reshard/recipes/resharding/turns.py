"""The order of runs that share the processes of one job.

The processes of a run talk to each other several times, and what they say is known by its order
alone. Runs that were begun at once must not talk at once, so they take turns::

    begun in each process    a        b        c
    process 0                aaaaaa   bbbbb    ccc
    process 1                aaa...   bbbb.    ccc       . waits for the others

A process that begins its runs in another order than the others means another plan when they meet,
which they find before anything is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import ClassVar


class Turn:
    """The place of one run among those of its coordinator; taken when the turn is made.

    `wait` comes back when all earlier runs have left. `leave` must be called in any case, for
    later ones wait for it.

    >>> processes = object()
    >>> first, second = Turn(processes), Turn(processes)
    >>> first.wait()
    >>> first.leave()
    >>> second.wait()
    >>> second.leave()
    """

    # By the identity of a coordinator, which need not be hashable: its turns hold it.
    _queues: ClassVar[dict[int, deque[Turn]]] = {}
    _has_changed: ClassVar[threading.Condition] = threading.Condition()

    def __init__(self, coordinator: object) -> None:
        self._coordinator = coordinator
        with self._has_changed:
            self._queues.setdefault(id(coordinator), deque()).append(self)

    def wait(self) -> None:
        """Wait until all runs that were begun earlier have left."""
        queue = self._queues[id(self._coordinator)]
        with self._has_changed:
            self._has_changed.wait_for(lambda: queue[0] is self)

    def leave(self) -> None:
        """Give the place up, whether the run has come to its turn or not."""
        queue = self._queues[id(self._coordinator)]
        with self._has_changed:
            queue.remove(self)
            if not queue:
                del self._queues[id(self._coordinator)]
            self._has_changed.notify_all()
