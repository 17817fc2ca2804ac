"""Messages on gloo's connections: what ends the waiting for them."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

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
    monkeypatch.setattr(connections, "_POLL_S", 0.01)


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


def test_silent_ranks_are_not_waited_for() -> None:
    group = Group(Work())
    silent = iter(["", "", "rank 1 gives no sign of life"])
    with pytest.raises(RuntimeError, match="no sign of life"):
        Connections(group, lambda: next(silent)).recv([], 1, 7).wait()
    # What still waits for it keeps its connections.
    group.work.ended.set()


class Mailbox:
    """As a group of torch, for ranks that are threads of one process."""

    def __init__(self, rank: int, mail: list[list[queue.Queue[torch.Tensor]]]) -> None:
        self._rank, self._mail = rank, mail

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._mail)

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Work:
        self._mail[receiver][self._rank].put(tensors[0].clone())
        work = Work()
        work.ended.set()
        return work

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Work:
        work = Work()
        if not tensors[0].numel():
            # It only asks whether the connection is there.
            return work

        def receive() -> None:
            tensors[0].copy_(self._mail[self._rank][sender].get(timeout=60))
            work.ended.set()

        threading.Thread(target=receive, daemon=True).start()
        return work


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_all_ranks_learn_what_one_has_and_what_all_have(ranks: int) -> None:
    mail: list[list[queue.Queue[torch.Tensor]]]
    mail = [[queue.Queue() for _ in range(ranks)] for _ in range(ranks)]
    found: dict[int, list[list[int]]] = {}

    def run(rank: int) -> None:
        between = Connections(Mailbox(rank, mail))
        end_s = time.monotonic() + 60
        every = [one.tolist() for one in between.all_gather(torch.tensor([rank, 7]), end_s)]
        for root in range(ranks):
            told = torch.tensor([root if rank == root else -1])
            between.broadcast(told, root, end_s)
            every.append(told.tolist())
        found[rank] = every

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [[rank, 7] for rank in range(ranks)] + [[root] for root in range(ranks)]
    assert found == dict.fromkeys(range(ranks), expected)
    assert all(box.empty() for boxes in mail for box in boxes)
