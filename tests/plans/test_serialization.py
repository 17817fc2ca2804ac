"""JSON documents of layouts, plans and jobs: written, read, and invalid ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from plans.changed_documents import STRANGE, changed, places
from reshard.binding import Address, Binding, FileRange, RankMemory, TensorName, View
from reshard.dtypes import dtype
from reshard.errors import NotationError, ReshardError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from selection import choose
from strategies import LayoutAndContents, layouts, movements, shapes

ADDRESSES = st.one_of(
    st.integers(0, 9).map(RankMemory),
    st.builds(FileRange, st.sampled_from(["a.safetensors", "höhe", ""]), st.integers(0, 1 << 40)),
    st.sampled_from(["q_proj", "k_proj", "v\n"]).map(TensorName),
)

# Each example is a few movements.
FEWER = settings(max_examples=max(settings().max_examples // 2, 1))


@st.composite
def bindings(draw: st.DrawFn, layout: Layout) -> Binding:
    """Addresses and views for some slots, one for each cell where there are several."""
    if draw(st.booleans()):
        return Binding.to_ranks(layout)
    addresses: dict[int, Address | tuple[Address, ...]] = {}
    views: dict[int, View | tuple[View, ...]] = {}
    view = st.builds(
        View, st.integers(0, 99), st.tuples(*(st.integers(-9, 99) for _ in layout.shape))
    )
    for slot in draw(st.permutations(layout.holders)):
        cells = len(layout.cells_of(slot))
        each = cells if cells > 1 or draw(st.booleans()) else 0
        if draw(st.booleans()):
            addresses[slot] = (
                tuple(draw(ADDRESSES) for _ in range(each)) if each else draw(ADDRESSES)
            )
        shape = layout.local_shape(slot)
        if draw(st.booleans()) and (each or len(shape or ()) == layout.ndim):
            views[slot] = tuple(draw(view) for _ in range(each)) if each else draw(view)
    return Binding(layout, addresses, views)


@st.composite
def jobs(draw: st.DrawFn) -> reshard.Job:
    """Tensors, some of one plan, with bindings of any kind."""
    items: list[reshard.JobItem] = []
    for _ in range(draw(st.integers(0, 2))):
        (source, _), (target, _) = draw(movements())
        plan = LayoutChange(source, target)
        for _ in range(draw(st.integers(1, 2))):
            width = dtype(draw(st.sampled_from(["int8", "float32"])))
            sides = draw(bindings(source)), draw(bindings(target))
            items.append(reshard.JobItem(f"t{len(items)}", width, plan, *sides))
    return reshard.Job(items, draw(st.sampled_from(["balanced", "stable"])))


@FEWER
@given(jobs())
def test_a_job_is_read_back_equal(job: reshard.Job) -> None:
    text = reshard.to_json(job)
    again = reshard.from_json(text)
    assert again == job
    assert again.digest == job.digest
    assert [item.change for item in again.items] == [item.change for item in job.items]
    assert reshard.to_json(again) == text


def mixed_job() -> reshard.Job:
    """A job with all there can be in a document."""
    mesh = reshard.DeviceMesh.of(tp=2)
    rows, whole = reshard.spec(mesh, "tp, -").layout((4, 4)), Layout.whole((4, 4), [0], 2)
    plan = LayoutChange(rows, whole)
    ragged = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})
    files = Binding(rows, {0: FileRange("a", 8), 1: TensorName("t")}, {1: View(3, (1, 2))})
    by_cell = Binding(
        ragged,
        {0: (RankMemory(5), FileRange("b", 16)), 1: RankMemory(1)},
        {0: (View(0, (4, 1)), View(4, (4, 1)))},
    )
    return reshard.Job(
        [
            reshard.JobItem("a", dtype("bfloat16"), plan, files, Binding.to_ranks(whole)),
            reshard.JobItem(
                "b", dtype("int8"), LayoutChange(ragged, whole), by_cell, Binding.to_ranks(whole)
            ),
            reshard.JobItem.between_ranks("c", dtype("bfloat16"), rows, whole),
        ]
    )


def test_the_form_of_a_job_document() -> None:
    """Entered by hand: a change of form needs a new version."""
    document = json.loads(reshard.to_json(mixed_job()))
    assert document["paths"] == ["a", "b"]
    assert document["plans"] == [[0, 1, "bfloat16"], [2, 1, "int8"]]
    assert document["items"] == [
        [
            "a",
            0,
            {
                "source": {
                    "slots": [0, 1],
                    "kinds": [1, 2],
                    "paths": [0],
                    "starts": [8],
                    "names": ["t"],
                    "views": {"slots": [1], "offsets": [3], "strides": [1, 2]},
                }
            },
        ],
        [
            "b",
            1,
            {
                "source": {
                    "slots": [0, 1],
                    "cells": [2, 0],
                    "kinds": [0, 1, 0],
                    "ranks": [5, 1],
                    "paths": [1],
                    "starts": [16],
                    "views": {
                        "slots": [0],
                        "cells": [2],
                        "offsets": [0, 4],
                        "strides": [4, 1, 4, 1],
                    },
                },
            },
        ],
        ["c", 0],
    ]
    assert reshard.from_json(json.dumps(document)) == mixed_job()


def choose_places(document: Any, value: Any) -> list[tuple[Any, ...]]:
    """Return the places to change: by default a third of them, all over the values."""
    step = choose(3, 1)
    return [*places(document)][STRANGE.index(value) % step :: step]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_changed_job_document_is_another_job_or_raises(value: Any) -> None:
    document = json.loads(reshard.to_json(mixed_job()))
    for path in choose_places(document, value):
        if path or value is not ...:
            try:
                job = reshard.from_json(json.dumps(changed(document, path, value)))
            except ReshardError:
                continue
            assert reshard.from_json(reshard.to_json(job)) == job


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("items", 2, 0), "a", "two tensors of the job are named 'a'"),
        (("sources",), "random", "sources='random'"),
        (("sources",), None, "is not a JSON string"),
        (("plans", 1, 2), ..., "neither tensor 'b' nor its plan has a dtype"),
        (("plans", 1, 2), "float99", "unknown"),
        (("items", 2, 1), 2, "number 2 of 2"),
        (("items", 0, 2, "source", "starts"), [8, 9], "2 starts for 1 paths"),
        (("items", 0, 2, "source", "paths"), [2], "number 2 of 2"),
        (("items", 0, 2, "source", "kinds"), [1, 1], "the kinds are not those"),
        (("items", 0, 2, "source", "kinds"), [1], "the kinds are not those"),
        (("items", 0, 2, "source", "slots"), [1, 0], "rising slots"),
        (("items", 0, 2, "source", "slots"), [0], "2 addresses for 1 slots"),
        (("items", 0, 2, "source", "slots"), [0, 2], "rank 2 has an address"),
        (("items", 0, 2, "source", "views", "strides"), [1], "1 strides for 1 views"),
        (("items", 1, 2, "source", "cells"), [1, 1], "addresses for 2 slots"),
    ],
)
def test_invalid_jobs_raise(path: tuple[Any, ...], value: Any, problem: str) -> None:
    document = changed(json.loads(reshard.to_json(mixed_job())), path, value)
    with pytest.raises(ReshardError, match=problem):
        reshard.from_json(json.dumps(document))


def test_the_policy_of_senders_is_stored() -> None:
    usual = mixed_job()
    stable = reshard.Job(usual.items, "stable")
    assert "sources" not in json.loads(reshard.to_json(usual))
    assert json.loads(reshard.to_json(stable))["sources"] == "stable"
    assert reshard.from_json(reshard.to_json(stable)) == stable != usual
    for value, problem in (("fast", "sources='fast'"), (1, "sources: 1 is not")):
        with pytest.raises(ReshardError, match=problem):
            reshard.from_json(json.dumps(json.loads(reshard.to_json(usual)) | {"sources": value}))


def test_a_large_model_is_tens_of_kilobytes() -> None:
    """724 tensors from the byte ranges of 8 files to 32 ranks."""
    mesh, wanted = reshard.DeviceMesh.of(tp=8), reshard.DeviceMesh.of(dp=4, tp=8)
    items, start_bytes = [], 0
    for layer in range(80):
        for name, shape, cut in (
            ("self_attn.q_proj", (8192, 8192), "tp, -"),
            ("self_attn.k_proj", (1024, 8192), "tp, -"),
            ("self_attn.v_proj", (1024, 8192), "tp, -"),
            ("self_attn.o_proj", (8192, 8192), "-, tp"),
            ("mlp.gate_proj", (28672, 8192), "tp, -"),
            ("mlp.up_proj", (28672, 8192), "tp, -"),
            ("mlp.down_proj", (8192, 28672), "-, tp"),
            ("input_layernorm", (8192,), "-"),
            ("post_attention_layernorm", (8192,), "-"),
        ):
            source = reshard.spec(mesh, cut).layout(shape)
            target = reshard.spec(wanted, cut.replace("tp", "dp tp")).layout(shape)
            addresses = {
                slot: FileRange(f"model-{slot + 1:05}-of-00008.safetensors", start_bytes)
                for slot in source.holders
            }
            start_bytes += 2 * int(source.cell_elements[0])
            plan = LayoutChange(source, target)
            sides = Binding(source, addresses, {}), Binding.to_ranks(target)
            items.append(
                reshard.JobItem(
                    f"model.layers.{layer}.{name}.weight", dtype("bfloat16"), plan, *sides
                )
            )
    job = reshard.Job(items)
    assert len(job) == 720
    text = reshard.to_json(job)
    assert reshard.from_json(text) == job
    assert len(text) < 100_000


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
def test_a_changed_plan_document_is_another_plan_or_raises(value: Any) -> None:
    document = json.loads(reshard.to_json(PLAN))
    read = 0
    for path in choose_places(document, value):
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
        ("[]", "is not a layout, plan, job or engine-layout"),
        ("{}", "is not a layout, plan, job or engine-layout"),
        ('{"reshard":"trace","version":1}', "is not a layout, plan, job or engine-layout"),
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
def test_invalid_layouts_raise(text: Any, problem: str) -> None:
    with pytest.raises(NotationError, match=problem):
        reshard.from_json(text)


def test_a_plan_between_different_shapes_raises() -> None:
    document = json.loads(reshard.to_json(reshard.plan(PARTIAL, Layout.replicated((6, 4), 4))))
    other = json.loads(reshard.to_json(Layout.replicated((4, 6), 4)))
    document["tables"] = [*document["tables"], *other["tables"]]
    shifted = [number + len(document["tables"]) - 2 for number in other["layouts"][0]["tables"]]
    document["layouts"][1] = other["layouts"][0] | {"tables": shifted}
    with pytest.raises(reshard.ReshardError, match="both layouts must be of"):
        reshard.from_json(json.dumps(document))


def test_values_without_documents_raise() -> None:
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
def test_stored_documents_are_read(kind: str) -> None:
    """Documents of version 1, written by the release that introduced it."""
    text = (Path(__file__).parent / "stored" / f"{kind}.json").read_text()
    assert reshard.from_json(text) == STORED[kind]
