"""A save that takes the place of an older checkpoint where two names cannot be swapped."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.errors import RunError

torch = pytest.importorskip("torch")

from reshard.torch.storage import folder_save  # noqa: E402
from reshard.torch.storage.folder_save import FolderSave  # noqa: E402


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_save, "exchange_names", lambda *_: False)
    target = tmp_path / "step"
    write(target, "old")
    return target


def write(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    write_file(folder / "model.safetensors", {name: tensor("float32", (2,))})


def begin(target: Path) -> FolderSave:
    write_plan = cast("WritePlan", SimpleNamespace(files=()))
    save = FolderSave(target, write_plan, sync_files=False)
    save.begin()
    write(save.folder, "new")
    return save


def name_in(folder: Path) -> str:
    return next(iter(checkpoint.open(folder)))


def fail_at(patch: pytest.MonkeyPatch, rename_number: int, error: BaseException) -> None:
    real, calls = Path.rename, []

    def rename(path: Path, new: Path) -> Any:
        calls.append(new)
        if len(calls) == rename_number:
            raise error
        return real(path, new)

    patch.setattr(Path, "rename", rename)


def test_two_renames_are_a_line_of_the_log(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = begin(target)
    with caplog.at_level(logging.WARNING, "reshard"):
        save.commit()
    assert name_in(target) == "new"
    assert "step was replaced by two renames" in caplog.text
    assert [path.name for path in target.parent.iterdir()] == ["step"]


@pytest.mark.parametrize("rename_number", [1, 2])
def test_an_old_checkpoint_comes_back_after_a_kill_between_two_renames(
    target: Path, monkeypatch: pytest.MonkeyPatch, rename_number: int
) -> None:
    save = begin(target)
    with monkeypatch.context() as patch:
        fail_at(patch, rename_number, Killed())
        with pytest.raises(Killed):
            save.commit()
    assert target.exists() == (rename_number == 1)
    again = begin(target)
    assert name_in(target) == "old"
    again.commit()
    assert name_in(target) == "new"
    assert [path.name for path in target.parent.iterdir()] == ["step"]


def test_an_old_checkpoint_stays_where_the_second_rename_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = begin(target)
    with monkeypatch.context() as patch:
        fail_at(patch, 2, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(RunError, match="Input/output error"):
            save.commit()
    assert name_in(target) == "old"


def test_two_files_that_are_one_on_the_file_system(tmp_path: Path) -> None:
    """As of names that differ by case, on most disks of Macs."""
    files = [SimpleNamespace(stored=SimpleNamespace(name="w", size_bytes=0), known_bytes=list)] * 2
    with pytest.raises(RunError, match="is the file of another name already"):
        folder_save.make_files(tmp_path / "folder", cast("Any", files))
