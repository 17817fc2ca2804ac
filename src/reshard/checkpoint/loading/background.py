"""Loading and converting in the background, while the program goes on.

Each call gives a handle at once; the work is done by threads of this process. A handle is awaited
by `await` in a coroutine, or by `wait` and `result` elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from reshard.checkpoint.storage.threads import Progress, ProgressFunction
from reshard.errors import RunError

Result = TypeVar("Result")


class BackgroundWork(Generic[Result]):
    """A handle of work in a thread, which `load_async` and `convert_async` return.

    At exit, a program waits for the work unless it is cancelled. `progress` is the latest progress.
    """

    def __init__(self, work: Callable[..., Result], progress: ProgressFunction | None) -> None:
        self._stop = threading.Event()
        self._future: Future[Result] = Future()
        # A pending future would be cancelled with a task that awaits it, and then take no result.
        self._future.set_running_or_notify_cancel()
        self._tell = progress
        self.progress: Progress | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="reshard-background")
        self._thread.start()

    def _run(self, work: Callable[..., Result]) -> None:
        try:
            result = work(progress=self._note, stop=self._stop)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def _note(self, progress: Progress) -> None:
        self.progress = progress
        if self._tell is not None:
            self._tell(progress)

    def done(self) -> bool:
        """Return whether the work has come to an end: done, failed or cancelled."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work, for at most `timeout_s`; return whether it has ended."""
        with suppress(TimeoutError):
            # Returns the error of the work, which `result` raises.
            self._future.exception(timeout_s)
        return self.done()

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the work, and return its result.

        Raises:
            InterruptedRunError: it was cancelled.
            RunError: it did not end within `timeout_s`.
            Exception: the error that the work raised.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self.done():
                raise
            raise RunError(
                f"the work has not come to its end in {timeout_s} s; wait for it, or cancel it"
            ) from None

    def cancel(self) -> None:
        """Ask the work to end. It ends after its current pieces, or may complete before that."""
        self._stop.set()

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        state = "done" if self.done() else "cancelled" if self._stop.is_set() else "at work"
        return f"BackgroundWork({state}, {self.progress})"
