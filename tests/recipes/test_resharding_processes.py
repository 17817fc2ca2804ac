"""Several real processes that reshard together: shares of bytes and memory, and runs in turn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


SOURCES, TARGETS = 3, 8
TOTAL_BYTES = 8 * (240 * 2048 + 480 * 512)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_bytes_and_memory_fall_with_the_processes(tmp_path: Path, processes: int) -> None:
    random = np.random.default_rng(0)
    for rank in range(SOURCES):
        (tmp_path / str(rank)).mkdir()
        for name, shape in (("a", (80, 2048)), ("b", (160, 512))):
            np.save(tmp_path / str(rank) / f"{name}.npy", random.standard_normal(shape))
    script = Path(__file__).with_name("resharding_sharing_process.py")
    ended = run_ranks(str(script), processes, tmp_path, SOURCES, TARGETS)
    expect_all_end_well(ended)
    told = [json.loads(one.output.splitlines()[-1]) for one in ended]
    assert [rank for one in told for rank in one["ranks"]] == list(range(TARGETS))
    share = TOTAL_BYTES // processes
    assert [one["copied_bytes"] for one in told] == [share] * processes
    for one in told:
        # The rest is Python's: views, names, and what the processes say to each other.
        assert share <= one["allocated_bytes"] < share + 200_000


@pytest.mark.parametrize("processes", [2, 3])
def test_runs_that_are_begun_at_once_take_turns(processes: int) -> None:
    script = Path(__file__).with_name("resharding_queue_process.py")
    ended = run_ranks(str(script), processes, 8, timeout_s=60)
    expect_all_end_well(ended)
    assert all(one.output.endswith("done\n") for one in ended)
