"""Groups of ranks: what carries what, in which order, and what they know of failures."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")

CASES = [
    "tensors_travel_by_the_backend_of_their_device",
    "a_group_without_a_named_backend_has_one_for_each_device",
    "threads_of_one_group_keep_one_order_or_are_refused",
    "refits_in_another_order_are_refused",
    "a rank that raises while it posts is known at once",
    "a rank that raises while it waits is known at once",
    "a rank that raises at the end is known at once",
]


@pytest.mark.parametrize("case", CASES)
def test_groups_of_two_ranks(case: str) -> None:
    expect_all_end_well(run_ranks("groups_process.py", 2, case, timeout_s=60))
