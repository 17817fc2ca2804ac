"""Addresses of links, their secrets and their stores."""

from __future__ import annotations

import socket

import pytest

torch = pytest.importorskip("torch")

from live_processes import free_port  # noqa: E402
from reshard.errors import LinkError, UsageError  # noqa: E402
from reshard.torch.links.address import LinkAddress  # noqa: E402
from reshard.torch.links.link import connect  # noqa: E402


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
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://10\.0\.0\.1:29400"):
        LinkAddress.of(url)


def test_an_address_without_its_scheme() -> None:
    assert LinkAddress.of("trainer:29400") == LinkAddress("trainer", 29400)


def test_loopback() -> None:
    assert LinkAddress.of("tcp://127.0.0.1:1").is_loopback
    assert LinkAddress.of("tcp://localhost:1").is_loopback
    assert LinkAddress.of("tcp://[::1]:1").is_loopback
    assert not LinkAddress.of("tcp://10.0.0.1:1").is_loopback
    assert LinkAddress.of("tcp://127.0.0.1:1").own_address() == "127.0.0.1"


def test_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nobody_serves_it() -> None:
    with pytest.raises(LinkError, match="nobody serves"):
        LinkAddress("127.0.0.1", free_port()).open_store(False, "s", 0.3)


def test_what_listens_there_is_no_store() -> None:
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
def test_private_addresses(host: str) -> None:
    LinkAddress(host, 1).check_privacy()


@pytest.mark.parametrize(
    "host",
    [
        *("8.8.8.8", "172.32.0.1", "100.128.0.1", "192.0.2.1", "198.18.0.1", "0.0.0.0", "::"),
        *("2001:db8::1", "::ffff:8.8.8.8"),
    ],
)
def test_addresses_where_others_may_listen(host: str) -> None:
    with pytest.raises(UsageError, match=r"not private(.|\n)*insecure=True"):
        LinkAddress(host, 1).check_privacy()


def test_connect_refuses_such_before_anything_else() -> None:
    with pytest.raises(UsageError, match="insecure=True"):
        connect("tcp://192.0.2.1:1", "engine", rank=0, ranks=1, secret="s", timeout_s=0.1)
    with pytest.raises(LinkError, match=r"does not answer|nobody serves"):
        connect(
            "tcp://0.0.0.0:1", "engine", rank=0, ranks=1, secret="s", timeout_s=0.1, insecure=True
        )
