"""A conversion killed anywhere and run again gives, bit for bit, what an undisturbed one gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoint.faulty_process import FaultyProcesses, Outcome, lose_what_was_not_synced
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard.checkpoint import convert
from reshard.checkpoint.staging import staging_folder

KILLS = 50
LAST_CALLS = 25
POWER_FAILURES = 15


class Case:
    """A conversion of shards of rows to shards of columns, and what it gives undisturbed."""

    def __init__(self, folder: Path, processes: FaultyProcesses) -> None:
        self.processes = processes
        self.folder = folder
        self.source = folder / "rows"
        convert(write_model(folder / "whole"), self.source, **ROWS)
        self.undisturbed = self.run(folder / "undisturbed", has_old=False)
        assert self.undisturbed.error is None
        self.expected = contents(folder / "undisturbed")
        self.calls = cache(self._calls)

    def run(self, target: Path, has_old: bool, **options: Any) -> Outcome:
        return self.processes.convert(
            self.source, target, overwrite=has_old, sync_bytes=256 * 1024, **COLUMNS, **options
        )

    def _calls(self, has_old: bool, threads: int) -> list[str]:
        """The calls that an undisturbed run makes."""
        target = self.folder / f"{has_old}-{threads}"
        if has_old:
            write_old(target)
        return self.run(target, has_old, threads=threads).calls


@pytest.fixture(scope="module")
def processes() -> Iterator[FaultyProcesses]:
    processes = FaultyProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, processes: FaultyProcesses) -> Case:
    return Case(tmp_path_factory.mktemp("case"), processes)


@pytest.fixture(params=[False, True], ids=["fresh", "overwrite"])
def has_old(request: pytest.FixtureRequest, target: Path) -> bool:
    """Whether there is an old target."""
    if request.param:
        write_old(target)
    return bool(request.param)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def write_old(target: Path) -> None:
    (target / "inner").mkdir(parents=True)
    (target / "old weights").write_bytes(bytes(10_000))
    (target / "inner" / "old words").write_text("old")


def run_again(case: Case, target: Path, has_old: bool, old: dict[str, str] | None) -> Outcome:
    """The same call after a kill, which finds one or the other whole and makes it the new."""
    seen = contents(target)
    assert seen in (old, case.expected)
    again = case.run(target, has_old)
    if again.error is not None:
        # Killed when nothing was left to do but to remove the emptied staging folder.
        assert "UsageError: the target exists" in again.error
        assert seen == case.expected
    assert os.listdir(target.parent) == [target.name]
    assert contents(target) == case.expected
    return again


@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_at_points_spread_over_the_run(
    case: Case, target: Path, has_old: bool, kill: int
) -> None:
    old = contents(target)
    calls = len(case.calls(has_old, 4))
    kill_at = kill * (calls - 1) // (KILLS - 1)

    killed = case.run(target, has_old, kill_at=kill_at)

    # How often a run syncs depends on the order in which its threads finish blocks.
    assert killed.was_killed or (killed.error is None and kill_at > calls * 0.8)
    was_put_in_place = contents(target) != old
    again = run_again(case, target, has_old, old)
    if not was_put_in_place and not again.was_complete:
        spared_bytes = case.undisturbed.written_bytes - again.written_bytes
        assert spared_bytes == again.resumed_bytes
        assert again.resumed_bytes > 0 or kill_at < calls * 0.85


@pytest.mark.parametrize("from_end", range(1, LAST_CALLS + 1))
def test_killed_at_each_of_the_last_calls(
    case: Case, target: Path, has_old: bool, from_end: int
) -> None:
    """One thread makes the same calls in every run, so that each is hit for certain."""
    old = contents(target)
    kill_at = len(case.calls(has_old, 1)) - from_end

    assert case.run(target, has_old, threads=1, kill_at=kill_at).was_killed

    run_again(case, target, has_old, old)


def test_the_last_calls_hold_all_of_the_commit(case: Case) -> None:
    for has_old, name in ((False, "rename"), (True, "exchange")):
        last = case.calls(has_old, 1)[-LAST_CALLS:]
        assert {"pwrite", "fdatasync", "fsync", name, "unlink", "rmdir"} <= {*last}


@pytest.mark.parametrize("first", [0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("second", [0.1, 0.2, 0.4])
def test_killed_once_more_when_it_goes_on(
    case: Case, target: Path, has_old: bool, first: float, second: float
) -> None:
    old = contents(target)
    calls = len(case.calls(has_old, 4))

    assert case.run(target, has_old, kill_at=int(first * calls)).was_killed
    case.run(target, has_old, kill_at=int(second * calls))

    run_again(case, target, has_old, old)


@pytest.mark.parametrize("failure", range(POWER_FAILURES))
def test_the_power_fails(case: Case, target: Path, has_old: bool, failure: int) -> None:
    """As a kill, but what was not synced is lost: data, sizes and the names of new files."""
    old = contents(target)
    durable_before = {path.stat().st_ino for path in [target.parent, *target.parent.rglob("*")]}
    synced = target.parent / "synced"
    synced.mkdir()
    calls = len(case.calls(has_old, 4))
    kill_at = failure * (calls - 1) // (POWER_FAILURES - 1)
    case.run(target, has_old, synced=synced, kill_at=kill_at)

    for folder in (target, staging_folder(target)):
        lose_what_was_not_synced(folder, synced, durable_before)
    for copy in synced.iterdir():
        copy.unlink()
    synced.rmdir()

    run_again(case, target, has_old, old)
