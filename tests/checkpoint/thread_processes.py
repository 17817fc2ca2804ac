"""Threads that stand for the processes of one conversion: quick to start, and as many as wanted."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from reshard.checkpoint.processes import OtherProcessError
from reshard.errors import ReshardError, RunError

Value = TypeVar("Value")
Result = TypeVar("Result")


class _Meeting:
    """Where the threads of one run meet, and what they hand over there."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values = [b""] * size
        self.failed: str | None = None
        self.is_final = False


class ThreadProcess:
    """One of them: what `reshard.checkpoint.processes.Processes` asks for."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = size

    def share(self, value: Any) -> Any:
        return self.collect(value if self.rank == 0 else None)[0]

    def collect(self, value: Value) -> list[Value]:
        meeting = self._meeting
        # Processes have nothing in common, so each gets a copy.
        meeting.values[self.rank] = pickle.dumps(value)
        try:
            meeting.barrier.wait()
            values = [pickle.loads(one) for one in meeting.values]
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RunError(f"another process stopped: {meeting.failed or 'it hangs'}") from None
        return values

    def check(self) -> None:
        if self._meeting.failed is not None:
            message = f"another process stopped: {self._meeting.failed}"
            raise OtherProcessError(message, self._meeting.is_final)

    def fail(self, message: str, *, is_final: bool = False) -> None:
        if self._meeting.failed is None:
            self._meeting.failed, self._meeting.is_final = message, is_final
        self._meeting.barrier.abort()


def in_processes(count: int, work: Callable[[ThreadProcess], Result]) -> list[Result]:
    """What `work` answers in each of `count` threads. Raises the first one's own error."""
    meeting = _Meeting(count)
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadProcess(meeting, rank, count))
        except Exception as error:
            errors[rank] = error
            # One that failed before it spoke to anybody leaves nobody waiting.
            meeting.failed = meeting.failed or str(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, ReshardError)):
        raise error
    return [results[rank] for rank in range(count)]
