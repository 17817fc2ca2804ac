"""Events of a run's buckets: which tensors are complete, and what may happen between two buckets.

A bucket is written between `begin` and `end`, in the thread of the run::

    guard         | held |      | held |      | held |
    bucket        |  0   |      |  1   |      |  2   |
    events               ^ 0           ^ 1           ^ 2
    progress             ^ bytes       ^             ^
    stop          ?             ?             ?

The events are of the buckets in which the trainer sends to the engine. Where another engine hands
on in other buckets, an event comes once all that it names is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from reshard.checkpoint.storage.threads import (
    Progress,
    ProgressFunction,
    check_stop,
    check_stop_event,
)
from reshard.errors import LinkError, UsageError


class BucketEvent:
    """Tensors of an engine that are complete together in a run.

    `names` are the model's own, of those that this rank has; `size_bytes` is theirs.
    """

    def __init__(self, names: Sequence[str], size_bytes: int) -> None:
        self.names = tuple(names)
        self.size_bytes = size_bytes
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"BucketEvent({', '.join(self.names)})"

    @property
    def is_done(self) -> bool:
        """Whether its tensors have the version that comes; False where they will not."""
        return self._ended.is_set() and self._error is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until its tensors are complete; whether they are, within the time.

        Raises LinkError where the run failed before.
        """
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise LinkError(f"{self} is not complete: {self._error}") from self._error
        return ended

    def _set(self) -> None:
        self._ended.set()

    def _fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run does beside moving weights; see `WeightSync.run`. Raises UsageError."""

    progress: ProgressFunction | None = None
    stop: threading.Event | None = None
    guard: AbstractContextManager[Any] | None = None
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_stop_event(self.stop)
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress={self.progress!r}; give a function of a Progress")
        if self.guard is not None and not hasattr(type(self.guard), "__enter__"):
            raise UsageError(f"guard={self.guard!r}; give a lock, or what `with` takes")


class BucketCounter:
    """How far a run is, for its progress and its stop. Several threads tell it of buckets."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._done_bytes = self._total_bytes = 0
        self._turn = threading.Lock()

    def check(self) -> None:
        """Raise StoppedError where the caller wants the run to end."""
        check_stop(self._options.stop)

    def is_stopped(self) -> bool:
        """Whether the caller wants the run to end."""
        return self._options.stop is not None and self._options.stop.is_set()

    def expect(self, size_bytes: int) -> None:
        """So many more bytes are to come."""
        with self._turn:
            self._total_bytes += size_bytes

    def add(self, size_bytes: int, name: str) -> None:
        """So many more bytes are done."""
        with self._turn:
            self._done_bytes += size_bytes
            if self._options.progress is not None:
                told = Progress(self._done_bytes, self._total_bytes, 0, name)
                self._options.progress(told)


class SentBuckets:
    """Is told of the batches that one rank of the trainer sends to an engine."""

    def __init__(self, counter: BucketCounter, sent_bytes: Sequence[int], names: Sequence[str]):
        self._counter, self._sent_bytes, self._names = counter, sent_bytes, names
        counter.expect(sum(sent_bytes))

    def begin(self, number: int) -> None:
        """A batch is to be sent."""
        self._counter.check()

    def end(self, number: int) -> None:
        """A batch is sent."""
        if self._sent_bytes[number]:
            self._counter.add(self._sent_bytes[number], self._names[number])


class FilledBuckets:
    """Is told of the batches of one refit by which an engine is filled, and tells everybody else.

    Args:
        options: of the run.
        counter: of the run; it goes on where a second refit has to fill the engine.
        events: of all buckets.
        needs: for each, the batch of the refit that completes it.
    """

    def __init__(
        self,
        options: RunOptions,
        counter: BucketCounter,
        events: Sequence[BucketEvent],
        needs: Sequence[int],
    ) -> None:
        self._options, self._counter = options, counter
        self._events, self._needs = events, needs
        self._held = ExitStack()

    def begin(self, number: int) -> None:
        """Wait until a batch may be written."""
        self._counter.check()
        if self._options.guard is not None:
            self._held.enter_context(self._options.guard)

    def end(self, number: int) -> None:
        """A batch is complete."""
        self._held.close()
        for event, need in zip(self._events, self._needs, strict=True):
            if need == number and not event.is_done:
                event._set()
                self._counter.add(event.size_bytes, event.names[-1])

    def close(self) -> None:
        """The run ended, somehow."""
        self._held.close()
