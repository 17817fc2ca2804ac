"""Ranks of a side find each other, trainers find engines, and processes prove the secret."""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import reshard  # noqa: E402
from reshard import log  # noqa: E402
from reshard.errors import LinkError  # noqa: E402
from reshard.torch.exchange.groups import RankGroup  # noqa: E402
from reshard.torch.exchange.rendezvous import meet_at, peer_key  # noqa: E402
from reshard.torch.links.handshake import (  # noqa: E402
    PROTOCOL,
    TRAINER,
    Announcement,
    announce,
    find_engines,
    find_trainer,
    prove_secret,
    read_announcement,
    rendezvous_key,
    wait_for_engines,
)
from reshard.torch.links.heartbeat import Heartbeat  # noqa: E402
from reshard.torch.links.sealed_store import SealedStore, derive_key  # noqa: E402


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(dist.HashStore(), derive_key("s", b"0123456789abcdef"))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return or raise that run side by side."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_ranks_of_a_side_get_the_same_announcement(store: SealedStore) -> None:
    found = together(*[lambda rank=rank: announce(store, "a", rank, 3, 20) for rank in (2, 1, 0)])
    process = f"host {socket.gethostname()}, process {os.getpid()}"
    told = Announcement(0, "a", 3, 3, found[0].tokens, reshard.__version__, (process,) * 3)
    assert found == [told] * 3
    assert len(set(found[0].tokens)) == 3
    assert find_engines(store, set()) == found[:1]
    assert find_engines(store, {0}) == []


def test_engines_of_the_same_name_count_as_one(store: SealedStore) -> None:
    trainer = announce(store, TRAINER, 0, 1, 20)
    engines = [announce(store, name, 0, 1, 20) for name in "ab"]
    for one in (engines[0], replace(engines[0], number=7), engines[1]):
        store.set(f"announcement/{one.number}", json.dumps(asdict(one)))
        store.set(f"{rendezvous_key(one.number)}/{peer_key(0, 1)}", "")
    store.add("sides", 8)
    came = wait_for_engines(store, set(), 2, 5, trainer, Heartbeat())
    assert {one.name for one in came} == {"a", "b"}
    with pytest.raises(
        LinkError, match=r"3 engines came.* under 2 of the 3 names: a, b; give each"
    ):
        wait_for_engines(store, set(), 3, 0.1, trainer, Heartbeat())


def test_a_restarted_side_gets_another_number(store: SealedStore) -> None:
    # The first rank of the first time died before it saw the other one's claim.
    lost = store.add("sides", 1) - 1
    store.set("side/a", str(lost))
    late = threading.Timer(0.2, lambda: announce(store, "a", 0, 2, 20))
    late.start()
    found = announce(store, "a", 1, 2, 20)
    late.join()
    assert found.number == lost + 1


def test_ranks_with_different_numbers_of_ranks_are_refused(store: SealedStore) -> None:
    found = together(lambda: announce(store, "a", 0, 2, 20), lambda: announce(store, "a", 1, 3, 20))
    assert all(isinstance(one, LinkError) and "rank 1 has ranks=3" in str(one) for one in found)


def test_a_long_wait_is_reported_with_what_is_awaited(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "NOTICE_S", 0.05)
    with pytest.raises(LinkError):
        announce(store, "a", 0, 2, 0.2)
    with pytest.raises(LinkError):
        announce(store, "b", 1, 2, 0.2)
    with pytest.raises(LinkError):
        find_trainer(store, 0.2)
    assert capsys.readouterr().err.splitlines() == [
        "reshard: waiting for rank 1 of a",
        "reshard: waiting for rank 0 of b",
        "reshard: waiting for the trainer",
    ]


def test_missing_ranks_are_named_after_the_timeout(store: SealedStore) -> None:
    with pytest.raises(LinkError, match="rank 1 of a did not come"):
        announce(store, "a", 0, 2, 0.2)
    with pytest.raises(LinkError, match="rank 0 of b did not let rank 1 in"):
        announce(store, "b", 1, 2, 0.2)
    with pytest.raises(LinkError, match="no trainer came"):
        find_trainer(store, 0.2)


def test_sides_with_different_protocols_are_refused(
    store: SealedStore, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = announce(store, TRAINER, 0, 1, 1)
    assert find_trainer(store, 1) == trainer
    other = replace(trainer, protocol=PROTOCOL + 1, release="9.1")
    store.set(f"announcement/{trainer.number}", json.dumps(asdict(other)))
    both = rf"9\.1, whose .* protocol {PROTOCOL + 1}, .* {reshard.__version__}, .* {PROTOCOL};"
    with pytest.raises(LinkError, match=both):
        find_trainer(store, 1)
    engine = announce(store, "a", 0, 1, 1)
    store.set(f"announcement/{engine.number}", json.dumps(asdict(replace(engine, protocol=0))))
    seen: set[int] = set()
    assert find_engines(store, seen) == []
    assert find_engines(store, seen) == []
    # Once, and who it is.
    assert [one.getMessage() for one in caplog.records] == [
        f"an engine is not admitted: a has reshard {reshard.__version__}, whose links speak "
        f"protocol 0, and this process has reshard {reshard.__version__}, whose links speak "
        f"protocol {PROTOCOL}; give both sides one release"
    ]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"number": "0", "name": "a", "ranks": 1}'])
def test_invalid_announcements_are_refused(store: SealedStore, text: bytes) -> None:
    store.set("announcement/3", text)
    with pytest.raises(LinkError, match="is no announcement of a side of a link"):
        read_announcement(store, 3)


@pytest.mark.parametrize("keys", [(b"k", b"k", b"k"), (b"k", b"k", b"other")])
def test_processes_without_the_secret_are_named(keys: tuple[bytes, ...]) -> None:
    shared = dist.HashStore()
    patience = datetime.timedelta(seconds=20)

    def prove(position: int) -> None:
        meeting = meet_at(
            shared,
            position,
            len(keys),
            patience,
            job="j",
            home_rank=position,
            address="127.0.0.1",
        )
        prove_secret(RankGroup(meeting, None), keys[position])

    found = together(*[lambda p=position: prove(p) for position in range(len(keys))])
    if len(set(keys)) == 1:
        assert found == [None] * len(keys)
    else:
        assert all(isinstance(one, LinkError) and "secret" in str(one) for one in found)
        assert "rank 2" in str(found[0]) and "rank 2" in str(found[1])
