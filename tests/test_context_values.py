"""Context variables set inside blocks."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from reshard.context_values import set_inside


def test_blocks_nest_and_end_by_errors() -> None:
    unit: ContextVar[str] = ContextVar("unit", default="bytes")

    def fail() -> None:
        with set_inside(unit, "rows"):
            with set_inside(unit, "columns"):
                assert unit.get() == "columns"
            assert unit.get() == "rows"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert unit.get() == "bytes"


def test_another_thread_has_its_own_value() -> None:
    unit: ContextVar[str] = ContextVar("unit", default="bytes")
    seen: list[str] = []
    with set_inside(unit, "rows"):
        thread = threading.Thread(target=lambda: seen.append(unit.get()))
        thread.start()
        thread.join()
    assert seen == ["bytes"]
