"""Timetables of pipelines: when each task runs, idle time, and diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work
from reshard.text import bytes_text


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage for one micro-batch: times in seconds or any other unit.

    Args:
        forward: the time of the forward pass.
        backward_input: the time of the gradient of the stage's input.
        backward_weights: the time of the gradients of its weights. A full backward pass takes the
            sum of both.
        send: the time from a task to a task of another rank that takes its result; both ranks
            compute meanwhile.
        activation_bytes: the memory that the stage stores for the backward pass of a micro-batch,
            on each of its devices.

    Raises:
        UsageError: a number that is negative or not finite, or a forward pass that takes no time.

    >>> StageCosts(forward=1, backward_input=1, backward_weights=0.5).of(Work.BACKWARD)
    1.5
    """

    forward: float = 1
    backward_input: float = 1
    backward_weights: float = 1
    send: float = 0
    activation_bytes: float = 0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            if not isfinite(cost) or cost < 0 or (cost == 0 and name == "forward"):
                raise UsageError(
                    f"{name}={cost!r}.\nExpected a finite number, 0 or more (`forward`: more)."
                )

    @property
    def times(self) -> tuple[float, ...]:
        """The times, without the bytes."""
        return self.forward, self.backward_input, self.backward_weights, self.send

    def rounded(self, unit: float) -> StageCosts:
        """Times as integer multiples of a unit, for diagrams: at least 1 for nonzero times.

        >>> StageCosts(2e-3, 4.2e-3, 1e-4).rounded(1e-3).times
        (2, 4, 1, 0)
        """
        forward, back, weights, send = (
            max(round(time / unit), int(time > 0)) for time in self.times
        )
        return StageCosts(forward, back, weights, send, self.activation_bytes)

    def of(self, work: Work) -> float:
        """The time of a task."""
        return {
            Work.FORWARD: self.forward,
            Work.BACKWARD: self.backward_input + self.backward_weights,
            Work.BACKWARD_INPUT: self.backward_input,
            Work.BACKWARD_WEIGHTS: self.backward_weights,
        }[work]


@dataclass(frozen=True)
class Timetable:
    """The start time of each task of a schedule, if every rank runs each task as early as it can.

    Args:
        schedule: the schedule.
        costs: one for all stages, or one for each.

    Raises:
        UsageError: costs for more or fewer stages than there are.

    >>> from reshard.spmd.programs.pipelines.orders import pipeline_schedule
    >>> table = Timetable(pipeline_schedule("1f1b", n_ranks=2, n_microbatches=3))
    >>> table.length, table.bubble
    (12.0, 0.25)
    >>> print(table)
    0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
    >>> first, last = StageCosts(activation_bytes=4e6), StageCosts(2, activation_bytes=6e6)
    >>> print(Timetable(table.schedule, (first, last)))
    0 | F0 F1 .. .. .. B0 B0 F2 .. B1 B1 .. .. B2 B2 | 8.00 MB
    1 | .. F0 F0 B0 B0 F1 F1 B1 B1 F2 F2 B2 B2 .. .. | 6.00 MB
    """

    schedule: PipelineSchedule
    costs: StageCosts | Sequence[StageCosts] = StageCosts()

    def __post_init__(self) -> None:
        if len(self.stage_costs) != self.schedule.n_stages:
            raise UsageError(
                f"costs of {len(self.stage_costs)} stages for a schedule of "
                f"{self.schedule.n_stages}.\nExpected one for each, or one for all alike."
            )

    @cached_property
    def stage_costs(self) -> tuple[StageCosts, ...]:
        """The costs of each stage."""
        if isinstance(self.costs, StageCosts):
            return (self.costs,) * self.schedule.n_stages
        return tuple(self.costs)

    def time_of(self, task: PipelineTask) -> float:
        """The time of a task."""
        return self.stage_costs[task.stage].of(task.work)

    @cached_property
    def starts(self) -> dict[PipelineTask, float]:
        """The start time of each task, relative to the first."""
        starts: dict[PipelineTask, float] = {}
        free = [0.0] * self.schedule.n_ranks
        rank_of = self.schedule.rank_of
        for task in self.schedule.run_order:
            rank = rank_of[task.stage]
            begin = free[rank]
            for need in self.schedule.needs(task):
                is_sent = rank_of[need.stage] != rank
                ready = starts[need] + self.time_of(need)
                begin = max(begin, ready + self.stage_costs[need.stage].send * is_sent)
            starts[task] = begin
            free[rank] = begin + self.time_of(task)
        return starts

    @property
    def length(self) -> float:
        """The time from the start of the first task to the end of the last one."""
        return max(self._end(task) for task in self.starts)

    @property
    def period(self) -> float:
        """The time per step of many steps, where ranks begin the next one as soon as they finish.

        It is the longest time of one rank from the start of its first task to the end of its last
        one.
        """
        return max(self._end(line[-1]) - self.starts[line[0]] for line in self.schedule.tasks)

    @property
    def bubble(self) -> float:
        """The fraction of the time of all ranks that is idle: from 0 to less than 1."""
        busy = sum(self.time_of(task) for line in self.schedule.tasks for task in line)
        return 1 - busy / (self.schedule.n_ranks * self.length)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """For each rank, the peak memory of activations in bytes.

        They are stored from the forward task to the backward one, or to that of the weights.
        """
        peaks = []
        for line in self.schedule.tasks:
            held = peak = 0.0
            for task in line:
                own = self.stage_costs[task.stage].activation_bytes
                if task.work is Work.FORWARD:
                    held += own
                    peak = max(peak, held)
                elif task.work is not Work.BACKWARD_INPUT:
                    held -= own
            peaks.append(peak)
        return tuple(peaks)

    def _end(self, task: PipelineTask) -> float:
        return self.starts[task] + self.time_of(task)

    def __str__(self) -> str:
        """A line a rank, a column a unit of time; `F3` is microbatch 3, `F3'` on its second stage.

        At the end, where costs say what activations take, is the most that the rank holds of them.

        Raises:
            UsageError: times that are not whole numbers.
        """
        if any(time != int(time) for costs in self.stage_costs for time in costs.times):
            raise UsageError(
                f"{self.costs}: no picture.\n"
                "Expected whole numbers, which are columns; round them by StageCosts.rounded."
            )
        n_ranks, rank_of = self.schedule.n_ranks, self.schedule.rank_of
        rows = [[""] * int(self.length) for _ in range(n_ranks)]
        for task, begin in self.starts.items():
            before = sum(rank_of[stage] == rank_of[task.stage] for stage in range(task.stage))
            mark = f"{task.work.value}{task.microbatch}" + "'" * before
            for column in range(int(begin), int(self._end(task))):
                rows[rank_of[task.stage]][column] = mark
        width = max(len(mark) for row in rows for mark in row)
        ranks = len(str(n_ranks - 1))
        has_bytes = any(costs.activation_bytes for costs in self.stage_costs)
        return "\n".join(
            f"{rank:{ranks}} | "
            + " ".join((mark or "." * width).ljust(width) for mark in row)
            + (f" | {bytes_text(held)}" if has_bytes else "")
            for rank, (row, held) in enumerate(zip(rows, self.peak_bytes, strict=True))
        )
