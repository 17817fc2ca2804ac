"""Sealed stores: what others wrote, or who has another secret, is found out."""

from __future__ import annotations

import datetime

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from reshard.errors import LinkError  # noqa: E402
from reshard.torch.links.sealed_store import SealedStore, code_of, derive_key  # noqa: E402

SALT = b"0123456789abcdef"


def open_both() -> tuple[dist.Store, SealedStore, SealedStore]:
    server, key = dist.HashStore(), derive_key("s", SALT)
    return server, SealedStore(server, key), SealedStore(server, key)


def test_what_one_writes_the_other_reads() -> None:
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


def test_keys_say_nothing_of_their_names() -> None:
    _, mine, _ = open_both()
    assert "card" not in mine._seal_key("0/card/1")
    assert mine._seal_key("0/card/1") != mine._seal_key("0/card/2")


def test_parts_of_a_code_are_not_run_together() -> None:
    assert code_of(b"k", b"ab", b"c") != code_of(b"k", b"a", b"bc")


def test_torchs_own_groups_take_it() -> None:
    _, mine, _ = open_both()
    prefixed = dist.PrefixStore("gloo", mine)
    group = dist.ProcessGroupGloo(prefixed, 0, 1, datetime.timedelta(seconds=5))
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1, 1]


def test_a_closed_store_says_so_and_keeps_no_connection() -> None:
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
