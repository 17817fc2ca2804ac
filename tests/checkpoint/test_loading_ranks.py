"""One rank's arrays are what the oracle says, and little else is read for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    Tensor,
    cuts,
    small_folder,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from reshard import checkpoint
from reshard.checkpoint.blocks import shard_reads
from reshard.checkpoint.loading import arrays as loading
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.errors import CheckpointError, ShardError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import spec
from rule_definitions import NO_ELEMENT
from strategies import layouts_with_contents


def expected_bits(whole: Tensor, elements: np.ndarray) -> np.ndarray:
    """The bits of a rank's array; padding is zero."""
    flat = np.append(whole.bits.reshape(-1), np.zeros(1, whole.bits.dtype))
    return flat[np.where(elements == NO_ELEMENT, len(flat) - 1, elements)]


@given(st.data(), tensors(), st.sampled_from([1, 64, 4 << 20]), st.booleans())
def test_every_rank_of_any_layout_from_any_cut(
    data: st.DataObject, whole: dict[str, Tensor], buffer_bytes: int, in_place: bool
) -> None:
    mesh, specs = data.draw(cuts(whole))
    targets = {
        name: data.draw(layouts_with_contents(item.shape, reductions=()))
        for name, item in whole.items()
    }
    with small_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reads, "BUFFER_BYTES", buffer_bytes)
        patch.setattr(shard_reads, "SECTOR_BYTES", data.draw(st.sampled_from([1, 16, 512])))
        write_ranks(folder / "cut", whole, mesh, specs)
        found = checkpoint.open(folder / "cut")
        layouts = {name: layout for name, (layout, _) in targets.items()}
        for rank in range(max((layout.slots for layout in layouts.values()), default=0)):
            out = None
            if in_place:
                out = {
                    name: np.full(layout.local_shape(rank), 1).astype(whole[name].bits.dtype)
                    for name, layout in layouts.items()
                    if rank in layout.holders
                }
            arrays = checkpoint.load(found, layouts, rank, out=out, threads=2)
            held = {name for name, layout in layouts.items() if rank in layout.holders}
            assert {*arrays} == held
            for name, array in arrays.items():
                elements = targets[name][1].elements[rank]
                wanted = expected_bits(whole[name], elements)
                assert array.shape == elements.shape
                assert array.tobytes() == wanted.tobytes()
                assert out is None or array is out[name]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    """Every file that `load` opens."""
    files: list[SourceFile] = []
    open_sources = loading.open_sources

    def watched(found: checkpoint.Checkpoint, **how: Any) -> Any:
        sources = open_sources(found, **how)
        open_file = sources._open

        def open_and_remember(name: str) -> SourceFile:
            file = open_file(name)
            files.append(file)
            return file

        sources._open = open_and_remember
        return sources

    monkeypatch.setattr(loading, "open_sources", watched)
    return files


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tp, -", (64, 1024)),
        ("-, tp", (64, 1024)),
        ("-, tp@stride2", (64, 2048)),
        ("-, tp", (64, 1022)),
        ("-, -, tp", (4, 16, 600)),
        ("-, tp, -", (4, 16, 600)),
        ("tp@cyclic3, -", (64, 300)),
    ],
)
def test_no_more_than_a_twentieth_is_read_in_vain(
    tmp_path: Path, opened: list[SourceFile], text: str, shape: tuple[int, ...]
) -> None:
    whole = tensor("float32", shape)
    write_file(tmp_path / "model.safetensors", {"w": whole})
    layout = spec(DeviceMesh.of(tp=4), text).layout(shape)
    for rank in range(4):
        opened.clear()
        array = checkpoint.load(tmp_path, {"w": layout}, rank)["w"]
        read_bytes = sum(file.read_bytes for file in opened)
        assert array.nbytes <= read_bytes <= 1.05 * array.nbytes


def test_a_rank_without_a_part_gets_nothing(tmp_path: Path, opened: list[SourceFile]) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4))})
    assert checkpoint.load(tmp_path, {"w": Layout.whole((4, 4), [0], 2)}, rank=1) == {}
    assert opened == []


def test_a_view_is_filled_in_place(tmp_path: Path) -> None:
    whole = tensor("int32", (6, 8))
    write_file(tmp_path / "model.safetensors", {"w": whole})
    memory = np.zeros((8, 6), np.int32)
    layout = Layout.whole((6, 8), [0], 1)
    checkpoint.load(tmp_path, {"w": layout}, out={"w": memory.T})
    assert np.array_equal(memory.T.view(np.uint32), whole.bits)


def refused(tmp_path: Path, error: type[Exception], match: str, **arguments: Any) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4))})
    with pytest.raises(error, match=match):
        checkpoint.load(tmp_path, **arguments)


def test_an_unknown_name(tmp_path: Path) -> None:
    layouts = {"v": Layout.replicated((4, 4))}
    refused(tmp_path, CheckpointError, "no tensor 'v'", layouts=layouts)


def test_another_shape(tmp_path: Path) -> None:
    layouts = {"w": Layout.replicated((4, 5))}
    refused(tmp_path, UsageError, r"'w' is for shape \[4, 5\]", layouts=layouts)


def test_a_partial_layout(tmp_path: Path) -> None:
    layout = spec(DeviceMesh.of(x=2), "-, - | sum(x)").layout((4, 4))
    refused(tmp_path, UsageError, "is partial", layouts={"w": layout})


@pytest.mark.parametrize(
    ("out", "match"),
    [
        ({}, "no array for 'w'"),
        ({"w": np.zeros((4, 5), np.float32)}, r"float32 \[4, 5\]"),
        ({"w": np.zeros((4, 4), np.float64)}, "float64"),
        ({"w": np.zeros((4, 4), np.int32)}, "nothing is cast"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, out: dict[str, Any], match: str) -> None:
    layouts = {"w": Layout.replicated((4, 4))}
    refused(tmp_path, ShardError, match, layouts=layouts, out=out)


def test_arrays_that_cannot_be_filled(tmp_path: Path) -> None:
    layouts = {"w": Layout.replicated((4, 4))}
    locked = np.zeros((4, 4), np.float32)
    locked.setflags(write=False)
    for out, match in (({"w": locked}, "cannot be written"), ({"w": 3}, "expected a NumPy array")):
        refused(tmp_path, ShardError, match, layouts=layouts, out=out)


def test_nothing_is_written_where_one_array_does_not_fit(tmp_path: Path) -> None:
    """Not even padding."""
    padded = spec(DeviceMesh.of(x=3), "x@pad, -").layout((4, 4))
    write_file(tmp_path / "model.safetensors", {n: tensor("float32", (4, 4), 1) for n in "vw"})
    out = {"v": np.ones((2, 4), np.float32), "w": np.ones((9, 9), np.float32)}
    with pytest.raises(ShardError, match="'w'"):
        checkpoint.load(tmp_path, {"v": padded, "w": padded}, rank=2, out=out)
    assert (out["v"] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"layouts": 3}, "layouts of int"),
        ({"layouts": {"w": "tp, -"}}, "the layout of 'w' is 'tp, -'"),
        ({"layouts": {}, "rank": -1}, "rank=-1; expected a whole number from 0"),
        ({"layouts": {}, "rank": "0"}, "rank='0'; expected a whole number from 0"),
        ({"layouts": {}, "out": []}, "out of list; give a dict"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], match: str) -> None:
    refused(tmp_path, UsageError, match, **arguments)
