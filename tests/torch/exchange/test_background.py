"""Redistributions that go on in the background, between real processes."""

from __future__ import annotations

import pytest

from live_processes import expect_all_end_well, run_ranks

pytest.importorskip("torch")


def test_redistributions_in_the_background() -> None:
    expect_all_end_well(run_ranks("background_process.py", 3))
