"""Garbage collection waits while a refit is prepared, and goes on behind it."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch")

from reshard.torch.refitting.collection import paused_collection


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
