"""The bytes of a trace are those that processes receive."""

from live_processes import expect_all_end_well, run_ranks


def test_processes_receive_what_was_traced() -> None:
    expect_all_end_well(run_ranks("trace_process.py", 6))
