"""Progress of long work, and its end where the caller asks for one.

Work that takes `progress` calls it as it goes on. Work that takes `stop` ends soon after that event
is set, as after ctrl-C: what was there before is untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from reshard.errors import InterruptedRunError, UsageError


@dataclass(frozen=True, slots=True)
class Progress:
    """How far work is: bytes of tensors done, of all, and of those done before this run."""

    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    tensor: str


ProgressFunction = Callable[[Progress], None]


class StoppedError(InterruptedRunError):
    """Raised within work whose `stop` was set; the caller says what it came to."""


def check_stop(stop: threading.Event | None) -> None:
    """Raise StoppedError if an event is set.

    >>> check_stop(None)
    """
    if stop is not None and stop.is_set():
        raise StoppedError("stopped")


def expect_stop(stop: object) -> None:
    """Raise UsageError for a `stop` that is no event."""
    if stop is not None and not isinstance(stop, threading.Event):
        raise UsageError(f"stop={stop!r}; give a threading.Event, which ends the work once set")
