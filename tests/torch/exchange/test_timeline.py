"""Timelines, as Chrome's trace events."""

from __future__ import annotations

import contextvars
import io
import json
import os
import threading
from typing import Any

import pytest

pytest.importorskip("torch")

from reshard.torch.exchange.timeline import Timeline, current_timeline, span


def written(timeline: Timeline) -> list[dict[str, Any]]:
    file = io.StringIO()
    timeline.write(file)
    found = json.loads(file.getvalue())
    assert found["displayTimeUnit"] == "ms"
    return list(found["traceEvents"])


def test_spans_of_threads_and_messages() -> None:
    timeline = Timeline("trainer rank 0")

    def work() -> None:
        with span("beside"):
            pass

    with timeline.recording():
        with span("run"), span("pack", lambda: {"bytes": 16}):
            pass
        number = timeline.begin_message("message to rank 1", lambda: {"bytes": 16})
        other = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="other")
        other.start()
        other.join()
        timeline.end_message("message to rank 1", number)
    with span("not recorded"):
        pass
    events = written(timeline)
    assert [(one["ph"], one["name"]) for one in events] == [
        ("M", "process_name"),
        ("M", "thread_name"),
        ("X", "pack"),
        ("X", "run"),
        ("b", "message to rank 1"),
        ("M", "thread_name"),
        ("X", "beside"),
        ("e", "message to rank 1"),
    ]
    assert {one["pid"] for one in events} == {os.getpid()}
    assert events[0]["args"] == {"name": "trainer rank 0"}
    assert (events[5]["args"], events[5]["tid"]) == ({"name": "other"}, events[6]["tid"])
    pack, run = events[2], events[3]
    assert pack["args"] == {"bytes": 16} and pack["tid"] == run["tid"] != events[6]["tid"]
    assert run["ts"] <= pack["ts"] and pack["ts"] + pack["dur"] <= run["ts"] + run["dur"]
    begun, ended = events[4], events[7]
    assert (begun["id"], begun["cat"]) == (ended["id"], ended["cat"])


def test_a_span_is_recorded_where_what_it_is_of_fails() -> None:
    timeline = Timeline("engine rank 0")
    with pytest.raises(ValueError, match="no"), timeline.recording(), span("wait"):
        raise ValueError("no")
    assert timeline.events[-1]["name"] == "wait"
    assert current_timeline() is None


def test_details_are_asked_for_where_they_are_recorded() -> None:
    with span("pack", lambda: pytest.fail("nobody records")):
        pass
