"""Programs of collectives between the ranks of jobs of real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks
from selection import keep_where


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 6, (4, 6), "the same programs, more at random")
)
def test_programs_give_what_the_plan_gives(ranks: int) -> None:
    expect_all_end_well(run_ranks("program_process.py", ranks))
