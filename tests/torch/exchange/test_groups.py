"""Groups of ranks: what carries what, in which order, and what they know of failures."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")

CASES = [
    "backends",
    "unnamed",
    "threads",
    "refits",
    "raises while it posts",
    "raises while it waits",
    "raises at the end",
]


@pytest.mark.parametrize("case", CASES)
def test_groups_of_two_ranks(case: str) -> None:
    expect_all_end_well(run_ranks("groups_process.py", 2, case, timeout_s=60))
