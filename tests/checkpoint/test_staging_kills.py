"""At every moment the target is the whole old checkpoint or the whole new.

A small conversion is ended just before (or, for a write, in the middle of) its n-th system
call that changes something, for every n; what is left is looked at and the run is repeated.
"""

from __future__ import annotations

import errno
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from checkpoint.killed_conversion import can_exchange_names
from checkpoint.small_conversion import (
    LEAVINGS,
    NEW,
    OLD,
    OTHER,
    Machine,
    append_blocks,
    assert_done,
    convert,
    digest,
    error_of,
    files_in,
    scenario,
    start,
    write_files,
)
from reshard.checkpoint.conversion import staging
from reshard.checkpoint.conversion.staging import Staging, staging_folder
from reshard.checkpoint.options import RunOptions
from reshard.errors import ReshardError, RunError, UsageError
from selection import choose


@pytest.fixture(params=[True, False], ids=["exchange", "move aside"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param and not can_exchange_names():
        pytest.skip("names cannot be swapped here")
    return Machine(monkeypatch, can_exchange=request.param)


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
            left = [name for name in LEAVINGS if (staging_folder(target) / name).exists()]
            if seen == NEW and left:
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
        # By default every other pair, like the squares of one color on a chessboard.
        for second in range(choose(first % 2, 0), 1000, choose(2, 1)):
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
            with Staging(target, RunOptions(overwrite=True)).open("new", {}) as work:
                write_files(work.content, {"weights-0": b"new 0"})
                append_blocks(work.journal, [(0, 0, digest(b"new 0"))])
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

    with Staging(target, RunOptions(overwrite=True)).open("new", {}) as work:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "exchange_names", lambda *_: False)
            patch.setattr(os, "rename", move_aside_only)
            with pytest.raises(RunError, match="Input/output error"):
                work.commit()
        assert not target.exists()
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


@pytest.mark.parametrize(
    ("call", "occurrence"),
    [("sync_data", 1), ("sync_data", 2), ("exchange_names", 1), ("unlink", 1), ("rmdir", 1)],
)
def test_a_process_that_is_really_killed(tmp_path: Path, call: str, occurrence: int) -> None:
    """SIGKILL right after the named call has been made for the given time."""
    target = tmp_path / "checkpoint"
    write_files(target, OLD)
    killed = start(
        """
        import os, signal, sys
        from pathlib import Path
        import numpy as np
        from reshard.checkpoint.conversion import journal, staging
        from reshard.checkpoint.options import RunOptions
        target, call, occurrence = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
        owners = {"exchange_names": staging, "sync_data": journal}
        owner, name = owners.get(call, os), call
        real, count = getattr(owner, name), 0
        def call_and_die(*arguments, **keywords):
            global count
            answer = real(*arguments, **keywords)
            count += 1
            if count == occurrence:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        opened = staging.Staging(target, RunOptions(overwrite=True))
        with opened.open("new", {"identity": "new"}) as work:
            setattr(owner, name, call_and_die)
            (work.content / "weights-0").write_bytes(b"new 0")
            digest = b"new 0".ljust(16, b".")
            work.journal.append_blocks(np.array([0]), np.array([0]), digest)
            (work.content / "reshard.manifest.json").write_bytes(b"{ }")
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
    is_old = call == "sync_data" or (call == "exchange_names" and not can_exchange_names())
    assert files_in(target) == (OLD if is_old else NEW)

    convert(target, overwrite=True)

    assert_done(target)


@pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "old"])
def test_a_target_that_is_a_file_killed_at_any_call(
    tmp_path: Path, machine: Machine, old: bytes | None
) -> None:
    """The target is the whole old file or the whole new; nothing else of the content is left."""
    overwrite = old is not None
    for calls in range(1000):
        with scenario(tmp_path, calls, None) as target:
            if old is not None:
                target.write_bytes(old)
            again = partial(convert, target, overwrite=overwrite, file="weights-0")
            ended = machine.run(again, calls)
            seen = target.read_bytes() if target.exists() else None
            assert seen in (old, b"new 0")
            if not ended:
                left = any((staging_folder(target) / name).exists() for name in LEAVINGS)
                if seen == b"new 0" and not overwrite and not left:
                    with pytest.raises(UsageError):
                        again()
                elif seen == b"new 0" and left:
                    assert again() is False
                else:
                    again()
            assert target.read_bytes() == b"new 0"
            assert os.listdir(target.parent) == [target.name]
            if ended:
                break
    assert calls > 15


def test_a_file_and_a_folder_do_not_replace_each_other(tmp_path: Path) -> None:
    write_files(tmp_path / "folder", OLD)
    with pytest.raises(UsageError, match="the target is not a file"):
        convert(tmp_path / "folder", overwrite=True, file="weights-0")
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(UsageError, match="the target is a file"):
        convert(tmp_path / "file", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
