"""What a replaced folder would lose: listed and refused, unless the user says that it may go."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.conversion.replaced_folder import find_others
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.checkpoint.formats.registry import written_names
from reshard.errors import RunError, UnmatchedError, UsageError

WHOLE = {f"layers.{i}.weight": tensor("float32", (8, 4), i) for i in range(2)}
OPTIMIZER = ("exp_avg", "exp_avg_sq")
MODEL_FILES = ("config.json", "tokenizer.json", "README.md", "merges.txt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(folder / "model.safetensors", WHOLE)
    for name in MODEL_FILES:
        (folder / name).write_text("{}")
    return folder


def file(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"precious")

    return make


def link_to_folder(folder: Path) -> None:
    (folder.parent / "evaluations").mkdir(exist_ok=True)
    (folder / "evals").symlink_to("../evaluations")


def link_to_file(folder: Path) -> None:
    (folder / "data.csv").symlink_to("/etc/hostname")


def link_to_vocabulary(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("/etc/hostname")


def large(folder: Path) -> None:
    (folder / "train.parquet").touch()
    os.truncate(folder / "train.parquet", 70_000_000)


def other_tensors(folder: Path) -> None:
    write_file(folder / "extra.safetensors", WHOLE)


# What a copy of the checkpoint does not take along: how it is listed.
LOST: dict[str, Callable[[Path], None]] = {
    ".git/": file(".git/objects/0f"),
    ".gitattributes": file(".gitattributes"),
    ".cache/": file(".cache/mine"),
    "empty/": lambda folder: (folder / "empty").mkdir(),
    "evals (a link to ../evaluations)": link_to_folder,
    "data.csv (a link to /etc/hostname)": link_to_file,
    "vocab.json (a link to /etc/hostname)": link_to_vocabulary,
    "train.parquet": large,
    "optimizer.pt": file("optimizer.pt"),
    "model.gguf": file("model.gguf"),
    "sub/": file("sub/weights.bin"),
    "extra.safetensors": other_tensors,
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another"])
def test_what_would_be_lost_is_listed_and_refused(
    model: Path, tmp_path: Path, name: str, in_place: bool
) -> None:
    source = model
    if not in_place:
        source = tmp_path / "source"
        shutil.copytree(model, source)
    LOST[name](model)
    before = sorted(path.relative_to(model) for path in model.rglob("*"))

    with pytest.raises(UsageError) as refused:
        checkpoint.convert(source, model, to=2, overwrite=True)

    assert f"\n  {name}\n" in str(refused.value) and "--discard-others" in str(refused.value)
    assert sorted(path.relative_to(model) for path in model.rglob("*")) == before
    assert not staging_folder(model).exists()

    checkpoint.convert(source, model, to=2, overwrite=True, discard_others=True)
    assert not (model / name.partition(" ")[0]).exists()


@pytest.mark.parametrize("name", ["notes.txt", "train.py", "wandb/run1/log", "eval.json"])
def test_files_that_are_carried_are_lost_to_another_model_alone(model: Path, name: str) -> None:
    source = model.with_name("source")
    shutil.copytree(model, source)
    file(name)(model)
    listed = name.partition("/")[0] + "/" * ("/" in name)
    with pytest.raises(UsageError, match=rf"\n  {listed}\n"):
        checkpoint.convert(source, model, to=2, overwrite=True)
    checkpoint.convert(model, model, to=2, overwrite=True)
    assert (model / name).read_bytes() == b"precious"
    # The manifest lists it from now on: it is part of the checkpoint.
    checkpoint.convert(source, model, to=2, overwrite=True)


@pytest.mark.parametrize("hub_notes", [True, False])
def test_nothing_is_lost_of_an_ordinary_model(model: Path, hub_notes: bool) -> None:
    """Neither in place nor by another one, once or twice, with what `hf download` leaves."""
    source = model.with_name("source")
    shutil.copytree(model, source)
    if hub_notes:
        file(".cache/huggingface/download/config.json.metadata")(model)
    for to in ("full", 2, "full"):
        checkpoint.convert(source, model, to=to, overwrite=True)
    checkpoint.convert(model, model, to=2, overwrite=True)
    checkpoint.convert(model, model, to="full", overwrite=True)
    assert {path.name for path in model.iterdir()} > set(MODEL_FILES)


@pytest.mark.parametrize("keeps_manifest", [True, False])
# `vllm-sharded-state` needs the layout of an engine.
@pytest.mark.parametrize("format", sorted({*written_names()} - {"vllm-sharded-state"}))
def test_every_format_knows_its_files(model: Path, format: str, keeps_manifest: bool) -> None:
    target = model.with_name("out")
    if "deepspeed" in format:
        states = {f"optimizer.state.{a}.{b}": WHOLE[a] for a in WHOLE for b in OPTIMIZER}
        write_file(model / "model.safetensors", WHOLE | states)
    placed: list[dict[str, Any]] = [{"to": "dp=2", "rules": ["*=dp, -"]}, {"to": "dp=2"}]
    for options in [*placed, {"to": "full"}]:
        with contextlib.suppress(UsageError, UnmatchedError):
            checkpoint.convert(model, target, format=format, **options)
            break
    if not keeps_manifest:
        (target / "reshard.manifest.json").unlink()
    assert target.exists() and [*find_others(target, ())] == []


def test_files_that_come_during_the_run(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    checkpoint.convert(model, target, to=2)

    def come(_: object) -> None:
        (target / "precious").touch()

    with pytest.raises(RunError, match=r"\n  precious\n"):
        checkpoint.convert(model, target, to="full", overwrite=True, progress=come)
    assert (target / "precious").exists()
    report = checkpoint.convert(model, target, to="full", overwrite=True, discard_others=True)
    assert report.resumed_bytes > 0 and not (target / "precious").exists()


def test_a_damaged_checkpoint_is_known_by_names(model: Path) -> None:
    (model / "reshard.manifest.json").write_text("{}")
    (model / "precious").touch()
    assert [*find_others(model, ())] == ["precious"]


def test_discarding_others_without_replacing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without overwrite"):
        checkpoint.convert(model, tmp_path / "out", to=2, discard_others=True)
