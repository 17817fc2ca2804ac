"""Operations on names, and the lock of a folder: what they do, and say where they cannot."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint.files import folders
from reshard.errors import RunError


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    folders.sync_folder(tmp_path)


def test_a_folder_that_fails_to_sync_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        folders.sync_folder(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folders.sync_folders_under(tmp_path / "missing")


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    with folders.FolderLock.acquire(folder):
        with pytest.raises(RunError, match=rf"staging is in use by process {os.getpid()} on "):
            folders.FolderLock.acquire(folder)
        assert (folder / "lock").exists()
    folders.FolderLock.acquire(folder).close()


def test_the_last_to_hold_it_removes_the_folder(tmp_path: Path) -> None:
    lock = folders.FolderLock.acquire(tmp_path / "staging")
    lock.remove_folder()
    assert os.listdir(tmp_path) == []
    lock.close()


def test_a_folder_with_something_in_it_is_not_removed(tmp_path: Path) -> None:
    with folders.FolderLock.acquire(tmp_path / "staging") as lock:
        (lock.folder / "file").touch()
        with pytest.raises(OSError, match="not empty"):
            lock.remove_folder()


def once(before: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, with something happening just before its first call."""
    pending = [before]

    def call(*arguments: Any, **keywords: Any) -> Any:
        if pending:
            pending.pop()()
        return real(*arguments, **keywords)

    return call


def test_a_folder_removed_just_before_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "staging"
    monkeypatch.setattr(os, "open", once(folder.rmdir, os.open))
    with folders.FolderLock.acquire(folder):
        assert os.listdir(folder) == ["lock"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lock_file_removed_just_before_it_is_locked_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    folder = tmp_path / "staging"

    def remove() -> None:
        (folder / "lock").unlink()
        if is_made_again:
            (folder / "lock").touch()

    monkeypatch.setattr(fcntl, "flock", once(remove, fcntl.flock))
    with folders.FolderLock.acquire(folder), pytest.raises(RunError, match="in use"):
        folders.FolderLock.acquire(folder)


def test_a_folder_taken_over_while_it_is_removed_is_left_to_its_new_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "staging"
    new_holders: list[folders.FolderLock] = []
    lock = folders.FolderLock.acquire(folder)
    take_over = lambda: new_holders.append(folders.FolderLock.acquire(folder))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", once(take_over, os.rmdir))
        lock.remove_folder()
    with pytest.raises(RunError, match="in use"):
        folders.FolderLock.acquire(folder)
    new_holders[0].remove_folder()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_vanishes_every_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", vanish)
    with pytest.raises(RunError, match="removed as often as it is made"):
        folders.FolderLock.acquire(tmp_path / "staging")


def test_a_name_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "staging").touch()
    with pytest.raises(RunError, match="staging is a file"):
        folders.FolderLock.acquire(tmp_path / "staging")
