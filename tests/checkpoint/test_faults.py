"""What can go wrong while a conversion runs: it says so, harms nothing, and can go on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard.checkpoint import (
    ConversionReport,
    convert,
    plan_conversion,
    read_tensor,
    run_conversion,
)
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.checkpoint.manifest import MANIFEST_NAME
from reshard.checkpoint.storage.local_files import TargetFile
from reshard.errors import InterruptedRunError, RunError, SourceChangedError, UsageError
from selection import choose, keep_covering

BLOCK_BYTES = 64 * 1024
CHANGING_CALLS = (
    "pwritev",
    "pwrite",
    "fdatasync",
    "fsync",
    "rename",
    "mkdir",
    "ftruncate",
    "posix_fallocate",
)


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of shards, which no test changes."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
        convert(write_model(folder / "whole"), folder / "source", **ROWS)
    return folder / "source"


@pytest.fixture
def source(made: Path) -> Path:
    return made


@pytest.fixture
def changing(made: Path, tmp_path: Path) -> Path:
    """A copy, for the tests that change their source."""
    return Path(shutil.copytree(made, tmp_path / "source"))


@pytest.fixture(scope="module")
def expected(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str] | None:
    """The files of an undisturbed conversion."""
    target = tmp_path_factory.mktemp("expected") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
        run(made, target)
    return contents(target)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An old target, which the runs may replace."""
    folder = tmp_path / "place" / "target"
    folder.mkdir(parents=True)
    (folder / "old.safetensors").write_bytes(bytes(1000))
    (folder / MANIFEST_NAME).write_text("{}")
    return folder


@pytest.fixture
def old(target: Path) -> dict[str, str] | None:
    return contents(target)


def run(source: Path, target: Path, **options: Any) -> ConversionReport:
    options = {"overwrite": True, "sync_bytes": 4 * BLOCK_BYTES, **options}
    return run_conversion(plan_conversion(source, target, **COLUMNS), **options)


