"""Weight syncs: a trainer's weights into those of engines, prepared once and run after every step.

Both sides call `run` once a step; what one run does, with all engines at once::

    trainer (`trainer_sync`)               engine (`engine_sync`)
    which engines are there, which version, who hands on to whom (`fan_out`)
    an order (`orders`)           --->     waits for it
    refit, from the trainer or    --->     is written in place, and handed on (`relay`)
    an engine
    report                                 has the version

An engine whose run fails is given up by the trainer, and the others go on. The engine's `version`
is the one that it has completely. It is None where a run broke after the first byte: then it has
parts of two, and `is_usable` is False.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.checkpoint.storage.threads import ProgressFunction
from reshard.errors import UsageError
from reshard.torch.exchange.timeline import Timeline, span
from reshard.torch.graph_breaks import break_graph
from reshard.torch.links.bucket_events import BucketEvent, RunOptions


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a run, on the trainer or on an engine.

    Attributes:
        version: of the weights.
        engines: by name, the seconds after which each engine had the weights.
        lost: engines that were given up in this run or since the one before, and the reasons.
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

    `version` is that of the last run that completed here; None before the first, while an engine is
    written, and after a run that failed midway. `report` is that of the last run. `buckets` are, on
    an engine, the events of the most recently started run, in their order.
    """

    def __init__(self, label: str, number: int, turn: threading.Lock) -> None:
        # What people call this process, and which of the link's syncs this is.
        self._label, self._number = label, number
        self.version: int | None = None
        self.buckets: tuple[BucketEvent, ...] = ()
        self.report: SyncReport | None = None
        # Of the link: held while a run of any of its syncs is under way, also in the background.
        self._turn = turn
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the model has exactly the values of one version."""
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
        progress: ProgressFunction | None = None,
        stop: threading.Event | None = None,
        guard: AbstractContextManager[Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> SyncReport | None:
        """Send the trainer's current weights to the engines. All processes of all sides call this.

        Runs of one link follow one another, whatever threads call them and whatever models they
        are of. Where a link has several models, all processes run them in one order.

        Args:
            version: of the weights, on the trainer; one more than the last when None. An engine
                learns it.
            async_op: whether to return at once; `wait` then gives the report. Until it has, a
                trainer must not change its weights, nor an engine use its own but those whose
                event of `buckets` is done.
            progress: called with a `Progress` after every bucket: of bytes that this rank of an
                engine has, or of the trainer sends.
            stop: ends the run before its next bucket once it is set. Before the first the link
                goes on as if the run had not been begun; after it, engines that do not have all
                are given up, and have parts of two versions.
            guard: on an engine, what is entered before a bucket is written and left after it, such
                as a lock that whoever uses the weights holds meanwhile.
            trace: a file of this rank's own, for what it does when, as Chrome's trace events.

        Returns:
            The report; None with `async_op`.

        Raises:
            LinkError: the other side is gone, or closed the link. An engine has its old weights
                then, unless `is_usable` says that it has not.
            RunError: a rank that fails.
            InterruptedRunError: the run was stopped.
            UsageError: a version that is no number from 0 up, or one before the last.
        """
        options = RunOptions(progress, stop, guard, trace)
        self._turn.acquire()
        begun: threading.Thread | None = None
        try:
            self.wait()
            version = self._check_version(version)
            self.buckets = self._list_buckets()
            self._free_gathered()
            if not async_op:
                self.report = self._run_traced(version, options)
                return self.report
            self._error = None
            # A thread that waits for a process that never answers must not keep this one.
            thread = threading.Thread(
                target=self._run_beside, args=(version, options), name="reshard sync", daemon=True
            )
            thread.start()
            self._thread = begun = thread
            return None
        finally:
            # A run in the background gives the turn on once it has ended.
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
        """Compare the engines' weights with the trainer's current ones, by digests.

        All processes of all sides call this.

        Raises:
            RunError: on all sides, elements that differ: which tensors, and on which ranks.
            LinkError: no engine is there.
        """
        with self._turn:
            self.wait()
            self._verify()

    def _verify(self) -> None:
        raise NotImplementedError

    def _list_buckets(self) -> tuple[BucketEvent, ...]:
        return ()

    def _free_gathered(self) -> None:
        """Free what FSDP2 gathered of a trainer's shards: later this thread may compute."""

    def _run_beside(self, version: int, options: RunOptions) -> None:
        try:
            self.report = self._run_traced(version, options)
        except BaseException as error:
            self._error = error
        finally:
            self._turn.release()

    def _run_traced(self, version: int, options: RunOptions) -> SyncReport:
        if options.trace is None:
            return self._run(version, options)
        # A run that fails is worth looking at, too; one that cannot be written is not begun.
        try:
            path = Path(options.trace)
            path.write_text("")
        except (OSError, TypeError) as error:
            raise UsageError(f"trace={options.trace!r}: {error}; give a file to write") from error
        timeline = Timeline(self._label)
        try:
            with timeline.recording(), span("run"):
                return self._run(version, options)
        finally:
            with path.open("w", encoding="utf-8") as file:
                timeline.write(file)

    def _run(self, version: int, options: RunOptions) -> SyncReport:
        raise NotImplementedError

    def _check_version(self, version: int | None) -> int:
        raise NotImplementedError
