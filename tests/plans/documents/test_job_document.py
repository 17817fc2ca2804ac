"""Jobs as JSON: bindings of every kind, shared plans once, malformed documents refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from plans.changed_documents import STRANGE, changed, places
from reshard.binding import Address, Binding, FileRange, RankMemory, TensorName, View
from reshard.dtypes import dtype
from reshard.errors import ReshardError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.testing.strategies import movements

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


def test_the_form_of_a_document() -> None:
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


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_document_changed_anywhere_is_another_job_or_one_of_our_errors(value: Any) -> None:
    document = json.loads(reshard.to_json(mixed_job()))
    for path in places(document):
        if path or value is not ...:
            try:
                job = reshard.from_json(json.dumps(changed(document, path, value)))
            except ReshardError:
                continue
            assert reshard.from_json(reshard.to_json(job)) == job


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("items", 2, 0), "a", "'a' appears twice"),
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
def test_what_is_no_job(path: tuple[Any, ...], value: Any, problem: str) -> None:
    document = changed(json.loads(reshard.to_json(mixed_job())), path, value)
    with pytest.raises(ReshardError, match=problem):
        reshard.from_json(json.dumps(document))


def test_how_senders_are_chosen_is_kept() -> None:
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
