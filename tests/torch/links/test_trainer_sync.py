"""The ranks of a trainer combine their observations of a run, and compare engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from reshard.errors import LinkError, RunError  # noqa: E402
from reshard.torch.links.handshake import Announcement  # noqa: E402
from reshard.torch.links.heartbeat import Heartbeat  # noqa: E402
from reshard.torch.links.messages import read_message, write_message  # noqa: E402
from reshard.torch.links.sealed_store import SealedStore, derive_key  # noqa: E402
from reshard.torch.links.trainer_sync import (  # noqa: E402
    RunSummary,
    TrainerSync,
    exchange_summaries,
)

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
        found[rank] = exchange_summaries(
            store, "step/7", own, trainer, rank, PATIENCE_S, Heartbeat()
        )

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
    found = exchange_summaries(store, "step/7", FIRST, trainer_of(2), 0, PATIENCE_S, Heartbeat())
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
    found = exchange_summaries(store, "step/7", FIRST, trainer_of(2), 0, PATIENCE_S, seen)
    assert found == RunSummary.merge([FIRST, OTHER])


def test_the_first_rank_waits_for_a_rank_until_the_timeout() -> None:
    store = open_store()
    store.set("step/7/said/1", write_message(OTHER))
    found = exchange_summaries(store, "step/7", FIRST, trainer_of(2), 0, 0.01, Heartbeat())
    assert found == RunSummary.merge([FIRST, OTHER])


def test_a_rank_that_reports_nothing_is_named() -> None:
    with pytest.raises(LinkError, match=r"rank 1 of the trainer does not answer for 0\.01 s"):
        exchange_summaries(open_store(), "step/7", FIRST, trainer_of(2), 0, 0.01, Heartbeat())
    seen = Seen()
    seen.end("token 1")
    with pytest.raises(LinkError, match="rank 1 of the trainer has ended"):
        exchange_summaries(open_store(), "step/7", FIRST, trainer_of(2), 0, PATIENCE_S, seen)


def test_the_only_rank_of_a_trainer_waits_for_none() -> None:
    assert (
        exchange_summaries(open_store(), "step/7", FIRST, trainer_of(1), 0, 0.01, Heartbeat())
        is FIRST
    )


class Compared:
    """A refit with an engine; comparing does what is given."""

    sent_bytes = 0

    def __init__(self, compare: Callable[[], None]) -> None:
        self.verify = compare


def sync_with(
    engines: dict[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> TrainerSync:
    """A trainer's sync with engines, of one rank each."""

    class Pair:
        ranks = (0, 1)

    monkeypatch.setattr("reshard.torch.links.trainer_sync.gather", lambda *_: {0: b"0", 1: b"kind"})
    turn = threading.Lock()
    callbacks: dict[str, Any] = dict.fromkeys(
        ("prepare", "begin", "give_up", "take_lost", "interrupt", "exchange_summaries")
    )
    sync = TrainerSync("trainer", 0, turn, ranks=1, relays=False, needs_alike=False, **callbacks)
    for number, (name, compare) in enumerate(engines.items()):
        prepared: Any = Compared(compare)
        sync._prepare = lambda _, prepared=prepared: prepared  # type: ignore[misc]
        sync.prepare_for(number, name, Pair())  # type: ignore[arg-type]
    return sync


def test_engines_are_compared_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each waits until all three are compared.
    together = threading.Barrier(3, timeout=PATIENCE_S)
    sync_with(dict.fromkeys("abc", together.wait), monkeypatch).verify()  # type: ignore[arg-type]


def test_engines_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> None:
        raise RunError("rank 1: not the source's: norm")

    sync = sync_with({"a": differ, "b": lambda: None, "c": differ}, monkeypatch)
    with pytest.raises(RunError) as raised:
        sync.verify()
    told = [f"engine {name}: rank 1: not the source's: norm" for name in "ac"]
    assert str(raised.value) == "; ".join(told)


def test_other_errors_of_a_comparison_are_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        sync_with({"a": lambda: None, "b": fail}, monkeypatch).verify()
    with pytest.raises(LinkError, match="no engine is there to be compared"):
        sync_with({}, monkeypatch).verify()
