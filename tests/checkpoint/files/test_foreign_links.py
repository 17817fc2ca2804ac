"""Links beside the tensors: those of a folder and of a cache's snapshot are followed, no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint import open_checkpoint
from reshard.checkpoint.pretrained.model_folder import find_model_files
from reshard.errors import CheckpointError

CONFIG = json.dumps({"model_type": "llama", "torch_dtype": "float32"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    write_file(found / "model.safetensors", {"a.weight": tensor("float32", (4, 4))})
    return found


def convert(source: Path, **options: object) -> list[str]:
    """The files of what a checkpoint is converted to."""
    target = source.with_name("out")
    checkpoint.convert(source, target, to="full", **options)  # type: ignore[arg-type]
    assert not any(path.is_symlink() for path in target.rglob("*"))
    return sorted(
        path.relative_to(target).as_posix()
        for path in target.rglob("*")
        if path.is_file() and path.name not in ("model.safetensors", "reshard.manifest.json")
    )


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "sub/vocab.txt"])
@pytest.mark.parametrize(
    "leads_to", ["secret", "../secret", "../../secret", "/proc/self/environ", "../model-2/secret"]
)
def test_a_link_out_of_the_folder_is_named_and_not_followed(
    folder: Path, name: str, leads_to: str
) -> None:
    (folder.parent / "secret").write_text("PRIVATE KEY")
    (folder.parent / "model-2").mkdir()
    (folder.parent / "model-2" / "secret").write_text("PRIVATE KEY")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    up = "../" if "/" in name and leads_to.startswith("..") else ""
    path.symlink_to(folder.parent / "secret" if leads_to == "secret" else up + leads_to)

    assert convert(folder) == []
    assert [found for found, why in open_checkpoint(folder).left_out if "a link" in why] == [name]
    assert any(name in note for note in checkpoint.plan_conversion(folder, "o", to=2).notes)


def test_a_link_to_a_folder_is_named_and_not_entered(folder: Path) -> None:
    (folder.parent / "private").mkdir()
    (folder.parent / "private" / "key").write_text("PRIVATE KEY")
    (folder / "evals").symlink_to(folder.parent / "private")
    assert convert(folder) == []
    assert open_checkpoint(folder).left_out == (
        ("evals", "a link to a folder, which is not entered"),
    )


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.json").symlink_to("tokenizer.json")
    (folder.parent / "by link").symlink_to(folder)
    assert convert(folder.parent / "by link") == ["tokenizer.json", "vocab.json"]


@pytest.mark.parametrize("repository", ["models--meta--llama", "datasets--meta--llama"])
def test_a_snapshot_of_the_hugging_face_cache_is_converted(folder: Path, repository: str) -> None:
    """All files of a snapshot are links to the blobs of its repository."""
    blobs = folder.parent / repository / "blobs"
    snapshot = folder.parent / repository / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "words.json").write_text("{}")
    for number, path in enumerate(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        shutil.move(path, blobs / f"{number}")
        link = snapshot / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path(*[".."] * (1 + len(name.parts))) / "blobs" / f"{number}")

    assert convert(snapshot) == ["config.json", "onnx/words.json"]
    assert open_checkpoint(snapshot).left_out == ()


def test_a_snapshot_is_no_way_to_another_repository(folder: Path) -> None:
    other = folder.parent / "models--b" / "blobs" / "0"
    snapshot = folder.parent / "models--a" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    other.parent.mkdir(parents=True)
    other.write_text("PRIVATE")
    shutil.copy(folder / "model.safetensors", snapshot)
    (snapshot / "config.json").symlink_to("../../../models--b/blobs/0")
    assert convert(snapshot) == []


def test_a_config_by_a_link_is_neither_copied_nor_rewritten(folder: Path) -> None:
    """Casts write config.json anew with another type, which would publish the rest of it."""
    (folder.parent / "private.json").write_text(CONFIG)
    (folder / "config.json").symlink_to("../private.json")
    assert convert(folder, dtype="bf16") == []


def test_model_folders_for_transformers_take_no_links_out_of_them(folder: Path) -> None:
    (folder.parent / "private.json").write_text(CONFIG)
    (folder / "tokenizer.json").symlink_to("../private.json")
    (folder / "vocab.json").write_text("{}")
    (folder / "config.json").write_text(CONFIG)
    assert list(find_model_files(open_checkpoint(folder)).companions) == ["vocab.json"]

    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../private.json")
    with pytest.raises(CheckpointError, match=r"outside the folder(.|\n)*--config .*private.json"):
        find_model_files(open_checkpoint(folder))
    assert find_model_files(open_checkpoint(folder), folder / "config.json").config
