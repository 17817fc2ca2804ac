"""What does one target rank get of a job, in one process?

A job may be carried out rank by rank: each target rank's arrays follow from the source's alone,
so that ranks can be treated at the same time, or in different processes, and only the parts of
the source are read that the rank gets.

1. New memory of the rank's local shape, zero where it is padding.
2. Box by box, what a sender has is copied; contributions are combined in order.
3. Means are scaled, and contributions that combine nothing are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.execution.arrays import kind_of
from reshard.execution.local import cell_arrays, finish_contributions
from reshard.planning.transfers import Transfers
from reshard.runs import IntArray

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

Array = TypeVar("Array")


def target_shard(
    plan: Plan,
    transfers: Transfers,
    rank: int,
    shards: Mapping[int, Array],
    check: Callable[[], None] = lambda: None,
) -> tuple[Array, int]:
    """The array of a target rank that holds something, and how many elements were copied to it.

    Args:
        plan: of the tensor, whose arrays were checked (`execution.local.check_shards`).
        transfers: of the tensor, into any ranks.
        rank: whose array is wanted.
        shards: the arrays of the source's ranks; only read.
        check: called before every box; what it raises ends the work.

    >>> import reshard
    >>> whole = reshard.Layout.replicated((4,), 1)
    >>> halves = reshard.spec(reshard.DeviceMesh.of(x=2), "x").layout((4,))
    >>> plan = reshard.plan(whole, halves)
    >>> target_shard(plan, plan.transfers, 1, {0: np.arange(4)})
    (array([2, 3]), 2)
    """
    kind = kind_of(next(iter(shards.values())), "the source's array")
    held = {slot: kind.storage(shards[slot]) for slot in plan.source.holders}
    sources = cell_arrays(plan.source, held)
    shape = plan.target.local_shape(rank)
    filled = np.zeros(shape or (), dtype=kind.dtype.storage)
    numbers = plan.target.cells_of(rank)
    targets = {}
    for cell in numbers:
        targets[cell] = filled
        if len(numbers) > 1:
            begin, extent = int(plan.target.cell_offset[cell]), plan.target.cell_shape[cell]
            stop = begin + int(extent.prod())
            targets[cell] = filled[begin:stop].reshape(tuple(extent.tolist()))
    rows = transfers.take(transfers.target_slot == rank)
    reduction = plan.source.reduction or "sum"
    for row in np.argsort(rows.order, kind="stable").tolist():
        check()
        data = sources[rows.source_cell[row]][_window(rows.source_start[row], rows.shape[row])]
        whole = targets[int(rows.target_cell[row])]
        place = _window(rows.target_start[row], rows.shape[row])
        if rows.order[row] > 0:
            data = kind.combine(reduction, whole[place], data)
        whole[place] = data
    finish_contributions(plan, kind, targets)
    array: Array = kind.array(filled)
    return array, int(rows.elements.sum())


def _window(start: IntArray, shape: IntArray) -> Any:
    ends = zip(start.tolist(), shape.tolist(), strict=True)
    return tuple(slice(a, a + n) for a, n in ends) or (...,)
