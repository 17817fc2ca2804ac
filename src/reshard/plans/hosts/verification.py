"""Verification of stages: together they deliver every element of the target exactly once.

Every stage after the exchange forwards what earlier stages have delivered. Its transfers are
traced back to the origin of their boxes, and then the whole is checked like a plan without stages
(`verification`):

1. every transfer of a later stage lies inside its two target cells, where it says;
2. its box is cut by the boxes that the stages before it brought into the cell it comes from;
   together they must be all of it, of every contribution that the cell combines;
3. each of those parts comes, in the end, from the source cell that the exchange took it from:
   with these transfers instead, all stages together must be a plan.
"""

from __future__ import annotations

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.verification import check_ends, check_slots, verify_transfers
from reshard.runs import IntArray, ragged_arange


def verify_stages(plan: LayoutChange, exchange: Transfers, *handed_on: Transfers) -> None:
    """Raise PlanError unless all stages, one after the other, do what the layouts ask for."""
    whole = exchange
    for stage in handed_on:
        check_slots(plan.target, plan.target, stage)
        for d in range(plan.target.ndim):
            check_ends(plan.target, stage.source_cell, stage.source_start, stage, d, "relay")
        whole = Transfers.joined((whole, _trace_back(plan, whole, stage)))
    verify_transfers(plan.source, plan.target, plan.combines, whole)


def _trace_back(plan: LayoutChange, exchange: Transfers, fan_out: Transfers) -> Transfers:
    """A stage as transfers from the source cells that its boxes come from.

    `exchange` is what the stages before it bring, as if all of it were exchanged.
    """
    row, origin = _match_boxes(plan, exchange, fan_out)
    start = np.maximum(fan_out.start[row], exchange.start[origin])
    stop = np.minimum(
        fan_out.start[row] + fan_out.shape[row], exchange.start[origin] + exchange.shape[origin]
    )
    brought = np.zeros(len(fan_out), dtype=np.int64)
    np.add.at(brought, row, (stop - start).prod(axis=1))
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    due = fan_out.elements * counts[plan.target.cell_contribution[fan_out.source_cell]]
    short = np.flatnonzero(brought != due)
    if len(short):
        at = int(short[0])
        raise PlanError(
            f"a later stage sends {fan_out.box(at)} from rank {fan_out.source_slot[at]} to rank "
            f"{fan_out.target_slot[at]}, but what comes before it brings {brought[at]} of its "
            f"{due[at]} elements there"
        )
    return Transfers(
        exchange.source_slot[origin],
        fan_out.target_slot[row],
        exchange.source_cell[origin],
        fan_out.target_cell[row],
        exchange.order[origin],
        # What the receiver had to begin with must not be handed to it.
        np.zeros(len(row), dtype=bool),
        start,
        stop - start,
        exchange.source_start[origin] + start - exchange.start[origin],
        fan_out.target_start[row] + start - fan_out.start[row],
    )


def _match_boxes(
    plan: LayoutChange, exchange: Transfers, fan_out: Transfers
) -> tuple[IntArray, IntArray]:
    """Rows of the fan-out, and rows of the exchange that brought some of the same elements."""
    described = np.concatenate(
        (
            np.column_stack((exchange.target_cell, exchange.start, exchange.shape)),
            np.column_stack((fan_out.source_cell, fan_out.start, fan_out.shape)),
        )
    )
    _, number = np.unique(described, axis=0, return_inverse=True)
    number = number.reshape(-1)
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    due = counts[plan.target.cell_contribution[fan_out.source_cell]]
    # Mostly a box is forwarded as it was received.
    row, origin = _match_equal(number[len(exchange) :], number[: len(exchange)])
    alike = np.bincount(row, minlength=len(fan_out)) == due
    row, origin = row[alike[row]], origin[alike[row]]
    # The others are compared with all that was brought into their cell.
    rest = np.flatnonzero(~alike)
    at, other = _match_equal(fan_out.source_cell[rest], exchange.target_cell)
    at = rest[at]
    meets = np.ones(len(at), dtype=bool)
    for d in range(plan.target.ndim):
        a, b = fan_out.start[at, d], exchange.start[other, d]
        meets &= (a < b + exchange.shape[other, d]) & (b < a + fan_out.shape[at, d])
    return np.concatenate((row, at[meets])), np.concatenate((origin, other[meets]))


def _match_equal(left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of places where `left` and `right` are equal."""
    order = np.argsort(right, kind="stable")
    low = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - low
    at = np.repeat(np.arange(len(left)), count)
    return at, order[np.repeat(low, count) + ragged_arange(count)]
