"""Tasks in threads, with progress and a way to stop them.

Reading, copying and writing release the interpreter lock, so threads overlap them. Results are
returned to the caller's thread in the order in which tasks finish. Leaving the loop, by an error or
by ctrl-C, stops the threads after their current tasks and waits for them.

Functions that take `progress` call it while they run. Functions that take `stop` end soon after
that event is set, as after ctrl-C, and leave existing content untouched.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

from reshard.checkpoint.storage.filesystem import Closing
from reshard.errors import InterruptedRunError, UsageError


class Progress(NamedTuple):
    """The progress of a run, in bytes of tensors: done, total, and done by earlier runs."""

    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    tensor: str


ProgressFunction = Callable[[Progress], None]


class StoppedError(InterruptedRunError):
    """An error for a run whose `stop` was set.

    The caller replaces it by an error that describes the result.
    """


def check_stop(stop: threading.Event | None) -> None:
    """Raise StoppedError if an event is set.

    >>> check_stop(None)
    """
    if stop is not None and stop.is_set():
        raise StoppedError("stopped")


def check_stop_event(stop: object) -> None:
    """Raise UsageError if `stop` is neither None nor a threading.Event."""
    if stop is not None and not isinstance(stop, threading.Event):
        raise UsageError(f"stop={stop!r}: expected a threading.Event, which ends the run once set")


Task = TypeVar("Task")
Result = TypeVar("Result")


Memory = TypeVar("Memory", bound=Closing)


def run_in_threads(
    tasks: Iterable[Task],
    work: Callable[[Task, Memory], Result],
    new_memory: Callable[[], Memory],
    threads: int,
) -> Generator[Result]:
    """Yield the results of `work(task, memory)` for all tasks, as they finish.

    Each thread has its own memory, from `new_memory()`, which is closed when the thread ends. An
    exception in a task is raised here after the threads have stopped.
    """
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

    def loop(is_done: threading.Event) -> None:
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
        finally:
            is_done.set()

    done = [threading.Event() for _ in range(threads)]
    workers = [
        threading.Thread(target=loop, args=(is_done,), name=f"reshard-{number}")
        for number, is_done in enumerate(done)
    ]
    try:
        for worker in workers:
            worker.start()
        # After its results, each thread puts a last item into the queue that marks its end.
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
        # Do not wait for threads that were not started: they never set their events.
        started = zip(workers, done, strict=True)
        _wait_for([pair for pair in started if pair[0].ident is not None])


def _wait_for(workers: Sequence[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait for threads to set their events, however often ctrl-C is pressed meanwhile.

    The caller then closes files, whose descriptor numbers are reused: no thread may still write to
    them. (In some versions of Python an interrupted `Thread.join` takes a running thread for
    ended.)
    """
    interrupt: KeyboardInterrupt | None = None
    for _, is_done in workers:
        while not is_done.is_set():
            try:
                is_done.wait()
            except KeyboardInterrupt as error:
                interrupt = error
    for worker, _ in workers:
        worker.join()
    if interrupt is not None:
        raise interrupt
