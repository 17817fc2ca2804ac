"""Exchanges between real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks


def test_what_several_ranks_are_sent_is_packed_once() -> None:
    expect_all_end_well(run_ranks("exchange_process.py", 4))


def test_redistributions_in_the_background() -> None:
    expect_all_end_well(run_ranks("background_process.py", 3))
