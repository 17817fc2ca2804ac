"""The ranks of a trainer combine their observations of a run, at the link's store."""

from __future__ import annotations

import json
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from reshard.errors import LinkError  # noqa: E402
from reshard.torch.links.handshake import Announcement  # noqa: E402
from reshard.torch.links.heartbeat import Heartbeat  # noqa: E402
from reshard.torch.links.membership import LinkMembers, RunSummary  # noqa: E402
from reshard.torch.links.messages import read_message, write_message  # noqa: E402
from reshard.torch.links.sealed_store import LinkAddress, SealedStore, derive_key  # noqa: E402

FIRST = RunSummary({"a": (0.5, "trainer")}, {"b": "it left"}, (4,), 8)
OTHER = RunSummary({"b": (0.6, "a")}, trainer_bytes=8)
PATIENCE_S = 60.0


class Seen(Heartbeat):
    """A trainer's first rank, which knows who has ended."""

    def end(self, token: str) -> None:
        self._gone[token] = b"c"


class Asked(SealedStore):
    """A store at which the second rank reads the account only once the first has asked for that."""

    def check(self, keys: list[str]) -> bool:
        if keys == ["step/7/read/1"] and not super().check(keys):
            self.account = self.get("step/7/account")
            self.set("step/7/read/1", "")
            return False
        return super().check(keys)


def open_store() -> SealedStore:
    return SealedStore(dist.HashStore(), derive_key("s", b"0123456789abcdef"))


def trainer_of(ranks: int) -> Announcement:
    return Announcement(0, "trainer", ranks, tokens=tuple(f"token {rank}" for rank in range(ranks)))


def settle(
    store: SealedStore,
    own: RunSummary,
    trainer: Announcement,
    rank: int,
    timeout_s: float,
    presence: Heartbeat,
) -> RunSummary:
    """Settle a run of which `own` is the summary of a rank, which waits so long for others."""
    address = LinkAddress("127.0.0.1", 29400)
    # A trainer waits half of the link's timeout.
    members = LinkMembers(trainer, trainer, rank, address, store, presence, 2 * timeout_s, 3.0)
    return members.settle("step/7", own)


def test_an_engine_counts_as_served_if_any_rank_observed_it() -> None:
    first = RunSummary({"a": (0.5, "trainer")}, {"b": "it left"}, (4,), 8)
    other = RunSummary({"a": (0.7, "trainer"), "b": (0.6, "a")}, {"c": "it died"}, (5,), 8)
    found = RunSummary.merge([first, other])
    assert found.engines == {"a": (0.5, "trainer"), "b": (0.6, "a")}
    assert found.lost == {"b": "it left", "c": "it died"}
    assert found.given_up == (4, 5) and found.trainer_bytes == 8


def test_if_ranks_differ_the_first_rank_counts() -> None:
    told = [RunSummary({}, {"b": why}) for why in ("it left", "rank 3 does not answer")]
    assert RunSummary.merge(told).lost == {"b": "it left"}


@pytest.mark.parametrize(
    "change",
    [
        {"engines": 3},
        {"engines": {"a": 1}},
        {"lost": 3},
        {"given_up": ["x"]},
        {"trainer_bytes": ""},
    ],
)
def test_invalid_summaries_are_refused(change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(write_message(RunSummary({}))), **change})
    with pytest.raises(LinkError, match="is no account of a run"):
        read_message(RunSummary, text, "account of a run")
    with pytest.raises(LinkError, match="is no account of a run"):
        read_message(RunSummary, "{", "account of a run")


def test_all_ranks_get_the_same_summary_and_nothing_is_left_at_the_store() -> None:
    store, trainer, found = open_store(), trainer_of(3), {}
    store.set("step/7", "told")

    def take_part(rank: int, own: RunSummary) -> None:
        found[rank] = settle(store, own, trainer, rank, PATIENCE_S, Heartbeat())

    others = [threading.Thread(target=take_part, args=(rank, OTHER)) for rank in (1, 2)]
    for one in others:
        one.start()
    take_part(0, FIRST)
    for one in others:
        one.join()
    assert found == dict.fromkeys(range(3), RunSummary.merge([FIRST, OTHER]))
    # However often a link runs, its store does not grow.
    paths = ("said/1", "said/2", "read/1", "read/2", "account")
    assert not any(store.check([f"step/7/{path}"]) for path in paths)
    assert not store.check(["step/7"])


def test_the_first_rank_waits_until_others_have_read() -> None:
    store = open_store()
    store = Asked(store._store, store.key)
    store.set("step/7/said/1", write_message(OTHER))
    found = settle(store, FIRST, trainer_of(2), 0, PATIENCE_S, Heartbeat())
    # With the first rank the store would have ended, and nobody could have read this.
    assert (
        read_message(RunSummary, store.account, "account of a run")
        == found
        == RunSummary.merge([FIRST, OTHER])
    )


def test_the_first_rank_does_not_wait_for_a_rank_that_has_ended() -> None:
    store, seen = open_store(), Seen()
    store.set("step/7/said/1", write_message(OTHER))
    seen.end("token 1")
    found = settle(store, FIRST, trainer_of(2), 0, PATIENCE_S, seen)
    assert found == RunSummary.merge([FIRST, OTHER])


def test_the_first_rank_waits_for_a_rank_until_the_timeout() -> None:
    store = open_store()
    store.set("step/7/said/1", write_message(OTHER))
    found = settle(store, FIRST, trainer_of(2), 0, 0.01, Heartbeat())
    assert found == RunSummary.merge([FIRST, OTHER])


def test_a_rank_that_reports_nothing_is_named() -> None:
    with pytest.raises(LinkError, match=r"rank 1 of the trainer does not answer for 0\.01 s"):
        settle(open_store(), FIRST, trainer_of(2), 0, 0.01, Heartbeat())
    seen = Seen()
    seen.end("token 1")
    with pytest.raises(LinkError, match="rank 1 of the trainer has ended"):
        settle(open_store(), FIRST, trainer_of(2), 0, PATIENCE_S, seen)


def test_the_only_rank_of_a_trainer_waits_for_none() -> None:
    assert settle(open_store(), FIRST, trainer_of(1), 0, 0.01, Heartbeat()) is FIRST
