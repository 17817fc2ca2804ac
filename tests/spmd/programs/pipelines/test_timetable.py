"""Times of tasks against a simulation of one unit of time after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.orders import ORDERS, pipeline_schedule
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask
from reshard.spmd.programs.pipelines.timetable import StageCosts, Timetable


def simulate(
    schedule: PipelineSchedule, costs: StageCosts
) -> tuple[dict[PipelineTask, int], list[int]]:
    """When each task begins, and for how many units each rank works, by a clock that ticks."""
    n_ranks, last = schedule.n_ranks, schedule.n_stages - 1
    left = [list(line) for line in schedule.tasks]
    begun: dict[PipelineTask, int] = {}
    ended: dict[tuple[str, int, int], int] = {}
    busy_until, worked, clock = [0] * n_ranks, [0] * n_ranks, 0

    def there(letters: str, stage: int, microbatch: int, rank: int) -> bool:
        wait = costs.send if stage % n_ranks != rank else 0
        return any(ended.get((one, stage, microbatch), 10**9) + wait <= clock for one in letters)

    while any(left):
        for rank, line in enumerate(left):
            if not line or busy_until[rank] > clock:
                continue
            task = line[0]
            letter, s, m = task.work.value, task.stage, task.microbatch
            able = {
                "F": s == 0 or there("F", s - 1, m, rank),
                "W": there("I", s, m, rank),
            }.get(letter, there("F", s, m, rank) and (s == last or there("BI", s + 1, m, rank)))
            if able:
                line.pop(0)
                cost = int(costs.of(task.work))
                begun[task], ended[letter, s, m] = clock, clock + cost
                busy_until[rank] = clock + cost
                worked[rank] += cost
        clock += 1
    return begun, worked


@settings(deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(0, 3)),
)
def test_times_are_those_of_a_ticking_clock(
    order: str, n_ranks: int, groups: int, per_rank: int, numbers: tuple[int, int, int, int]
) -> None:
    per_rank = per_rank if order == "interleaved" else 1
    schedule = pipeline_schedule(order, n_ranks, n_ranks * groups, stages_per_rank=per_rank)
    costs = StageCosts(*numbers)
    table = Timetable(schedule, costs)
    begun, worked = simulate(schedule, costs)
    assert table.starts == begun
    length = max(begin + costs.of(task.work) for task, begin in begun.items())
    assert table.length == length
    assert table.bubble == pytest.approx(1 - sum(worked) / (n_ranks * length), abs=1e-12)
    # Each column that a rank works in is drawn.
    drawn = [line.split("| ")[1].split() for line in str(table).splitlines()]
    assert [sum(set(mark) != {"."} for mark in row) for row in drawn] == worked


def test_a_picture_of_stages_of_one_rank() -> None:
    schedule = pipeline_schedule("interleaved", 1, 1, stages_per_rank=2)
    assert str(Timetable(schedule)) == "0 | F0  F0' B0' B0' B0  B0 "


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 0.0])
def test_costs_that_cannot_be_are_refused(cost: float) -> None:
    with pytest.raises(UsageError, match="forward="):
        StageCosts(forward=cost)


def test_a_picture_of_parts_of_units_is_refused() -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        str(Timetable(pipeline_schedule("gpipe", 2, 2), StageCosts(forward=0.5)))
