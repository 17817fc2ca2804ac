"""A plan carried out on arrays in one process.

1. The arrays are checked against the source layout before anything is copied.
2. Every target slot gets new memory; positions that are padding are zero.
3. Each route copies its product of pieces at once: with slices where a dimension has one
   piece, with index lists where it has several. The first contribution of an element is
   copied, the rest are combined with it in order.
4. Means are scaled. A target contribution that combines none is filled with the reduction's
   identity.

Sources are only read. NumPy arrays and, where torch is loaded, torch CPU tensors are taken;
the result is of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, check_reduction, identity, kind_of
from reshard.layout import Layout
from reshard.planning.overlap import Pieces
from reshard.runs import PAD, IntArray, ragged_arange

if TYPE_CHECKING:
    from reshard.planning.plan import Plan

Array = TypeVar("Array")


def run(plan: Plan, shards: Mapping[int, Array]) -> dict[int, Array]:
    """The target's shards, from the source's.

    Args:
        plan: what to do.
        shards: for every source slot that holds something, its array: of the slot's local
            shape (`plan.source.local_shape(slot)`), all of one dtype and kind.

    Returns:
        For every target slot that holds something, a new array of its local shape.

    Raises:
        ShardError: an array that is missing, has another shape or dtype, or is on a device.
        PlanError: a source that leaves out an element.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((2, 4)) for text in ("x, -", "-, x"))
    >>> shards = {0: np.array([[0, 1, 2, 3]]), 1: np.array([[4, 5, 6, 7]])}
    >>> run(reshard.plan(rows, columns), shards)[1].tolist()
    [[2, 3], [6, 7]]
    """
    kind = check_shards(plan, shards)
    source = {slot: kind.storage(shards[slot]) for slot in plan.source.holders}
    target = {
        slot: np.zeros(plan.target.local_shape(slot) or (), dtype=kind.dtype.storage)
        for slot in plan.target.holders
    }
    source_cells, target_cells = cell_arrays(plan.source, source), cell_arrays(plan.target, target)
    routes = plan.routes
    pieces = plan.pieces
    reduction = plan.source.reduction or "sum"
    for route in np.argsort(routes.order, kind="stable").tolist():
        data = source_cells[routes.source_cell[route]][_index(pieces, route, "source_local")]
        cell, place = (
            target_cells[routes.target_cell[route]],
            _index(pieces, route, "target_local"),
        )
        if routes.order[route] > 0:
            data = kind.combine(reduction, cell[place], data)
        cell[place] = data
    finish_contributions(plan, kind, dict(enumerate(target_cells)))
    return {slot: kind.array(storage) for slot, storage in target.items()}


def check_shards(plan: Plan, shards: Mapping[int, Any]) -> ArrayKind:
    """The kind of the arrays of a plan's source. Raises ShardError where they do not fit it."""
    holders = plan.source.holders
    missing = [slot for slot in holders if slot not in shards]
    if missing:
        raise ShardError(
            f"no array for slot {missing[0]}; the source holds data on slots {list(holders)}, "
            f"got {sorted(shards)}"
        )
    if not holders:
        raise ShardError("the source layout holds nothing, so there is nothing to run on")
    kinds = {slot: kind_of(shards[slot], f"the array of slot {slot}") for slot in holders}
    kind = kinds[holders[0]]
    for slot, other in kinds.items():
        found, expected = tuple(shards[slot].shape), plan.source.local_shape(slot)
        if found != expected:
            raise ShardError(
                f"the array of slot {slot} has shape {list(found)}, but the source layout says "
                f"{list(expected or ())}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"the array of slot {slot} is {type(other).__name__} of {other.dtype.name}, "
                f"that of slot {holders[0]} {type(kind).__name__} of {kind.dtype.name}; "
                "all must be alike"
            )
    if plan.dtype is not None and kind.dtype is not plan.dtype:
        raise ShardError(
            f"arrays of {kind.dtype.name} for a plan of {plan.dtype.name}; nothing is cast"
        )
    for reduction in {plan.source.reduction, plan.target.reduction} - {None}:
        # Where only the target is a mean, its contributions are copies: nothing is divided.
        if reduction != "mean" or plan.source.reduction == "mean":
            check_reduction(str(reduction), kind.dtype)
    return kind


def cell_arrays(layout: Layout, arrays: Mapping[int, Storage]) -> list[Storage]:
    """The array of every cell: a slot's whole array, or its stretch of the slot's flat one."""
    cells: list[Storage] = []
    for slot in layout.holders:
        numbers = layout.cells_of(slot)
        if len(numbers) == 1:
            cells.append(arrays[slot])
            continue
        for cell in numbers:
            begin, shape = int(layout.cell_offset[cell]), layout.cell_shape[cell]
            stop = begin + int(shape.prod())
            cells.append(arrays[slot][begin:stop].reshape(tuple(shape.tolist())))
    return cells


def _index(pieces: tuple[Pieces, ...], route: int, side: str) -> Any:
    """The positions of a route's elements in a cell: slices, or index lists for `np.ix_`."""
    slices: list[slice] = []
    for column in pieces:
        low, count = int(column.begin[route]), int(column.count[route])
        if count != 1:
            return np.ix_(*(_positions(piece, route, side) for piece in pieces))
        begin = int(getattr(column, side)[low])
        slices.append(slice(begin, begin + int(column.length[low])))
    return tuple(slices) or (...,)


def _positions(column: Pieces, route: int, side: str) -> IntArray:
    rows = column.rows(route)
    length = column.length[rows]
    begin: IntArray = getattr(column, side)[rows]
    return np.repeat(begin, length) + ragged_arange(length)


def finish_contributions(plan: Plan, kind: ArrayKind, cells: Mapping[int, Storage]) -> None:
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
        real = []
        for d, table in enumerate(plan.target.tables):
            part = int(plan.target.cell_part[cell, d])
            mask = np.zeros(int(table.local_lengths[part]), dtype=bool)
            for start, stop, local, role in table.runs_of(part):
                mask[local : local + stop - start] = role != PAD
            real.append(np.flatnonzero(mask))
        storage[np.ix_(*real) if real else ...] = identity(plan.target.reduction, kind)[0]
