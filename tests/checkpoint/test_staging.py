"""The staging folder: at every moment the target is the whole old checkpoint or the whole new.

Most tests here run a small conversion on a `Machine`, which ends it just before (or, for a
write, in the middle of) its n-th system call that changes something, for every n, and look at
what is left.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint import durability, staging
from reshard.checkpoint.journal import Commit
from reshard.checkpoint.staging import Staging, staging_folder
from reshard.errors import ReshardError, RunError, UsageError

OLD = {"weights": b"old weights", "config.json": b"{}", "inner/tokenizer": b"old words"}
NEW = {"weights-0": b"new 0", "weights-1": b"new 1", "inner/tokenizer": b"new words"}
OTHER = {"other": b"another conversion's"}
CHANGING_CALLS = ["mkdir", "rename", "unlink", "rmdir", "fsync", "fdatasync", "ftruncate"]


# The caller's own way to make folders, which no machine counts.
make_folder = os.mkdir


class Killed(BaseException):
    """The end of the process: no handler of errors runs."""


class Machine:
    """Runs code up to its n-th changing system call, then lets nothing more be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
        self.calls_left = 10**9
        self.calls: list[str] = []
        exchange = staging.exchange_folders
        pwrite = os.pwrite

        def torn_pwrite(descriptor: int, data: bytes, offset: int) -> int:
            if self.calls_left == 0:
                pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
            self.count("pwrite")
            return pwrite(descriptor, data, offset)

        def counted_exchange(first: Path, second: Path) -> bool:
            if not can_exchange:
                return False
            self.count("exchange")
            return exchange(first, second)

        for name in CHANGING_CALLS:
            # Syncing takes long and shows nothing here: a call to count, not to make.
            real = getattr(os, name) if "sync" not in name else lambda *_: None
            monkeypatch.setattr(os, name, self.counted(name, real))
        monkeypatch.setattr(os, "pwrite", torn_pwrite)
        monkeypatch.setattr(staging, "exchange_folders", counted_exchange)

    def counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.count(name)
            return real(*arguments, **keywords)

        return call

    def count(self, name: str) -> None:
        if self.calls_left == 0:
            raise Killed(name)
        self.calls_left -= 1
        self.calls.append(name)

    def run(self, code: Callable[[], object], calls: int | None = None) -> bool:
        """Whether `code` came to its end within so many calls (None: as many as it takes)."""
        self.calls = []
        self.calls_left = 10**9 if calls is None else calls
        try:
            code()
        except Killed:
            return False
        else:
            return True
        finally:
            self.calls_left = 10**9


