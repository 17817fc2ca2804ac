"""A job carried out on arrays in one process: the boxes that its senders were chosen for.

1. The arrays of all tensors are checked before anything is copied.
2. Box by box, a target array gets what its sender has: the first contribution of an element is
   copied, the rest are combined with it in order.
3. Means are scaled, and contributions that combine nothing are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.errors import ShardError
from reshard.execution.local import cell_arrays, check_shards, finish_contributions
from reshard.planning.transfers import Transfers
from reshard.runs import IntArray

if TYPE_CHECKING:
    from reshard.planning.job import Job

Array = TypeVar("Array")


def run_job(job: Job, arrays: Mapping[str, Mapping[int, Array]]) -> dict[str, dict[int, Array]]:
    """The target's arrays of every tensor, from the source's: `{name: {rank: array}}`.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype.
        PlanError: a source that leaves out an element.

    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> whole, last = reshard.Layout.replicated((3,), 2), reshard.Layout.whole((3,), [2], 3)
    >>> job = reshard.Job([reshard.JobItem.between_ranks("a", dtype("int8"), whole, last)])
    >>> copy = np.array([1, 2, 3], np.int8)
    >>> run_job(job, {"a": {0: copy, 1: copy}})["a"][2].tolist()
    [1, 2, 3]
    """
    kinds = {}
    for item in job.items:
        if item.name not in arrays:
            raise ShardError(f"no arrays for tensor {item.name!r}; got {sorted(arrays)}")
        kinds[item.name] = check_shards(item.plan, arrays[item.name])
    results: dict[str, dict[int, Array]] = {}
    for item in job.items:
        plan, kind = item.plan, kinds[item.name]
        held = {slot: kind.storage(arrays[item.name][slot]) for slot in plan.source.holders}
        filled = {
            slot: np.zeros(plan.target.local_shape(slot) or (), dtype=kind.dtype.storage)
            for slot in plan.target.holders
        }
        sources, targets = cell_arrays(plan.source, held), cell_arrays(plan.target, filled)
        transfers = job.transfers.get(item.name, Transfers.none(plan.target.ndim))
        reduction = plan.source.reduction or "sum"
        for row in np.argsort(transfers.order, kind="stable").tolist():
            shape = transfers.shape[row]
            data = sources[transfers.source_cell[row]][_window(transfers.source_start[row], shape)]
            cell = targets[transfers.target_cell[row]]
            place = _window(transfers.target_start[row], shape)
            if transfers.order[row] > 0:
                data = kind.combine(reduction, cell[place], data)
            cell[place] = data
        finish_contributions(plan, kind, dict(enumerate(targets)))
        results[item.name] = {slot: kind.array(storage) for slot, storage in filled.items()}
    return results


def _window(start: IntArray, shape: IntArray) -> Any:
    ends = zip(start.tolist(), shape.tolist(), strict=True)
    return tuple(slice(a, a + n) for a, n in ends) or (...,)
