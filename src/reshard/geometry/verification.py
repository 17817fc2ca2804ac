"""Verification: transfers turn the source into the target, completely and once.

The transfers are checked against the two layouts alone, independently of the planner:

1. Every box is inside its source cell, at its local offset, in runs that may be sources. The same
   applies to its target cell.
2. A transfer that stays has equal slots. A transfer that moves has different slots, and the
   receiving slot did not hold its elements.
3. The contributions combined in a target cell are exactly those it requires, and the boxes of each
   are disjoint and fill the cell.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from reshard.errors import PlanError
from reshard.geometry.boxes import are_disjoint
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, HALO, OWNED, IntArray, RunTable, joined, ragged_numbers

BoolArray = NDArray[np.bool_]


def verify_transfers(
    source: Layout,
    target: Layout,
    combines: tuple[tuple[int, ...], ...],
    transfers: Transfers,
) -> None:
    """Raise PlanError unless the transfers turn the source into the target."""
    check_slots(source, target, transfers)
    for d in range(target.ndim):
        check_ends(source, transfers.source_cell, transfers.source_start, transfers, d, "source")
        check_ends(target, transfers.target_cell, transfers.target_start, transfers, d, "target")
    _check_stays(source, transfers)
    # Cell by cell: the transfers into a cell are `order[begin[cell]:begin[cell + 1]]`.
    order = np.lexsort((transfers.order, transfers.target_cell))
    cells = transfers.target_cell[order]
    begin = np.searchsorted(cells, np.arange(target.cells + 1))
    for cell in range(target.cells):
        rows = order[begin[cell] : begin[cell + 1]]
        _check_cell(source, target, cell, combines, transfers.take(rows))


def _fail(transfers: Transfers, row: int, problem: str) -> None:
    raise PlanError(
        f"transfer {row}, {transfers.box(row)} from rank {transfers.source_slot[row]} to rank "
        f"{transfers.target_slot[row]}: {problem}"
    )


def check_slots(source: Layout, target: Layout, transfers: Transfers) -> None:
    """Raise PlanError unless every transfer has elements, and cells of its slots at both ends."""
    for layout, cell, slot, name in (
        (source, transfers.source_cell, transfers.source_slot, "source"),
        (target, transfers.target_cell, transfers.target_slot, "target"),
    ):
        bad = (cell < 0) | (cell >= layout.cells)
        if bad.any():
            _fail(transfers, int(np.flatnonzero(bad)[0]), f"its {name} cell does not exist")
        other = np.flatnonzero(layout.cell_slot[cell] != slot)
        if len(other):
            _fail(transfers, int(other[0]), f"the {name} rank has no such cell")
    empty = np.flatnonzero((transfers.shape < 1).any(axis=1))
    if len(empty):
        _fail(transfers, int(empty[0]), "it is empty")


def check_ends(
    layout: Layout, cell: IntArray, local: IntArray, transfers: Transfers, d: int, name: str
) -> None:
    """Raise PlanError unless every box is in a run of its cell's part, at its local offset."""
    table: RunTable = layout.tables[d]
    runs = table.single_runs()
    usable = (OWNED, FRESH_HALO) if name == "source" else (OWNED, HALO, FRESH_HALO)
    runs = runs.take(np.isin(runs.role, usable))
    # Adjacent runs are joined regardless of their role: a box may span owned indices and a halo.
    runs = joined(replace(runs, role=np.zeros_like(runs.role)))
    # Runs are sorted by part and local position: map both to a common line.
    span = int(table.local_lengths.max(initial=0)) + 1
    line = runs.part * span + runs.local_start
    part = layout.cell_part[cell, d]
    at = np.searchsorted(line, part * span + local[:, d], side="right") - 1
    bad = np.ones(len(at), dtype=bool)
    if len(line):
        inside = local[:, d] - runs.local_start[at]
        bad = (
            (at < 0)
            | (runs.part[at] != part)
            | (local[:, d] < 0)
            | (inside + transfers.shape[:, d] > runs.length[at])
            | (runs.start[at] + inside != transfers.start[:, d])
        )
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        _fail(
            transfers,
            row,
            f"the {name} does not have these indices of dimension {d} at local position "
            f"{local[row, d]}",
        )


def _check_stays(source: Layout, transfers: Transfers) -> None:
    same = transfers.source_slot == transfers.target_slot
    wrong = np.flatnonzero(same != transfers.stays)
    if len(wrong):
        _fail(transfers, int(wrong[0]), "it must stay if and only if both ranks are equal")
    # Every transfer that moves, with every cell of its receiver.
    moving = np.flatnonzero(~transfers.stays & (transfers.target_slot < source.slots))
    slot = transfers.target_slot[moving]
    first = np.searchsorted(source.cell_slot, slot)
    count = np.searchsorted(source.cell_slot, slot, side="right") - first
    at, cell = ragged_numbers(first, count)
    row = moving[at]
    held = source.cell_contribution[transfers.source_cell[row]] == source.cell_contribution[cell]
    for d, table in enumerate(source.tables):
        start = transfers.start[row, d]
        stop = start + transfers.shape[row, d]
        held &= _holds_some(table, source.cell_part[cell, d], start, stop)
    if held.any():
        _fail(transfers, int(row[held][0]), "the receiver holds it already")


def _holds_some(table: RunTable, part: IntArray, start: IntArray, stop: IntArray) -> BoolArray:
    """Return whether a part may be a source of any index of `start:stop`; columns of all three."""
    runs = table.single_runs()
    runs = runs.take((runs.role == OWNED) | (runs.role == FRESH_HALO))
    # Map all parts to a common line: the runs that begin before `stop`, and how far they reach.
    width = table.dimension_length + 1
    order = np.lexsort((runs.start, runs.part))
    begin = (runs.part * width + runs.start)[order]
    reach = np.maximum.accumulate((runs.part * width + runs.stop)[order])
    last = np.searchsorted(begin, part * width + stop)
    holds: BoolArray = np.append(-1, reach)[last] > part * width + start
    return holds


def _check_cell(
    source: Layout,
    target: Layout,
    cell: int,
    combines: tuple[tuple[int, ...], ...],
    rows: Transfers,
) -> None:
    combined = combines[int(target.cell_contribution[cell])]
    elements = int(target.cell_elements[cell])
    if len(rows) and not (set(rows.order.tolist()) <= set(range(len(combined)))):
        raise PlanError(f"target cell {cell} combines more than its {len(combined)} contributions")
    for order, contribution in enumerate(combined):
        boxes = rows.take(rows.order == order)
        carried = source.cell_contribution[boxes.source_cell]
        if (carried != contribution).any():
            raise PlanError(
                f"target cell {cell} combines contribution {carried[carried != contribution][0]} "
                f"where {contribution} is due"
            )
        # Disjoint boxes with as many elements as the cell cover it.
        ends = boxes.target_start + boxes.shape
        if int(boxes.elements.sum()) != elements or not are_disjoint(boxes.target_start, ends):
            raise PlanError(
                f"rank {target.cell_slot[cell]} receives {int(boxes.elements.sum())} elements of "
                f"contribution {contribution} for a cell of {elements}; each must come once"
            )
