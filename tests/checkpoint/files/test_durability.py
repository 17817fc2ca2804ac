"""Operations on names: what they do, and what they say where they cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reshard.checkpoint.files import durability


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(data)


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    write(tmp_path / "a" / "file", b"1")
    write(tmp_path / "b" / "other", b"2")
    if durability.exchange_folders(tmp_path / "a", tmp_path / "b"):
        assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["other"], ["file"])
    else:
        assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["file"], ["other"])


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_exchange_says_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    class Library:
        """A C library without the call (None), or over a kernel that refuses it."""

        if number is not None:

            @staticmethod
            def renameat2(*_: object) -> int:
                durability.ctypes.set_errno(number or 0)
                return -1

    monkeypatch.setattr(durability.ctypes, "CDLL", lambda *_, **__: Library)
    assert durability.exchange_folders(tmp_path / "a", tmp_path / "b") is False


def test_exchange_with_a_name_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="b"):
        durability.exchange_folders(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    durability.sync_folder(tmp_path)


def test_a_folder_that_fails_to_sync_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        durability.sync_folder(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        durability.sync_folders_under(tmp_path / "missing")
