"""A conversion killed anywhere and run again gives, bit for bit, what an undisturbed one gives."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import (
    Case,
    run_again,
    run_until_the_power_fails,
    write_old,
)
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard.checkpoint import convert, plan_conversion
from selection import keep_covering, keep_where

OLD = ("fresh", "overwrite")
KILLS = 50
LAST_CALLS = 25
POWER_FAILURES = 15
EVERY_KILL = "every point of a run; spread points and the end of the commit are killed by default"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, processes: FaultyProcesses) -> Case:
    """Shards of rows become shards of columns."""
    folder = tmp_path_factory.mktemp("case")
    convert(write_model(folder / "whole"), folder / "rows", **ROWS)
    return Case(folder, processes, folder / "rows", **COLUMNS)


@pytest.fixture
def has_old(request: pytest.FixtureRequest, target: Path) -> bool:
    """Whether there is an old target."""
    is_there = request.param == OLD[1]
    if is_there:
        write_old(target)
    return is_there


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.mark.parametrize(
    ("has_old", "kill"),
    keep_where(
        lambda case: case[1] % 7 == 0 and case[0] == OLD[1 - case[1] // 7 % 2],
        itertools.product(OLD, range(KILLS)),
        EVERY_KILL,
    ),
    indirect=["has_old"],
)
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
        copy_bytes = plan_conversion(case.source, "new", **COLUMNS).write_plan.copy_bytes
        # A block counts once, and the copies of it in the files of other ranks are spared too.
        assert 0 <= spared_bytes - again.resumed_bytes <= copy_bytes
        assert again.resumed_bytes > 0 or kill_at < calls * 0.85


@pytest.mark.parametrize(
    "from_end", keep_where(lambda call: call <= 6, range(1, LAST_CALLS + 1), EVERY_KILL)
)
@pytest.mark.parametrize("has_old", OLD, indirect=True)
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
        syncs = {name for name in ("fdatasync", "fsync") if hasattr(os, name)}
        assert {"pwrite", *syncs, name, "unlink", "rmdir"} <= {*last}


@pytest.mark.parametrize(
    ("has_old", "first", "second"),
    keep_covering(1, itertools.product(OLD, (0.3, 0.5, 0.7, 0.8), (0.1, 0.2, 0.4)), EVERY_KILL),
    indirect=["has_old"],
)
def test_killed_once_more_when_it_goes_on(
    case: Case, target: Path, has_old: bool, first: float, second: float
) -> None:
    old = contents(target)
    calls = len(case.calls(has_old, 4))

    assert case.run(target, has_old, kill_at=int(first * calls)).was_killed
    case.run(target, has_old, kill_at=int(second * calls))

    run_again(case, target, has_old, old)


@pytest.mark.parametrize(
    ("has_old", "failure"),
    keep_where(
        lambda case: case in [(OLD[0], 2), (OLD[0], 9), (OLD[1], 5), (OLD[1], 14)],
        itertools.product(OLD, range(POWER_FAILURES)),
        EVERY_KILL,
    ),
    indirect=["has_old"],
)
def test_the_power_fails(case: Case, target: Path, has_old: bool, failure: int) -> None:
    old = contents(target)
    calls = len(case.calls(has_old, 4))
    kill_at = failure * (calls - 1) // (POWER_FAILURES - 1)

    run_until_the_power_fails(case, target, has_old, kill_at)

    run_again(case, target, has_old, old)
