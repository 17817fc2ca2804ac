"""A trainer counts what it sends, and compares its engines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reshard.checkpoint.storage.threads import StoppedError  # noqa: E402
from reshard.errors import LinkError, RunError  # noqa: E402
from reshard.torch.links.sync import RunControl  # noqa: E402
from reshard.torch.links.trainer_sync import SentBatches, TrainerSync  # noqa: E402

PATIENCE_S = 60.0


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
    members: Any = SimpleNamespace(own=SimpleNamespace(ranks=1))
    prepare: Any = None
    sync = TrainerSync(members, 0, turn, relays=False, needs_alike=False, prepare=prepare)
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


def test_a_run_stops_before_its_next_bucket() -> None:
    stop = threading.Event()
    control = RunControl(stop=stop)
    sent = SentBatches(control, [8, 0], ["up", ""])
    sent.begin(0)
    stop.set()
    sent.end(0)
    with pytest.raises(StoppedError):
        sent.begin(1)
    assert control.is_stopped()
