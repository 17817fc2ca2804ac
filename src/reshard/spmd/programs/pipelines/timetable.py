"""When each task of a pipeline runs, how much of the time ranks are idle, and a picture of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work


@dataclass(frozen=True)
class StageCosts:
    """What one stage costs for one microbatch, in seconds or any other unit, the same everywhere.

    Args:
        forward: of the forward pass.
        backward_input: of the gradient of the stage's input.
        backward_weights: of the gradients of its weights. A whole backward pass costs both.
        send: from a task to one of another rank that takes its result; the ranks work meanwhile.

    Raises:
        UsageError: a cost that is negative or not finite, or a task that costs nothing.

    >>> StageCosts(forward=1, backward_input=1, backward_weights=0.5).of(Work.BACKWARD)
    1.5
    """

    forward: float = 1
    backward_input: float = 1
    backward_weights: float = 1
    send: float = 0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            if not isfinite(cost) or cost < 0 or (cost == 0 and name != "send"):
                raise UsageError(
                    f"{name}={cost!r}.\nExpected a cost above 0 (of `send`, 0 or more), and finite."
                )

    def of(self, work: Work) -> float:
        """The cost of a task."""
        return {
            Work.FORWARD: self.forward,
            Work.BACKWARD: self.backward_input + self.backward_weights,
            Work.BACKWARD_INPUT: self.backward_input,
            Work.BACKWARD_WEIGHTS: self.backward_weights,
        }[work]


@dataclass(frozen=True)
class Timetable:
    """When each task of a schedule begins, if every rank runs its next task as soon as it can.

    Args:
        schedule: whose tasks they are.
        costs: of each task.

    >>> from reshard.spmd.programs.pipelines.orders import pipeline_schedule
    >>> table = Timetable(pipeline_schedule("1f1b", n_ranks=2, n_microbatches=3))
    >>> table.length, table.bubble
    (12.0, 0.25)
    >>> print(table)
    0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
    """

    schedule: PipelineSchedule
    costs: StageCosts = StageCosts()

    @property
    def starts(self) -> dict[PipelineTask, float]:
        """When each task begins, counted from the first."""
        starts: dict[PipelineTask, float] = {}
        free = [0.0] * self.schedule.n_ranks
        for task in self.schedule.run_order:
            rank = task.stage % self.schedule.n_ranks
            begin = free[rank]
            for need in self.schedule.needs(task):
                moved = need.stage % self.schedule.n_ranks != rank
                ready = starts[need] + self.costs.of(need.work) + self.costs.send * moved
                begin = max(begin, ready)
            starts[task] = begin
            free[rank] = begin + self.costs.of(task.work)
        return starts

    @property
    def length(self) -> float:
        """From the first task's begin to the last one's end, in the unit of the costs."""
        return max(begin + self.costs.of(task.work) for task, begin in self.starts.items())

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they are idle: from 0 to less than 1."""
        busy = sum(self.costs.of(task.work) for line in self.schedule.tasks for task in line)
        return 1 - busy / (self.schedule.n_ranks * self.length)

    def __str__(self) -> str:
        """A line a rank, a column a unit of time; `F3` is microbatch 3, `F3'` on its second stage.

        Raises:
            UsageError: costs that are not whole numbers.
        """
        if any(cost != int(cost) for cost in vars(self.costs).values()):
            raise UsageError(
                f"{self.costs}: no picture.\nExpected whole numbers, which are columns; round them."
            )
        n_ranks = self.schedule.n_ranks
        rows = [[""] * int(self.length) for _ in range(n_ranks)]
        for task, begin in self.starts.items():
            mark = f"{task.work.value}{task.microbatch}" + "'" * (task.stage // n_ranks)
            for column in range(int(begin), int(begin + self.costs.of(task.work))):
                rows[task.stage % n_ranks][column] = mark
        width = max(len(mark) for row in rows for mark in row)
        ranks = len(str(n_ranks - 1))
        return "\n".join(
            f"{rank:{ranks}} | " + " ".join((mark or "." * width).ljust(width) for mark in row)
            for rank, row in enumerate(rows)
        )
