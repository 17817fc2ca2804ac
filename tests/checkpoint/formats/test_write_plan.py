"""Which files a new checkpoint has, and which ranks store what."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.checkpoint.formats.safetensors import huggingface, sharded
from reshard.checkpoint.formats.safetensors.header import LENGTH_BYTES, parse_header
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    WritePlan,
    are_boxes,
    first_indices,
)
from reshard.dtypes import dtype
from reshard.errors import RecipeError, UsageError
from reshard.layout import Box, Layout
from strategies import layouts as layouts_of
from strategies import shapes

F32 = dtype("float32")


def first_bytes(file: NewFile) -> bytes:
    """What a file has before its tensors."""
    return b"".join(piece for _, piece in file.known_bytes())


def planned(mesh: reshard.DeviceMesh, text: str, shape: tuple[int, ...]) -> PlannedTensor:
    return PlannedTensor(F32, reshard.spec(mesh, text).layout(shape), text)


def arrange_shards(
    tensors: Mapping[str, PlannedTensor], mesh: reshard.DeviceMesh | None, replicas: str = "once"
) -> WritePlan:
    return sharded.FORMAT.plan_write(NewCheckpoint(tensors, mesh, replicas=replicas))


def storing(write_plan: WritePlan, name: str) -> tuple[int, ...]:
    return write_plan.tensors[name].stored_slots


def arranged(
    mesh: reshard.DeviceMesh, text: str, shape: tuple[int, ...], replicas: str = "once"
) -> tuple[int, ...]:
    return storing(arrange_shards({"w": planned(mesh, text, shape)}, mesh, replicas), "w")


def test_copies_are_stored_once_or_every_time() -> None:
    mesh = reshard.DeviceMesh.of(dp=2, tp=2)
    assert arranged(mesh, "tp, -", (4, 4)) == (0, 1)
    assert arranged(mesh, "tp, -", (4, 4), "every") == (0, 1, 2, 3)
    assert arranged(mesh, "dp tp, -", (4, 4)) == (0, 1, 2, 3)
    assert arranged(mesh, "", ()) == (0,)
    assert arranged(mesh, "", (), "every") == (0, 1, 2, 3)


def test_heads_that_ranks_share_are_stored_once() -> None:
    mesh = reshard.DeviceMesh.of(tp=8)
    assert arranged(mesh, "tp@heads2, -", (8, 4)) == (0, 4)
    assert len(arranged(mesh, "tp@heads2, -", (8, 4), "every")) == 8


def test_empty_shards_are_not_stored_unless_all_are_empty() -> None:
    mesh = reshard.DeviceMesh.of(tp=4)
    assert arranged(mesh, "tp, -", (2, 4)) == (0, 1)
    assert arranged(mesh, "tp, -", (2, 4), "every") == (0, 1)
    assert arranged(mesh, "tp, -", (0, 4)) == (0,)


def test_copies_are_spread_over_the_ranks() -> None:
    mesh = reshard.DeviceMesh.of(dp=4)
    tensors = {f"t{n}": planned(mesh, "-", (100,)) for n in range(8)}
    write_plan = arrange_shards(tensors, mesh)
    counts = Counter(storing(write_plan, name) for name in tensors)
    assert set(counts.values()) == {2}
    assert len(counts) == 4


def test_a_file_for_each_rank_that_stores_something() -> None:
    mesh = reshard.DeviceMesh("mesh", (2,), ("tp",), (5, 2))
    write_plan = arrange_shards({"w": planned(mesh, "tp", (5,))}, mesh)
    assert [(file.stored.rank, file.stored.name) for file in write_plan.files] == [
        (2, "shard-00003-model-00001-of-00001.safetensors"),
        (5, "shard-00006-model-00001-of-00001.safetensors"),
    ]
    for file in write_plan.files:
        content = first_bytes(file)
        parse_header(content[LENGTH_BYTES:], file.stored.size_bytes, file.stored.name)
        assert len(content) % 4096 == 0


def test_a_shard_that_is_not_a_box_excludes_the_convention() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    tensors = {"w": planned(mesh, "tp", (8,)), "glu": planned(mesh, "tp@stride2", (8,))}
    write_plan = arrange_shards(tensors, mesh)
    assert len(write_plan.notes) == 1
    assert "glu" in write_plan.notes[0]
    assert not any(b"DCP_SHARDING_INFO" in first_bytes(file) for file in write_plan.files)
    del tensors["glu"]
    write_plan = arrange_shards(tensors, mesh)
    assert write_plan.notes == ()
    assert all(b"DCP_SHARDING_INFO" in first_bytes(file) for file in write_plan.files)


def test_layouts_of_strategies_that_a_manifest_can_describe() -> None:
    halves = [(0, Box((0, 0), (2, 4))), (1, Box((2, 0), (4, 4)))]
    several = [(0, Box((3, 0), (4, 4))), (1, Box((1, 0), (3, 4))), (0, Box((0, 0), (1, 4)))]
    for boxes in (halves, several):
        layout = Layout.from_boxes((4, 4), boxes, 3)
        arrange_shards({"w": PlannedTensor(F32, layout)}, None)
    flat = Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})
    arrange_shards({"w": PlannedTensor(F32, flat)}, None)


@pytest.mark.parametrize(
    "text", ["tp@stride2, -", "-, tp@cyclic1", "tp@pad3, -", "tp@halo[1,1], -"]
)
def test_layouts_of_strategies_that_it_cannot(text: str) -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    layout = reshard.spec(mesh, text).layout((4, 4))
    with pytest.raises(RecipeError, match="'w' is laid out by a strategy"):
        arrange_shards({"w": PlannedTensor(F32, layout)}, None)


def test_contributions_are_no_values() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    with pytest.raises(RecipeError, match="'w' would be partial"):
        arrange_shards({"w": planned(mesh, "-, - | sum(tp)", (4, 4))}, mesh)


def test_an_unknown_value_of_replicas_is_an_error() -> None:
    with pytest.raises(UsageError, match="replicas 'twice'"):
        arrange_shards({}, None, "twice")


def test_nothing_at_all_is_still_a_file() -> None:
    assert len(arrange_shards({}, None).files) == 1
    assert len(huggingface.FORMAT.plan_write(NewCheckpoint({})).files) == 1


@given(shapes().flatmap(layouts_of), st.data())
def test_offsets_of_shards_are_those_of_their_boxes(layout: Layout, data: st.DataObject) -> None:
    """Of any layout, also with several cells on a rank, pads, and empty parts."""
    slots = frozenset(data.draw(st.sets(st.sampled_from(layout.holders), min_size=1)))
    begins = first_indices(layout, slots)
    assert {*begins} == slots
    for slot, begin in begins.items():
        boxes, local = layout.boxes(slot), layout.local_shapes[slot]
        if boxes:
            assert begin == boxes[0].start
        elif len(local) == layout.ndim:
            assert begin == tuple(max(0, n - m) for n, m in zip(layout.shape, local, strict=True))
    if are_boxes(layout, slots):
        for slot, begin in begins.items():
            end = tuple(a + n for a, n in zip(begin, layout.local_shapes[slot], strict=True))
            boxes = layout.boxes(slot)
            assert boxes == (Box(begin, end),) if boxes else 0 in layout.local_shapes[slot]
            assert all(map(operator.le, end, layout.shape))


def test_of_very_many_ranks_few_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at rank by rank that holds nothing."""
    asked: list[int] = []
    real = Layout.boxes
    monkeypatch.setattr(Layout, "boxes", lambda self, slot: asked.append(slot) or real(self, slot))
    mesh = reshard.DeviceMesh.of(tp=100_000)
    assert arranged(mesh, "tp, -", (7, 3)) == tuple(range(7))
    assert len(asked) < 1000
