"""Descriptors of files.

Files that this package makes by names that others can guess: links and other owners are refused.

Each place that writes, truncates, locks or deletes by such a name is tried with what another user
of a shared folder can put there.

Operations on names, and the lock of a folder: what they do, and say where they cannot."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint.conversion.journal import Journal, read_journal
from reshard.checkpoint.conversion.staging import Staging, staging_folder
from reshard.checkpoint.deltas.delta_file import DeltaWriter
from reshard.checkpoint.storage import filesystem
from reshard.checkpoint.storage.filesystem import (
    FolderLock,
    check_own_folder,
    is_exclusive,
    make_own_folder,
    open_new,
    open_own,
    read_range,
    read_up_to,
    write_files,
)
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.checkpoint.storage.object_stores import FileStream
from reshard.checkpoint.storage.uploads import SentRecords, read_released_ranges
from reshard.errors import CheckpointError, FormatError, RunError

# Allocating it fails, so only a request that is cut to the file can pass.
HUGE_BYTES = 1 << 60
CONTENT = bytes(range(256)) * 5000


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("start", [0, 300, len(CONTENT), len(CONTENT) + 5])
def test_no_more_memory_is_asked_for_than_the_file_has(
    tmp_path: Path, buffering: int, start: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb", buffering=buffering) as file:
        assert read_range(file, start, HUGE_BYTES) == CONTENT[start:]
        file.seek(start)
        assert read_up_to(file, HUGE_BYTES) == CONTENT[start:]


def test_a_stream_without_a_descriptor_is_read_up_to_its_end() -> None:
    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert size <= len(CONTENT)
            return super().read(size)

    assert read_range(Stream(CONTENT), 300, HUGE_BYTES) == CONTENT[300:]


def test_a_short_range_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        assert read_range(file, 10, 5) == CONTENT[10:15]
        file.seek(10)
        assert read_up_to(file, 5) == CONTENT[10:15]
        assert file.tell() == 15


Use = Callable[[Path], object]
PRECIOUS = b"precious line of the victim"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def lock(path: Path) -> None:
    FolderLock.acquire(path.parent)


def new_journal(path: Path) -> None:
    Journal.open(path.with_name(path.name.removesuffix(".new")), "c0ffee", {})


def note_given_back(path: Path) -> None:
    SentRecords(path.parent.parent, int(path.suffix.removeprefix(".")))


# What is opened, by its name.
USES: dict[str, Use] = {
    "lock": lock,
    "journal": read_journal,
    "journal.new": new_journal,
    "weights": lambda path: TargetFile(path, 10),
    "config.json": lambda path: write_files(path.parent, {path.name: b"new"}),
    ".reshard/given_back.0": note_given_back,
    ".reshard/given_back.1": lambda path: list(read_released_ranges(path.parent.parent)),
    ".changes.reshard-partial": lambda path: DeltaWriter(path.with_name("changes")),
    "manifest": open_new,
}


def link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def hard_link(path: Path, precious: Path) -> None:
    os.link(precious, path)


def dangling_link(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("made by whoever follows"))


def pipe(path: Path, precious: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("plant", [link, hard_link, dangling_link, pipe])
def test_planted_files_are_refused(
    tmp_path: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(PRECIOUS)
    path = tmp_path / "staging" / name
    path.parent.mkdir(parents=True)
    plant(path, precious)

    with pytest.raises(RunError, match=r"is (a link|a file with a second|not a regular)(.|\n)*exp"):
        USES[name](path)

    assert precious.read_bytes() == PRECIOUS
    assert not precious.with_name("made by whoever follows").exists()


@as_root
@pytest.mark.parametrize("name", USES)
def test_files_of_another_user_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "staging" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(PRECIOUS)
    os.chown(path, 65534, 65534)
    with pytest.raises(RunError, match="of another user, 65534"):
        USES[name](path)
    assert path.read_bytes() == PRECIOUS


def test_files_sent_to_a_store_are_not_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "staged").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        FileStream(tmp_path / "staged", 0, 6)


@pytest.mark.parametrize(
    "use", [Staging.check, lambda work: work.open("c0ffee", {})], ids=["dry run", "run"]
)
@pytest.mark.parametrize("plant", [link, pipe, dangling_link])
def test_a_planted_staging_folder_is_refused(
    tmp_path: Path, use: Callable[..., object], plant: Callable[[Path, Path], None]
) -> None:
    website = tmp_path / "website"
    (website / "content").mkdir(parents=True)
    (website / "content" / "page").write_text("page")
    (website / "journal.2026").write_text("diary")
    plant(staging_folder(tmp_path / "out"), website)

    with pytest.raises(RunError, match=r"reshard-staging is (a link|not a regular file)"):
        use(Staging(tmp_path / "out"))

    assert (website / "content" / "page").read_text() == "page"
    assert (website / "journal.2026").exists() and not (tmp_path / "out").exists()


@as_root
def test_a_staging_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    root = staging_folder(tmp_path / "out")
    root.mkdir(mode=0o777)
    os.chown(root, 65534, 65534)
    with pytest.raises(RunError, match="is of another user, 65534"):
        Staging(tmp_path / "out").open("c0ffee", {})
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o1777, 0o2775], ids=["sticky", "group-writable"])
def test_shared_parent_folders_are_accepted(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    for resumed in (False, True):
        with Staging(tmp_path / "out").open("c0ffee", {}) as work:
            assert (work.resumed, work.is_untouched) == (resumed, True)
            assert staging_folder(tmp_path / "out").stat().st_mode & 0o777 == 0o700


@as_root
def test_a_file_system_with_one_owner_for_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with squashed root: folders and files made by this process are another user's."""
    make = filesystem.tempfile.mkstemp

    def make_for_nobody(**arguments: Path | str) -> tuple[int, str]:
        descriptor, name = make(**arguments)
        os.fchown(descriptor, 65534, 65534)
        return descriptor, name

    monkeypatch.setattr(filesystem.tempfile, "mkstemp", make_for_nobody)
    folder = tmp_path / "staging"
    folder.mkdir(mode=0o700)
    (folder / "lock").write_text("")
    for path in (folder, folder / "lock"):
        os.chown(path, 65534, 65534)

    state = check_own_folder(folder)
    os.close(open_own(folder / "lock", os.O_RDWR))

    # Nobody is everybody there: staged bytes are compared.
    assert not is_exclusive(state)
    assert os.listdir(tmp_path) == ["staging"]


