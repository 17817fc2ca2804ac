"""Every operator on shards that lie one in each process."""

from live_processes import expect_all_end_well, run_ranks


def test_every_operator_over_processes() -> None:
    expect_all_end_well(run_ranks("spmd_process.py", 4))
