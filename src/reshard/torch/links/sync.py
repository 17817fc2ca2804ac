"""Weight syncs: send a trainer's weights to engines; prepared once, and run after every step.

Both sides call `run` once a step; a run serves all engines at once::

    trainer (`trainer_sync`)               engine (`engine_sync`)
    which engines exist, which version, who forwards to whom (`relay_tree`)
    an order (`messages`)         --->     waits for it
    refit, from the trainer or    --->     is written in place, and forwarded
    an engine
    report                                 has the version

The trainer gives up an engine whose run fails, and continues with the others. The engine's
`version` is the last complete version. It is None if a run failed after the first byte: the engine
then has parts of two versions, and `is_usable` is False.

A bucket is written between `begin` and `end`, in the thread of the run::

    guard         | held |      | held |      | held |
    bucket        |  0   |      |  1   |      |  2   |
    events               ^ 0           ^ 1           ^ 2
    progress             ^ bytes       ^             ^
    stop          ?             ?             ?

Events correspond to the buckets that the trainer sends to the engine. If another engine forwards in
other buckets, an event occurs once all of its tensors are there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.checkpoint.storage import threads
from reshard.errors import LinkError, UsageError
from reshard.torch.exchange.timeline import Timeline, span
from reshard.torch.graph_breaks import break_graph
from reshard.torch.links.membership import LinkMembers


class BucketEvent:
    """Tensors of an engine that are complete together in a run.

    `names` are the model's own names of tensors on this rank; `size_bytes` is their size.
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
        """Whether its tensors have the new version; False if they never will."""
        return self._ended.is_set() and self._error is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until its tensors are complete; return whether they are in time.

        Raises LinkError if the run failed before they were complete.
        """
        ended = self._ended.wait(timeout_s)
        if self._error is not None:
            raise LinkError(f"{self} is not complete: {self._error}") from self._error
        return ended

    def _set(self) -> None:
        self._ended.set()

    def _fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            # Set before the event, so that a thread that this wakes sees it.
            self._error = error
            self._ended.set()


class RunControl:
    """How the caller follows and stops a run (`WeightSync.run`). Several threads report buckets.

    Args:
        progress: called after every bucket.
        stop: ends the run before its next bucket.
        guard: held while a bucket is written.

    Raises UsageError.
    """

    def __init__(
        self,
        progress: threads.ProgressFunction | None = None,
        stop: threading.Event | None = None,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        threads.check_stop_event(stop)
        if progress is not None and not callable(progress):
            raise UsageError(f"progress={progress!r}; give a function of a Progress")
        if guard is not None and not hasattr(type(guard), "__enter__"):
            raise UsageError(f"guard={guard!r}; give a lock, or what `with` takes")
        self.guard = guard
        self._progress, self._stop = progress, stop
        self._done_bytes = self._total_bytes = 0
        self._turn = threading.Lock()

    def check(self) -> None:
        """Raise StoppedError if the caller wants the run to end."""
        threads.check_stop(self._stop)

    def is_stopped(self) -> bool:
        """Return whether the caller asked the run to stop."""
        return self._stop is not None and self._stop.is_set()

    def expect(self, size_bytes: int) -> None:
        """Add bytes to the total."""
        with self._turn:
            self._total_bytes += size_bytes

    def add(self, size_bytes: int, name: str) -> None:
        """Add bytes that are done, and report the progress."""
        with self._turn:
            self._done_bytes += size_bytes
            if self._progress is not None:
                self._progress(threads.Progress(self._done_bytes, self._total_bytes, 0, name))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a run, on the trainer or on an engine.

    Attributes:
        version: of the weights.
        engines: by name, the seconds after which each engine had the weights.
        lost: engines that were dropped in this run or since the previous run, and the reasons.
        seconds: the duration of the whole run.
        sent_bytes, received_bytes: of this rank; for an engine, including what it relays.
        fed_by: by engine, the trainer or the engine that sent it the weights.
        trainer_bytes: the bytes sent by all ranks of the trainer.
    """

    version: int
    engines: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    fed_by: Mapping[str, str] = field(default_factory=dict)
    trainer_bytes: int = 0


