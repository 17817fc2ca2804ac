"""The manifest says what was written; a damaged one is an error, never a wrong tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import MANIFEST, small_folder, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.manifest import is_plain_name, read_manifest
from reshard.errors import CheckpointError, FormatError

WHOLE = {
    "w": tensor("float32", (5, 6), 1),
    "b": tensor("bfloat16", (7,), 2),
    "s": tensor("int64", (), 3),
    "e": tensor("float16", (0, 3), 4),
}
KINDS: dict[str, dict[str, Any]] = {
    "box shards": {"to": "tp=3,dp=2", "rules": ["w=tp, dp", "*=..."]},
    "interleaved shards": {"to": "tp=2", "rules": ["w=tp@stride2, -", "b=tp@pad8", "*=..."]},
    "round robin": {"to": 3},
    "whole": {"to": "full"},
    "whole in files": {"to": "full", "most_file_bytes": 100},
}


def written(folder: Path, kind: str) -> Path:
    write_file(folder / "model.safetensors", WHOLE)
    checkpoint.convert(folder / "model.safetensors", folder / "made", **KINDS[kind])
    return folder / "made"


def loaded(folder: Path) -> dict[str, bytes]:
    found = checkpoint.open(folder)
    return {name: checkpoint.read_tensor(found, name).tobytes() for name in found}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, as the keys that lead there."""
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31, 2**63, 10**30]),
    st.floats(),
    st.sampled_from(["", "tp", "-, tp", "tp, -", "tp, - | sum(dp)", "float64", "zz", "a" * 32]),
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS)
)


def mutate(draw: Callable[..., Any], content: Any) -> None:
    """Change the JSON in one place: a value, a key, an item more or less."""
    *above, key = draw(st.sampled_from([place for place in places(content) if place]))
    parent = content
    for step in above:
        parent = parent[step]
    kind = draw(st.sampled_from(["replace", "remove", "digit", "copy", "rename"]))
    if kind == "remove":
        del parent[key]
    elif kind == "digit" and isinstance(parent[key], int | str) and parent[key]:
        text = list(str(parent[key]))
        text[draw(st.integers(0, len(text) - 1))] = draw(st.sampled_from("0123456789abf.-, "))
        new = "".join(text)
        parent[key] = int(new) if isinstance(parent[key], int) and new.isdigit() else new
    elif kind == "copy" and isinstance(parent, list):
        parent.append(parent[key])
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from([*parent, "other", "../x"]))] = parent.pop(key)
    else:
        parent[key] = draw(VALUES)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_damaged_manifest_is_an_error_or_says_the_same(kind: str, data: st.DataObject) -> None:
    with small_folder() as folder:
        target = written(folder, kind)
        before = loaded(target)
        assert before == {name: t.bits.tobytes() for name, t in WHOLE.items()}
        content = json.loads((target / MANIFEST).read_text())
        for _ in range(data.draw(st.integers(1, 2))):
            mutate(data.draw, content)
        (target / MANIFEST).write_text(json.dumps(content))
        after, message = None, ""
        try:
            after = loaded(target)
        except CheckpointError as error:
            message = str(error)
        assert after == before or str(folder) in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a manifest"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "is not a manifest"),
        (b"null", "is not a manifest"),
        (b"{", "is not a manifest"),
        (b"{}", "no 'format_version'"),
        (b'{"format_version": 2}', "format version 2"),
        (b'{"format_version": 1, "format_version": 1}', "appears twice"),
        (b"[" * 100_000, "is not a manifest"),
        (b'{"format_version": 1, "mesh": null, "files": {}}', "no files"),
        (b'{"format_version": 1, "mesh": null, "files": {"../x": {}}}', "leads outside"),
    ],
)
def test_what_is_no_manifest(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(FormatError, match=says) as caught:
        checkpoint.open(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)


def edited(target: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((target / MANIFEST).read_text())
    change(content)
    (target / MANIFEST).write_text(json.dumps(content))


def test_ranks_that_were_swapped_in_the_mesh_are_noticed(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4))})
    target = tmp_path / "made"
    checkpoint.convert(
        tmp_path / "model.safetensors", target, to="tp=2", rules=["w=tp, -", "*=..."]
    )
    edited(target, lambda content: content["mesh"].update(devices=[1, 0]))
    with pytest.raises(FormatError, match=r"begins at \[0, 0\].*the manifest says at \[2, 0\]"):
        checkpoint.open(target)


def test_a_partial_sharding_is_no_checkpoint(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4))})
    target = tmp_path / "made"
    checkpoint.convert(
        tmp_path / "model.safetensors",
        target,
        to="tp=2",
        rules=["w=-, -", "*=..."],
        replicas="every",
    )
    edited(target, lambda content: content["tensors"]["w"].update(spec="-, - | sum(tp)"))
    with pytest.raises(FormatError, match=r"'w' is partial"):
        checkpoint.open(target)


def test_a_shape_of_more_than_the_files_hold_costs_no_memory(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (4, 4))})
    target = tmp_path / "made"
    checkpoint.convert(
        tmp_path / "model.safetensors", target, to="tp=2", rules=["w=tp@cyclic1, -", "*=..."]
    )
    edited(target, lambda content: content["tensors"]["w"].update(shape=[10**15, 4]))
    with pytest.raises(FormatError, match=r"'w' of 16000000000000000 bytes in files of \d+ bytes"):
        checkpoint.open(target)


def test_it_says_what_was_written(tmp_path: Path) -> None:
    target = written(tmp_path, "box shards")
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.format == "sharded-safetensors"
    assert manifest.mesh is not None
    assert manifest.mesh.text == "dp=2,tp=3"
    assert {name: (t.dtype, t.layout.shape) for name, t in manifest.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in WHOLE.items()
    }
    assert manifest.tensors["w"].spec == "tp, dp"
    sizes = {file.name: file.size_bytes for file in manifest.files}
    assert sizes == {path.name: path.stat().st_size for path in target.glob("*.safetensors")}


def test_there_need_not_be_one(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_manifest_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/a", "a\\b", "a\0b"])
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not is_plain_name(name)


def test_arrays_are_what_was_written(tmp_path: Path) -> None:
    found = checkpoint.open(written(tmp_path, "round robin"))
    assert checkpoint.read_tensor(found, "w").dtype == np.float32
    assert {name: t.layout.holders for name, t in found.tensors.items()} != {}
