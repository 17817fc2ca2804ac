"""A plan carried out on arrays in one process.

1. The arrays are checked against both layouts before anything is copied.
2. Every target slot gets new memory, unless the caller gives it; positions that are padding are
   zero.
3. Each route copies its product of pieces (`route_copies`). The first contribution of an element
   is copied, the rest are combined with it in order. Threads share this (`copies`).
4. Means are scaled. A target contribution that combines none is filled with the reduction's
   identity.

Sources are only read. NumPy arrays and, where torch is loaded, torch CPU tensors are taken;
the result is of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.arrays import (
    ArrayKind,
    Storage,
    check_by_slot,
    check_reduction,
    identity,
    in_order,
    kind_of,
)
from reshard.execution.cells import cell_arrays, clear_pads, element_positions
from reshard.execution.copies import carry_out, checked_threads
from reshard.execution.outputs import storages_to_fill
from reshard.execution.route_copies import route_copies
from reshard.geometry.layout_change import LayoutChange

Array = TypeVar("Array")


def run(
    plan: LayoutChange,
    shards: Mapping[int, Array],
    out: Mapping[int, Array] | None = None,
    threads: int | None = None,
    dtype: DType | None = None,
) -> dict[int, Array]:
    """The target's shards, from the source's.

    Args:
        plan: what to do.
        shards: for every source slot that holds something, its array: of the slot's local
            shape (`plan.source.local_shape(slot)`), all of one dtype and kind.
        out: arrays to write to, one for every target slot that holds something: of its local
            shape, and of the sources' dtype and kind. New arrays are made when None, which
            takes about twice as long, and more where memory has to come from a virtual
            machine's host: the system has to find and clear it first.
        threads: how many copy at most; one for each processor when None. The result is the
            same for any number.
        dtype: what the arrays have to be of; anything when None.

    Returns:
        For every target slot that holds something its array: that of `out`, or a new one.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device; an
            array of `out` that cannot be written, or that shares memory with another.
        PlanError: a source that leaves out an element.
        UsageError: fewer than one thread.

    >>> import numpy as np
    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((2, 4)) for text in ("x, -", "-, x"))
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run(LayoutChange(rows, columns), shards)[1].tolist()
    [[2, 3], [6, 7]]
    >>> whole = np.zeros((2, 4), int)
    >>> found = run(LayoutChange(rows, columns), shards, {0: whole[:, :2], 1: whole[:, 2:]})
    >>> whole.tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    workers = checked_threads(threads)
    kind = check_shards(plan, shards, dtype=dtype)
    source = source_storages(plan, kind, shards)
    target = storages_to_fill(plan.target, kind, out, source, workers)
    cells = cell_arrays(plan.target, target)
    copies = list(route_copies(plan, kind, cell_arrays(plan.source, source), cells))
    clear_pads(plan.target, cells)
    carry_out(copies, workers)
    finish_contributions(plan, kind, cells)
    if out is None:
        return {slot: kind.array(storage) for slot, storage in target.items()}
    return {slot: out[slot] for slot in target}


def check_shards(
    plan: LayoutChange, shards: Mapping[int, Any], tensor: str = "", dtype: DType | None = None
) -> ArrayKind:
    """The kind of the arrays of a plan's source. Raises ShardError where they do not fit it.

    `tensor` is what errors call the tensor, where a run has several.
    """
    check_by_slot(shards, f"what is given{tensor}")
    holders = plan.source.holders
    missing = [slot for slot in holders if slot not in shards]
    if missing:
        raise ShardError(
            f"no array{tensor} for slot {missing[0]}; the source holds data on slots "
            f"{list(holders)}, got {in_order(shards)}"
        )
    if not holders:
        raise ShardError(f"the source layout{tensor} holds nothing, so there is nothing to run on")
    kinds = {slot: kind_of(shards[slot], source_name(slot, tensor)) for slot in holders}
    kind = kinds[holders[0]]
    for slot, other in kinds.items():
        found, expected = tuple(shards[slot].shape), plan.source.local_shape(slot)
        if found != expected:
            raise ShardError(
                f"{source_name(slot, tensor)} has shape {list(found)}, but the source layout "
                f"says {list(expected or ())}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"{source_name(slot, tensor)} is {type(other).__name__} of {other.dtype.name}, "
                f"that of slot {holders[0]} {type(kind).__name__} of {kind.dtype.name}; "
                "all must be alike"
            )
    if dtype is not None and kind.dtype is not dtype:
        raise ShardError(
            f"arrays{tensor} of {kind.dtype.name} for a plan of {dtype.name}; nothing is cast"
        )
    for reduction in {plan.source.reduction, plan.target.reduction} - {None}:
        # Where only the target is a mean, its contributions are copies: nothing is divided.
        if reduction != "mean" or plan.source.reduction == "mean":
            check_reduction(str(reduction), kind.dtype)
    return kind


def source_storages(
    plan: LayoutChange, kind: ArrayKind, shards: Mapping[int, Any], tensor: str = ""
) -> dict[int, Storage]:
    """The memory of a plan's source arrays, that were checked.

    Raises ShardError where it is elsewhere, or cannot be shared; `tensor` as in `check_shards`.
    """
    return {
        slot: kind.storage(shards[slot], source_name(slot, tensor)) for slot in plan.source.holders
    }


def source_name(slot: int, tensor: str = "") -> str:
    """What an error calls the array that was given for a slot."""
    return f"the array of slot {slot}{tensor}"


def finish_contributions(plan: LayoutChange, kind: ArrayKind, cells: Mapping[int, Storage]) -> None:
    """Scale means, and fill what combines nothing with the reduction's identity.

    `cells` are the storages of target cells, by their number; not all need be given.
    """
    numerator, denominator = plan.scale
    for cell, storage in cells.items():
        if plan.combines[int(plan.target.cell_contribution[cell])]:
            if numerator != denominator:
                storage[...] = kind.scale(storage, numerator, denominator)
            continue
        if plan.target.reduction is None:
            continue
        positions = element_positions(plan.target, cell)
        storage[positions] = identity(plan.target.reduction, kind)[0]
