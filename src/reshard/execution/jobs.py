"""A job carried out on arrays in one process: the boxes that its senders were chosen for.

1. The arrays of all tensors are checked before anything is copied.
2. Box by box, a target array gets what its sender has: the first contribution of an element is
   copied, the rest are combined with it in order. Threads share the boxes of all tensors.
3. Means are scaled, and contributions that combine nothing are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, check_by_name, in_order
from reshard.execution.cells import cell_arrays, clear_pads
from reshard.execution.copies import Copy, carry_out, checked_threads
from reshard.execution.fresh_memory import FreshMemory
from reshard.execution.local import check_shards, finish_contributions, source_storages
from reshard.execution.outputs import (
    NamedStorage,
    check_apart,
    given_storages,
    new_storages,
    output_name,
)
from reshard.execution.transfer_copies import transfer_copies
from reshard.geometry.transfers import Transfers

if TYPE_CHECKING:
    from reshard.plans.job import Job

Array = TypeVar("Array")


def run_job(
    job: Job,
    arrays: Mapping[str, Mapping[int, Array]],
    out: Mapping[str, Mapping[int, Array]] | None = None,
    threads: int | None = None,
) -> dict[str, dict[int, Array]]:
    """The target's arrays of every tensor, from the source's: `{name: {rank: array}}`.

    Args:
        job: what to do.
        arrays: for every tensor and source rank that holds something, its array.
        out: arrays to write to, for every tensor and target rank, as in `Plan.run`.
        threads: how many copy at most, all tensors together; one for each processor when None.

    Raises:
        ShardError: a tensor or an array that is missing, or has another shape or dtype; an
            array of `out` that cannot be written, or shares memory with one of any tensor.
        PlanError: a source that leaves out an element.
        UsageError: fewer than one thread.

    >>> import numpy as np
    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> whole, last = reshard.Layout.replicated((3,), 2), reshard.Layout.whole((3,), [2], 3)
    >>> job = reshard.Job([reshard.JobItem.between_ranks("a", dtype("int8"), whole, last)])
    >>> copy = np.array([1, 2, 3], np.int8)
    >>> run_job(job, {"a": {0: copy, 1: copy}})["a"][2].tolist()
    [1, 2, 3]
    """
    workers = checked_threads(threads)
    kinds, held = given_sources(job, arrays)
    if out is None:
        memory = FreshMemory()
        filled = {i.name: new_storages(i.change.target, kinds[i.name], memory) for i in job.items}
        memory.find(workers)
    else:
        filled = _given(job, kinds, out)
        check_apart(
            _named(filled, lambda slot, tensor: output_name(slot, f" of {tensor!r}")),
            _named(held, lambda slot, tensor: f"the source of {tensor!r} on slot {slot}"),
        )
    copies: list[Copy] = []
    cells = {i.name: cell_arrays(i.change.target, filled[i.name]) for i in job.items}
    for item in job.items:
        plan, kind = item.change, kinds[item.name]
        transfers = job.transfers.get(item.name, Transfers.none(plan.target.ndim))
        sources = cell_arrays(plan.source, held[item.name])
        copies += transfer_copies(transfers, sources, cells[item.name], kind, plan.source.reduction)
    for item in job.items:
        clear_pads(item.change.target, cells[item.name])
    carry_out(copies, workers)
    results: dict[str, dict[int, Array]] = {}
    for item in job.items:
        kind, storages = kinds[item.name], filled[item.name]
        finish_contributions(item.change, kind, cells[item.name])
        if out is None:
            results[item.name] = {slot: kind.array(array) for slot, array in storages.items()}
        else:
            results[item.name] = {slot: out[item.name][slot] for slot in storages}
    return results


def given_sources(
    job: Job, arrays: Mapping[str, Mapping[int, Any]]
) -> tuple[dict[str, ArrayKind], dict[str, dict[int, Storage]]]:
    """The kind of each tensor's source arrays, and their memory.

    Raises ShardError for a tensor or an array that is missing, or does not fit the source.
    """
    check_by_name(arrays, "what is given")
    kinds, held = {}, {}
    for item in job.items:
        name, tensor = item.name, f" of {item.name!r}"
        if name not in arrays:
            raise ShardError(f"no arrays for tensor {name!r}; got {in_order(arrays)}")
        kinds[name] = check_shards(item.change, arrays[name], tensor, item.dtype)
        held[name] = source_storages(item.change, kinds[name], arrays[name], tensor)
    return kinds, held


def _given(
    job: Job, kinds: Mapping[str, ArrayKind], out: Mapping[str, Mapping[int, Any]]
) -> dict[str, dict[int, Storage]]:
    """The memory of all arrays in `out`. Raises ShardError for one that does not fit."""
    check_by_name(out, "out")
    found = {}
    for item in job.items:
        if item.name not in out:
            raise ShardError(f"no arrays for tensor {item.name!r} in out; got {in_order(out)}")
        tensor = f" of {item.name!r}"
        layout = item.change.target
        found[item.name] = given_storages(layout, kinds[item.name], out[item.name], tensor)
    return found


def _named(
    storages: Mapping[str, Mapping[int, Storage]], name: Callable[[int, str], str]
) -> Iterator[NamedStorage]:
    for tensor, of_slots in storages.items():
        for slot, storage in of_slots.items():
            yield NamedStorage(name(slot, tensor), storage)
