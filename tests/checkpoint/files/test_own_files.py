"""Files that this package makes by names that others can guess: links and other owners are refused.

Each place that writes, truncates, locks or deletes by such a name is tried with what another user
of a shared folder can put there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.checkpoint.conversion.journal import Journal, read_journal
from reshard.checkpoint.conversion.staging import Staging, check_target, staging_folder
from reshard.checkpoint.deltas.delta_file import DeltaWriter
from reshard.checkpoint.files import own_files
from reshard.checkpoint.files.folders import FolderLock, write_files
from reshard.checkpoint.files.own_files import (
    expect_own_folder,
    is_exclusive,
    make_own_folder,
    open_new,
    open_own,
)
from reshard.checkpoint.files.places.spool import GivenBack, read_given_back
from reshard.checkpoint.files.places.stores.object_target import FileStream
from reshard.checkpoint.files.target_file import TargetFile
from reshard.errors import RunError

Use = Callable[[Path], object]
PRECIOUS = b"precious line of the victim"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def lock(path: Path) -> None:
    FolderLock.acquire(path.parent)


def new_journal(path: Path) -> None:
    Journal.open(path.with_name(path.name.removesuffix(".new")), "c0ffee", {})


def note_given_back(path: Path) -> None:
    GivenBack(path.parent.parent, int(path.suffix.removeprefix(".")))


# What is opened, by its name.
USES: dict[str, Use] = {
    "lock": lock,
    "journal": read_journal,
    "journal.new": new_journal,
    "weights": lambda path: TargetFile(path, 10),
    "config.json": lambda path: write_files(path.parent, {path.name: b"new"}),
    ".reshard/given_back.0": note_given_back,
    ".reshard/given_back.1": lambda path: list(read_given_back(path.parent.parent)),
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


def test_what_is_sent_to_a_store_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "staged").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        FileStream(tmp_path / "staged", 0, 6)


@pytest.mark.parametrize("use", [check_target, Staging.open], ids=["dry run", "run"])
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
        use(tmp_path / "out", False, False) if use is check_target else use(
            tmp_path / "out", "c0ffee", {}
        )

    assert (website / "content" / "page").read_text() == "page"
    assert (website / "journal.2026").exists() and not (tmp_path / "out").exists()


@as_root
def test_a_staging_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    root = staging_folder(tmp_path / "out")
    root.mkdir(mode=0o777)
    os.chown(root, 65534, 65534)
    with pytest.raises(RunError, match="is of another user, 65534"):
        Staging.open(tmp_path / "out", "c0ffee", {})
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o1777, 0o2775], ids=["sticky", "group-writable"])
def test_shared_parents_are_no_reason_to_refuse(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    for resumed in (False, True):
        with Staging.open(tmp_path / "out", "c0ffee", {}) as work:
            assert (work.resumed, work.is_untouched) == (resumed, True)
            assert staging_folder(tmp_path / "out").stat().st_mode & 0o777 == 0o700


@as_root
def test_a_file_system_that_gives_all_files_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with squashed root: folders and files made by this process are another user's."""
    make = own_files.tempfile.mkstemp

    def make_for_nobody(**arguments: Path | str) -> tuple[int, str]:
        descriptor, name = make(**arguments)
        os.fchown(descriptor, 65534, 65534)
        return descriptor, name

    monkeypatch.setattr(own_files.tempfile, "mkstemp", make_for_nobody)
    folder = tmp_path / "staging"
    folder.mkdir(mode=0o700)
    (folder / "lock").write_text("")
    for path in (folder, folder / "lock"):
        os.chown(path, 65534, 65534)

    state = expect_own_folder(folder)
    os.close(open_own(folder / "lock", os.O_RDWR))

    # Nobody is everybody there: staged bytes are compared.
    assert not is_exclusive(state)
    assert os.listdir(tmp_path) == ["staging"]


def test_a_new_folder_is_this_users_alone(tmp_path: Path) -> None:
    assert is_exclusive(make_own_folder(tmp_path / "new"))
    (tmp_path / "old").mkdir(mode=0o755)
    assert not is_exclusive(make_own_folder(tmp_path / "old"))


def test_a_folder_that_took_the_place_of_a_locked_one(tmp_path: Path) -> None:
    with Staging.open(tmp_path / "out", "c0ffee", {}) as work:
        root = staging_folder(tmp_path / "out")
        root.rename(tmp_path / "moved")
        root.mkdir()
        (root / "content").mkdir()
        with pytest.raises(RunError, match="another folder took the place"):
            work.commit()
    assert not (tmp_path / "out").exists()
