"""Garbage collection waits, and goes on as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from reshard import garbage_collection
from reshard.garbage_collection import paused_collection


@pytest.fixture(autouse=True)
def _nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return to the collector what `conftest.py` froze, as in a process that freezes nothing."""
    monkeypatch.setattr(garbage_collection, "_freezing", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_it_goes_on_also_behind_an_error() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with paused_collection():
            assert not gc.isenabled()
            with paused_collection():
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
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_counts_as_old_and_is_not_looked_through_again() -> None:
    with paused_collection(are_kept=True):
        made = [[number] for number in range(10)]
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)


def test_what_others_keep_from_the_collector_stays_kept() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_collection(are_kept=True):
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
        with paused_collection(are_kept=True):
            pass
    assert not [*counts]
