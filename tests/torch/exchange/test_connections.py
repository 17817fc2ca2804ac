"""Messages on gloo's connections: what ends the waiting for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from reshard.torch.exchange import connections
from reshard.torch.exchange.connections import Connections


class Work:
    """A message of torch, which ends when it is told to."""

    def __init__(self, error: str = "") -> None:
        self.ended = threading.Event()
        self._error = error

    def wait(self, timeout: object = None) -> None:
        assert timeout is None
        assert self.ended.wait(60)
        if self._error:
            raise RuntimeError(self._error)


class Group:
    """Torch's group: the given work for each message, and whether its connections are closed."""

    def __init__(self, work: Work) -> None:
        self.work, self.is_closed = work, False
        self.probes = 0

    def recv(self, tensors: list[Any], sender: int, tag: int) -> Work:
        if tag == 7:
            return self.work
        self.probes += 1
        if self.is_closed:
            raise RuntimeError("Socket closed")
        return Work()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LOOK_S", 0.01)


def waiting_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "reshard wait"}


def test_what_ends_has_ended_and_raises_what_it_raises() -> None:
    for error in ("", "Connection closed by peer", ""):
        group = Group(Work(error))
        group.work.ended.set()
        message = Connections(group).recv([], 1, 7)
        if error:
            with pytest.raises(RuntimeError, match=error):
                message.wait()
        else:
            message.wait()


def test_one_thread_waits_for_one_message_after_another() -> None:
    work = Work()
    work.ended.set()
    Connections(Group(work)).recv([], 1, 7).wait()
    before = waiting_threads()
    for _ in range(5):
        Connections(Group(work)).recv([], 1, 7).wait()
    assert before
    assert waiting_threads() == before


def test_what_takes_long_is_waited_for_while_its_connection_is_there() -> None:
    group = Group(Work())
    threading.Timer(0.2, group.work.ended.set).start()
    Connections(group).recv([], 1, 7).wait()
    assert group.probes > 1


def test_a_lost_message_is_not_waited_for() -> None:
    connections._IDLE.clear()
    before = waiting_threads()
    group = Group(Work())
    group.is_closed = True
    with pytest.raises(RuntimeError, match="closed in the middle of a message"):
        Connections(group).recv([], 1, 7).wait()
    # The thread that waits for it ends with it.
    group.work.ended.set()
    for one in waiting_threads() - before:
        one.join(60)
    assert waiting_threads() <= before


def test_nobody_waits_beyond_the_given_time() -> None:
    group = Group(Work())
    with pytest.raises(RuntimeError, match="time to wait"):
        Connections(group).recv([], 1, 7).wait(time.monotonic() + 0.05)
    group.work.ended.set()
