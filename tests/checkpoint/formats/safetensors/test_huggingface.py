"""Whole tensors in the files of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, read_file, tensor, write_file
from reshard import checkpoint
from reshard.binding import FileRange
from reshard.checkpoint.formats.safetensors.header import parse_header
from reshard.checkpoint.formats.safetensors.huggingface import (
    FORMAT,
    plan_headers,
    read_indexed,
    read_single,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, PlannedTensor
from reshard.dtypes import dtype
from reshard.layout import Layout

WHOLE = {
    "model.b": tensor("float32", (5,), 1),
    "model.a": tensor("bfloat16", (3, 4), 2),
    "lm_head": tensor("int64", (), 3),
    "unused": tensor("float16", (0, 4), 4),
}


def write_indexed(folder: Path) -> dict[str, str]:
    """The order of names in an index is not that of the files."""
    files = {
        "model-00001-of-00002.safetensors": ["model.b", "unused"],
        "model-00002-of-00002.safetensors": ["model.a", "lm_head"],
    }
    for file, names in files.items():
        write_file(folder / file, {name: WHOLE[name] for name in names}, {"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": 52}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return weight_map


def test_a_single_file_is_read_under_any_name(tmp_path: Path) -> None:
    write_file(tmp_path / "any name.safetensors", WHOLE, {"format": "pt", "note": "x"})
    found = read_single(tmp_path / "any name.safetensors")
    assert (found.format, found.ranks, found.mesh) == ("safetensors", 1, None)
    assert found.metadata == {"format": "pt", "note": "x"}
    assert {name: (t.dtype, t.shape) for name, t in found.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in WHOLE.items()
    }
    assert found.size_bytes == sum(t.size_bytes for t in WHOLE.values())
    content = (tmp_path / "any name.safetensors").read_bytes()
    for name, expected in WHOLE.items():
        place = found[name].file_range(0)
        assert place.path == "any name.safetensors"
        stored = content[place.start_bytes : place.start_bytes + expected.size_bytes]
        assert stored == expected.bits.tobytes()


def test_an_index_written_by_hand_is_read(tmp_path: Path) -> None:
    weight_map = write_indexed(tmp_path)
    found = read_indexed(tmp_path / "model.safetensors.index.json")
    assert [file.name for file in found.files] == sorted(set(weight_map.values()))
    for name, file in weight_map.items():
        place = found[name].file_range(0)
        assert isinstance(place, FileRange)
        assert place.path == file
    assert set(list(found)[:2]) == {"model.b", "unused"}, "tensors are in the order of the files"
    for opened in (checkpoint.open(tmp_path), found):
        assert {name: checkpoint.read_tensor(opened, name).tobytes() for name in opened} == {
            name: t.bits.tobytes() for name, t in WHOLE.items()
        }


def test_files_with_an_index_are_sharded_and_joined_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_indexed(source)
    (source / "config.json").write_text("{}")
    checkpoint.convert(source, tmp_path / "cut", to="tp=2", rules=["model.*=tp, ...", "*=..."])
    assert (tmp_path / "cut" / "config.json").exists()
    assert not (tmp_path / "cut" / "model.safetensors.index.json").exists()
    checkpoint.convert(tmp_path / "cut", tmp_path / "full", to="full")
    assert read_file(tmp_path / "full" / "model.safetensors") == WHOLE


@given(st.lists(st.integers(0, 3000), max_size=12), st.one_of(st.none(), st.integers(1, 5000)))
def test_files_hold_tensors_in_order_up_to_a_limit(sizes: list[int], limit: int | None) -> None:
    all_names = [f"t{number}" for number in range(len(sizes))]
    kinds = [(dtype("uint8"), (size,)) for size in sizes]
    files = plan_headers(all_names, kinds, np.arange(len(sizes)), {"format": "pt"}, limit)
    headers = [
        parse_header(b"".join(header.pieces())[8:], header.file_size_bytes, name)
        for name, header in files.items()
    ]
    held = [[tensor.name for tensor in header.tensors] for header in headers]
    at = 0
    for names in held:
        assert sorted(names, key=lambda name: int(name[1:])) == [
            f"t{number}" for number in range(at, at + len(names))
        ]
        at += len(names)
    assert at == len(sizes)
    totals = [sum(tensor.size_bytes for tensor in header.tensors) for header in headers]
    if limit is None:
        assert len(files) == 1
        return
    for number, names in enumerate(held):
        assert totals[number] <= limit or len(names) == 1
        if number + 1 < len(held):
            following = min(held[number + 1], key=lambda name: int(name[1:]))
            assert totals[number] + sizes[int(following[1:])] > limit, "room was left"


def test_an_index_is_written_as_hugging_face_writes_it() -> None:
    tensors = {
        "b": PlannedTensor(dtype("float32"), Layout.whole((2,), [0], 1)),
        "a": PlannedTensor(dtype("uint8"), Layout.whole((3,), [0], 1)),
    }
    write_plan = FORMAT.plan_write(NewCheckpoint(tensors, most_file_bytes=8))
    ((name, text),) = FORMAT.final_files(write_plan)
    assert name == "model.safetensors.index.json"
    content = json.loads(text)
    assert content == {
        "metadata": {"total_size": 11},
        "weight_map": {
            "a": "model-00002-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize("names", [["z", "a"], ["a", "z"]])
def test_our_own_index_is_read_in_the_order_of_its_files(tmp_path: Path, names: list[str]) -> None:
    whole: dict[str, Tensor] = {name: tensor("float32", (8,), 1) for name in names}
    write_file(tmp_path / "model.safetensors", whole)
    target = tmp_path / "made"
    checkpoint.convert(tmp_path / "model.safetensors", target, to="full", most_file_bytes=32)
    assert list(checkpoint.open(target)) == names
    assert checkpoint.open(target)["z"].digest is not None
