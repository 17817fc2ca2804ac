"""Pipeline schedules: the tasks of each rank, named orders of them, and when each task runs.

Each stage of a function is on the rank that has its tasks. A backward pass is a task, or
two: the gradient of a stage's input, for which the stage before it waits, and the gradients of its
weights, for which no task waits (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

Sources of the named orders: `gpipe`, Huang et al., "GPipe" (2019); `1f1b`, PipeDream-Flush of
Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021); `interleaved`, Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021);
`zb-h1` and `zb-h2`, Qi et al. (2023); `zb-v`, Qi et al., "Pipeline Parallelism with Controllable
Memory" (2024).

The stages of a rank with several are assigned round-robin (`interleaved`), or forth and back
(`zb-v`)::

    rank      0  1  2  3            rank      0  1  2  3
    stages    0  1  2  3            stages    0  1  2  3
              4  5  6  7                      7  6  5  4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import isfinite

from reshard._validation import check_int
from reshard.errors import PlanError, UsageError
from reshard.text import bytes_text


class Work(Enum):
    """The computation of a task; its value is the letter in diagrams."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHTS = "W"


@dataclass(frozen=True)
class PipelineTask:
    """Work on a stage for a micro-batch.

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
        # Computed here, so that an order in which ranks wait forever is refused before it runs.
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
        """Return the tasks whose results a task needs, of its own and of the neighbouring stage."""
        stage, microbatch = task.stage, task.microbatch
        if task.work is Work.FORWARD:
            return (PipelineTask(Work.FORWARD, stage - 1, microbatch),) if stage else ()
        if task.work is Work.BACKWARD_WEIGHTS:
            return (PipelineTask(Work.BACKWARD_INPUT, stage, microbatch),)
        forward = PipelineTask(Work.FORWARD, stage, microbatch)
        # The loss is there, so its backward pass begins from its own forward pass.
        if stage == self.n_stages - 1:
            return (forward,)
        split = (stage + 1, microbatch) in self.splits_backward
        after = Work.BACKWARD_INPUT if split else Work.BACKWARD
        return forward, PipelineTask(after, stage + 1, microbatch)

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
        """For each rank, the maximum number of stored activations of a stage and micro-batch.

        They are stored from the forward task to the backward task, or to that of the weights.
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
    """Raise PlanError for a wrong number of stages and for misplaced or missing tasks."""
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
    counts = Counter(task for line in schedule.tasks for task in line)
    expected = {
        PipelineTask(work, stage, microbatch)
        for stage in range(schedule.n_stages)
        for microbatch in range(schedule.n_microbatches)
        for work in _works(schedule, stage, microbatch)
    }
    # Sorted, so that the same task is named each time: sets are unordered.
    for task in sorted(counts.keys() | expected, key=str):
        expected_count = int(task in expected)
        if counts[task] != expected_count:
            raise PlanError(
                f"{task}: {counts[task]} times.\nExpected it {expected_count} times: each stage "
                "has for each microbatch one forward task, and one backward task or its two halves."
            )


