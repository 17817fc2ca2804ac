"""Pipeline schedules: the tasks of each rank in their order.

Each stage of a function is on one rank, the one that has its tasks. A backward pass is one task, or
two: the gradient of a stage's input, for which the stage before it waits, and the gradients of its
weights, for which nobody does (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from reshard._validation import check_int
from reshard.errors import PlanError


class Work(Enum):
    """The computation of a task; its value is the letter in diagrams."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHTS = "W"


@dataclass(frozen=True)
class PipelineTask:
    """Work on one stage for one micro-batch.

    >>> print(PipelineTask(Work.FORWARD, stage=2, microbatch=5))
    F5 of stage 2
    """

    work: Work
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.work.value}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The tasks of each rank of a pipeline, in the order in which the rank runs them.

    Args:
        tasks: of each rank.
        n_stages: of the function, a multiple of the ranks.
        n_microbatches: that a step is cut into.

    Raises:
        PlanError: a task that is on another rank than others of its stage, is missing or is there
            twice, or an order in which ranks wait for each other for ever.
        UsageError: a number that is less than 1.

    >>> F, B = Work.FORWARD, Work.BACKWARD
    >>> first = (PipelineTask(F, 0, 0), PipelineTask(B, 0, 0))
    >>> last = (PipelineTask(F, 1, 0), PipelineTask(B, 1, 0))
    >>> PipelineSchedule((first, last), n_stages=2, n_microbatches=1).peak_activations
    (1, 1)
    """

    tasks: tuple[tuple[PipelineTask, ...], ...]
    n_stages: int
    n_microbatches: int

    def __post_init__(self) -> None:
        check_int(self.n_stages, "number of stages", minimum=1)
        check_int(self.n_microbatches, "number of microbatches", minimum=1)
        _check_tasks(self)
        _ = self.run_order

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return len(self.tasks)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {task.stage: rank for rank, line in enumerate(self.tasks) for task in line}

    @cached_property
    def splits_backward(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose backward pass is two tasks."""
        return frozenset(
            (task.stage, task.microbatch)
            for line in self.tasks
            for task in line
            if task.work is Work.BACKWARD_INPUT
        )

    def needs(self, task: PipelineTask) -> tuple[PipelineTask, ...]:
        """The tasks whose results a task needs: of its own stage, and of the neighbouring stage."""
        stage, microbatch = task.stage, task.microbatch
        if task.work is Work.FORWARD:
            return (PipelineTask(Work.FORWARD, stage - 1, microbatch),) if stage else ()
        if task.work is Work.BACKWARD_WEIGHTS:
            return (PipelineTask(Work.BACKWARD_INPUT, stage, microbatch),)
        own = PipelineTask(Work.FORWARD, stage, microbatch)
        if stage == self.n_stages - 1:
            return (own,)
        split = (stage + 1, microbatch) in self.splits_backward
        after = Work.BACKWARD_INPUT if split else Work.BACKWARD
        return own, PipelineTask(after, stage + 1, microbatch)

    @cached_property
    def run_order(self) -> tuple[PipelineTask, ...]:
        """All tasks in an order in which one process can run them: each after those it needs."""
        order: list[PipelineTask] = []
        done: set[PipelineTask] = set()
        places = [0] * self.n_ranks
        moved = True
        while moved:
            moved = False
            for rank, line in enumerate(self.tasks):
                while places[rank] < len(line) and done.issuperset(self.needs(line[places[rank]])):
                    done.add(line[places[rank]])
                    order.append(line[places[rank]])
                    places[rank] += 1
                    moved = True
        stuck = [r for r, line in enumerate(self.tasks) if places[r] < len(line)]
        if stuck:
            rank = stuck[0]
            task = self.tasks[rank][places[rank]]
            missing = next(need for need in self.needs(task) if need not in done)
            raise PlanError(
                f"{task}: rank {rank} waits for {missing} for ever.\n"
                "Expected an order in which each task comes after those whose results it takes."
            )
        return tuple(order)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the maximum number of stored activations of one stage and micro-batch.

        They are stored from the forward task to the backward one, or to that of the weights.
        """
        peaks = []
        for line in self.tasks:
            held = peak = 0
            for task in line:
                if task.work is Work.FORWARD:
                    held += 1
                    peak = max(peak, held)
                elif task.work is not Work.BACKWARD_INPUT:
                    held -= 1
            peaks.append(peak)
        return tuple(peaks)


def _check_tasks(schedule: PipelineSchedule) -> None:
    """Refuse stages not on all ranks alike, and tasks elsewhere, missing or there twice."""
    n_ranks = schedule.n_ranks
    if not n_ranks or schedule.n_stages % n_ranks:
        raise PlanError(
            f"{schedule.n_stages} stages on {n_ranks} ranks.\n"
            "Expected a multiple of the number of ranks; leave out ranks or join stages."
        )
    for rank, line in enumerate(schedule.tasks):
        for task in line:
            if schedule.rank_of[task.stage] != rank:
                raise PlanError(
                    f"{task}: on rank {rank}.\nExpected it on rank "
                    f"{schedule.rank_of[task.stage]}, which has others of its stage."
                )
    given = Counter(task for line in schedule.tasks for task in line)
    expected = {
        PipelineTask(work, stage, microbatch)
        for stage in range(schedule.n_stages)
        for microbatch in range(schedule.n_microbatches)
        for work in _works(schedule, stage, microbatch)
    }
    for task in sorted(given.keys() | expected, key=str):
        wanted = int(task in expected)
        if given[task] != wanted:
            raise PlanError(
                f"{task}: {given[task]} times.\nExpected it {wanted} times: each stage has for "
                "each microbatch one forward task, and one backward task or its two halves."
            )


def _works(schedule: PipelineSchedule, stage: int, microbatch: int) -> tuple[Work, ...]:
    """What a stage must do for a microbatch."""
    if (stage, microbatch) in schedule.splits_backward:
        return Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHTS
    return Work.FORWARD, Work.BACKWARD