def test_a_new_folder_is_this_users_alone(tmp_path: Path) -> None:
    assert is_exclusive(make_own_folder(tmp_path / "new"))
    (tmp_path / "old").mkdir(mode=0o755)
    assert not is_exclusive(make_own_folder(tmp_path / "old"))


def test_a_folder_that_replaced_a_locked_folder_is_detected(tmp_path: Path) -> None:
    with Staging(tmp_path / "out").open("c0ffee", {}) as work:
        root = staging_folder(tmp_path / "out")
        root.rename(tmp_path / "moved")
        root.mkdir()
        (root / "content").mkdir()
        with pytest.raises(RunError, match="was replaced by another folder"):
            work.commit()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    filesystem.sync_folder(tmp_path)


def test_a_folder_that_fails_to_sync_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        filesystem.sync_folder(tmp_path)


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        filesystem.sync_folders_under(tmp_path / "missing")


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    with filesystem.FolderLock.acquire(folder):
        with pytest.raises(RunError, match=rf"staging is in use by process {os.getpid()} on "):
            filesystem.FolderLock.acquire(folder)
        assert (folder / "lock").exists()
    filesystem.FolderLock.acquire(folder).close()


def test_the_last_to_hold_it_removes_the_folder(tmp_path: Path) -> None:
    lock = filesystem.FolderLock.acquire(tmp_path / "staging")
    lock.remove_folder()
    assert os.listdir(tmp_path) == []
    lock.close()


def test_a_folder_with_something_in_it_is_not_removed(tmp_path: Path) -> None:
    with filesystem.FolderLock.acquire(tmp_path / "staging") as lock:
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
    with filesystem.FolderLock.acquire(folder):
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
    with filesystem.FolderLock.acquire(folder), pytest.raises(RunError, match="in use"):
        filesystem.FolderLock.acquire(folder)


def test_a_folder_taken_over_while_it_is_removed_is_left_to_its_new_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "staging"
    new_holders: list[filesystem.FolderLock] = []
    lock = filesystem.FolderLock.acquire(folder)
    take_over = lambda: new_holders.append(filesystem.FolderLock.acquire(folder))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", once(take_over, os.rmdir))
        lock.remove_folder()
    with pytest.raises(RunError, match="in use"):
        filesystem.FolderLock.acquire(folder)
    new_holders[0].remove_folder()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_vanishes_every_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", vanish)
    with pytest.raises(RunError, match="removed as often as it is created"):
        filesystem.FolderLock.acquire(tmp_path / "staging")


def test_a_name_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "staging").touch()
    with pytest.raises(RunError, match="staging is a file"):
        filesystem.FolderLock.acquire(tmp_path / "staging")


def test_files_of_metadata_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    with pytest.raises(CheckpointError, match=r"index\.json is missing"):
        filesystem.read_file(path, 100)
    path.write_text('{"a": 1}')
    assert filesystem.read_file(path, 8) == b'{"a": 1}'
    assert filesystem.read_file_range(path, 2, 3, 3) == b'a":'
    with pytest.raises(FormatError, match="more than 7 bytes"):
        filesystem.read_file(path, 7)
    with pytest.raises(FormatError, match="4 bytes should be read at once, 3 are the most"):
        filesystem.read_file_range(path, 2, 4, 3)
    with pytest.raises(FormatError, match=r"ends at byte 8, 3 bytes at 6 were expected"):
        filesystem.read_file_range(path, 6, 3, 3)
    with pytest.raises(CheckpointError, match=r"cannot read .*Is a directory"):
        filesystem.read_file(tmp_path, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "is not a JSON object, but a list"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"\xff", "is not JSON: .*utf-8"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_other_content_than_a_json_object_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        filesystem.read_json_object(tmp_path / "index.json", 1 << 20)


def test_of_equal_keys_of_a_config_the_last_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert filesystem.read_json_file(path) is None
    path.write_text('{"hidden_size": 1, "hidden_size": 2}')
    assert filesystem.read_json_file(path) == {"hidden_size": 2}
    path.write_text('{"hidden_size": 1')
    with pytest.raises(FormatError, match=r"config\.json is not JSON"):
        filesystem.read_json_file(path)
