"""A job in stages carried out on arrays in one process, box by box.

1. The arrays of all tensors are checked before anything is copied.
2. The exchange fills target arrays from source arrays: the first contribution of an element
   is copied, the rest are combined with it in order.
3. The fan-out copies from target arrays to target arrays.
4. Means are scaled, and contributions that combine nothing are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.errors import ShardError
from reshard.execution.arrays import Storage
from reshard.execution.local import cell_arrays, check_shards, finish_contributions
from reshard.planning.transfers import Transfers
from reshard.runs import IntArray

if TYPE_CHECKING:
    from reshard.planning.stages import StagedJob

Array = TypeVar("Array")


def run_staged(
    staged: StagedJob, shards: Mapping[str, Mapping[int, Array]]
) -> dict[str, dict[int, Array]]:
    """The target's shards of every tensor, from the source's: `{name: {rank: array}}`.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype.
    """
    kinds = {}
    for item in staged.job.items:
        if item.name not in shards:
            raise ShardError(f"no arrays for tensor {item.name!r}; got {sorted(shards)}")
        kinds[item.name] = check_shards(item.plan, shards[item.name])
    results: dict[str, dict[int, Array]] = {}
    for number, item in enumerate(staged.job.items):
        plan, kind = item.plan, kinds[item.name]
        source = {slot: kind.storage(shards[item.name][slot]) for slot in plan.source.holders}
        target = {
            slot: np.zeros(plan.target.local_shape(slot) or (), dtype=kind.dtype.storage)
            for slot in plan.target.holders
        }
        source_cells = cell_arrays(plan.source, source)
        target_cells = cell_arrays(plan.target, target)
        exchange, fan_out = staged.transfers(number)
        reduction = plan.source.reduction or "sum"
        for row in np.argsort(exchange.order, kind="stable").tolist():
            data = _box(source_cells, exchange.source_cell, exchange.source_start, exchange, row)
            place = _box(target_cells, exchange.target_cell, exchange.target_start, exchange, row)
            combined = exchange.order[row] > 0
            place[...] = kind.combine(reduction, place, data) if combined else data
        for row in range(len(fan_out)):
            data = _box(target_cells, fan_out.source_cell, fan_out.source_start, fan_out, row)
            place = _box(target_cells, fan_out.target_cell, fan_out.target_start, fan_out, row)
            place[...] = data
        finish_contributions(plan, kind, dict(enumerate(target_cells)))
        results[item.name] = {slot: kind.array(storage) for slot, storage in target.items()}
    return results


def _box(
    cells: list[Storage], cell: IntArray, start: IntArray, transfers: Transfers, row: int
) -> Storage:
    """The box of a transfer in the array of a cell, sharing its memory."""
    low, size = start[row].tolist(), transfers.shape[row].tolist()
    window: Any = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
    # A scalar's box is an array too, so that it can be written to.
    box: Storage = cells[int(cell[row])][window or ...]
    return box
