"""What a pipeline's schedule refuses, and what it says of a valid one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import PlanError, UsageError
from reshard.spmd.programs.pipelines.orders import ORDERS, pipeline_schedule
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work


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
