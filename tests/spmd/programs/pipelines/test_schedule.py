"""What a pipeline's schedule refuses, and what it says of a valid one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import PlanError, UsageError
from reshard.spmd.programs.pipelines.schedule import (
    ORDERS,
    PipelineSchedule,
    PipelineTask,
    StageCosts,
    Timetable,
    Work,
    pipeline_schedule,
)


def ends(lines: list[list[PipelineTask]], n_stages: int) -> bool:
    """Whether ranks that look at their next task again and again get to their ends."""
    done: set[tuple[str, int, int]] = set()
    left = [list(line) for line in lines]
    for _ in range(sum(map(len, lines))):
        for line in left:
            if not line:
                continue
            s, m, letter = line[0].stage, line[0].microbatch, line[0].work.value
            after = s + 1 == n_stages or ("B", s + 1, m) in done or ("I", s + 1, m) in done
            able = {
                "F": s == 0 or ("F", s - 1, m) in done,
                "B": ("F", s, m) in done and after,
                "I": ("F", s, m) in done and after,
                "W": ("I", s, m) in done,
            }[letter]
            if able:
                done.add((letter, s, m))
                line.pop(0)
    return not any(left)


@given(st.sampled_from(ORDERS), st.integers(1, 3), st.integers(1, 2), st.data())
def test_valid_if_and_only_if_its_ranks_get_to_their_ends(
    order: str, n_ranks: int, groups: int, data: st.DataObject
) -> None:
    per_rank = 2 if order == "zb-v" else 1
    schedule = pipeline_schedule(order, n_ranks, n_ranks * groups, stages_per_rank=per_rank)
    lines = [list(line) for line in schedule.tasks]
    for line in lines:
        a, b = (data.draw(st.integers(0, len(line) - 1)) for _ in range(2))
        line[a], line[b] = line[b], line[a]
    tasks = tuple(map(tuple, lines))
    if ends(lines, schedule.n_stages):
        valid = replace(schedule, tasks=tasks)
        seen: set[PipelineTask] = set()
        for task in valid.run_order:
            assert seen.issuperset(valid.needs(task))
            seen.add(task)
    else:
        with pytest.raises(PlanError, match="for ever"):
            replace(schedule, tasks=tasks)


def test_missing_repeated_and_misplaced_tasks_are_refused() -> None:
    schedule = pipeline_schedule("zb-h1", 2, 3)
    first, last = schedule.tasks
    with pytest.raises(PlanError, match="W2 of stage 0: 0 times"):
        replace(schedule, tasks=(first[:-1], last))
    with pytest.raises(PlanError, match="W2 of stage 0: 2 times"):
        replace(schedule, tasks=((*first, first[-1]), last))
    with pytest.raises(PlanError, match=r"on rank 0.\nExpected it on rank 1, which has others"):
        replace(schedule, tasks=((*first, last[0]), last[1:]))
    assert replace(schedule, tasks=(last, first)).rank_of == {1: 0, 0: 1}
    whole = PipelineTask(Work.BACKWARD, 0, 0)
    with pytest.raises(PlanError, match="B0 of stage 0: 1 times"):
        replace(schedule, tasks=((*first, whole), last))


def test_numbers_that_do_not_fit_are_refused() -> None:
    schedule = pipeline_schedule("gpipe", 2, 2)
    with pytest.raises(PlanError, match="3 stages on 2 ranks"):
        replace(schedule, n_stages=3)
    with pytest.raises(PlanError, match="on 0 ranks"):
        PipelineSchedule((), 1, 1)
    with pytest.raises(UsageError):
        replace(schedule, n_microbatches=0)


cost = st.integers(1, 4)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 10), cost, cost, cost)
def test_gpipe_and_1f1b_take_equal_time_and_hold_different_memory(
    n_ranks: int, n: int, f: int, i: int, w: int
) -> None:
    for order in ("gpipe", "1f1b"):
        table = Timetable(pipeline_schedule(order, n_ranks, n), StageCosts(f, i, w))
        assert table.length == (n + n_ranks - 1) * (f + i + w)
    assert pipeline_schedule("gpipe", n_ranks, n).peak_activations == (n,) * n_ranks
    held = tuple(min(n, n_ranks - rank) for rank in range(n_ranks))
    assert pipeline_schedule("1f1b", n_ranks, n).peak_activations == held


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), cost, cost)
def test_more_stages_on_a_rank_divide_the_bubble_of_the_interleaved_order(
    n_ranks: int, groups: int, per_rank: int, f: int, i: int
) -> None:
    n = n_ranks * groups
    schedule = pipeline_schedule("interleaved", n_ranks, n, stages_per_rank=per_rank)
    table = Timetable(schedule, StageCosts(f, i, f))
    work = n * per_rank * (f + i + f)
    # A stage costs a `per_rank`-th of what a rank does.
    assert table.length - work == (n_ranks - 1) * (f + i + f)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), cost)
def test_zb_h1_has_a_third_of_the_bubble(n_ranks: int, more: int, unit: int) -> None:
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
