"""Layouts and plans as JSON: read back as the very objects, or refused with one of our errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from plans.changed_documents import STRANGE, changed, places
from reshard.binding import Binding, FileRange, TensorName, View
from reshard.dtypes import dtype
from reshard.errors import NotationError, ReshardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.testing.strategies import LayoutAndContents, layouts, movements, shapes

Movement = tuple[LayoutAndContents, LayoutAndContents]


@given(shapes().flatmap(layouts))
def test_a_layout_is_read_back_as_itself(layout: Layout) -> None:
    text = reshard.to_json(layout)
    assert reshard.from_json(text) is layout
    assert reshard.from_json(json.dumps(json.loads(text), indent=1)) is layout


@given(movements(), st.sampled_from([None, "bfloat16", "complex128"]))
def test_a_plan_is_read_back_as_itself(movement: Movement, dtype: str | None) -> None:
    (source, _), (target, _) = movement
    plan = reshard.plan(source, target, dtype=dtype)
    assert reshard.from_json(reshard.to_json(plan)) is plan


def test_another_process_reads_the_same_layout() -> None:
    mesh = reshard.DeviceMesh.of(dp=2, tp=3)
    layout = reshard.spec(mesh, "tp@cyclic2, - | sum(dp)").layout((14, 5))
    program = "import sys, reshard; print(reshard.from_json(sys.stdin.read()).fingerprint.hex())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=reshard.to_json(layout),
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert done.stdout.strip() == layout.fingerprint.hex()


def test_the_form_of_a_document() -> None:
    """Entered by hand: a change of form needs a new version."""
    layout = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((6, 4))
    expected = {
        "reshard": "layout",
        "version": 1,
        "tables": [[6, 2, [0, 1], [0, 3], [3, 3]], [4, 1, [0], [0], [4]]],
        "layouts": [
            {
                "shape": [6, 4],
                "tables": [0, 1],
                "slots": 2,
                "cells": [0, 1],
                "parts": [[0, 1], [0, 0]],
            }
        ],
    }
    assert json.loads(reshard.to_json(layout)) == expected


def test_regular_layouts_are_short_however_many_ranks() -> None:
    mesh = reshard.DeviceMesh.of(pp=16, dp=32, tp=8)
    layout = reshard.spec(mesh, "tp@stride2, dp").layout((53248, 16384))
    assert layout.slots == 4096
    assert len(reshard.to_json(layout)) < 700


PARTIAL = reshard.spec(reshard.DeviceMesh.of(x=2, y=2), "x@cyclic1, - | sum(y)").layout((6, 4))
PLAN = reshard.plan(PARTIAL, Layout.replicated((6, 4), 4), dtype="float32")


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_document_changed_anywhere_is_another_plan_or_one_of_our_errors(value: Any) -> None:
    document = json.loads(reshard.to_json(PLAN))
    read = 0
    for path in places(document):
        if path or value is not ...:
            try:
                plan = reshard.from_json(json.dumps(changed(document, path, value)))
            except ReshardError:
                continue
            assert isinstance(plan, reshard.Plan)
            assert reshard.from_json(reshard.to_json(plan)) is plan
            read += 1
    assert read < 60


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no layout, plan, job or engine-layout"),
        ("{}", "is no layout, plan, job or engine-layout"),
        ('{"reshard":"trace","version":1}', "is no layout, plan, job or engine-layout"),
        ('{"reshard":"layout","version":2}', "version 2"),
        ('{"reshard":"layout","version":1}', "tables"),
        ('{"reshard":"layout","version":1,"tables":[],"layouts":[]}', "0 layouts"),
        ('{"reshard":"layout","version":1,"tables":[[NaN,1,[],[],[]]],"layouts":[]}', "nan"),
        ('{"reshard":"layout","version":1,"tables":[[4,1,[0],[0],[4],[0],[0]]],"layouts":[]}', "1"),
        ('{"reshard":"layout","version":1,"tables":[[4,1,[0],[0],[0]]],"layouts":[]}', "1 or more"),
        (b"{}", "bytes"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_layout(text: Any, problem: str) -> None:
    with pytest.raises(NotationError, match=problem):
        reshard.from_json(text)


def test_a_plan_between_shapes_is_refused_as_always() -> None:
    document = json.loads(reshard.to_json(reshard.plan(PARTIAL, Layout.replicated((6, 4), 4))))
    other = json.loads(reshard.to_json(Layout.replicated((4, 6), 4)))
    document["tables"] = [*document["tables"], *other["tables"]]
    shifted = [number + len(document["tables"]) - 2 for number in other["layouts"][0]["tables"]]
    document["layouts"][1] = other["layouts"][0] | {"tables": shifted}
    with pytest.raises(reshard.ReshardError, match="both layouts must be of one tensor"):
        reshard.from_json(json.dumps(document))


def test_what_has_no_document() -> None:
    with pytest.raises(UsageError, match="expected a Layout, a Plan, a Job or an EngineLayout"):
        reshard.to_json({"a": 1})  # type: ignore[arg-type]


MESH = reshard.DeviceMesh.of(x=2, y=3)
GRID, TRANSPOSED, PARTIAL_ROWS = (
    reshard.spec(MESH, text).layout((6, 6)) for text in ("x, y", "y, x", "y@cyclic1, - | sum(x)")
)
COPIES = Layout.replicated((6, 6), 2)
IN_FILES = Binding(
    COPIES, {0: FileRange("a.bin", 128), 1: TensorName("model.w")}, {0: View(2, (1, 6))}
)
STORED = {
    "layout": PARTIAL_ROWS,
    "plan": reshard.plan(GRID, TRANSPOSED, "bfloat16"),
    "job": reshard.Job(
        [
            reshard.JobItem.between_ranks("w", "float32", GRID, TRANSPOSED),
            reshard.JobItem(
                "v", dtype("int8"), LayoutChange(COPIES, GRID), IN_FILES, Binding.to_ranks(GRID)
            ),
        ],
        sources="stable",
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_documents_that_were_stored_still_open(kind: str) -> None:
    """Documents of version 1, written by the release that introduced it."""
    text = (Path(__file__).parent / "stored" / f"{kind}.json").read_text()
    assert reshard.from_json(text) == STORED[kind]
