"""The store of a link: where it listens, whom it answers, and what strangers can do."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from reshard.errors import LinkError  # noqa: E402
from reshard.torch.links import store_server  # noqa: E402
from reshard.torch.links.address import LinkAddress  # noqa: E402
from reshard.torch.links.store_server import StoreLine, StoreServer  # noqa: E402


@pytest.fixture
def server() -> Iterator[StoreServer]:
    found = StoreServer([("127.0.0.1", 0)], "s")
    yield found
    found.close()


def connect(server: StoreServer, secret: str = "s") -> StoreLine:
    host, port = server.addresses[0]
    return StoreLine(host, port, secret, 5)


def test_what_one_writes_the_other_reads(server: StoreServer) -> None:
    mine, theirs = connect(server), connect(server)
    mine.set("a", b"\x00\n\xff" * 100_000)
    assert theirs.get("a") == b"\x00\n\xff" * 100_000
    assert theirs.check(["a"]) and theirs.check([]) and not theirs.check(["a", "b"])
    assert (mine.add("n", 2), theirs.add("n", 3), theirs.add("n", 0)) == (2, 5, 5)
    assert theirs.delete_key("a") and not theirs.delete_key("a") and not mine.check(["a"])


def test_many_at_once(server: StoreServer) -> None:
    lines = [connect(server) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda line=line: [line.add("n", 1) for _ in range(50)])
        for line in lines * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines[0].add("n", 0) == 400


def test_it_listens_at_its_address_alone(server: StoreServer) -> None:
    port = server.addresses[0][1]
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{port:04X}"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_name_with_several_addresses() -> None:
    found = LinkAddress("localhost", 0)._serve("s")
    assert {host for host, _ in found.addresses} <= {"127.0.0.1", "::1"}


def test_an_address_that_is_of_no_interface_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a service which leads here: the store listens where others find this process."""
    monkeypatch.setattr(LinkAddress, "_resolve", lambda _: ["192.0.2.1"])
    monkeypatch.setattr(LinkAddress, "own_address", lambda _: "127.0.0.1")
    assert LinkAddress("service", 0)._serve("s").addresses[0][0] == "127.0.0.1"


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\0" * 31])
def test_strangers_hold_up_nobody(server: StoreServer, says: bytes) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            stranger = opened.enter_context(socket.create_connection(server.addresses[0]))
            stranger.sendall(says)
        begun_s = time.monotonic()
        line = connect(server)
        line.set("a", b"1")
        assert line.get("a") == b"1"
        assert time.monotonic() - begun_s < 2


def test_more_strangers_than_are_kept(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_MAX_UNKNOWN", 3)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(socket.create_connection(server.addresses[0]))
        assert connect(server).add("n", 1) == 1


def test_strangers_see_nothing_and_are_closed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(server).set("a", b"precious")
    request = store_server._REQUEST.pack(b"G", 1, 0) + b"a"
    monkeypatch.setattr(store_server, "_GREETING_S", 0.2)
    with socket.create_connection(server.addresses[0], timeout=5) as stranger:
        # A code that is wrong, then a request.
        stranger.sendall(bytes(32) + request)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := stranger.recv(1000):
                received += more
    assert len(received) == store_server._HELLO_BYTES and b"precious" not in received
    with socket.create_connection(server.addresses[0], timeout=5) as idle:
        idle.recv(1000)
        assert idle.recv(1000) == b""


def test_a_client_that_announces_too_much_is_closed(server: StoreServer) -> None:
    line = connect(server)
    line._socket.sendall(store_server._REQUEST.pack(b"S", 1, 0xFFFFFFFF))
    with pytest.raises(RuntimeError, match="does not answer"):
        line.get("a")


def test_another_secret_is_said_at_once(server: StoreServer) -> None:
    with pytest.raises(LinkError, match="another secret"):
        connect(server, "t")


def test_a_server_of_something_else() -> None:
    def greet(listener: socket.socket) -> None:
        with listener.accept()[0] as found:
            found.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=greet, args=(other,))
        thread.start()
        with pytest.raises(LinkError, match="no link's store"):
            StoreLine(*other.getsockname(), "s", 5)
        thread.join()


def test_a_server_that_ends(server: StoreServer) -> None:
    line = connect(server)
    server.close()
    server.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not answer"):
            line.get("a")


def test_a_server_that_nobody_has_ends() -> None:
    found = StoreServer([("127.0.0.1", 0)], "s")
    line = connect(found)
    del found
    gc.collect()
    with pytest.raises(RuntimeError, match="does not answer"):
        line.get("a")
