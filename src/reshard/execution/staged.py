"""A job in stages carried out on arrays in one process, box by box.

1. The arrays of all tensors are checked before anything is copied.
2. The exchange fills target arrays from source arrays: the first contribution of an element
   is copied, the rest are combined with it in order.
3. The fan-out copies from target arrays to target arrays.
4. Means are scaled, and contributions that combine nothing are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from reshard.execution.cells import cell_arrays, clear_pads
from reshard.execution.copies import available_threads, carry_out
from reshard.execution.fresh_memory import FreshMemory
from reshard.execution.jobs import given_sources
from reshard.execution.local import finish_contributions
from reshard.execution.outputs import new_storages
from reshard.execution.transfer_copies import transfer_copies

if TYPE_CHECKING:
    from reshard.plans.hosts.staged_job import StagedJob

Array = TypeVar("Array")


def run_staged(
    staged: StagedJob, shards: Mapping[str, Mapping[int, Array]]
) -> dict[str, dict[int, Array]]:
    """The target's shards of every tensor, from the source's: `{name: {rank: array}}`.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype.
    """
    workers = available_threads()
    kinds, sources = given_sources(staged.job, shards)
    results: dict[str, dict[int, Array]] = {}
    for number, item in enumerate(staged.job.items):
        plan, kind = item.change, kinds[item.name]
        memory = FreshMemory()
        target = new_storages(plan.target, kind, memory)
        memory.find(workers)
        source_cells = cell_arrays(plan.source, sources[item.name])
        target_cells = cell_arrays(plan.target, target)
        clear_pads(plan.target, target_cells)
        exchange, fan_out = staged.transfers(number)
        for transfers, cells in ((exchange, source_cells), (fan_out, target_cells)):
            reduction = plan.source.reduction
            carry_out(transfer_copies(transfers, cells, target_cells, kind, reduction), workers)
        finish_contributions(plan, kind, target_cells)
        results[item.name] = {slot: kind.array(storage) for slot, storage in target.items()}
    return results
