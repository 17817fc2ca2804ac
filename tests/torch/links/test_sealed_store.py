"""The store of a link: addresses and their secrets, and sealed values of others."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from live_processes import free_port  # noqa: E402
from reshard.errors import LinkError, UsageError  # noqa: E402
from reshard.torch.links import sealed_store  # noqa: E402
from reshard.torch.links.link import connect  # noqa: E402
from reshard.torch.links.sealed_store import (  # noqa: E402
    LinkAddress,
    SealedStore,
    StoreClient,
    StoreServer,
    code_of,
    derive_key,
)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://a:1",
        "tcp://a",
        "tcp://:1",
        "tcp://a:b",
        "tcp://a:99999",
        "tcp://a:1/x",
        "tcp://a:0",
        7,
    ],
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://10\.0\.0\.1:29400"):
        LinkAddress.of(url)


def test_an_address_may_omit_its_scheme() -> None:
    assert LinkAddress.of("trainer:29400") == LinkAddress("trainer", 29400)


def test_loopback_addresses_are_known() -> None:
    assert LinkAddress.of("tcp://127.0.0.1:1").is_loopback
    assert LinkAddress.of("tcp://localhost:1").is_loopback
    assert LinkAddress.of("tcp://[::1]:1").is_loopback
    assert not LinkAddress.of("tcp://10.0.0.1:1").is_loopback
    assert LinkAddress.of("tcp://127.0.0.1:1").own_address() == "127.0.0.1"


def test_only_loopback_addresses_need_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_LINK_SECRET", raising=False)
    here, there = LinkAddress("127.0.0.1", 1), LinkAddress("10.0.0.1", 1)
    assert here.find_secret(None) == ""
    with pytest.raises(UsageError, match="RESHARD_LINK_SECRET"):
        there.find_secret(None)
    assert there.find_secret("a") == "a"
    with pytest.raises(UsageError, match="empty"):
        here.find_secret("")
    monkeypatch.setenv("RESHARD_LINK_SECRET", "b")
    assert there.find_secret(None) == "b"


def test_a_store_is_served_and_reached() -> None:
    place = LinkAddress("127.0.0.1", free_port())
    served = place.open_store(True, "s", 5)
    served.set("a", "1")
    assert place.open_store(False, "s", 5).get("a") == b"1"
    with pytest.raises(LinkError, match="another secret"):
        place.open_store(False, "t", 5)
    with pytest.raises(LinkError, match="cannot be served"):
        place.open_store(True, "s", 1)


def test_a_store_without_a_server_is_named() -> None:
    with pytest.raises(LinkError, match="nobody serves"):
        LinkAddress("127.0.0.1", free_port()).open_store(False, "s", 0.3)


def test_a_server_that_is_not_a_store_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = LinkAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(LinkError, match="another program has the port"):
            place.open_store(False, "s", 0.5)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "::1", "10.255.0.1", "172.31.0.1", "192.168.1.1"),
        *("169.254.1.1", "100.64.0.1", "100.127.255.255", "fd00::1", "fe80::1", "::ffff:10.0.0.1"),
    ],
)
def test_private_addresses_are_accepted(host: str) -> None:
    LinkAddress(host, 1).check_privacy()


@pytest.mark.parametrize(
    "host",
    [
        *("8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.2.1", "198.18.0.1", "0.0.0.0", "::"),
        *("2001:db8::1", "::ffff:8.8.8.8"),
    ],
)
def test_public_addresses_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match=r"not private(.|\n)*insecure=True"):
        LinkAddress(host, 1).check_privacy()


def test_connect_refuses_public_addresses_first() -> None:
    with pytest.raises(UsageError, match="insecure=True"):
        connect("tcp://192.0.2.1:1", "engine", rank=0, ranks=1, secret="s", timeout_s=0.1)
    with pytest.raises(LinkError, match=r"does not answer|nobody serves"):
        connect(
            "tcp://0.0.0.0:1", "engine", rank=0, ranks=1, secret="s", timeout_s=0.1, insecure=True
        )


SALT = b"0123456789abcdef"


def open_both() -> tuple[dist.Store, SealedStore, SealedStore]:
    server, key = dist.HashStore(), derive_key("s", SALT)
    return server, SealedStore(server, key), SealedStore(server, key)


def test_values_are_read_by_other_processes() -> None:
    _, mine, theirs = open_both()
    mine.set("a", "text")
    mine.set("b", b"\x00\xff")
    assert (theirs.get("a"), theirs.get("b")) == (b"text", b"\x00\xff")
    assert (mine.add("n", 2), theirs.add("n", 3)) == (2, 5)
    assert theirs.check(["a", "b"]) and not theirs.check(["a", "c"])
    assert theirs.delete_key("a") and not mine.check(["a"])
    theirs.wait(["b"], datetime.timedelta(seconds=1))


def test_values_of_others_are_refused() -> None:
    server, mine, theirs = open_both()
    mine.set("a", "1")
    mine.set("b", "2")
    server.set(mine._seal_key("a"), "forged" * 20)
    with pytest.raises(LinkError, match="'a'"):
        theirs.get("a")
    # A value that is sealed, for another key.
    server.set(mine._seal_key("a"), server.get(mine._seal_key("b")))
    with pytest.raises(LinkError, match="'a'"):
        theirs.get("a")


def test_sealed_keys_do_not_contain_names() -> None:
    _, mine, _ = open_both()
    assert "card" not in mine._seal_key("0/card/1")
    assert mine._seal_key("0/card/1") != mine._seal_key("0/card/2")


def test_codes_separate_their_parts() -> None:
    assert code_of(b"k", b"ab", b"c") != code_of(b"k", b"a", b"bc")


def test_torch_creates_groups_with_it() -> None:
    _, mine, _ = open_both()
    prefixed = dist.PrefixStore("gloo", mine)
    group = dist.ProcessGroupGloo(prefixed, 0, 1, datetime.timedelta(seconds=5))
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1, 1]


def test_a_closed_store_raises_and_keeps_no_connection() -> None:
    _, mine, theirs = open_both()
    mine.set("a", "text")
    theirs.close()
    theirs.close()
    with pytest.raises(LinkError, match="closed; connect again"):
        theirs.get("a")
    assert mine.get("a") == b"text"


def test_a_process_derives_a_key_once() -> None:
    """It takes 50 ms, and the trainer's server and its own line need the same key."""
    assert derive_key("once", SALT) is derive_key("once", SALT)
    assert derive_key("once", SALT) != derive_key("twice", SALT)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    found = StoreServer([("127.0.0.1", 0)], "s")
    yield found
    found.close()


