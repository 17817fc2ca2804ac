"""Refits that send only what changed, between real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks


def test_what_changed_is_sent_and_nothing_else() -> None:
    expect_all_end_well(run_ranks("changes_process.py", 4))
