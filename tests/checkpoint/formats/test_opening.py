"""Which kind of checkpoint is at a path, and what belongs to it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import MANIFEST, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats import opening
from reshard.checkpoint.formats.opening import read_config
from reshard.errors import CheckpointError, FormatError

WHOLE = {"w": tensor("float32", (4, 4), 1)}
SHARDS = {"to": "tp=2", "rules": ["w=tp, -", "*=..."]}


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """The same tensors in every form there is."""
    places = {name: tmp_path / name for name in ("single", "many", "shards", "bare")}
    places["single"].mkdir()
    write_file(places["single"] / "model.safetensors", WHOLE | {"v": tensor("int8", (3,), 2)})
    source = places["single"]
    checkpoint.convert(source, places["many"], to="full", most_file_bytes=1)
    checkpoint.convert(source, places["shards"], **SHARDS)
    checkpoint.convert(source, places["bare"], **SHARDS)
    (places["bare"] / MANIFEST).unlink()
    places["file"] = source / "model.safetensors"
    places["index"] = places["many"] / "model.safetensors.index.json"
    return places


def test_every_form_is_recognised(made: dict[str, Path]) -> None:
    formats = {name: checkpoint.open(path).format for name, path in made.items()}
    assert formats == {
        "single": "safetensors",
        "many": "safetensors",
        "shards": "sharded-safetensors",
        "bare": "sharded-safetensors",
        "file": "safetensors",
        "index": "safetensors",
    }
    for path in made.values():
        assert checkpoint.compare(made["file"], str(path)).is_same


def test_only_a_manifest_knows_mesh_cuts_and_digests(made: dict[str, Path]) -> None:
    with_manifest, bare = checkpoint.open(made["shards"]), checkpoint.open(made["bare"])
    assert with_manifest.mesh is not None
    assert with_manifest.mesh.text == "tp=2"
    assert with_manifest["w"].spec == "tp, -"
    assert with_manifest["w"].digest is not None
    assert (bare.mesh, bare["w"].spec, bare["w"].digest) == (None, None, None)
    assert checkpoint.open(made["many"])["w"].digest is not None
    assert checkpoint.open(made["index"])["w"].digest is None, "a file is taken by itself"


def test_an_index_is_preferred_to_other_files(made: dict[str, Path]) -> None:
    (made["many"] / MANIFEST).unlink()
    write_file(made["many"] / "model.safetensors", {"w": tensor("int8", (1,), 9)})
    found = checkpoint.open(made["many"])
    assert found["w"].shape == (4, 4)
    assert found.left_out == (("model.safetensors", "not a file of this checkpoint"),)


def test_the_usual_name_is_preferred_to_others(made: dict[str, Path]) -> None:
    shutil.copy(made["file"], made["single"] / "adapter.safetensors")
    found = checkpoint.open(made["single"])
    assert [file.name for file in found.files] == ["model.safetensors"]
    assert found.left_out == (("adapter.safetensors", "not a file of this checkpoint"),)


def test_other_files_of_a_folder_are_carried_or_left_out(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made["single"]
    (folder / "inner").mkdir()
    (folder / ".cache").mkdir()
    for name in ("config.json", "inner/vocabulary.txt", ".cache/secret", ".hidden"):
        (folder / name).write_text("small")
    (folder / "large.txt").write_bytes(b"x" * 2000)
    (folder / "model.onnx").write_text("weights")
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "linked.json").symlink_to(folder / "config.json")
    os.mkfifo(folder / "pipe")
    monkeypatch.setattr(opening, "MAX_CARRIED_BYTES", 1000)
    found = checkpoint.open(folder)
    assert set(found.carried) == {"config.json", "linked.json", "inner/vocabulary.txt"}
    assert dict(found.left_out) == {
        "large.txt": "larger than 1000 bytes",
        "model.onnx": "weights in another format",
        "broken": "not a regular file",
        "pipe": "not a regular file",
    }
    checkpoint.convert(folder, folder.parent / "target", to="full")
    assert (folder.parent / "target" / "linked.json").read_text() == "small"
    assert not (folder.parent / "target" / "linked.json").is_symlink()


def test_files_are_read_through_links(made: dict[str, Path], tmp_path: Path) -> None:
    """As the cache of Hugging Face has them."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(made["file"])
    assert checkpoint.compare(snapshot, made["single"]).is_same
    checkpoint.convert(snapshot, tmp_path / "cut", **SHARDS)
    assert checkpoint.compare(tmp_path / "cut", made["single"]).is_same


def test_the_config_is_read_or_refused(made: dict[str, Path]) -> None:
    found = checkpoint.open(made["single"])
    assert read_config(found) is None
    path = made["single"] / "config.json"
    path.write_text('{"hidden_size": 4}')
    assert read_config(found) == {"hidden_size": 4}
    for content in ("[]", "{", "[" * 100_000):
        path.write_text(content)
        with pytest.raises(FormatError, match=r"config\.json is not"):
            read_config(found)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_config(found)
