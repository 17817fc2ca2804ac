"""What a checkpoint says of itself."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import Checkpoint, StoredTensor, missing_box
from reshard.dtypes import dtype
from reshard.errors import CheckpointError, CoverageError
from reshard.layout import Box, Layout
from strategies import partitions_into_boxes, shapes

MESH = reshard.DeviceMesh.of(dp=2, tp=2)


def stored(text: str, shape: tuple[int, ...], slots: list[int]) -> StoredTensor:
    layout = reshard.spec(MESH, text).layout(shape)
    addresses = {slot: FileRange(f"{slot}.safetensors", 100 * slot) for slot in slots}
    return StoredTensor("w", dtype("float32"), Binding(layout, addresses, {}), text)


def test_a_stored_tensor_knows_its_shards_and_sizes() -> None:
    tensor = stored("tp, -", (5, 4), [0, 3])
    assert (tensor.shape, tensor.size_bytes, tensor.stored_slots) == ((5, 4), 80, (0, 3))
    assert tensor.shard_size_bytes(0) == 48
    assert tensor.shard_size_bytes(3) == 32
    assert tensor.file_range(3) == FileRange("3.safetensors", 300)
    assert tensor.stored_layout.holders == (0, 3)
    assert set(tensor.assembly.routes.source_cell.tolist()) == {0, 1}
    with pytest.raises(CheckpointError, match="rank 1 stores no shard of 'w'"):
        tensor.file_range(1)


def test_a_slot_that_holds_nothing_has_no_bytes() -> None:
    layout = Layout.whole((2, 3), [1], 3)
    tensor = StoredTensor("w", dtype("float32"), Binding(layout, {1: FileRange("a", 0)}, {}))
    assert [tensor.shard_size_bytes(slot) for slot in range(3)] == [0, 24, 0]


def test_a_part_that_is_stored_nowhere() -> None:
    tensor = stored("tp, dp", (5, 4), [0, 1, 2])
    with pytest.raises(CoverageError, match=r"'w' of shape \[5, 4\]: no shard holds \[3:5, 2:4\]"):
        _ = tensor.assembly


def test_an_address_that_is_no_file() -> None:
    layout = Layout.whole((2,), [0], 1)
    with pytest.raises(CheckpointError, match="rank 0 of 'w'"):
        StoredTensor("w", dtype("float32"), Binding.to_ranks(layout))


def test_a_checkpoint_is_a_mapping_of_its_tensors(tmp_path: Path) -> None:
    tensor = stored("tp, -", (5, 4), [0, 3])
    found = Checkpoint(tmp_path, "sharded-safetensors", {"w": tensor}, (), MESH)
    assert (list(found), len(found), found.size_bytes, found.ranks) == (["w"], 1, 80, 4)
    assert found["w"] is tensor
    assert found.path("x") == tmp_path / "x"
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        found["v"]


@given(shapes(max_rank=4), st.data())
def test_the_first_missing_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(partitions_into_boxes(shape))
    kept = [box for box in boxes if data.draw(st.booleans())]
    layout = Layout.from_boxes(shape, list(enumerate(kept)), len(kept) + 1)
    covered = np.zeros(shape, dtype=bool)
    for box in kept:
        covered[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
    found = missing_box(layout)
    if covered.all():
        assert found is None
        return
    assert found is not None
    first = tuple(int(i) for i in np.unravel_index(int(np.argmin(covered)), shape))
    assert found.start == first
    assert not covered[tuple(slice(a, b) for a, b in zip(*found, strict=True))].any()
    assert found.elements >= 1


def test_nothing_is_missing_from_an_empty_tensor() -> None:
    assert missing_box(Layout.from_boxes((0, 4), [], 1)) is None
    assert missing_box(Layout.from_boxes((), [], 1)) == Box((), ())
    assert math.prod(()) == 1
