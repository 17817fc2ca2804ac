"""Groups of ranks: what carries what, in which order, and what they know of failures."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")

from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.meeting import Watch

CASES = [
    "backends",
    "unnamed",
    "threads",
    "refits",
    "raises while it posts",
    "raises while it waits",
    "raises at the end",
]


@pytest.mark.parametrize("case", CASES)
def test_groups_of_two_ranks(case: str) -> None:
    expect_all_end_well(run_ranks("groups_process.py", 2, case, timeout_s=60))


class Work:
    """A collective of torch that ends when it is told to."""

    def __init__(self, error: str = "") -> None:
        self.ended = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended.wait(None if timeout is None else 0.01):
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self.ended.is_set()


def group_of(lost: str = "", silent: str = "") -> Any:
    group: Any = RankGroup.__new__(RankGroup)
    group._meeting = SimpleNamespace(watch=Watch(lambda: lost, lambda: silent, lambda: False, 1.0))
    group._transport = object()
    return group


def test_nothing_is_begun_with_who_is_silent() -> None:
    with pytest.raises(RuntimeError, match="no sign of life"):
        group_of(silent="rank 1 gives no sign of life")._finish(pytest.fail)


def test_who_has_ended_may_have_done_its_part() -> None:
    # Of a broadcast, the sender may end before those that hear it from others have begun.
    work = Work()
    work.ended.set()
    group_of(lost="rank 1 has ended")._finish(lambda: work)


def test_silent_ranks_are_not_waited_for() -> None:
    work = Work()
    group = group_of()
    silent = iter(["", "", "rank 1 gives no sign of life"])
    group._meeting.watch = Watch(lambda: "", lambda: next(silent), lambda: False, 1.0)
    with pytest.raises(RuntimeError, match="no sign of life"):
        group._finish(lambda: work)
    # What still waits for it keeps its connections.
    work.ended.set()


def test_others_are_waited_for_as_long_as_it_takes() -> None:
    work = Work()
    threading.Timer(0.1, work.ended.set).start()
    group_of()._finish(lambda: work)
    assert work.is_completed()


def test_what_torch_raises_is_raised() -> None:
    work = Work("Connection closed by peer")
    threading.Timer(0.1, work.ended.set).start()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        group_of()._finish(lambda: work)


def test_one_that_ends_just_behind_the_time_for_a_look() -> None:
    work = Work()
    looks: list[int] = []

    def is_completed() -> bool:
        looks.append(1)
        work.ended.set()
        return True

    work.is_completed = is_completed  # type: ignore[method-assign]
    group_of()._finish(lambda: work)
    assert looks == [1]
