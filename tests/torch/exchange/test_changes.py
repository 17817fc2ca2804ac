"""Refits that send only what changed, between real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks


def test_only_changes_are_sent() -> None:
    expect_all_end_well(run_ranks("changes_process.py", 4))
