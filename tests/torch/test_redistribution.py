"""Tensors between the ranks of jobs of two to eight real processes."""

from __future__ import annotations

import pytest
from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_every_tensor_is_what_the_oracle_and_dtensor_say(ranks: int) -> None:
    expect_all_end_well(run_ranks("redistribution_process.py", ranks))
