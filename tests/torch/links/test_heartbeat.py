"""Processes of a link that have ended, and hosts that became silent, are known to all others."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from reshard.torch.links import heartbeat
from reshard.torch.links.heartbeat import (
    is_unresponsive,
    resume_user_timeout,
    set_user_timeout,
    user_timeout_for_new_connections,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from reshard.errors import LinkError  # noqa: E402
from reshard.torch.links.heartbeat import Heartbeat, HeartbeatClient, HeartbeatServer  # noqa: E402
from reshard.torch.links.sealed_store import SealedStore, derive_key  # noqa: E402


def asks(connected: socket.socket) -> bool:
    return bool(connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_connections_get_the_user_timeout() -> None:
    with socket.socket() as one:
        set_user_timeout(one, 2.5)
        assert asks(one)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_sent_data_does_not_restart_a_silence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        set_user_timeout(one, 3.0)
        time.sleep(0.3)
        resume_user_timeout(one, 3.0)
        left_ms = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        # The other end's last sign of life was its answer to the connection.
        assert 500 <= left_ms <= 2750
        resume_user_timeout(one, 0.1)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500


def test_a_host_that_does_not_respond_is_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        assert not is_unresponsive(one, 3.0)
        for silence_s, least_ms in ((3.0, 1500), (1.0, 1500), (10.0, 8500)):
            for silent_ms in (least_ms - 1, least_ms):
                monkeypatch.setattr(heartbeat, "find_silence_ms", lambda _, ms=silent_ms: ms)
                assert is_unresponsive(one, silence_s) == (silent_ms == least_ms)
        monkeypatch.undo()
    # One that is closed tells nothing.
    assert not is_unresponsive(one, 3.0)


def test_only_new_connections_get_the_user_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as before:
            with user_timeout_for_new_connections(3.0):
                here = socket.create_connection(address)
            # Nothing is between the ends on one host.
            assert not asks(here)
            monkeypatch.setattr(heartbeat, "_is_of_this_host", lambda _: False)
            with user_timeout_for_new_connections(3.0), socket.socket() as gone:
                far = socket.create_connection(address)
            del gone
            assert asks(far) and not asks(before) and not asks(here)
            here.close()
            far.close()


# Generous: what is waited for comes at once.
PATIENCE_S = 30.0


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(dist.HashStore(), derive_key("s", b"0123456789abcdef"))


@pytest.fixture
def desk(store: SealedStore) -> Iterator[HeartbeatServer]:
    found = HeartbeatServer(store, "127.0.0.1", 3.0)
    yield found
    found.close()


def line(store: SealedStore) -> HeartbeatClient:
    return HeartbeatClient(store, PATIENCE_S, 3.0)


def comes(is_so: Callable[[], object]) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(is_so())


def test_all_processes_learn_which_process_ended(store: SealedStore, desk: HeartbeatServer) -> None:
    ends: list[Heartbeat] = [desk, line(store), line(store), line(store)]
    tokens = [one.token for one in ends]
    assert [one.find_departed(tokens) for one in ends] == ["", "", "", ""]
    ends[2].close()
    for number in (0, 1, 3):
        assert comes(lambda one=ends[number]: one.find_departed(tokens) == tokens[2])
        ends[number].check()
    # Who comes late learns of those that went before.
    late = line(store)
    assert comes(lambda: late.find_departed(tokens) == tokens[2])
    assert late.find_departed(tokens[:2]) == ""
    for one in (ends[1], ends[3], late):
        one.close()


def test_processes_learn_that_the_first_rank_ended(store: SealedStore) -> None:
    desk = HeartbeatServer(store, "127.0.0.1", 3.0)
    found = line(store)
    # Once it is known, nobody comes between.
    found.check()
    desk.close()

    def is_over() -> bool:
        try:
            found.check()
        except LinkError as error:
            return "has ended" in str(error)
        return False

    assert comes(is_over)
    found.close()
    with pytest.raises(LinkError, match=r"does not answer at 127\.0\.0\.1"):
        line(store)


GARBAGE = (b"", b"\0" * 10, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4, os.urandom(1 << 20))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_first_rank_that_has_forked_closes(store: SealedStore) -> None:
    desk = HeartbeatServer(store, "127.0.0.1", 3.0)
    read, write = os.pipe()
    forked = os.fork()
    if not forked:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        closing = threading.Thread(target=desk.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(forked, 0)


@pytest.mark.parametrize("said", GARBAGE, ids=["nothing", "little", "http", "much"])
def test_unauthenticated_connections_are_closed(
    store: SealedStore, desk: HeartbeatServer, said: bytes
) -> None:
    own = line(store)
    host, _, port = store.get("presence").decode().rpartition(" ")
    for _ in range(3):
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            assert len(stranger.recv(16)) == 16
            try:
                stranger.sendall(said)
            except OSError:
                assert len(said) > 48
    other = line(store)
    other.close()
    assert comes(lambda: own.find_departed([other.token]) == other.token)
    own.check()
    own.close()


def test_a_process_without_the_secret_is_not_admitted(
    store: SealedStore, desk: HeartbeatServer
) -> None:
    own = line(store)
    stranger = SealedStore(dist.HashStore(), b"another key")
    stranger.set("presence", store.get("presence"))
    found = line(stranger)
    # Its connection is closed, and the others are not told of it.
    assert comes(lambda: found.find_departed([]) == "" and found._is_over)
    assert own.find_departed([found.token]) == "" and desk.find_departed([found.token]) == ""
    found.close()
    own.close()


@pytest.mark.parametrize("is_silent", [False, True])
def test_all_processes_learn_how_a_process_ended(
    store: SealedStore, desk: HeartbeatServer, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_silent:
        # A connection that is reset stands for one that the system ends after a silence.
        monkeypatch.setattr(heartbeat, "SILENT_ERRORS", (errno.ECONNRESET,))
    ended, other = line(store), line(store)
    tokens = [ended.token]
    assert comes(lambda: len(desk._known) == 2)
    ended._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ended.close()
    for one in (desk, other):
        assert comes(lambda one=one: one.find_departed(tokens))
        assert bool(one.find_departed(tokens, is_silent=True)) is is_silent
        assert not one.is_disconnected
    other.close()


def test_a_disconnected_process_detects_it(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = HeartbeatServer(store, "127.0.0.1", 3.0)
    found = line(store)
    assert comes(lambda: desk._known)
    monkeypatch.setattr(heartbeat, "SILENT_ERRORS", (errno.ECONNRESET,))
    for one in desk._known:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    desk.close()
    assert comes(lambda: found.is_disconnected)
    found.close()


def test_an_unresponsive_host_seems_disconnected_before_the_timeout(
    store: SealedStore, desk: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = line(store)
    assert not one.seems_disconnected
    monkeypatch.setattr(heartbeat, "is_unresponsive", lambda *_: True)
    assert one.seems_disconnected and not one.is_disconnected
    one.check()
    assert not desk.seems_disconnected
    one.close()
