"""Who is let in by whom, of threads that stand for the processes of a host."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from reshard.torch.exchange.one_host import fd_passing
from reshard.torch.exchange.one_host.fd_passing import connect_shared_memory

pytestmark = pytest.mark.linux_only(reason="shared memory between ranks")
LIMIT_S = 120.0


class _Gathering:
    """All-gathers between threads."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=LIMIT_S)
        self._rows: list[torch.Tensor] = [torch.empty(0)] * count
        self._count = count

    def of(self, position: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            self._rows[position] = own.clone()
            self._barrier.wait()
            found = [row.clone() for row in self._rows]
            self._barrier.wait()
            return found

        return gather


def connect(count: int) -> dict[int, tuple[dict[int, socket.socket], bool]]:
    gathering, found = _Gathering(count), {}

    def run(position: int) -> None:
        found[position] = connect_shared_memory(position, count, LIMIT_S, gathering.of(position))

    threads = [threading.Thread(target=run, args=(position,)) for position in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def test_all_reach_all_and_strangers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_SHARED_MEMORY", raising=False)
    opened = fd_passing._open_listener
    strangers: list[socket.socket] = []

    def open_to_strangers(count: int) -> object:
        door = opened(count + 1)
        assert door is not None
        # Somebody who found the name comes first, with any word.
        stranger = fd_passing._reach(door.name, b"0" * 16, 0, LIMIT_S)
        assert stranger is not None
        strangers.append(stranger)
        return door

    monkeypatch.setattr(fd_passing, "_open_listener", open_to_strangers)
    found = connect(3)
    for position, (sockets, is_complete) in found.items():
        assert is_complete and set(sockets) == set(range(3)) - {position}
    found[0][0][2].send(b"from 0")
    assert found[2][0][0].recv(10) == b"from 0"
    for one in [*strangers, *(one for sockets, _ in found.values() for one in sockets.values())]:
        one.close()


def test_nobody_shares_where_one_cannot_keep_to_what_it_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RESHARD_SHARED_MEMORY", raising=False)
    monkeypatch.setattr(fd_passing._Listener, "admit", lambda door, expected: {})
    assert all(found == ({}, False) for found in connect(3).values())


def test_strangers_that_say_nothing_hold_up_nobody() -> None:
    door = fd_passing._open_listener(2)
    assert door is not None
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(60)]
    for stranger in strangers:
        stranger.settimeout(5)
        stranger.connect(fd_passing._address_of(door.name))
    reached = fd_passing._reach(door.name, door.word, 1, 5)
    assert reached is not None
    begun_s = time.monotonic()
    (admitted,) = door.admit({1}).values()
    assert time.monotonic() - begun_s < 2
    for one in (*strangers, reached, admitted, door):
        one.close()
