"""A program of collectives carried out on arrays in one process.

Between arrays of one process nothing has to be sent, and what a program says is only where each
element ends up: unless contributions are combined, all steps are done as one direct copy from
source to target, each element written once. On demand, and where contributions are combined,
whose order the steps decide, it goes step by step and group by group. Then a group's arrays are
all that its plan sees, so a step that reached outside its groups fails here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from reshard.collectives.steps import Permute
from reshard.errors import ShardError
from reshard.execution.arrays import check_by_slot, in_order
from reshard.execution.copies import Copy, carry_out, checked_threads
from reshard.execution.local import check_shards, run, source_storages
from reshard.execution.outputs import storages_to_fill
from reshard.geometry.layout_change import LayoutChange
from reshard.sharding import ShardingSpec

if TYPE_CHECKING:
    from reshard.collectives.program import Program
    from reshard.collectives.steps import Step

Array = TypeVar("Array")


def run_program(
    program: Program,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None = None,
    threads: int | None = None,
    stepwise: bool = False,
) -> dict[int, Array]:
    """The target's shards, from the source's.

    Args:
        program: what to do.
        shards: for every rank of the source its array, all of one dtype and kind.
        out: arrays to write to, one for every rank of the target, as in `Plan.run`.
        threads: how many copy at most; one for each processor when None.
        stepwise: carry out every step by itself, also where one direct copy does the same.

    Returns:
        For every rank of the target its array: that of `out`, or a new one.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that cannot be written, or that shares memory with another.
        PlanError: stepwise, a group that has not what its ranks need.
        UsageError: fewer than one thread.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2)
    >>> program = find_program(spec(mesh, "x, -"), spec(mesh, "-, x"), (2, 4))
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run_program(program, shards)[1].tolist()
    [[2, 3], [6, 7]]
    """
    workers = checked_threads(threads)
    direct = LayoutChange(
        program.source.layout(program.shape), program.target.layout(program.shape)
    )
    _check_ranks(program.source, direct, shards)
    layouts = [direct.source, *(step.target_layout for step in program.steps)]
    if not program.steps or not (stepwise or any(layout.reduction for layout in layouts)):
        return run(direct, shards, out, threads)
    kind = check_shards(direct, shards)
    if out is not None:
        # The last step reads what the steps before made: what is wrong has to be found here.
        sources = source_storages(direct, kind, shards)
        storages_to_fill(direct.target, kind, out, sources, workers)
    found: Mapping[int, Array] = shards
    for step in program.steps:
        found = run_step(step, found, out if step is program.steps[-1] else None, threads)
    return dict(found)


def run_step(
    step: Step,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None = None,
    threads: int | None = None,
) -> dict[int, Array]:
    """One step's result, from what was before. Raises as `run_program` does, stepwise."""
    if isinstance(step, Permute):
        return _permuted(step, shards, out, threads)
    found: dict[int, Array] = {}
    for plan in step.plans:
        _check_ranks(step.source, plan, shards)
        held = {rank: shards[rank] for rank in plan.source.holders}
        found |= run(plan, held, out, threads)
    return found


def _check_ranks(source: ShardingSpec, plan: LayoutChange, shards: Mapping[int, Array]) -> None:
    check_by_slot(shards, "what is given")
    missing = [rank for rank in plan.source.holders if rank not in shards]
    if missing:
        holders = source.layout(plan.source.shape).holders
        raise ShardError(
            f"no array for rank {missing[0]}; `{source}` holds data on ranks {list(holders)}, "
            f"got {in_order(shards)}"
        )


def _permuted(
    step: Permute,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None,
    threads: int | None,
) -> dict[int, Array]:
    """Whole shards that change places are copied as they are."""
    unmoved = LayoutChange(step.source_layout, step.source_layout)
    kind = check_shards(unmoved, shards)
    held = source_storages(unmoved, kind, shards)
    workers = checked_threads(threads)
    target = storages_to_fill(step.target_layout, kind, out, held, workers)
    carry_out(
        # An empty shard may have another shape than the one it is taken from.
        (
            Copy(target[receiver], held[sender].reshape(target[receiver].shape))
            for sender, receiver in step.pairs
        ),
        workers,
    )
    if out is not None:
        return {receiver: out[receiver] for _, receiver in step.pairs}
    return {receiver: kind.array(target[receiver]) for _, receiver in step.pairs}
