"""Modes of what is written: never more open than the source, or than what is replaced.

Links beside the tensors: those of a folder and of a cache's snapshot are followed, no others."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint import open_checkpoint
from reshard.checkpoint.pretrained.model_folder import find_model_files
from reshard.checkpoint.storage.permissions import (
    describe_foreign_link,
    find_mode_limits,
    restrict_mode,
)
from reshard.cli.output import write_whole
from reshard.errors import CheckpointError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", {"a.weight": tensor("float32", (4, 4))})
    (folder / "config.json").write_text("{}")
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: mode(path) for path in folder.iterdir()}


def convert_with_umask(source: Path, target: Path, **options: object) -> Path:
    checkpoint.convert(source, target, to="full", **options)  # type: ignore[arg-type]
    return target


def test_a_private_source_makes_a_private_target(source: Path, tmp_path: Path) -> None:
    source.chmod(0o700)
    (source / "model.safetensors").chmod(0o600)
    target = convert_with_umask(source, tmp_path / "out")
    assert mode(target) == 0o700
    assert modes(target) == {
        "model.safetensors": 0o600,
        # The manifest describes the weights; what is copied is as open as it was.
        "reshard.manifest.json": 0o600,
        "config.json": 0o644,
    }


def test_a_read_only_source_makes_a_target_that_its_owner_can_write(
    source: Path, tmp_path: Path
) -> None:
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    target = convert_with_umask(source, tmp_path / "out")
    source.chmod(0o755)
    assert (mode(target), mode(target / "config.json")) == (0o755, 0o644)


def test_an_open_source_leaves_it_to_the_umask(source: Path, tmp_path: Path) -> None:
    for path in (source, *source.iterdir()):
        path.chmod(0o777)
    os.umask(0o027)
    target = convert_with_umask(source, tmp_path / "out")
    assert (mode(target), mode(target / "config.json")) == (0o750, 0o640)


def test_a_single_private_file_restricts_all(source: Path, tmp_path: Path) -> None:
    shards = convert_with_umask(source, tmp_path / "shards")
    checkpoint.convert(source, tmp_path / "two", to=2, strategy="sharded")
    sorted((tmp_path / "two").glob("*.safetensors"))[0].chmod(0o600)
    target = convert_with_umask(tmp_path / "two", tmp_path / "out")
    assert mode(target / "model.safetensors") == 0o600
    assert mode(shards / "model.safetensors") == 0o644


def test_a_single_private_file(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").chmod(0o640)
    target = convert_with_umask(source / "model.safetensors", tmp_path / "out")
    assert modes(target) == {"model.safetensors": 0o640, "reshard.manifest.json": 0o640}


def test_a_replaced_folder_keeps_its_mode(source: Path, tmp_path: Path) -> None:
    target = convert_with_umask(source, tmp_path / "out")
    target.chmod(0o2750)
    (target / "config.json").chmod(0o600)
    convert_with_umask(source, target, overwrite=True)
    assert (mode(target), mode(target / "config.json")) == (0o2750, 0o600)


def test_in_place_keeps_modes(source: Path) -> None:
    source.chmod(0o710)
    (source / "model.safetensors").chmod(0o640)
    convert_with_umask(source, source, overwrite=True)
    assert (mode(source), mode(source / "model.safetensors")) == (0o710, 0o640)


@as_root
def test_a_replaced_folder_keeps_its_owner(source: Path, tmp_path: Path) -> None:
    target = convert_with_umask(source, tmp_path / "out")
    os.chown(target, 65534, 65533)
    convert_with_umask(source, target, overwrite=True)
    states = [path.stat() for path in (target, *target.iterdir())]
    assert {(state.st_uid, state.st_gid) for state in states} == {(65534, 65533)}


def test_a_group_that_cannot_be_kept_gets_no_more_than_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = convert_with_umask(source, tmp_path / "out")
    target.chmod(0o771)
    if os.geteuid() == 0:
        os.chown(target, -1, 65533)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    convert_with_umask(source, target, overwrite=True)
    assert mode(target) == (0o711 if os.geteuid() == 0 else 0o771)


def test_deltas_are_as_private_as_their_checkpoints(source: Path, tmp_path: Path) -> None:
    after = convert_with_umask(source, tmp_path / "after")
    delta = tmp_path / "delta"
    checkpoint.diff(source, after, delta)
    assert mode(delta) == 0o644
    after.chmod(0o700)
    checkpoint.diff(source, after, delta, overwrite=True)
    assert mode(delta) == 0o600


def test_a_text_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.html", "old", False, "report")
    assert mode(tmp_path / "report.html") == 0o644
    (tmp_path / "report.html").chmod(0o600)
    write_whole(tmp_path / "report.html", "new", True, "report")
    assert mode(tmp_path / "report.html") == 0o600


def test_missing_files_do_not_restrict_modes() -> None:
    assert find_mode_limits(Path("/nowhere"), [Path("/nowhere/a")]).files == 0o777


def test_the_owner_keeps_reading_and_writing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    restrict_mode(path, 0)
    assert mode(path) == 0o600


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


def test_a_snapshot_does_not_lead_to_another_repository(folder: Path) -> None:
    other = folder.parent / "models--b" / "blobs" / "0"
    snapshot = folder.parent / "models--a" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    other.parent.mkdir(parents=True)
    other.write_text("PRIVATE")
    shutil.copy(folder / "model.safetensors", snapshot)
    (snapshot / "config.json").symlink_to("../../../models--b/blobs/0")
    assert convert(snapshot) == []


def test_a_link_to_itself_is_not_followed(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    assert convert(folder) == []
    reason = "a link that leads back to itself"
    assert describe_foreign_link(folder / "tokenizer.json", folder) == reason


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