@pytest.fixture(params=[True, False], ids=["exchange", "move aside"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, can_exchange=request.param)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        for parent in reversed((folder / name).parents):
            if not parent.is_dir():
                make_folder(parent)
        (folder / name).write_bytes(data)


def files_in(folder: Path) -> dict[str, bytes] | None:
    """What a reader sees; None where there is nothing."""
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def digest(data: bytes) -> bytes:
    return data[:16].ljust(16, b".")


def convert(
    target: Path, files: dict[str, bytes] = NEW, identity: str = "new", **options: bool
) -> bool:
    """A conversion in which each file is one block, and recorded blocks are not written again.

    Answers whether there was anything to do.
    """
    with Staging.open(target, identity, {"identity": identity}, **options) as work:
        if work.already_complete:
            return False
        for index, (name, data) in enumerate(files.items()):
            if (index, 0) in work.journal.finished:
                assert work.journal.finished[index, 0] == digest(data)
                assert (work.content / name).read_bytes() == data
                continue
            write_files(work.content, {name: data})
            work.journal.append_blocks([(index, 0, digest(data))])
        work.commit()
        return True


@contextmanager
def scenario(parent: Path, number: object, old: dict[str, bytes] | None) -> Iterator[Path]:
    """A folder of its own with the old target in it."""
    folder = parent / str(number)
    folder.mkdir()
    target = folder / "checkpoint"
    if old is not None:
        write_files(target, old)
    yield target


def error_of(code: Callable[[], object]) -> Exception | None:
    try:
        code()
    except Exception as error:
        return error
    return None


def assert_done(target: Path) -> None:
    assert files_in(target) == NEW
    assert os.listdir(target.parent) == [target.name]


def test_a_new_target_appears(tmp_path: Path) -> None:
    convert(tmp_path / "checkpoint")
    assert_done(tmp_path / "checkpoint")


def test_an_old_target_is_replaced(tmp_path: Path, machine: Machine) -> None:
    write_files(tmp_path / "checkpoint", OLD)
    assert machine.run(lambda: convert(tmp_path / "checkpoint", overwrite=True))
    assert_done(tmp_path / "checkpoint")
    assert ("exchange" in machine.calls) == (machine.calls.count("rename") == 1)


@pytest.mark.parametrize("old", [None, OLD], ids=["absent", "old"])
def test_killed_at_any_call_then_run_again(
    tmp_path: Path, machine: Machine, old: dict[str, bytes] | None
) -> None:
    overwrite = old is not None
    absences = 0
    for calls in range(1000):
        with scenario(tmp_path, calls, old) as target:
            ended = machine.run(partial(convert, target, overwrite=overwrite), calls)
            seen = files_in(target)
            if overwrite and seen is None:
                # Only between the two renames of a file system that cannot exchange.
                absences += 1
                assert files_in(staging_folder(target) / "previous") == OLD
            else:
                assert seen in (old, NEW)
            if ended:
                assert_done(target)
                break
            if seen == NEW and (staging_folder(target) / "journal").exists():
                assert convert(target, overwrite=overwrite) is False
            elif seen == NEW and not overwrite:
                # The last thing left was to remove an emptied staging folder.
                with pytest.raises(UsageError):
                    convert(target)
            else:
                convert(target, overwrite=overwrite)
            assert_done(target)
    assert calls > 15
    assert absences == ("exchange" not in machine.calls and overwrite)


def test_killed_twice_at_any_two_calls(tmp_path: Path, machine: Machine) -> None:
    """Recovery is killed too: from the commit record on, at every pair of calls."""
    with scenario(tmp_path, "whole", OLD) as target:
        machine.run(partial(convert, target, overwrite=True))
        first_kill = len(machine.calls) - machine.calls[::-1].index("pwrite")
        total = len(machine.calls)
    for first in range(first_kill, total):
        for second in range(1000):
            with scenario(tmp_path, f"{first}-{second}", OLD) as target:
                again = partial(convert, target, overwrite=True)
                assert not machine.run(again, first)
                ended = machine.run(again, second)
                assert files_in(target) in (OLD, NEW, None)
                convert(target, overwrite=True)
                assert_done(target)
                if ended:
                    break


def test_killed_at_any_call_then_another_conversion_asked(tmp_path: Path, machine: Machine) -> None:
    refused = finished = 0
    for calls in range(1000):
        with scenario(tmp_path, calls, OLD) as target:
            ended = machine.run(
                partial(convert, target, OTHER, "other", overwrite=True),
                calls,
            )
            if ended:
                break
            before = files_in(target)
            error = error_of(partial(convert, target, overwrite=True))
            if error is None:
                finished += 1
            else:
                refused += 1
                assert isinstance(error, RunError)
                assert "identity: then 'other', now 'new'" in str(error)
                assert before == files_in(target) == OLD
                convert(target, overwrite=True, restart=True)
            assert_done(target)
    assert refused >= 3
    assert finished >= 3


def test_killed_at_any_call_then_another_conversion_without_leave_to_overwrite(
    tmp_path: Path, machine: Machine
) -> None:
    for calls in range(1000):
        with scenario(tmp_path, calls, OLD) as target:
            if machine.run(partial(convert, target, overwrite=True), calls):
                break
            before = files_in(target)
            with pytest.raises(ReshardError):
                convert(target, OTHER, "other")
            # What was committed with leave to replace is finished; nothing else is touched.
            assert files_in(target) in ([OLD, NEW] if before == OLD else [NEW])
            convert(target, overwrite=True)
            assert_done(target)


def test_a_restart_killed_at_any_call(tmp_path: Path, machine: Machine) -> None:
    """Whatever is thrown away half, no block that is gone is believed to be finished."""
    for calls in range(1000):
        with scenario(tmp_path, calls, OLD) as target:
            with Staging.open(target, "new", {}, overwrite=True) as work:
                write_files(work.content, {"weights-0": b"new 0"})
                work.journal.append_blocks([(0, 0, digest(b"new 0"))])
            restart = partial(convert, target, overwrite=True, restart=True)
            ended = machine.run(restart, calls)
            assert files_in(target) in (OLD, NEW, None)
            if ended:
                assert_done(target)
                break
            convert(target, overwrite=True)
            assert_done(target)


@pytest.fixture
def moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose run was killed between the two renames that replace it."""
    with monkeypatch.context() as patch:
        machine = Machine(patch, can_exchange=False)
        with scenario(tmp_path, "whole", OLD) as target:
            machine.run(partial(convert, target, overwrite=True))
        last_rename = len(machine.calls) - 1 - machine.calls[::-1].index("rename")
        with scenario(tmp_path, "killed", OLD) as target:
            machine.run(partial(convert, target, overwrite=True), last_rename)
    assert not target.exists()
    assert files_in(staging_folder(target) / "previous") == OLD
    return target


def test_a_restart_brings_an_old_target_back_that_was_moved_aside(moved_aside: Path) -> None:
    with pytest.raises(UsageError, match="the target exists"):
        convert(moved_aside, restart=True)
    assert files_in(moved_aside) == OLD
    convert(moved_aside, overwrite=True, restart=True)
    assert_done(moved_aside)


def test_a_target_that_appeared_after_the_old_was_moved_aside(
    moved_aside: Path, machine: Machine
) -> None:
    write_files(moved_aside, OTHER)
    convert(moved_aside, overwrite=True)
    assert_done(moved_aside)


def test_discard_after_a_commit_that_could_not_even_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old target is in the staging folder, and must not be thrown away with it."""
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    rename = os.rename

    def move_aside_only(source: Path, destination: Path) -> None:
        if destination == target:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    with Staging.open(target, "new", {}, overwrite=True) as work:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "exchange_folders", lambda *_: False)
            patch.setattr(os, "rename", move_aside_only)
            with pytest.raises(RunError, match="Input/output error"):
                work.commit()
        assert not target.exists()
        work.discard()
    assert files_in(target) == OLD
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_resumed_run_knows_what_is_finished(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        assert (work.resumed, work.already_complete) == (False, False)
        write_files(work.content, {"weights-0": b"new 0"})
        work.journal.append_blocks([(0, 0, digest(b"new 0"))])
    assert not target.exists()

    with Staging.open(target, "new", {}) as work:
        assert (work.resumed, work.already_complete) == (True, False)
        assert dict(work.journal.finished) == {(0, 0): digest(b"new 0")}
        assert files_in(work.content) == {"weights-0": b"new 0"}


def test_a_commit_that_recovery_finishes_is_told(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        write_files(work.content, NEW)
        work.journal.append_commit(Commit(work.content.stat().st_ino, replaces=False))

    with Staging.open(target, "new", {}) as work:
        assert work.already_complete and not work.resumed
        with pytest.raises(RunError, match="already_complete"):
            _ = work.journal
    assert_done(target)


def test_a_commit_whose_folder_is_gone_is_not_guessed_at(tmp_path: Path) -> None:
    """Swapped, killed, and the new target moved away by hand: what is staged is the old one."""
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        write_files(work.content, OLD)
        work.journal.append_commit(Commit(inode=work.content.stat().st_ino + 1, replaces=True))

    with pytest.raises(RunError, match=r"it is gone(.|\n)*--restart"):
        convert(target, overwrite=True)

    assert files_in(staging_folder(target) / "content") == OLD
    convert(target, restart=True)
    assert_done(target)


def test_staged_files_that_vanished_are_not_resumed(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        work.journal.append_blocks([(0, 0, bytes(16))])
        work.content.rmdir()
    with pytest.raises(RunError, match=r"staged files are gone(.|\n)*--restart"):
        convert(target)


def test_a_damaged_journal_needs_a_restart(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        path = work.journal.path
    path.write_bytes(b"\0" * 100)
    with pytest.raises(RunError, match=r"damaged(.|\n)*--restart"):
        convert(target)
    convert(target, restart=True)
    assert_done(target)


def test_an_existing_target_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_files(tmp_path / "checkpoint", OLD)
    with pytest.raises(UsageError, match=r"the target exists(.|\n)*--overwrite"):
        convert(tmp_path / "checkpoint")
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert files_in(tmp_path / "checkpoint") == OLD


def test_a_refusal_keeps_what_an_earlier_run_staged(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    with Staging.open(target, "new", {"identity": "new"}, overwrite=True) as work:
        write_files(work.content, {"weights-0": b"new 0"})
        work.journal.append_blocks([(0, 0, digest(b"new 0"))])
    for restart in (False, True):
        with pytest.raises(UsageError, match="the target exists"):
            convert(target, restart=restart)
    with Staging.open(target, "new", {"identity": "new"}, overwrite=True) as work:
        assert list(work.journal.finished) == [(0, 0)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_is_a_file_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"data")
    with pytest.raises(UsageError, match="the target is a file"):
        convert(tmp_path / "model.safetensors", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_missing_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"parent is not a folder: .*missing"):
        convert(tmp_path / "missing" / "checkpoint")
    assert os.listdir(tmp_path) == []


def test_a_mounted_target_is_refused() -> None:
    with pytest.raises(UsageError, match="mounted: /"):
        convert(Path("/"), overwrite=True)


@pytest.mark.parametrize("refused", ["parent", "target"])
def test_a_folder_without_leave_to_write_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    write_files(tmp_path / "checkpoint", OLD)
    folder = tmp_path if refused == "parent" else tmp_path / "checkpoint"
    # The user who runs the tests may be one to whom no permission is ever denied.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != folder)
    with pytest.raises(RunError, match=f"cannot write to {folder}\n"):
        convert(tmp_path / "checkpoint", overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_link_to_a_folder_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_files(tmp_path / "elsewhere" / "checkpoint", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "checkpoint")
    convert(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert_done(tmp_path / "elsewhere" / "checkpoint")


def test_a_target_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {"identity": "new"}) as work:
        for index, (name, data) in enumerate(NEW.items()):
            write_files(work.content, {name: data})
            work.journal.append_blocks([(index, 0, digest(data))])
        write_files(target, OLD)
        with pytest.raises(RunError, match="appeared during the run"):
            work.commit()
    assert files_in(target) == OLD
    convert(target, overwrite=True)
    assert_done(target)


def test_a_target_that_appears_after_the_commit_record_is_not_replaced_unasked(
    tmp_path: Path,
) -> None:
    target = tmp_path / "checkpoint"
    with Staging.open(target, "new", {}) as work:
        write_files(work.content, NEW)
        work.journal.append_commit(Commit(work.content.stat().st_ino, replaces=False))
    write_files(target, OLD)
    with pytest.raises(UsageError, match="the target exists"):
        convert(target)
    assert files_in(target) == OLD
    convert(target, overwrite=True)
    assert_done(target)


def test_discard_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    with Staging.open(target, "new", {}, overwrite=True) as work:
        write_files(work.content, NEW)
        work.discard()
    assert files_in(target) == OLD
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_every_refused_call_is_an_error_of_ours_and_loses_nothing(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kill at every call, but the system refuses it and the run goes on to its error."""

    def refuse(name: str) -> None:
        if machine.calls_left == 0:
            machine.calls_left = 10**9
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        count(name)

    count = machine.count
    monkeypatch.setattr(machine, "count", refuse)
    for calls in range(1000):
        with scenario(tmp_path, calls, OLD) as target:
            refused: list[str] = []
            machine.calls_left = calls
            error = error_of(partial(convert, target, overwrite=True))
            machine.calls_left = 10**9
            if not refused:
                break
            assert isinstance(error, RunError)
            assert "No space left on device" in str(error)
            assert str(target.parent) in str(error)
            assert files_in(target) in (OLD, NEW)
            convert(target, overwrite=True)
            assert_done(target)
    assert calls > 15


def test_everything_is_synced_before_the_next_step_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, fdatasync, exchange, rmtree = (
        os.fsync,
        os.fdatasync,
        staging.exchange_folders,
        durability.shutil.rmtree,
    )

    def name_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix()

    def note(event: Callable[..., str], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(event(*arguments))
            return real(*arguments)

        return call

    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    monkeypatch.setattr(os, "fsync", note(lambda fd: f"sync {name_of(fd)}", fsync))
    monkeypatch.setattr(os, "fdatasync", note(lambda fd: f"sync {name_of(fd)}", fdatasync))
    monkeypatch.setattr(os, "rename", note(lambda _, new: f"rename to {new.name}", os.rename))
    monkeypatch.setattr(staging, "exchange_folders", note(lambda *_: "exchange", exchange))
    monkeypatch.setattr(durability.shutil, "rmtree", note(lambda p: f"delete {p.name}", rmtree))
    root = ".checkpoint.reshard-staging"

    with Staging.open(target, "new", {}, overwrite=True) as work:
        assert events[-4:] == [
            "sync .",
            f"sync {root}/journal.new",
            "rename to journal",
            f"sync {root}",
        ]
        write_files(work.content, NEW)
        events.clear()
        work.commit()

    assert events == [
        f"sync {root}/content",
        f"sync {root}/content/inner",
        f"sync {root}/journal",
        "exchange",
        "sync .",
        f"sync {root}",
        "delete content",
    ]


def test_descriptors_and_lock_are_let_go(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    target = tmp_path / "checkpoint"
    before = descriptors()
    with pytest.raises(ZeroDivisionError), Staging.open(target, "new", {}):
        raise ZeroDivisionError
    assert descriptors() == before
    with pytest.raises(RunError):
        Staging.open(target, "other", {})
    assert descriptors() == before
    with Staging.open(target, "new", {}) as work:
        work.commit()
    assert descriptors() == before


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_second_process_is_told_who_holds_the_target(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    holder = start(
        """
        import sys
        from pathlib import Path
        from reshard.checkpoint.staging import Staging
        with Staging.open(Path(sys.argv[1]), "new", {}):
            print("ready", flush=True)
            sys.stdin.read()
        """,
        target,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        for restart in (False, True):
            with pytest.raises(RunError, match=rf"in use by process {holder.pid} on \S+\n"):
                convert(target, restart=restart)
        assert (staging_folder(target) / "journal").exists()
    finally:
        holder.kill()
        holder.communicate()

    with Staging.open(target, "new", {}) as work:
        assert work.resumed


@pytest.mark.parametrize(
    ("call", "occurrence"),
    [("fdatasync", 1), ("fdatasync", 2), ("exchange", 1), ("unlink", 1), ("rmdir", 1)],
)
def test_a_process_that_is_really_killed(tmp_path: Path, call: str, occurrence: int) -> None:
    """SIGKILL right after the named call has been made for the given time."""
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    killed = start(
        """
        import os, signal, sys
        from pathlib import Path
        from reshard.checkpoint import staging
        target, call, occurrence = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        owner, name = (staging, "exchange_folders") if call == "exchange" else (os, call)
        real, count = getattr(owner, name), 0
        def call_and_die(*arguments, **keywords):
            global count
            answer = real(*arguments, **keywords)
            count += 1
            if count == occurrence:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        with staging.Staging.open(target, "new", {"identity": "new"}, overwrite=True) as work:
            setattr(owner, name, call_and_die)
            (work.content / "weights-0").write_bytes(b"new 0")
            work.journal.append_blocks([(0, 0, b"new 0".ljust(16, b"."))])
            (work.content / "weights-1").write_bytes(b"new 1")
            (work.content / "inner").mkdir()
            (work.content / "inner" / "tokenizer").write_bytes(b"new words")
            work.commit()
        """,
        target,
        call,
        occurrence,
    )
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert staging_folder(target).exists()
    assert files_in(target) == (OLD if call == "fdatasync" else NEW)

    convert(target, overwrite=True)

    assert_done(target)