def _works(schedule: PipelineSchedule, stage: int, microbatch: int) -> tuple[Work, ...]:
    """Return the tasks of a stage for a microbatch."""
    if (stage, microbatch) in schedule.splits_backward:
        return Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHTS
    return Work.FORWARD, Work.BACKWARD


ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def pipeline_schedule(
    order: str, n_ranks: int, n_microbatches: int, *, stages_per_rank: int = 1
) -> PipelineSchedule:
    """Create a pipeline schedule by its name.

    Let F, I and W be the times of a rank for a micro-batch: forward pass, gradient of the input,
    and gradients of the weights. Each rank is idle for `(n_ranks - 1) * (F + I + W)` with `gpipe`
    and `1f1b`, and for that divided by `stages_per_rank` with `interleaved`. With `zb-h1`, if the
    three times are equal and there are at least as many micro-batches as ranks, it is idle for
    `(n_ranks - 1) * (F + I - W)`. Rank `r` stores the activations of all micro-batches with
    `gpipe`, of `n_ranks - r` with `1f1b`, and of `n_ranks` with `zb-h1`, or of all micro-batches if
    there are fewer.

    With `zb-h2` and `zb-v`, if the three times are equal and there are at least `2 * n_ranks - 1`
    micro-batches, a rank is never idle between its first and its last task. It stores the
    activations of `2 * n_ranks - 1` micro-batches with `zb-h2`, and of `2 * n_ranks` with `zb-v`,
    whose stages are half as large: as much as the first rank with `1f1b`.

    Args:
        order: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2` or `zb-v`.
        n_ranks: the number of ranks of the pipeline.
        n_microbatches: the number of micro-batches of a step; for `interleaved` a multiple of the
            ranks.
        stages_per_rank: any number for `interleaved`, 2 for `zb-v`, and 1 for all others.

    Raises:
        UsageError: another name; numbers that are less than 1 or do not fit the order.

    >>> from reshard.spmd.programs.pipelines.schedule import Timetable
    >>> print(Timetable(pipeline_schedule("zb-h1", n_ranks=2, n_microbatches=3)))
    0 | F0 F1 .. I0 W0 F2 I1 W1 I2 W2
    1 | .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    >>> pipeline_schedule("gpipe", 4, 8).peak_activations
    (8, 8, 8, 8)
    >>> pipeline_schedule("1f1b", 4, 8).peak_activations
    (4, 3, 2, 1)
    """
    if order not in ORDERS:
        raise UsageError(f"order {order!r}.\nExpected one of {', '.join(ORDERS)}.")
    n_ranks = check_int(n_ranks, "number of ranks", minimum=1)
    n_microbatches = check_int(n_microbatches, "number of microbatches", minimum=1)
    per_rank = check_int(stages_per_rank, "stages_per_rank", minimum=1)
    expected = 2 if order == "zb-v" else 1
    if order != "interleaved" and per_rank != expected:
        raise UsageError(
            f"stages_per_rank={per_rank} with order {order!r}.\n"
            f"Expected {expected}; any number of stages a rank is of order 'interleaved'."
        )
    # A rank takes as many microbatches as there are ranks through each stage, in whole groups.
    if order == "interleaved" and n_microbatches % n_ranks:
        raise UsageError(
            f"{n_microbatches} microbatches on {n_ranks} ranks, interleaved.\n"
            "Expected a multiple of the number of ranks; cut the batch otherwise."
        )
    if order == "zb-v":
        lines = [_list_there_and_back(rank, n_ranks, n_microbatches) for rank in range(n_ranks)]
    else:
        lines = [
            list(_list_tasks(order, rank, n_ranks, n_microbatches, per_rank))
            for rank in range(n_ranks)
        ]
    return PipelineSchedule(tuple(map(tuple, lines)), n_ranks * per_rank, n_microbatches)


