"""Times of tasks against a simulation of one unit of time after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.orders import ORDERS, pipeline_schedule
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask
from reshard.spmd.programs.pipelines.timetable import StageCosts, Timetable


def simulate(
    schedule: PipelineSchedule, costs: list[StageCosts]
) -> tuple[dict[PipelineTask, int], list[int]]:
    """When each task begins, and for how many units each rank works, by a clock that ticks."""
    n_ranks, last = schedule.n_ranks, schedule.n_stages - 1
    left = [list(line) for line in schedule.tasks]
    home = {task.stage: rank for rank, line in enumerate(left) for task in line}
    begun: dict[PipelineTask, int] = {}
    ended: dict[tuple[str, int, int], int] = {}
    busy_until, worked, clock = [0] * n_ranks, [0] * n_ranks, 0

    def there(letters: str, stage: int, microbatch: int, rank: int) -> bool:
        wait = costs[stage].send if home[stage] != rank else 0
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
                cost = int(costs[s].of(task.work))
                begun[task], ended[letter, s, m] = clock, clock + cost
                busy_until[rank] = clock + cost
                worked[rank] += cost
        clock += 1
    return begun, worked


def held_most(schedule: PipelineSchedule, costs: list[StageCosts]) -> list[float]:
    """The most bytes that each rank holds: of each task, what is begun before it and not ended."""
    most = []
    for line in schedule.tasks:
        held = []
        for place in range(len(line)):
            done = {(task.work.value, task.stage, task.microbatch) for task in line[: place + 1]}
            held.append(
                sum(
                    costs[s].activation_bytes
                    for letter, s, m in done
                    if letter == "F" and not {("B", s, m), ("W", s, m)} & done
                )
            )
        most.append(max(held))
    return most


@settings(deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
def test_times_are_those_of_a_ticking_clock(
    order: str, n_ranks: int, groups: int, per_rank: int, are_alike: bool, data: st.DataObject
) -> None:
    per_rank = {"interleaved": per_rank, "zb-v": 2}.get(order, 1)
    schedule = pipeline_schedule(order, n_ranks, n_ranks * groups, stages_per_rank=per_rank)
    drawn = st.tuples(*[st.integers(1, 3)] * 3, st.integers(0, 3), st.integers(1, 9))
    costs = [StageCosts(*data.draw(drawn)) for _ in range(1 if are_alike else schedule.n_stages)]
    table = Timetable(schedule, costs[0] if are_alike else costs)
    costs = costs * schedule.n_stages if are_alike else costs
    begun, worked = simulate(schedule, costs)
    assert table.starts == begun
    ends = {task: begin + costs[task.stage].of(task.work) for task, begin in begun.items()}
    assert table.length == max(ends.values())
    assert table.bubble == pytest.approx(1 - sum(worked) / (n_ranks * table.length), abs=1e-12)
    assert table.period == max(
        max(ends[task] for task in line) - min(begun[task] for task in line)
        for line in schedule.tasks
    )
    assert list(table.peak_bytes) == held_most(schedule, costs)
    # Each column that a rank works in is drawn.
    rows = [line.split("| ")[1].split() for line in str(table).splitlines()]
    assert [sum(set(mark) != {"."} for mark in row) for row in rows] == worked


@settings(deadline=None)
@given(st.sampled_from(ORDERS), st.integers(1, 3), st.integers(1, 2), st.data())
def test_steps_that_follow_one_another_take_a_period_each(
    order: str, n_ranks: int, groups: int, data: st.DataObject
) -> None:
    """Where each rank begins its next step as soon as it is done, none has to wait for longer."""
    per_rank = 2 if order == "zb-v" else 1
    schedule = pipeline_schedule(order, n_ranks, n_ranks * groups, stages_per_rank=per_rank)
    costs = [
        StageCosts(*data.draw(st.tuples(*[st.integers(1, 3)] * 3)))
        for _ in range(schedule.n_stages)
    ]
    table = Timetable(schedule, costs)
    steps = 4
    count = schedule.n_microbatches
    lines = tuple(
        tuple(
            replace(task, microbatch=task.microbatch + step * count)
            for step in range(steps)
            for task in line
        )
        for line in schedule.tasks
    )
    begun, _ = simulate(PipelineSchedule(lines, schedule.n_stages, steps * count), costs)
    for task, begin in table.starts.items():
        for step in range(steps):
            at = begun[replace(task, microbatch=task.microbatch + step * count)]
            assert at <= begin + step * table.period


def test_a_picture_of_stages_of_one_rank() -> None:
    schedule = pipeline_schedule("interleaved", 1, 1, stages_per_rank=2)
    assert str(Timetable(schedule)) == "0 | F0  F0' B0' B0' B0  B0 "


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 0.0])
def test_costs_that_cannot_be_are_refused(cost: float) -> None:
    with pytest.raises(UsageError, match="forward="):
        StageCosts(forward=cost)
    if cost:
        with pytest.raises(UsageError, match="activation_bytes="):
            StageCosts(activation_bytes=cost)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="costs of 3 stages for a schedule of 2"):
        Timetable(pipeline_schedule("gpipe", 2, 2), [StageCosts()] * 3)


def test_a_picture_of_parts_of_units_is_refused() -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        str(Timetable(pipeline_schedule("gpipe", 2, 2), StageCosts(forward=0.5)))
