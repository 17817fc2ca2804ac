"""Models refitted between real processes."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


def test_models_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_process.py", 4))


def test_models_of_megatron_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_megatron_process.py", 4))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("killed while sending", 7),
        ("killed while receiving", 7),
        ("lives on", 0),
        ("does not come", 7),
    ],
)
def test_where_a_rank_fails_all_raise(fault: str, code: int) -> None:
    ended = run_ranks("refit_fault_process.py", 3, fault, timeout_s=100)
    told = "\n".join(one.output for one in ended)
    assert [one.code for one in ended] == [0, code, 0], told