class WeightSync:
    """A model that is prepared to be sent or filled. Create one with `WeightLink.prepare`.

    `version` is that of the last run that completed here; None before the first run, while an
    engine is written, and after a run that failed midway. `report` is that of the last run. On an
    engine, `buckets` are the events of the most recently started run, in their order.
    """

    def __init__(self, members: LinkMembers, number: int, turn: threading.Lock) -> None:
        # The number of the sync in the link.
        self._members, self._number = members, number
        self.version: int | None = None
        self.buckets: tuple[BucketEvent, ...] = ()
        self.report: SyncReport | None = None
        # The lock of the link, held during a run of any of its syncs, also in the background.
        self._turn = turn
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the model has exactly the values of a single version."""
        raise NotImplementedError

    @property
    def is_done(self) -> bool:
        """Whether the most recently started run has ended."""
        return self._thread is None or not self._thread.is_alive()

    @break_graph
    def run(
        self,
        version: int | None = None,
        *,
        async_op: bool = False,
        progress: threads.ProgressFunction | None = None,
        stop: threading.Event | None = None,
        guard: AbstractContextManager[Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> SyncReport | None:
        """Send the trainer's current weights to the engines. All processes of all sides call this.

        Runs of a link are sequential, in whatever threads and for whatever models. If a link has
        several models, all processes run them in the same order.

        Args:
            version: of the weights, on the trainer; the last version plus 1 when None. An engine
                receives it.
            async_op: whether to return at once; `wait` then returns the report. Until then, a
                trainer must not change its weights, and an engine must only use weights whose event
                of `buckets` is done.
            progress: called with a `Progress` after every bucket: the bytes that this rank of an
                engine has received, or that a rank of the trainer has sent.
            stop: ends the run before its next bucket once it is set. Before the first bucket, the
                link continues as if the run had not begun; after it, engines without all weights
                are dropped, and have parts of two versions.
            guard: on an engine, a context entered before a bucket is written and left after it,
                such as a lock that users of the weights hold.
            trace: a file of this rank for its activity, as Chrome's trace events.

        Returns:
            The report; None with `async_op`.

        Raises:
            LinkError: the other side has ended, or closed the link. An engine then has its old
                weights, unless `is_usable` is False.
            RunError: a rank that fails.
            InterruptedRunError: the run was stopped.
            UsageError: a version that is not an integer of at least 0, or is below the last
                version.
        """
        control = RunControl(progress, stop, guard)
        # Without `with`: a background run releases it in its own thread.
        self._turn.acquire()
        begun: threading.Thread | None = None
        try:
            # The error of an earlier background run that nobody waited for is raised here.
            self.wait()
            version = self._check_version(version)
            self.buckets = self._list_buckets()
            self._free_gathered()
            if not async_op:
                self.report = self._run_traced(version, control, trace)
                return self.report
            self._error = None
            # A daemon thread, since a peer that never answers must not keep the process alive.
            thread = threading.Thread(
                target=self._run_beside,
                args=(version, control, trace),
                name="reshard sync",
                daemon=True,
            )
            thread.start()
            self._thread = begun = thread
            return None
        finally:
            # A background run releases the lock when it ends.
            if begun is None:
                self._turn.release()

    @break_graph
    def wait(self) -> SyncReport | None:
        """Wait for the most recently started run, and return its report. Raises the run's error."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error
        return self.report

    @break_graph
    def verify(self) -> None:
        """Compare the engines' weights with the trainer's current weights, by digests.

        All processes of all sides call this.

        Raises:
            RunError: on all sides, elements that differ, with their tensors and ranks.
            LinkError: a link without engines.
        """
        with self._turn:
            self.wait()
            self._verify()

    def _verify(self) -> None:
        raise NotImplementedError

    def _list_buckets(self) -> tuple[BucketEvent, ...]:
        return ()

    def _free_gathered(self) -> None:
        """Free FSDP2's gathered copies of a trainer, since this thread may compute later."""

    def _run_beside(self, *run: Any) -> None:
        try:
            self.report = self._run_traced(*run)
        except BaseException as error:
            self._error = error
        finally:
            self._turn.release()

    def _run_traced(
        self, version: int, control: RunControl, trace: str | os.PathLike[str] | None
    ) -> SyncReport:
        if trace is None:
            return self._run(version, control)
        # Failed runs are traced, too. A trace that cannot be written fails before the run.
        try:
            path = Path(trace)
            path.write_text("")
        except (OSError, TypeError) as error:
            raise UsageError(f"trace={trace!r}: {error}; give a file to write") from error
        timeline = Timeline(f"{self._members.own.name} rank {self._members.rank}")
        try:
            with timeline.recording(), span("run"):
                return self._run(version, control)
        finally:
            with path.open("w", encoding="utf-8") as file:
                timeline.write(file)

    def _run(self, version: int, control: RunControl) -> SyncReport:
        raise NotImplementedError

    def _check_version(self, version: int | None) -> int:
        raise NotImplementedError
