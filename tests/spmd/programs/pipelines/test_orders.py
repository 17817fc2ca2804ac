"""The named orders against what their papers say of idle time and of activations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.orders import pipeline_schedule
from reshard.spmd.programs.pipelines.timetable import StageCosts, Timetable

cost = st.integers(1, 4)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 10), cost, cost, cost)
def test_gpipe_and_1f1b(n_ranks: int, n: int, f: int, i: int, w: int) -> None:
    for order in ("gpipe", "1f1b"):
        table = Timetable(pipeline_schedule(order, n_ranks, n), StageCosts(f, i, w))
        assert table.length == (n + n_ranks - 1) * (f + i + w)
    assert pipeline_schedule("gpipe", n_ranks, n).peak_activations == (n,) * n_ranks
    held = tuple(min(n, n_ranks - rank) for rank in range(n_ranks))
    assert pipeline_schedule("1f1b", n_ranks, n).peak_activations == held


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), cost, cost)
def test_interleaved(n_ranks: int, groups: int, per_rank: int, f: int, i: int) -> None:
    n = n_ranks * groups
    schedule = pipeline_schedule("interleaved", n_ranks, n, stages_per_rank=per_rank)
    table = Timetable(schedule, StageCosts(f, i, f))
    work = n * per_rank * (f + i + f)
    # A stage costs a `per_rank`-th of what a rank does.
    assert table.length - work == (n_ranks - 1) * (f + i + f)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), cost)
def test_zb_h1(n_ranks: int, more: int, unit: int) -> None:
    n = n_ranks + more
    schedule = pipeline_schedule("zb-h1", n_ranks, n)
    table = Timetable(schedule, StageCosts(unit, unit, unit))
    assert table.length - n * 3 * unit == (n_ranks - 1) * unit
    assert schedule.peak_activations == (n_ranks,) * n_ranks


@given(st.integers(1, 6), st.integers(1, 10))
def test_zb_h1_holds_no_more_than_the_first_rank_under_1f1b(n_ranks: int, n: int) -> None:
    held = pipeline_schedule("zb-h1", n_ranks, n).peak_activations
    assert held == (pipeline_schedule("1f1b", n_ranks, n).peak_activations[0],) * n_ranks


@settings(deadline=None)
@given(st.sampled_from(["zb-h2", "zb-v"]), st.integers(1, 6), st.integers(0, 8), cost)
def test_zb_h2_and_zb_v_have_no_bubble_between_steps(
    order: str, n_ranks: int, more: int, unit: int
) -> None:
    n = 2 * n_ranks - 1 + more
    per_rank = 2 if order == "zb-v" else 1
    schedule = pipeline_schedule(order, n_ranks, n, stages_per_rank=per_rank)
    assert Timetable(schedule, StageCosts(unit, unit, unit)).period == 3 * unit * n * per_rank
    held = 2 * n_ranks if order == "zb-v" else 2 * n_ranks - 1
    assert max(schedule.peak_activations) == held


def test_zb_v_goes_there_and_back() -> None:
    schedule = pipeline_schedule("zb-v", 3, 2, stages_per_rank=2)
    assert schedule.rank_of == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="Expected one of gpipe"):
        pipeline_schedule("dualpipe", 2, 2)
    with pytest.raises(UsageError, match="stages_per_rank=2"):
        pipeline_schedule("1f1b", 2, 2, stages_per_rank=2)
    with pytest.raises(UsageError, match="Expected 2; any"):
        pipeline_schedule("zb-v", 2, 2)
    with pytest.raises(UsageError, match="3 microbatches on 2 ranks"):
        pipeline_schedule("interleaved", 2, 3)
    with pytest.raises(UsageError):
        pipeline_schedule("gpipe", 0, 3)
