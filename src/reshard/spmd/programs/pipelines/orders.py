"""The named orders of pipelines.

Sources: `gpipe`, Huang et al., "GPipe" (2019); `1f1b`, PipeDream-Flush of Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (2021); `interleaved`, Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021); `zb-h1`
and `zb-h2`, Qi et al., "Zero Bubble Pipeline Parallelism" (2023); `zb-v`, Qi et al., "Pipeline
Parallelism with Controllable Memory" (2024).

Where a rank has several stages they are dealt out in turn (`interleaved`), or there and back
(`zb-v`)::

    rank      0  1  2  3            rank      0  1  2  3
    stages    0  1  2  3            stages    0  1  2  3
              4  5  6  7                      7  6  5  4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reshard._validation import check_int
from reshard.errors import UsageError
from reshard.spmd.programs.pipelines.schedule import PipelineSchedule, PipelineTask, Work

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

    >>> from reshard.spmd.programs.pipelines.timetable import Timetable
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
    """One rank's tasks: forward ones to warm up, then one forward, one backward, then the rest."""
    n_tasks = n_microbatches * per_rank
    forward = [_place(k, rank, n_ranks, per_rank) for k in range(n_tasks)]
    backward = [
        ((per_rank - 1 - stage // n_ranks) * n_ranks + rank, microbatch)
        for stage, microbatch in forward
    ]
    split = order in ("zb-h1", "zb-h2")
    # Weights wait for as many microbatches as make the rank hold what the first one does.
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
    """How many forward tasks a rank runs before it takes turns."""
    if order == "gpipe":
        return n_tasks
    if order == "interleaved" and per_rank > 1:
        return 2 * (n_ranks - 1 - rank) + (per_rank - 1) * n_ranks
    if order == "zb-h2":
        # Until the gradient of its first microbatch can be there.
        return 2 * (n_ranks - 1 - rank)
    return n_ranks - 1 - rank


def _place(k: int, rank: int, n_ranks: int, per_rank: int) -> tuple[int, int]:
    """The stage and microbatch of a rank's `k`-th forward task.

    A rank takes as many microbatches as there are ranks through each of its stages in turn.
    """
    if per_rank == 1:
        return rank, k
    group, within = divmod(k, n_ranks * per_rank)
    stage, microbatch = divmod(within, n_ranks)
    return stage * n_ranks + rank, group * n_ranks + microbatch


def _list_there_and_back(rank: int, n_ranks: int, n_microbatches: int) -> list[PipelineTask]:
    """One rank's tasks under `zb-v`, on the stage there and the one back.

    1. Forward tasks, until the first microbatch is back at this rank's second stage.
    2. Rounds of all three works on the second stage, until its gradient is at the first one.
    3. Rounds on both stages in turn, while there are forward tasks.
    4. Gradients of inputs, for which other ranks wait, before those of weights.
    """
    there, back = rank, 2 * n_ranks - 1 - rank
    tasks: list[PipelineTask] = []
    counts: Counter[tuple[Work, int]] = Counter()

    def add(stage: int, *works: Work, times: int = 1) -> None:
        """Each work on the next microbatch that it can be done for, if there is one."""
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
# What a stage does before, for the same microbatch.
_BEFORE = {
    Work.BACKWARD_INPUT: Work.FORWARD,
    Work.BACKWARD_WEIGHTS: Work.BACKWARD_INPUT,
}
