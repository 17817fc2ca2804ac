"""Work in threads: all of it, its errors, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from reshard.checkpoint.storage.threads import run_in_threads


class Memory:
    """A memory that knows who uses it and whether it is closed."""

    def __init__(self, all_of_them: list[Memory]) -> None:
        self.thread = threading.get_ident()
        self.is_closed = False
        all_of_them.append(self)

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        self.is_closed = True


@pytest.fixture
def memories() -> Iterator[list[Memory]]:
    """The memories of a test's threads, of which none is left open and no thread running."""
    made: list[Memory] = []
    yield made
    assert all(memory.is_closed for memory in made)
    assert running() == []


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reshard-")]


def run(tasks, work, memories, threads=3):
    return run_in_threads(tasks, work, lambda: Memory(memories), threads)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_every_task_once(memories: list[Memory], threads: int, count: int) -> None:
    def work(task: int, memory: Memory) -> int:
        assert memory.thread == threading.get_ident()
        assert not memory.is_closed
        return task * task

    results = list(run(range(count), work, memories, threads))

    assert sorted(results) == [task * task for task in range(count)]
    assert len(memories) == threads


def test_one_thread_keeps_the_order(memories: list[Memory]) -> None:
    assert list(run(range(50), lambda task, _: task, memories, 1)) == list(range(50))


def test_results_come_as_they_are_finished(memories: list[Memory]) -> None:
    second_is_out = threading.Event()

    def work(task: int, _: Memory) -> int:
        if task == 0:
            assert second_is_out.wait(60)
        return task

    results = run(range(2), work, memories, 2)

    assert next(results) == 1
    second_is_out.set()
    assert list(results) == [0]


def test_tasks_run_at_the_same_time(memories: list[Memory]) -> None:
    together = threading.Barrier(3)

    def work(task: int, _: Memory) -> int:
        together.wait(60)
        return task

    assert len(list(run(range(3), work, memories, 3))) == 3


def test_tasks_are_taken_only_when_a_thread_is_free(memories: list[Memory]) -> None:
    """So tasks may be made as they are needed, however many there are."""
    may_go_on = threading.Event()
    taken = []

    def tasks() -> Iterator[int]:
        for task in range(100):
            taken.append(task)
            yield task

    def work(task: int, _: Memory) -> int:
        if task >= 2:
            assert may_go_on.wait(60)
        return task

    results = run(tasks(), work, memories, 2)
    assert {next(results), next(results)} == {0, 1}
    assert len(taken) <= 4
    may_go_on.set()
    assert len(list(results)) == 98


def test_an_error_of_a_task_ends_the_run(memories: list[Memory]) -> None:
    begun = []

    def work(task: int, _: Memory) -> int:
        begun.append(task)
        if task == 5:
            raise ValueError("task 5")
        return task

    with pytest.raises(ValueError, match="task 5"):
        list(run(range(100_000), work, memories))
    assert len(begun) < 100_000


def test_an_error_of_the_tasks_themselves(memories: list[Memory]) -> None:
    def tasks() -> Iterator[int]:
        yield 0
        raise ValueError("no more tasks")

    with pytest.raises(ValueError, match="no more tasks"):
        list(run(tasks(), lambda task, _: task, memories))


def test_an_error_of_a_memory(memories: list[Memory]) -> None:
    def new_memory() -> Memory:
        if len(memories) == 1:
            raise MemoryError("no room")
        return Memory(memories)

    with pytest.raises(MemoryError, match="no room"):
        list(run_in_threads(range(100_000), lambda task, _: task, new_memory, 3))


def test_results_before_an_error_are_not_lost(memories: list[Memory]) -> None:
    def work(task: int, _: Memory) -> int:
        if task == 3:
            raise ValueError("task 3")
        return task

    results = run(range(10), work, memories, 1)

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="task 3"):
        next(results)


def test_leaving_early_waits_for_running_tasks(memories: list[Memory]) -> None:
    ended = []

    def work(task: int, _: Memory) -> int:
        if task > 0:
            time.sleep(0.05)
        ended.append(task)
        return task

    results = run(range(1000), work, memories, 3)
    assert next(results) == 0
    results.close()

    assert running() == []
    assert len(ended) <= 6


def test_dropping_the_results_ends_the_threads(memories: list[Memory]) -> None:
    for result in run(range(1000), lambda task, _: task, memories):
        assert result < 1000
        break

    assert running() == []


def test_unread_results_start_no_task(memories: list[Memory]) -> None:
    results = run(range(10), lambda task, _: task, memories)
    assert running() == []
    results.close()
    assert memories == []


def test_a_thread_that_cannot_be_started(
    memories: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "reshard-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(run(range(1000), lambda task, _: task, memories))


def test_ctrl_c_ends_the_threads(memories: list[Memory]) -> None:
    def work(task: int, _: Memory) -> int:
        if task == 10:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return task

    with pytest.raises(KeyboardInterrupt):
        list(run(range(100_000), work, memories))
    assert running() == []


def test_ctrl_c_twice_still_waits_for_the_threads(memories: list[Memory]) -> None:
    """Nobody may close a file that a thread is writing to."""
    ended = []

    def work(task: int, _: Memory) -> int:
        if task == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            ended.append(task)
        return task

    with pytest.raises(KeyboardInterrupt):
        list(run(range(100_000), work, memories, 1))
    assert running() == []
    assert ended == [0]
