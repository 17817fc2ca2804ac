"""Many small tensors, loaded by few reads: every element, and what is read for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import DeviceMesh, checkpoint, spec
from reshard.checkpoint.blocks.block_io import open_sources
from reshard.dtypes import dtype
from reshard.elements import cast_elements
from reshard.errors import RunError
from reshard.layout import Layout

WHOLE = {
    f"layers.{number:03}.{part}": tensor(kind, shape, number)
    for number in range(300)
    for part, kind, shape in (
        ("up", "float32", (8, 16)),
        ("down", "bfloat16", (16, 8)),
        ("norm", "float32", (5,)),
        ("scale", "float16", ()),
        ("empty", "int8", (0, 3)),
    )
}
MESH = DeviceMesh.of(tp=3)
CUTS = {"up": "tp, -", "down": "-, tp", "norm": "tp", "scale": "", "empty": "-, -"}


def values(one: Tensor) -> Any:
    return one.bits.view(one.dtype.numpy)


@pytest.fixture
def source(tmp_path: Path) -> checkpoint.Checkpoint:
    write_file(tmp_path / "model.safetensors", WHOLE)
    return checkpoint.open(tmp_path)


def layouts_of(found: checkpoint.Checkpoint) -> dict[str, Layout]:
    cuts = {part: spec(MESH, text) for part, text in CUTS.items()}
    return {name: cuts[name.rpartition(".")[2]].layout(found[name].shape) for name in found}


def expected(layout: Layout, rank: int, whole: Any) -> Any:
    """A rank's part, element by element of its boxes."""
    part = np.zeros(layout.local_shape(rank) or (), whole.dtype)
    (box,) = layout.boxes(rank) or (None,)
    if box is not None:
        inside = tuple(map(slice, box.start, box.stop))
        part[tuple(slice(0, b - a) for a, b in zip(box.start, box.stop, strict=True))] = whole[
            inside
        ]
    return part


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("into", ["new arrays", "given ones", "parts of given ones"])
def test_every_element(source: checkpoint.Checkpoint, into: str, threads: int) -> None:
    layouts = layouts_of(source)
    for rank in range(3):
        out: dict[str, Any] | None = None
        if into != "new arrays":
            out = {}
            for name, layout in layouts.items():
                shape = layout.local_shape(rank) or ()
                # A part has elements of something else between its own.
                larger = np.ones([2 * n for n in shape], values(WHOLE[name]).dtype)
                is_part = into == "parts of given ones" and shape
                inside = tuple(slice(0, n) for n in shape)
                out[name] = larger[inside] if is_part else np.ones(shape, larger.dtype)
        found = checkpoint.load(source, layouts, rank, out=out, threads=threads)
        assert list(found) == list(layouts)
        for name, layout in layouts.items():
            assert found[name].tobytes() == expected(layout, rank, values(WHOLE[name])).tobytes()
            assert out is None or found[name] is out[name]


def test_types_are_cast_as_those_of_one_tensor(source: checkpoint.Checkpoint) -> None:
    layouts = layouts_of(source)
    found = checkpoint.load(source, layouts, 1, dtype="bf16")
    for name, array in found.items():
        part = expected(layouts[name], 1, WHOLE[name].bits).reshape(-1)
        if WHOLE[name].dtype.name != "int8":
            rounded = np.empty(part.shape, dtype("bfloat16").storage)
            cast_elements(part, WHOLE[name].dtype, rounded, dtype("bfloat16"))
            part = rounded
            assert array.dtype.name == "bfloat16"
        assert array.tobytes() == part.tobytes(), name


def test_few_reads_and_little_in_vain(
    source: checkpoint.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", counted)
    checkpoint.load(source, layouts_of(source), 2)
    assert calls < 50


@pytest.mark.parametrize(("rows", "most"), [(3 * 32, 1.0), (3, 100.0)])
def test_long_pieces_are_read_without_what_is_between(
    tmp_path: Path, rows: int, most: float
) -> None:
    # A third is 16 KiB, or half a KiB.
    whole = {f"w{number}": tensor("float32", (rows, 128), number) for number in range(40)}
    write_file(tmp_path / "model.safetensors", whole)
    opened = checkpoint.open(tmp_path)
    layout = spec(MESH, "tp, -").layout((rows, 128))
    files = open_sources(opened)
    found = checkpoint.load(opened, dict.fromkeys(opened, layout), 1, files=files)
    read_bytes = sum(file.read_bytes for file in files)
    files.close()
    needed_bytes = sum(array.nbytes for array in found.values())
    assert needed_bytes <= read_bytes <= most * needed_bytes
    # Short pieces share pages: nothing but the tensors themselves is read for them.
    assert read_bytes <= sum(values(one).nbytes for one in whole.values())
    for name, array in found.items():
        third = rows // 3
        assert array.tobytes() == values(whole[name])[third : 2 * third].tobytes()


def test_a_file_that_ends_early(source: checkpoint.Checkpoint) -> None:
    path = source.path(source.files[0].name)
    layouts = layouts_of(source)
    opened = open_sources(source)
    _ = opened[source.files[0].name]
    os.truncate(path, path.stat().st_size - 40_000)
    with pytest.raises(RunError, match="ends early"):
        checkpoint.load(source, layouts, 0, files=opened)
    opened.close()
