"""What the system refuses before a run has begun is an error of reshard's, and no bare one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard.checkpoint import (
    compare,
    convert,
    open_checkpoint,
    plan_conversion,
    run_conversion,
)
from reshard.errors import CheckpointError, RunError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_file(folder / "model.safetensors", {"w": tensor("float32", (4, 3))})
    return folder


def refusing(
    path: Path, real: Callable[..., os.stat_result] = os.stat
) -> Callable[..., os.stat_result]:
    """Return `os.stat` or `os.lstat` that may not look at a path."""

    def stat(asked: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if asked == path:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(asked, *arguments, **keywords)

    return stat


def test_a_source_that_may_not_be_looked_at_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.checkpoint.conversion.plan.open_checkpoint", lambda path: None)
    monkeypatch.setattr(os, "stat", refusing(source))
    with pytest.raises(RunError, match=f"look at the target: {source}: Permission denied"):
        plan_conversion(source, source.with_name("target"), to="full")


@pytest.mark.parametrize("name", ["target", ".target.reshard-staging"])
def test_a_target_that_may_not_be_looked_at(
    source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = source.with_name("target")
    target.mkdir()
    conversion = plan_conversion(source, target, to="full")
    with monkeypatch.context() as patch:
        for call in ("stat", "lstat"):
            patch.setattr(os, call, refusing(source.with_name(name), getattr(os, call)))
        with pytest.raises(RunError, match=f"^cannot .*: .*/{name}: Permission denied"):
            run_conversion(conversion, overwrite=True)
    run_conversion(conversion, overwrite=True)
    assert compare(source, target).is_same


def test_a_folder_beside_the_tensors_that_cannot_be_listed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in it would be missing in every target, and nobody told."""
    (source / "inner").mkdir()
    (source / "inner" / "tokenizer").write_text("words")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path) == str(source / "inner"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CheckpointError, match=f"{source}/inner: Input/output error"):
        open_checkpoint(source)


def test_reads_that_give_less_than_was_asked_for(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = source.with_name("torch")
    convert(source, torch, to="tp=2", rules=["w=tp, -"], format="torch-dcp")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: real(file, (size + 2) // 3, at))
    assert compare(source, torch).is_same