def open_line(server: StoreServer, secret: str = "s") -> StoreClient:
    host, port = server.addresses[0]
    return StoreClient(host, port, secret, 5)


def test_clients_read_what_others_write(server: StoreServer) -> None:
    mine, theirs = open_line(server), open_line(server)
    mine.set("a", b"\x00\n\xff" * 100_000)
    assert theirs.get("a") == b"\x00\n\xff" * 100_000
    assert theirs.check(["a"]) and theirs.check([]) and not theirs.check(["a", "b"])
    assert (mine.add("n", 2), theirs.add("n", 3), theirs.add("n", 0)) == (2, 5, 5)
    assert theirs.delete_key("a") and not theirs.delete_key("a") and not mine.check(["a"])


def test_many_clients_are_served_concurrently(server: StoreServer) -> None:
    lines = [open_line(server) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda line=line: [line.add("n", 1) for _ in range(50)])
        for line in lines * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines[0].add("n", 0) == 400


def test_a_server_listens_at_its_address_only(server: StoreServer) -> None:
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
def test_unauthenticated_connections_delay_no_client(server: StoreServer, says: bytes) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(300):
            stranger = opened.enter_context(socket.create_connection(server.addresses[0]))
            stranger.sendall(says)
        begun_s = time.monotonic()
        line = open_line(server)
        line.set("a", b"1")
        assert line.get("a") == b"1"
        assert time.monotonic() - begun_s < 2


def test_the_oldest_unauthenticated_connections_are_closed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_store, "_MAX_UNKNOWN", 3)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(socket.create_connection(server.addresses[0]))
        assert open_line(server).add("n", 1) == 1


def test_unauthenticated_requests_are_not_answered(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_line(server).set("a", b"precious")
    request = sealed_store._REQUEST.pack(b"G", 1, 0) + b"a"
    monkeypatch.setattr(sealed_store, "_GREETING_S", 0.2)
    with socket.create_connection(server.addresses[0], timeout=5) as stranger:
        # A code that is wrong, then a request.
        stranger.sendall(bytes(32) + request)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := stranger.recv(1000):
                received += more
    assert len(received) == sealed_store._HELLO_BYTES and b"precious" not in received
    with socket.create_connection(server.addresses[0], timeout=5) as idle:
        idle.recv(1000)
        assert idle.recv(1000) == b""


def test_a_client_that_announces_too_much_is_closed(server: StoreServer) -> None:
    line = open_line(server)
    line._socket.sendall(sealed_store._REQUEST.pack(b"S", 1, 0xFFFFFFFF))
    with pytest.raises(RuntimeError, match="does not answer"):
        line.get("a")


def test_a_client_with_another_secret_is_refused_at_once(server: StoreServer) -> None:
    with pytest.raises(LinkError, match="another secret"):
        open_line(server, "t")


def test_another_server_is_not_taken_for_a_store() -> None:
    def greet(listener: socket.socket) -> None:
        with listener.accept()[0] as found:
            found.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=greet, args=(other,))
        thread.start()
        with pytest.raises(LinkError, match="no link's store"):
            StoreClient(*other.getsockname(), "s", 5)
        thread.join()


def test_clients_of_an_ended_server_raise(server: StoreServer) -> None:
    line = open_line(server)
    server.close()
    server.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not answer"):
            line.get("a")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_server_of_a_process_that_has_forked_closes(server: StoreServer) -> None:
    read, write = os.pipe()
    forked = os.fork()
    if not forked:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(forked, 0)


def test_an_unreferenced_server_ends() -> None:
    found = StoreServer([("127.0.0.1", 0)], "s")
    line = open_line(found)
    del found
    # The server's thread may answer once more before it sees that it should end.
    end_s = time.monotonic() + 5

    def ask() -> None:
        while time.monotonic() < end_s:
            line.get("a")

    with pytest.raises(RuntimeError, match="does not answer"):
        ask()
