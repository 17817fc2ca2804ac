"""A program of collectives carried out on arrays in one process, step by step, group by group.

A group's arrays are all that its plan sees, so a step that reached outside its groups would
fail here. Whole shards that change places are copied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from reshard.collectives.steps import Permute
from reshard.errors import ShardError
from reshard.execution.local import check_shards
from reshard.planning.plan import Plan

if TYPE_CHECKING:
    from reshard.collectives.program import Program
    from reshard.collectives.steps import Step

Array = TypeVar("Array")


def run_program(program: Program, shards: Mapping[int, Array]) -> dict[int, Array]:
    """The target's shards, from the source's.

    Args:
        program: what to do.
        shards: for every rank of the source its array, all of one dtype and kind.

    Returns:
        For every rank of the target a new array of its local shape.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, spec
    >>> from reshard.collectives import find_program
    >>> mesh = DeviceMesh.of(x=2)
    >>> program = find_program(spec(mesh, "x, -"), spec(mesh, "-, x"), (2, 4))
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run_program(program, shards)[1].tolist()
    [[2, 3], [6, 7]]
    """
    if not program.steps:
        layout = program.source.layout(program.shape)
        return Plan(layout, layout).run(shards)
    found: Mapping[int, Array] = shards
    for step in program.steps:
        found = run_step(step, found)
    return dict(found)


def run_step(step: Step, shards: Mapping[int, Array]) -> dict[int, Array]:
    """One step's result, from what was before. Raises ShardError for arrays that do not fit."""
    if isinstance(step, Permute):
        return _permuted(step, shards)
    found: dict[int, Array] = {}
    for plan in step.plans:
        missing = [rank for rank in plan.source.holders if rank not in shards]
        if missing:
            raise ShardError(
                f"no array for rank {missing[0]}; `{step.source}` holds data on ranks "
                f"{list(step.source_layout.holders)}, got {sorted(shards)}"
            )
        found |= plan.run({rank: shards[rank] for rank in plan.source.holders})
    return found


def _permuted(step: Permute, shards: Mapping[int, Array]) -> dict[int, Array]:
    kind = check_shards(Plan(step.source_layout, step.source_layout), shards)
    found: dict[int, Array] = {}
    for sender, receiver in step.pairs:
        copied = kind.storage(shards[sender]).copy()
        # An empty shard may have another shape than the one it is taken from.
        found[receiver] = kind.array(copied.reshape(step.target_layout.local_shape(receiver) or ()))
    return found
