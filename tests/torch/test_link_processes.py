"""Links between jobs, as real processes."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, free_port, run_ranks

pytest.importorskip("torch")

KILLED = {"engine_dies": {3}, "trainer_dies": {0, 1}}
CASES = (
    "steps",
    "beside",
    "options",
    "misfits",
    "later",
    "engine_dies",
    "trainer_dies",
    "secrets",
)


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_and_two_engines(case: str) -> None:
    ports = [free_port() for _ in range(3)]
    ended = run_ranks("link_process.py", 5, case, *ports, timeout_s=120)
    killed = KILLED.get(case, set())
    assert {rank for rank, one in enumerate(ended) if one.code == 9} == killed
    expect_all_end_well([one for rank, one in enumerate(ended) if rank not in killed])