class Calls:
    """Counts the calls of some functions of `os`, and does something else instead of one."""

    def __init__(self, patch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.count = 0
        self.instead: Callable[[str], None] = lambda name: None
        self._lock = threading.Lock()
        for name in names:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def fail(self, number: int, error: int, times: int = 10**9) -> Calls:
        """Let `times` calls from `number` on fail."""
        self.count = 0

        def instead(name: str) -> None:
            if number <= self.count - 1 < number + times:
                raise OSError(error, os.strerror(error))

        self.instead = instead
        return self

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                self.count += 1
                self.instead(name)
            return real(*arguments, **keywords)

        return call


@pytest.mark.parametrize(
    ("error", "number"),
    keep_covering(
        1,
        itertools.product((errno.ENOSPC, errno.EDQUOT, errno.EIO), (0, 1, 2, 5, 40, 90)),
        "every error at every call; each error and each call is in a default case",
    ),
)
def test_no_more_can_be_written(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: int,
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, ("pwritev",)).fail(number, error)
        with pytest.raises(RunError, match=os.strerror(error)) as caught:
            run(source, target, threads=1)  # so that the calls come in one order
    assert str(staging_folder(target)) in str(caught.value)
    assert "it continues" in str(caught.value)
    assert contents(target) == old

    report = run(source, target)

    assert contents(target) == expected
    assert os.listdir(target.parent) == [target.name]
    assert (report.resumed_bytes > 0) == (number > 4)


def test_any_call_that_is_refused_once(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        calls = Calls(patch, CHANGING_CALLS)
        run(source, target)
        total = calls.count
    for number in [*range(0, total - 12, choose(41, 11)), *range(total - 12, total)]:
        shutil.rmtree(target)
        target.mkdir()
        (target / "old.safetensors").write_bytes(bytes(1000))
        (target / MANIFEST_NAME).write_text("{}")
        with monkeypatch.context() as patch:
            Calls(patch, CHANGING_CALLS).fail(number, errno.EIO, times=1)
            # Some refusals have another way out, and the last calls only tidy up.
            with contextlib.suppress(RunError):
                run(source, target)
        assert contents(target) in (old, expected)
        if contents(target) == old:
            run(source, target)
        assert contents(target) == expected
        if staging_folder(target).exists():
            assert run(source, target).was_complete
        assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_failed_sync_says_nothing_about_the_data_before_it(
    source: Path,
    target: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """After it the system has thrown the data away, and the next sync succeeds."""
    written: list[tuple[TargetFile, int, int]] = []
    write, sync, count = TargetFile.write, TargetFile.sync, 0

    def noted_write(file: TargetFile, region: memoryview, offset_bytes: int) -> None:
        write(file, region, offset_bytes)
        written.append((file, offset_bytes, region.nbytes))

    def failing_sync(file: TargetFile) -> None:
        nonlocal count
        count += 1
        if count <= 2 or count - 3 != number:
            sync(file)
            written[:] = [entry for entry in written if entry[0] is not file]
            return
        for lost_file, offset_bytes, size_bytes in list(written):
            if lost_file is file:
                write(file, memoryview(bytes(size_bytes)), offset_bytes)
        raise RunError(f"{file.path}: cannot sync: lost")

    with monkeypatch.context() as patch:
        patch.setattr(TargetFile, "write", noted_write)
        patch.setattr(TargetFile, "sync", failing_sync)
        with pytest.raises(RunError, match="cannot sync: lost"):
            run(source, target, threads=1)

    run(source, target)

    assert contents(target) == expected


@pytest.mark.parametrize("number", [0, 20, 60])
def test_a_source_that_cannot_be_read(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, ("preadv",)).fail(number, errno.EIO)
        with pytest.raises(RunError, match="cannot read") as caught:
            run(source, target)
    assert f"{source}{os.sep}shard-" in str(caught.value)
    assert contents(target) == old
    run(source, target)
    assert contents(target) == expected


def at_progress(action: Callable[[], None], at_bytes: int = 1_000_000) -> Callable[[Any], None]:
    """Progress that acts once, when so much is done."""
    is_done = []

    def progress(progress: Any) -> None:
        if progress.done_bytes >= at_bytes and not is_done:
            is_done.append(True)
            action()

    return progress


def shard(source: Path) -> Path:
    return max(source.glob("*.safetensors"))


def shrink(source: Path) -> None:
    os.truncate(shard(source), 10_000)


def grow(source: Path) -> None:
    with shard(source).open("ab") as file:
        file.write(b"more")


def touch(source: Path) -> None:
    os.utime(shard(source), ns=(1, 1))


def copy_over(source: Path) -> None:
    """The same bytes and times in another file."""
    shutil.copy2(shard(source), source / "copy")
    os.replace(source / "copy", shard(source))


def interrupt() -> None:
    raise KeyboardInterrupt


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("change", [shrink, grow, touch])
def test_a_source_that_changes_during_the_run(
    changing: Path, target: Path, old: dict[str, str], change: Callable[[Path], None]
) -> None:
    progress = at_progress(lambda: change(changing))
    with pytest.raises(SourceChangedError) as caught:
        run(changing, target, threads=1, progress=progress)
    assert str(shard(changing)) in str(caught.value)
    assert contents(target) == old
    assert staging_folder(target).exists()


@pytest.mark.parametrize(("change", "named"), [(touch, "modified_ns"), (copy_over, "inode")])
def test_a_source_that_changed_between_two_runs(
    changing: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    change: Callable[[Path], None],
    named: str,
) -> None:
    with pytest.raises(InterruptedRunError):
        run(changing, target, progress=at_progress(interrupt))
    change(changing)

    with pytest.raises(RunError) as caught:
        run(changing, target)

    assert f"source files.{shard(changing).name}.{named}: then" in str(caught.value)
    assert "--restart" in str(caught.value)
    assert contents(target) == old
    assert run(changing, target, restart=True).resumed_bytes == 0
    assert {*(contents(target) or {})} == {*expected}


def replace(source: Path) -> None:
    """Another file gets the name."""
    write_model(source.parent / "other", rows=2)
    convert(source.parent / "other", source.parent / "other rows", **ROWS)
    os.replace(shard(source.parent / "other rows"), shard(source))


def overwrite_in_place(source: Path) -> None:
    data = bytearray(shard(source).read_bytes())
    data[-100:] = bytes(100)
    shard(source).write_bytes(data)


@pytest.mark.parametrize("change", [replace, overwrite_in_place, shrink, touch])
def test_a_source_that_changed_between_plan_and_run(
    changing: Path, target: Path, old: dict[str, str], change: Callable[[Path], None]
) -> None:
    conversion = plan_conversion(changing, target, **COLUMNS)
    change(changing)
    with pytest.raises(SourceChangedError, match=shard(changing).name):
        run_conversion(conversion, overwrite=True)
    with pytest.raises(SourceChangedError, match="changed since it was opened"):
        read_tensor(conversion.source, "layers.0.weight")
    assert contents(target) == old


@pytest.mark.parametrize("press", [interrupt, press_ctrl_c])
def test_ctrl_c(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    press: Callable[[], None],
) -> None:
    with pytest.raises(InterruptedRunError, match="the same command continues") as caught:
        run(source, target, progress=at_progress(press))
    assert contents(target) == old
    report = run(source, target)
    assert report.resumed_bytes >= 1_000_000
    assert f"{report.resumed_bytes} of" in str(caught.value)
    assert contents(target) == expected


@pytest.mark.parametrize(
    ("which", "name"),
    keep_covering(
        1,
        itertools.product((0, -1), CHANGING_CALLS),
        "the first and the last call of each kind; each kind is in a default case",
    ),
)
def test_ctrl_c_at_any_moment(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    which: int,
) -> None:
    """The first and the last call of each kind that the main thread makes."""

    def instead(name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            made.append(name)
            if press_at is not None and len(made) - 1 == press_at:
                raise KeyboardInterrupt

    made: list[str] = []
    press_at: int | None = None
    counted = shutil.copytree(target, target.with_name("counted"))
    with monkeypatch.context() as patch:
        Calls(patch, (name,)).instead = instead
        run(source, counted, threads=1)
        press_at, made = range(len(made))[which], []
        with pytest.raises(InterruptedRunError):
            run(source, target, threads=1)
    assert contents(target) in (old, expected)
    if contents(target) == old:
        run(source, target)
    assert contents(target) == expected


def test_an_error_of_the_caller_is_his(
    source: Path, target: Path, old: dict[str, str], expected: dict[str, str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the caller's progress bar")

    with pytest.raises(ZeroDivisionError, match="progress bar"):
        run(source, target, progress=at_progress(fail))
    assert contents(target) == old
    assert run(source, target).resumed_bytes >= 1_000_000
    assert contents(target) == expected


def test_two_conversions_to_one_target(
    source: Path, target: Path, expected: dict[str, str]
) -> None:
    def second() -> None:
        for restart in (False, True):
            with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
                run(source, target, restart=restart)
        with pytest.raises(RunError, match="in use by"):
            convert(source, target, to=3, overwrite=True)
        refused.append(True)

    refused: list[bool] = []
    run(source, target, progress=at_progress(second))
    assert refused
    assert contents(target) == expected


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 5000)])
def test_staged_files_that_are_gone_or_cut_off(
    source: Path,
    target: Path,
    old: dict[str, str],
    expected: dict[str, str],
    damage: Callable[[Path], None],
) -> None:
    with pytest.raises(InterruptedRunError):
        run(source, target, progress=at_progress(interrupt))
    staged = max((staging_folder(target) / "content").glob("*.safetensors"))
    damage(staged)
    with pytest.raises(RunError, match="--restart starts over") as caught:
        run(source, target)
    assert str(staged) in str(caught.value)
    assert contents(target) == old
    run(source, target, restart=True)
    assert contents(target) == expected


def test_a_companion_that_is_gone(changing: Path, target: Path, old: dict[str, str]) -> None:
    with pytest.raises(RunError, match=r"No such file or directory") as caught:
        run(changing, target, progress=at_progress((changing / "config.json").unlink))
    assert "config.json" in str(caught.value)
    assert contents(target) == old


def test_a_target_that_may_not_be_written(
    source: Path, target: Path, old: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may write everywhere."""
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: access(path, mode) and not (mode & os.W_OK and path == target.parent),
    )
    with pytest.raises(RunError, match=f"cannot write to {target.parent}"):
        run(source, target)
    assert contents(target) == old
    assert os.listdir(target.parent) == [target.name]


def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """A file system at `folder` for as long as a test takes; skips where that is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *arguments, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode != 0:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    if request.param == "tmpfs":
        yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=24m", "none")
        return
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4: {error}")
    yield from mounted(tmp_path / "disk", "-o", "loop", str(image))


def fill(disk: Path, left_bytes: int) -> Path:
    """A file that leaves only so much room."""
    state = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - left_bytes)
    return filler


def test_a_disk_with_room(small_disk: Path, source: Path, expected: dict[str, str]) -> None:
    run(source, small_disk / "target")
    assert contents(small_disk / "target") == expected


@pytest.mark.parametrize("takes_room_first", [True, False])
@pytest.mark.parametrize("left_bytes", [2_500_000, 5_000_000, 40_000])
def test_a_disk_without_room(
    small_disk: Path,
    source: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    takes_room_first: bool,
    left_bytes: int,
) -> None:
    target = small_disk / "target"
    target.mkdir()
    (target / "old.safetensors").write_bytes(bytes(1000))
    (target / MANIFEST_NAME).write_text("{}")
    old = contents(target)
    filler = fill(small_disk, left_bytes)

    def no_room_is_taken(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patch:
        if not takes_room_first:
            patch.setattr(os, "posix_fallocate", no_room_is_taken)
        with pytest.raises(RunError, match="No space left on device"):
            run(source, target)
    assert contents(target) == old
    filler.unlink()
    run(source, target)
    assert contents(target) == expected
    assert {*os.listdir(small_disk)} - {"lost+found"} == {"target"}


def test_a_file_system_that_is_read_only(source: Path, target: Path, old: dict[str, str]) -> None:
    for place in mounted(target.parent, "--bind", str(target.parent)):
        remount = ["mount", "-o", "remount,ro,bind", str(place)]
        if subprocess.run(remount, capture_output=True, check=False).returncode != 0:
            pytest.skip("remounting is not allowed here")
        with pytest.raises((RunError, UsageError)) as caught:
            run(source, target)
        assert str(target.parent) in str(caught.value)
        assert type(caught.value) is RunError
    assert contents(target) == old
