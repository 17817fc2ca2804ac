"""Progress of long work, and its end where the caller asks for one.

Work that takes `progress` calls it as it goes on. Work that takes `stop` ends soon after that event
is set, as after ctrl-C: what was there before is untouched.

Many independent pieces of work, a few at a time, in threads.

Reading, copying and writing release the interpreter, so threads overlap them. The results
come back to the caller's thread, in the order they are finished; leaving the loop, by an
error or by ctrl-C, stops the threads after the piece each is at, and waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reshard.checkpoint.storage.filesystem import Closable
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


def check_stop_event(stop: object) -> None:
    """Raise UsageError for a `stop` that is no event."""
    if stop is not None and not isinstance(stop, threading.Event):
        raise UsageError(f"stop={stop!r}; give a threading.Event, which ends the work once set")


Task = TypeVar("Task")
Result = TypeVar("Result")


Memory = TypeVar("Memory", bound=Closable)


def run_in_threads(
    tasks: Iterable[Task],
    work: Callable[[Task, Memory], Result],
    new_memory: Callable[[], Memory],
    threads: int,
) -> Generator[Result]:
    """The results of `work(task, memory)` for all tasks, as they are finished.

    Each thread has a memory of its own, from `new_memory()`, closed at its end. An exception
    in a task is raised here, after the threads have stopped.

    Raises UsageError for no threads, which would leave all of it undone.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads={threads!r}; give a whole number from 1 up")
    iterator = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()
    results: queue.SimpleQueue[tuple[Result | None, BaseException | None, bool]]
    results = queue.SimpleQueue()

    def next_task() -> tuple[Task] | None:
        # A generator cannot be advanced by two threads at once.
        with lock:
            if stop.is_set():
                return None
            for task in iterator:
                return (task,)
            return None

    def loop() -> None:
        try:
            memory = new_memory()
            try:
                while (item := next_task()) is not None:
                    results.put((work(item[0], memory), None, False))
            finally:
                memory.close()
        except BaseException as error:
            stop.set()
            results.put((None, error, True))
        else:
            results.put((None, None, True))

    workers = [_Worker(loop, f"reshard-{n}") for n in range(threads)]
    try:
        for worker in workers:
            worker.start()
        # Each thread puts one last result that says it ended, after all of its own.
        running = threads
        while running:
            result, error, ended = results.get()
            if error is not None:
                raise error
            if ended:
                running -= 1
            else:
                yield result  # type: ignore[misc]
    finally:
        stop.set()
        _wait_for([worker for worker in workers if worker.ident is not None])


class _Worker(threading.Thread):
    """A thread that sets an event when its work is done."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name)
        self._work = work
        self.is_done = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.is_done.set()


def _wait_for(workers: Sequence[_Worker]) -> None:
    """Wait for threads to end, however often ctrl-C is pressed meanwhile.

    The caller goes on to close files, whose numbers the next files get: no thread may still
    be writing to them. (`Thread.join` believes in some versions of Python, once interrupted,
    that a thread which runs has ended.)
    """
    interrupt: KeyboardInterrupt | None = None
    for worker in workers:
        while not worker.is_done.is_set():
            try:
                worker.is_done.wait()
            except KeyboardInterrupt as error:
                interrupt = error
    for worker in workers:
        worker.join()
    if interrupt is not None:
        raise interrupt
