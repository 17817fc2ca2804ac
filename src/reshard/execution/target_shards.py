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
from typing import TypeVar

import numpy as np

from reshard.execution.arrays import kind_of
from reshard.execution.cells import cell_arrays
from reshard.execution.local import finish_contributions
from reshard.execution.transfer_copies import transfer_copies
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.runs import distinct

Array = TypeVar("Array")


def target_shard(
    plan: LayoutChange,
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
    >>> plan = LayoutChange(whole, halves)
    >>> target_shard(plan, plan.transfers, 1, {0: np.arange(4)})
    (array([2, 3]), 2)
    """
    rows = transfers.take(transfers.target_slot == rank)
    kind = kind_of(next(iter(shards.values())), "the source's array")
    senders = distinct(rows.source_slot).tolist()
    sources = cell_arrays(plan.source, {slot: kind.storage(shards[slot]) for slot in senders})
    filled = np.zeros(plan.target.local_shape(rank) or (), dtype=kind.dtype.storage)
    targets = cell_arrays(plan.target, {rank: filled})
    for copy in transfer_copies(rows, sources, targets, kind, plan.source.reduction):
        check()
        copy.carry_out()
    finish_contributions(plan, kind, targets)
    array: Array = kind.array(filled)
    return array, int(rows.elements.sum())
