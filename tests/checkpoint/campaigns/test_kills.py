"""Conversions of every kind, killed anywhere and run again, give what undisturbed ones give."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.campaigns.small_checkpoints import CONVERSIONS, SmallConversion
from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import (
    Case,
    run_again,
    run_until_the_power_fails,
    write_old,
)
from checkpoint.model_files import contents
from reshard.checkpoint.blocks import grid as blocks
from selection import keep_first_of, keep_where

BLOCK_BYTES = 512
# Where, in parts of a run.
KILLS = (0.2, 0.5, 0.8, 0.95)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[FaultyProcesses]:
    processes = FaultyProcesses()
    yield processes
    processes.close()


@pytest.mark.parametrize(
    "row",
    keep_first_of(
        lambda row: row.format,
        CONVERSIONS,
        "another conversion to a format that a default case writes",
    ),
    ids=lambda one: one.name,
)
@pytest.mark.parametrize(
    "is_whole",
    keep_where(lambda is_whole: not is_whole, (False, True), "all kills of every conversion"),
    ids=("two kills", "every kill"),
)
def test_killed_and_without_power(
    row: SmallConversion,
    is_whole: bool,
    processes: FaultyProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default a kill and a power failure a conversion, at all points over the conversions."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    (tmp_path / "made").mkdir()
    source, options = row.make(tmp_path / "made")
    sizes = {"block_bytes": BLOCK_BYTES, "sync_bytes": 2 * BLOCK_BYTES}
    case = Case(tmp_path, processes, source, **options, **sizes)
    killed = resumed_bytes = 0
    tries = list(enumerate(itertools.product(KILLS, (False, True))))
    if not is_whole:
        # Tries 0, 1, 4 and 5 are kills, the others power failures.
        turn = CONVERSIONS.index(row)
        tries = [tries[(0, 1, 4, 5)[turn % 4]], tries[(7, 6, 3, 2)[turn % 4]]]
    for number, (kill, has_old) in tries:
        place = tmp_path / str(number)
        place.mkdir()
        target = place / "target"
        if has_old:
            write_old(target)
        old = contents(target)
        kill_at = int(kill * len(case.calls(has_old, 1)))
        if number % 4 < 2:
            outcome = case.run(target, has_old, threads=1, kill_at=kill_at)
        else:
            outcome = run_until_the_power_fails(case, target, has_old, kill_at)
        killed += outcome.was_killed
        resumed_bytes += run_again(case, target, has_old, old).resumed_bytes
        shutil.rmtree(place)
    # Several threads make fewer calls.
    assert killed >= len(tries) // 2
    # One block is written or not; of several some are kept.
    assert not is_whole or resumed_bytes or case.undisturbed.written_bytes < 4 * BLOCK_BYTES
