"""Modes of what is written: never more open than the source, or than what is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.files.modes import find_open_bits, restrict_mode
from reshard.cli.whole_file import write_whole

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


def convert(source: Path, target: Path, **options: object) -> Path:
    checkpoint.convert(source, target, to="full", **options)  # type: ignore[arg-type]
    return target


def test_a_private_source_makes_a_private_target(source: Path, tmp_path: Path) -> None:
    source.chmod(0o700)
    (source / "model.safetensors").chmod(0o600)
    target = convert(source, tmp_path / "out")
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
    target = convert(source, tmp_path / "out")
    source.chmod(0o755)
    assert (mode(target), mode(target / "config.json")) == (0o755, 0o644)


def test_an_open_source_leaves_it_to_the_umask(source: Path, tmp_path: Path) -> None:
    for path in (source, *source.iterdir()):
        path.chmod(0o777)
    os.umask(0o027)
    target = convert(source, tmp_path / "out")
    assert (mode(target), mode(target / "config.json")) == (0o750, 0o640)


def test_one_private_file_among_the_tensors_counts(source: Path, tmp_path: Path) -> None:
    shards = convert(source, tmp_path / "shards")
    checkpoint.convert(source, tmp_path / "two", to=2, strategy="sharded")
    sorted((tmp_path / "two").glob("*.safetensors"))[0].chmod(0o600)
    target = convert(tmp_path / "two", tmp_path / "out")
    assert mode(target / "model.safetensors") == 0o600
    assert mode(shards / "model.safetensors") == 0o644


def test_a_single_private_file(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").chmod(0o640)
    target = convert(source / "model.safetensors", tmp_path / "out")
    assert modes(target) == {"model.safetensors": 0o640, "reshard.manifest.json": 0o640}


def test_a_replaced_folder_keeps_its_mode(source: Path, tmp_path: Path) -> None:
    target = convert(source, tmp_path / "out")
    target.chmod(0o2750)
    (target / "config.json").chmod(0o600)
    convert(source, target, overwrite=True)
    assert (mode(target), mode(target / "config.json")) == (0o2750, 0o600)


def test_in_place_keeps_modes(source: Path) -> None:
    source.chmod(0o710)
    (source / "model.safetensors").chmod(0o640)
    convert(source, source, overwrite=True)
    assert (mode(source), mode(source / "model.safetensors")) == (0o710, 0o640)


@as_root
def test_a_replaced_folder_keeps_its_owner(source: Path, tmp_path: Path) -> None:
    target = convert(source, tmp_path / "out")
    os.chown(target, 65534, 65533)
    convert(source, target, overwrite=True)
    states = [path.stat() for path in (target, *target.iterdir())]
    assert {(state.st_uid, state.st_gid) for state in states} == {(65534, 65533)}


def test_a_group_that_cannot_be_kept_gets_no_more_than_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = convert(source, tmp_path / "out")
    target.chmod(0o771)
    if os.geteuid() == 0:
        os.chown(target, -1, 65533)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    convert(source, target, overwrite=True)
    assert mode(target) == (0o711 if os.geteuid() == 0 else 0o771)


def test_deltas_are_as_private_as_what_they_are_of(source: Path, tmp_path: Path) -> None:
    after = convert(source, tmp_path / "after")
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


def test_bits_of_what_is_not_there() -> None:
    assert find_open_bits(Path("/nowhere"), [Path("/nowhere/a")]).files == 0o777


def test_the_owner_keeps_reading_and_writing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    restrict_mode(path, 0)
    assert mode(path) == 0o600
