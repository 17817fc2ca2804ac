"""Models refitted between real processes."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


def test_models_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_process.py", 4))
