"""Connections between hosts that are opened meanwhile ask silent hosts for a sign of life."""

from __future__ import annotations

import socket
import time

import pytest

from reshard.torch.links import tcp_user_timeout
from reshard.torch.links.tcp_user_timeout import (
    is_unresponsive,
    resume_user_timeout,
    set_user_timeout,
    user_timeout_for_new_connections,
)

pytest.importorskip("torch")


def asks(connected: socket.socket) -> bool:
    return bool(connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_what_is_asked() -> None:
    with socket.socket() as one:
        set_user_timeout(one, 2.5)
        assert asks(one)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_what_is_sent_does_not_begin_a_silence_anew() -> None:
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


def test_who_does_not_answer_seems_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        assert not is_unresponsive(one, 3.0)
        for silence_s, least_ms in ((3.0, 1500), (1.0, 1500), (10.0, 8500)):
            for silent_ms in (least_ms - 1, least_ms):
                monkeypatch.setattr(tcp_user_timeout, "find_silence_ms", lambda _, ms=silent_ms: ms)
                assert is_unresponsive(one, silence_s) == (silent_ms == least_ms)
        monkeypatch.undo()
    # One that is closed tells nothing.
    assert not is_unresponsive(one, 3.0)


def test_only_connections_that_are_opened_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as before:
            with user_timeout_for_new_connections(3.0):
                here = socket.create_connection(address)
            # Nothing is between the ends on one host.
            assert not asks(here)
            monkeypatch.setattr(tcp_user_timeout, "_is_of_this_host", lambda _: False)
            with user_timeout_for_new_connections(3.0), socket.socket() as gone:
                far = socket.create_connection(address)
            del gone
            assert asks(far) and not asks(before) and not asks(here)
            here.close()
            far.close()