def _list_tasks(
    order: str, rank: int, n_ranks: int, n_microbatches: int, per_rank: int
) -> Iterator[PipelineTask]:
    """Yield a rank's tasks: a forward warm-up, alternating forward and backward, then the rest."""
    n_tasks = n_microbatches * per_rank
    forward = [_place(k, rank, n_ranks, per_rank) for k in range(n_tasks)]
    backward = [
        # Backward passes go through a rank's stages from the last to the first.
        ((per_rank - 1 - stage // n_ranks) * n_ranks + rank, microbatch)
        for stage, microbatch in forward
    ]
    split = order in ("zb-h1", "zb-h2")
    # Weights wait for as many microbatches as make the rank hold as much as the first rank.
    waiting = {"zb-h1": rank, "zb-h2": 2 * rank}.get(order, 0)
    warm = min(n_tasks, _warm_up(order, rank, n_ranks, n_tasks, per_rank))
    for place in forward[:warm]:
        yield PipelineTask(Work.FORWARD, *place)
    for k, place in enumerate(backward):
        if warm + k < n_tasks:
            yield PipelineTask(Work.FORWARD, *forward[warm + k])
        yield PipelineTask(Work.BACKWARD_INPUT if split else Work.BACKWARD, *place)
        if split and k >= waiting:
            yield PipelineTask(Work.BACKWARD_WEIGHTS, *backward[k - waiting])
    if split:
        for place in backward[max(0, n_tasks - waiting) :]:
            yield PipelineTask(Work.BACKWARD_WEIGHTS, *place)


def _warm_up(order: str, rank: int, n_ranks: int, n_tasks: int, per_rank: int) -> int:
    """Return how many forward tasks a rank runs before it takes turns."""
    if order == "gpipe":
        return n_tasks
    if order == "interleaved" and per_rank > 1:
        # As Megatron-LM's interleaved schedule.
        return 2 * (n_ranks - 1 - rank) + (per_rank - 1) * n_ranks
    if order == "zb-h2":
        # Until the gradient of its first microbatch can be there.
        return 2 * (n_ranks - 1 - rank)
    # As many as later ranks need until the first gradient comes back.
    return n_ranks - 1 - rank


def _place(k: int, rank: int, n_ranks: int, per_rank: int) -> tuple[int, int]:
    """Return the stage and microbatch of a rank's `k`-th forward task.

    A rank takes as many microbatches as there are ranks through each of its stages in turn.
    """
    if per_rank == 1:
        return rank, k
    group, within = divmod(k, n_ranks * per_rank)
    stage, microbatch = divmod(within, n_ranks)
    return stage * n_ranks + rank, group * n_ranks + microbatch


def _list_there_and_back(rank: int, n_ranks: int, n_microbatches: int) -> list[PipelineTask]:
    """Return a rank's tasks under `zb-v`, on its stages forth and back.

    1. Forward tasks, until the first microbatch is back at this rank's second stage.
    2. Rounds of all three works on the second stage, until its gradient is at the first.
    3. Rounds on both stages in turn, while there are forward tasks.
    4. Gradients of inputs, for which other ranks wait, before those of weights.
    """
    there, back = rank, 2 * n_ranks - 1 - rank
    tasks: list[PipelineTask] = []
    counts: Counter[tuple[Work, int]] = Counter()

    def add(stage: int, *works: Work, times: int = 1) -> None:
        """Add each work on the next microbatch that it can be done for, if any."""
        for work in works * times:
            before = _BEFORE.get(work)
            most = n_microbatches if before is None else counts[before, stage]
            if counts[work, stage] < most:
                tasks.append(PipelineTask(work, stage, counts[work, stage]))
                counts[work, stage] += 1

    add(there, Work.FORWARD, times=2 * (n_ranks - rank) - 1)
    for _ in range(rank):
        add(back, Work.FORWARD)
        add(there, Work.FORWARD)
    add(back, *_ROUND, times=n_ranks - rank)
    while counts[Work.FORWARD, back] < n_microbatches:
        add(there, *_ROUND)
        add(back, *_ROUND)
    for _ in range(rank):
        add(there, Work.BACKWARD_INPUT)
        add(back, Work.BACKWARD_INPUT)
    add(there, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHTS, times=n_ranks - rank)
    for work in (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHTS):
        add(back, work, times=n_microbatches)
        add(there, work, times=n_microbatches)
    return tasks


_ROUND = (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHTS)
# The previous task of a stage for the same microbatch.
_BEFORE = {
    Work.BACKWARD_INPUT: Work.FORWARD,
    Work.BACKWARD_WEIGHTS: Work.BACKWARD_INPUT,
}


@dataclass(frozen=True)
class StageCosts:
    """The costs of a stage for a micro-batch: times in seconds or any other unit.

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
        """Return times as integer multiples of a unit, for diagrams: at least 1 if nonzero.

        >>> StageCosts(2e-3, 4.2e-3, 1e-4).rounded(1e-3).times
        (2, 4, 1, 0)
        """
        forward, back, weights, send = (
            max(round(time / unit), int(time > 0)) for time in self.times
        )
        return StageCosts(forward, back, weights, send, self.activation_bytes)

    def of(self, work: Work) -> float:
        """Return the time of a task."""
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
        costs: of all stages, or a list of those of each.

    Raises:
        UsageError: costs for more or fewer stages than there are.

    >>> from reshard.spmd.programs.pipelines.schedule import pipeline_schedule
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
        """Return the time of a task."""
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
        """The time from the start of the first task to the end of the last."""
        return max(self._end(task) for task in self.starts)

    @property
    def period(self) -> float:
        """The time per step of many steps, if ranks start the next step as soon as they finish.

        It is the longest time of a rank from the start of its first task to the end of its last.
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

        They are stored from the forward task to the backward task, or to that of the weights.
        """
        peaks = []
        for line in self.schedule.tasks:
            held = peak = 0.0
            for task in line:
                stored_bytes = self.stage_costs[task.stage].activation_bytes
                if task.work is Work.FORWARD:
                    held += stored_bytes
                    peak = max(peak, held)
                elif task.work is not Work.BACKWARD_INPUT:
                    held -= stored_bytes
            peaks.append(peak)
        return tuple(peaks)

    def _end(self, task: PipelineTask) -> float:
        return self.starts[task] + self.time_of(task)

    def __str__(self) -> str:
        """Draw a line per rank, a column per unit of time; `F3'` is `F3` on the second stage.

        A line ends with the rank's peak memory of activations, if the costs define it.

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
            # A prime for each earlier stage of the rank.
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
