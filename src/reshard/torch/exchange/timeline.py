"""Timelines of a rank: packing, messages and waiting, in each of its threads.

A timeline is recorded while it is current, in its thread and in threads that inherit its context;
otherwise a span costs only the lookup. It is written as Chrome's trace events, which
chrome://tracing and Perfetto show::

    thread "reshard engine"   | bucket 0           | bucket 1
                              | pack | wait | unpack |
    messages                     |-- to rank 2 --|

Spans are complete events (`ph` X) of a thread, which are nested; messages are asynchronous events
(`b` and `e`), which overlap. Times are those of the host's clock, so timelines of its processes are
comparable.

Source: the Trace Event Format, as documented by Chrome.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import IO, Any

from reshard._contexts import set_context

_CATEGORY = "reshard"
_CURRENT: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
_NO_SPAN: AbstractContextManager[None] = nullcontext()
Details = Callable[[], Mapping[str, Any]]


class Timeline:
    """The activity of this process, as trace events.

    Args:
        process: its name, such as `trainer rank 0`.

    >>> timeline = Timeline("trainer rank 0")
    >>> with timeline.recording(), span("pack", lambda: {"bytes": 16}):
    ...     pass
    >>> [(one["name"], one["ph"]) for one in timeline.events]
    [('process_name', 'M'), ('thread_name', 'M'), ('pack', 'X')]
    """

    def __init__(self, process: str) -> None:
        # Monotonic clocks, offset by the time of the host's clock.
        self._ahead_ns = time.time_ns() - time.perf_counter_ns()
        self._process = os.getpid()
        self._threads: set[int] = set()
        self._numbers = itertools.count()
        self.events: list[dict[str, Any]] = []
        self._add_name("process_name", process, 0)

    def recording(self) -> AbstractContextManager[None]:
        """Record the activity of this thread inside."""
        return set_context(_CURRENT, self)

    @contextmanager
    def span(self, name: str, details: Details | None = None) -> Iterator[None]:
        """Record the block inside."""
        begun_us = self._now_us()
        try:
            yield
        finally:
            self._add("X", name, details, begun_us, dur=self._now_us() - begun_us)

    def begin_message(self, name: str, details: Details) -> int:
        """Record that a message is in flight; return a number to end it by."""
        number = next(self._numbers)
        self._add("b", name, details, self._now_us(), id=number)
        return number

    def end_message(self, name: str, number: int) -> None:
        """Record that a message has arrived, or is sent."""
        self._add("e", name, None, self._now_us(), id=number)

    def write(self, file: IO[str]) -> None:
        """Write the timeline as JSON."""
        json.dump({"traceEvents": self.events, "displayTimeUnit": "ms"}, file)

    def _now_us(self) -> float:
        return (time.perf_counter_ns() + self._ahead_ns) / 1000

    def _add(
        self, phase: str, name: str, details: Details | None, at_us: float, **more: Any
    ) -> None:
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            self._add_name("thread_name", threading.current_thread().name, thread)
        event = {"name": name, "cat": _CATEGORY, "ph": phase, "ts": at_us, "pid": self._process}
        self.events.append(
            event | {"tid": thread, "args": dict(details()) if details else {}} | more
        )

    def _add_name(self, kind: str, name: str, thread: int) -> None:
        self.events.append(
            {
                "name": kind,
                "cat": _CATEGORY,
                "ph": "M",
                "ts": 0,
                "pid": self._process,
                "tid": thread,
                "args": {"name": name},
            }
        )


def current_timeline() -> Timeline | None:
    """Return the timeline of this thread, or None."""
    return _CURRENT.get()


def start_thread(name: str, call: Callable[..., object], *args: object) -> threading.Thread:
    """Start a thread that records to the timeline of this thread.

    It is a daemon thread: a peer that never answers must not keep the process alive.
    """
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(call, *args), name=name, daemon=True)
    thread.start()
    return thread


def span(name: str, details: Details | None = None) -> AbstractContextManager[None]:
    """Record the block inside, if a timeline is current.

    Args:
        name: of the span.
        details: of the span; called only if it is recorded.
    """
    timeline = _CURRENT.get()
    return _NO_SPAN if timeline is None else timeline.span(name, details)
