"""Context managers: context variables, and a pause of the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from reshard import _contexts
from reshard._contexts import pause_gc, set_context


def test_blocks_nest_and_end_by_errors() -> None:
    unit: ContextVar[str] = ContextVar("unit", default="bytes")

    def fail() -> None:
        with set_context(unit, "rows"):
            with set_context(unit, "columns"):
                assert unit.get() == "columns"
            assert unit.get() == "rows"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert unit.get() == "bytes"


def test_another_thread_has_its_own_value() -> None:
    unit: ContextVar[str] = ContextVar("unit", default="bytes")
    seen: list[str] = []
    with set_context(unit, "rows"):
        thread = threading.Thread(target=lambda: seen.append(unit.get()))
        thread.start()
        thread.join()
    assert seen == ["bytes"]


@pytest.fixture(autouse=True)
def _nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return to the collector what `conftest.py` froze, as in a process that freezes nothing."""
    monkeypatch.setattr(_contexts, "_freezing", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_collector_runs_again_after_an_error() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with pause_gc():
            assert not gc.isenabled()
            with pause_gc():
                pass
            # The outer one is still there.
            assert not gc.isenabled()
            raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        fail()
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_counts_as_old_and_is_not_looked_through_again() -> None:
    with pause_gc(freeze=True):
        made = [[number] for number in range(10)]
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)


def test_what_others_keep_from_the_collector_stays_kept() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with pause_gc(freeze=True):
            pass
        # Some of it may have been freed meanwhile.
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them takes time in proportion to their number."""
    counts = iter([0, 0, 12])
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    for _ in range(5):
        with pause_gc(freeze=True):
            pass
    assert not [*counts]
