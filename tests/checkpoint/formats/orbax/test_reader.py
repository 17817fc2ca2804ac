"""Checkpoints of Orbax, read without it: every array bit for bit, and every plain value."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.formats.orbax.orbax_states import VALUES, VARIANTS, arrays, as_read
from reshard import checkpoint
from reshard.errors import CheckpointError, CoverageError, FormatError, ReshardError
from reshard.sharding import spec


@pytest.mark.parametrize("variant", VARIANTS)
def test_arrays_and_values_of_every_variant_are_read(saved: Path, variant: str) -> None:
    found = checkpoint.open(saved / variant)
    assert found.format == "orbax"
    assert {*found} == {*arrays()}
    for name, array in arrays().items():
        read = checkpoint.read_tensor(found, name)
        expected = as_read(array)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape), name
        assert read.tobytes() == expected.tobytes(), name
    assert dict(found.values) == VALUES
    assert found.paths["params.layers.0.w"] == ("params", "layers", 0, "w")
    assert found.attributes == {"narrow_types": {"params.int4": "int4"}}
    assert not found.carried
    assert not found.left_out
    assert not checkpoint.check_digests(found).damaged


def test_chunks_are_shards_of_their_ranks(saved: Path) -> None:
    found = checkpoint.open(saved / "ocdbt")
    assert found.mesh is not None
    assert found.mesh.text == "x=4,y=2"
    tensor = found["params.layers.0.w"]
    assert tensor.spec == "x, y"
    assert tensor.layout is spec(found.mesh, "x, y").layout((16, 32))
    # A replicated array is stored in pieces, which all have some rank.
    assert found["params.layers.1.b"].spec is None
    assert found["params.layers.1.w"].layout.holders == (0, 2, 4, 6)


def test_uncompressed_chunks_are_read_in_place(saved: Path) -> None:
    assert checkpoint.open(saved / "ocdbt").derived
    found = checkpoint.open(saved / "uncompressed")
    # Only what is so small that it lies in a node of the database is not in a file.
    assert {*found.derived} <= {"_METADATA/unpacked"}


@pytest.mark.parametrize("variant", ["ocdbt", "zarr3", "chunked", "uncompressed"])
def test_a_rank_loads_its_part(saved: Path, variant: str) -> None:
    found = checkpoint.open(saved / variant)
    mesh = checkpoint.open(saved / "ocdbt").mesh
    assert mesh is not None
    layout = spec(mesh, "-, y x").layout((16, 32))
    for rank in range(8):
        part = checkpoint.load(found, {"params.layers.1.w": layout}, rank=rank)
        (box,) = layout.boxes(rank)
        whole = arrays()["params.layers.1.w"]
        expected = whole[tuple(map(slice, box.start, box.stop))]
        assert np.array_equal(part["params.layers.1.w"], expected)


def test_the_last_step_and_its_item_are_opened(saved: Path) -> None:
    last = checkpoint.open(saved / "manager")
    assert last.folder == saved / "manager" / "10" / "default"
    assert any("step 10" in note and "(9)" in note for note in last.notes)
    assert checkpoint.open(saved / "manager" / "9").folder.parent.name == "9"
    assert checkpoint.open(saved / "manager" / "9" / "default").notes == ()
    item = checkpoint.open(saved / "composite")
    assert any("item state" in note and "meta" in note for note in item.notes)
    assert item.attributes == {"random_keys": {"key": "threefry2x32"}}


def copied(saved: Path, variant: str, tmp_path: Path) -> Path:
    return shutil.copytree(saved / variant, tmp_path / "damaged")


def read_all(folder: Path) -> None:
    found = checkpoint.open(folder)
    for name in found:
        checkpoint.read_tensor(found, name)


def test_a_missing_chunk_is_an_error(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, "zarr", tmp_path)
    (folder / "params.layers.0.w" / "1.1").unlink()
    with pytest.raises(CoverageError, match=r"1\.1 is missing"):
        checkpoint.open(folder)


def test_a_chunk_of_zeros_may_be_missing(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, "zarr", tmp_path)
    path = folder / "_METADATA"
    text = path.read_text()
    assert '"store_array_data_equal_to_fill_value": true' in text
    path.write_text(re.sub('("store_array_data_equal_to_fill_value": )true', r"\1false", text))
    (folder / "params.layers.0.w" / "1.1").unlink()
    expected = arrays()["params.layers.0.w"]
    expected[4:8, 16:] = 0
    read = checkpoint.read_tensor(checkpoint.open(folder), "params.layers.0.w")
    assert np.array_equal(read, expected)


def test_a_missing_array_is_an_error(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, "zarr", tmp_path)
    shutil.rmtree(folder / "params.layers.0.w")
    with pytest.raises(CheckpointError, match=r"params\.layers\.0\.w.* is not in the folder"):
        checkpoint.open(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("dtype", "<U8", "type '<U8'"), ("compressor", {"id": "blosc"}, "blosc")],
)
def test_other_arrays_are_read_if_one_is_unknown(
    saved: Path, tmp_path: Path, key: str, value: Any, says: str
) -> None:
    folder = copied(saved, "zarr", tmp_path)
    names = [*checkpoint.open(folder)]
    path = folder / "params.layers.0.w" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    found = checkpoint.open(folder)
    assert [*found] == [name for name in names if name != "params.layers.0.w"]
    assert says in found.unreadable["params.layers.0.w"]


@pytest.mark.parametrize("variant", ["zarr", "zarr3"])
def test_chunks_of_another_size_are_errors(saved: Path, tmp_path: Path, variant: str) -> None:
    folder = copied(saved, variant, tmp_path)
    chunk = folder / "params.layers.0.w" / ("1.1" if variant == "zarr" else "c/1/1")
    content = chunk.read_bytes()
    # A shard of Zarr 3 may have more than its index speaks of.
    longer = [content + content] if variant == "zarr" else []
    for damaged in (content[:-1], content[: len(content) // 2], b"", *longer):
        chunk.write_bytes(damaged)
        with pytest.raises(FormatError, match="1"):
            read_all(folder)


def test_a_chunk_that_expands_beyond_its_size_is_an_error(saved: Path, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = copied(saved, "zarr", tmp_path)
    chunk = folder / "params.layers.0.w" / "1.1"
    chunk.write_bytes(zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    with pytest.raises(FormatError, match="expands beyond"):
        read_all(folder)


def test_damage_is_reported_with_the_file_of_the_chunk(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, "zarr", tmp_path)
    chunk = folder / "params.layers.0.w" / "1.1"
    content = chunk.read_bytes()[:-3]
    chunk.write_bytes(content)
    (damaged,) = checkpoint.check_digests(checkpoint.open(folder)).damaged
    assert damaged.tensor == "params.layers.0.w"
    assert damaged.places == (f"params.layers.0.w/1.1 bytes 0:{len(content)}",)


def test_an_unfinished_save_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "5.orbax-checkpoint-tmp-7"
    shutil.copytree(saved / "ocdbt", folder)
    with pytest.raises(CheckpointError, match="not finished"):
        checkpoint.open(folder)


def test_flipped_bytes_are_errors_of_ours_or_right(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, "ocdbt", tmp_path)
    random = np.random.default_rng(0)
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = path.read_bytes()
        for at in random.integers(0, len(content), 3).tolist():
            damaged = bytearray(content)
            damaged[at] ^= 1 << int(random.integers(8))
            path.write_bytes(bytes(damaged))
            with contextlib.suppress(ReshardError):
                read_all(folder)
        path.write_bytes(content)
