"""Copies in a rank's own memory that carrying out transfers as messages takes.

::

    source, cut by columns      the rows of a piece lie apart: they are packed, in 3 runs
    +----+----+
    | ## | .. |                 target, cut by rows: the piece is one run of memory, received
    | ## | .. |                 where it belongs
    | ## | .. |
    +----+----+

1. A piece lies in one run where all dimensions behind the first that is longer than 1 are whole
   in the local array. Else its runs are as long as its trailing whole dimensions, and the one
   before them.
2. What is sent or received is copied where it is not one run. Contributions are copied anyway,
   as they are combined; so are small pieces that travel together.
3. What stays is copied from source to target, in runs of the side that has the shorter ones.

This is how `reshard.torch` carries out messages.

Estimates of the seconds that an exchange takes: of a plan, of a job, or in stages.

Slots are ranks; all pieces from one rank to another, of all tensors, are one message, and all
messages are sent at once (`reshard.cost.estimate`). The fan-out of a staged job follows its
exchange. Where the topology's `Overhead` counts copies, packing and unpacking are added, except for
stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reshard.cost.estimate import Estimate, LocalCopies, Part, message_cost
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.schedule import LARGE_PIECE_BYTES
from reshard.runs import IntArray
from reshard.topology import Topology


def copies_of(
    transfers: Transfers,
    source: Layout,
    target: Layout,
    itemsize_bytes: int,
    *,
    keeps: bool = True,
    inside: Layout | None = None,
) -> LocalCopies:
    """The copies of all ranks.

    Args:
        transfers: between the two layouts, of one tensor.
        source, target: whose slots are ranks.
        itemsize_bytes: of an element.
        keeps: whether what stays is copied; False where it is in its place.
        inside: whose arrays the source's are views of, one a rank; None where of none.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> columns, rows = (reshard.spec(mesh, text).layout((6, 4)) for text in ("-, x", "x, -"))
    >>> plan = reshard.plan(columns, rows)
    >>> found = copies_of(plan.transfers, columns, rows, 1)
    >>> [column.tolist() for column in (found.rank, found.size_bytes, found.runs)]
    [[0, 1, 0, 1], [6, 6, 6, 6], [3, 3, 3, 3]]
    """
    elements = transfers.elements
    around = source.cell_shape[transfers.source_cell]
    if inside is not None:
        cells = np.searchsorted(inside.cell_slot, transfers.source_slot)
        around = inside.cell_shape[cells]
    source_run = run_elements(transfers.shape, around)
    target_run = run_elements(transfers.shape, target.cell_shape[transfers.target_cell])
    # Which transfers are copied: where they stay, on the sender, and on the receiver. The first
    # contribution may be received in place; those after it are combined.
    stays, moves = transfers.stays & keeps, ~transfers.stays
    is_packed = _find_packed(transfers, elements * itemsize_bytes)
    packs = moves & (is_packed | (source_run < elements))
    unpacks = moves & (is_packed | (target_run < elements) | (transfers.order > 0))
    is_combined = transfers.order > 0
    never = np.zeros_like(is_combined)
    parts = [
        (stays, transfers.target_slot, np.minimum(source_run, target_run), is_combined),
        (packs, transfers.source_slot, source_run, never),
        (unpacks, transfers.target_slot, target_run, is_combined),
    ]
    return LocalCopies.joined(
        LocalCopies(
            rank[chosen],
            elements[chosen] * itemsize_bytes,
            elements[chosen] // np.maximum(run[chosen], 1),
            elements[chosen] * combined[chosen] * itemsize_bytes,
        )
        for chosen, rank, run, combined in parts
    )


def run_elements(shape: IntArray, around: IntArray) -> IntArray:
    """Elements of one run of boxes in row-major arrays around them: shape `(boxes,)`.

    Args:
        shape, around: of the boxes and of their arrays, shape `(boxes, dims)`.

    >>> run_elements(np.array([[2, 3, 4], [2, 2, 4], [1, 1, 2]]), np.array([[5, 3, 4]] * 3))
    array([24,  8,  2])
    """
    run = np.ones(len(shape), dtype=np.int64)
    goes_on = np.ones(len(shape), dtype=bool)
    for dim in reversed(range(shape.shape[1])):
        # From the last dimension on: a run goes on as long as whole dimensions lie behind.
        run *= np.where(goes_on, shape[:, dim], 1)
        goes_on &= shape[:, dim] == around[:, dim]
    return run


def _find_packed(transfers: Transfers, size_bytes: IntArray) -> NDArray[np.bool_]:
    """Which pieces are small, and not the only small one between their ranks."""
    small = ~transfers.stays & (size_bytes < LARGE_PIECE_BYTES)
    ranks = int(max(transfers.target_slot.max(initial=0), transfers.source_slot.max(initial=0)))
    # Pieces travel together that share the order of combination, the sender and the receiver.
    key = (transfers.order * (ranks + 1) + transfers.source_slot) * (ranks + 1)
    key = key + transfers.target_slot
    _, of_pair, counts = np.unique(key[small], return_inverse=True, return_counts=True)
    found = np.zeros(len(transfers), dtype=bool)
    found[small] = counts[of_pair.reshape(-1)] > 1
    return found


def exchanges_part(
    plans: Sequence[LayoutChange],
    itemsize_bytes: int,
    topology: Topology,
    name: str = "exchange",
    *,
    keeps: bool = True,
    inside: Layout | None = None,
) -> Part:
    """The messages of several plans at once; for `keeps` and `inside` see `copies_of`.

    Raises LayoutError for a rank that the topology has not, or a link that it does not know.
    """
    # Routes are enough for the messages; boxes are written out only where copies count.
    nothing = np.zeros(0, dtype=np.int64)
    routes = [(plan, plan.routes) for plan in plans]
    copies = None
    if topology.overhead.counts_copies:
        copies = LocalCopies.joined(
            copies_of(
                plan.transfers,
                plan.source,
                plan.target,
                itemsize_bytes,
                keeps=keeps,
                inside=inside,
            )
            for plan in plans
        )
    return message_cost(
        np.concatenate([nothing, *(p.source.cell_slot[r.source_cell] for p, r in routes)]),
        np.concatenate([nothing, *(p.target.cell_slot[r.target_cell] for p, r in routes)]),
        np.concatenate([nothing, *(found.elements * itemsize_bytes for _, found in routes)]),
        topology,
        name,
        copies,
    )


def change_estimate(change: LayoutChange, itemsize_bytes: int, topology: Topology) -> Estimate:
    """The seconds of one tensor's direct exchange, for elements of `itemsize_bytes`.

    >>> import reshard
    >>> from reshard.topology import Link
    >>> mesh = reshard.DeviceMesh.of(x=4)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e6, 1e-3))
    >>> change_estimate(LayoutChange(rows, columns), 4, topology).seconds_s
    0.003048
    """
    check_topology(topology)
    part = exchanges_part([change], itemsize_bytes, topology)
    return Estimate((part,), topology.overhead.call_s)


def check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise PlanError(f"seconds on {topology!r}; give a Topology, such as one of Topology.of")


def transfers_part(
    found: Sequence[tuple[Transfers, int]],
    topology: Topology,
    name: str,
    copies: LocalCopies | None = None,
) -> Part:
    nothing = np.zeros(0, dtype=np.int64)
    return message_cost(
        np.concatenate([nothing, *(transfers.source_slot for transfers, _ in found)]),
        np.concatenate([nothing, *(transfers.target_slot for transfers, _ in found)]),
        np.concatenate([nothing, *(transfers.elements * size for transfers, size in found)]),
        topology,
        name,
        copies,
    )
