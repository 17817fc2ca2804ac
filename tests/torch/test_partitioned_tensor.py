"""Partitioned tensors between real processes."""

from __future__ import annotations

import pytest
from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [2, 3])
def test_conversions(ranks: int) -> None:
    expect_all_end_well(run_ranks("partitioned_process.py", ranks))
