"""Estimates of the seconds that direct exchanges take, and of the local copies that they need.

Slots are ranks. All pieces from a rank to another, of all tensors, form a message, and all
messages are sent at once (`reshard.cost.estimate`). If the topology's `Overhead` counts copies,
packing and unpacking are added, as `reshard.torch` carries out messages.
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
from reshard.runs import IntArray, concatenate, find_distinct
from reshard.topology import Topology


def find_copies(
    transfers: Transfers,
    source: Layout,
    target: Layout,
    itemsize_bytes: int,
    *,
    keeps: bool = True,
    inside: Layout | None = None,
) -> LocalCopies:
    """Return the copies in the memory of all ranks that transfers as messages take.

    1. A piece is contiguous if all dimensions after the first that is longer than 1 are whole in
       the local array. Otherwise its runs are as long as its trailing whole dimensions, times the
       dimension before them::

           source, split by columns    the rows of a piece are apart: they are packed, in 3 runs
           +----+----+
           | ## | .. |                 target, split by rows: the piece is contiguous, and is
           | ## | .. |                 received in place
           | ## | .. |
           +----+----+

    2. A piece that is not contiguous is copied when it is sent or received. Contributions are
       copied because they are combined, small pieces because they are packed together.
    3. Elements that stay are copied from source to target, in runs of the side with shorter runs.

    Args:
        transfers: of a tensor, between the two layouts.
        source, target: layouts whose slots are ranks.
        itemsize_bytes: of an element.
        keeps: whether elements that stay are copied; False if they are in place already.
        inside: the layout of the arrays of which the source's arrays are views, if any.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> columns, rows = (reshard.spec(mesh, text).layout((6, 4)) for text in ("-, x", "x, -"))
    >>> plan = reshard.plan(columns, rows)
    >>> copies = find_copies(plan.transfers, columns, rows, 1)
    >>> [column.tolist() for column in (copies.rank, copies.size_bytes, copies.runs)]
    [[0, 1, 0, 1], [6, 6, 6, 6], [3, 3, 3, 3]]
    """
    elements = transfers.elements
    around = source.cell_shape[transfers.source_cell]
    if inside is not None:
        cells = np.searchsorted(inside.cell_slot, transfers.source_slot)
        around = inside.cell_shape[cells]
    source_run = count_run_elements(transfers.shape, around)
    target_run = count_run_elements(transfers.shape, target.cell_shape[transfers.target_cell])
    # The transfers that are copied: if they stay, on the sender, and on the receiver. The first
    # contribution may be received in place; later contributions are combined.
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


def count_run_elements(shape: IntArray, around: IntArray) -> IntArray:
    """Count the elements of a contiguous run of boxes in row-major arrays: shape `(boxes,)`.

    Args:
        shape, around: the shapes of the boxes and of their arrays, `(boxes, dims)`.

    >>> count_run_elements(np.array([[2, 3, 4], [2, 2, 4], [1, 1, 2]]), np.array([[5, 3, 4]] * 3))
    array([24,  8,  2])
    """
    run = np.ones(len(shape), dtype=np.int64)
    is_contiguous = np.ones(len(shape), dtype=bool)
    # A run extends over a dimension if all later dimensions are whole.
    for dim in reversed(range(shape.shape[1])):
        run *= np.where(is_contiguous, shape[:, dim], 1)
        is_contiguous &= shape[:, dim] == around[:, dim]
    return run


def _find_packed(transfers: Transfers, size_bytes: IntArray) -> NDArray[np.bool_]:
    """Return the mask of pieces that are packed: small, and not the only small piece of a pair."""
    small = ~transfers.stays & (size_bytes < LARGE_PIECE_BYTES)
    ranks = int(max(transfers.target_slot.max(initial=0), transfers.source_slot.max(initial=0)))
    # Pieces with the same contribution, sender and receiver are packed together.
    key = (transfers.order * (ranks + 1) + transfers.source_slot) * (ranks + 1)
    key = key + transfers.target_slot
    _, _, of_pair = find_distinct(key[small])
    is_packed = np.zeros(len(transfers), dtype=bool)
    is_packed[small] = np.bincount(of_pair)[of_pair] > 1
    return is_packed


def estimate_exchanges(
    plans: Sequence[LayoutChange],
    itemsize_bytes: int,
    topology: Topology,
    name: str = "exchange",
    *,
    keeps: bool = True,
    inside: Layout | None = None,
) -> Part:
    """Estimate the messages of several plans at once; for `keeps` and `inside` see `find_copies`.

    Raises LayoutError for a rank outside the topology, or a link of unknown speed.
    """
    # Routes suffice for messages. Boxes are written out only if the topology counts copies.
    pieces = [
        (
            plan.source.cell_slot[plan.routes.source_cell],
            plan.target.cell_slot[plan.routes.target_cell],
            plan.routes.elements * itemsize_bytes,
        )
        for plan in plans
    ]
    copies = None
    if topology.overhead.counts_copies:
        copies = LocalCopies.joined(
            find_copies(
                plan.transfers,
                plan.source,
                plan.target,
                itemsize_bytes,
                keeps=keeps,
                inside=inside,
            )
            for plan in plans
        )
    return _estimate_pieces(pieces, topology, name, copies)


def _estimate_pieces(
    pieces: Sequence[tuple[IntArray, IntArray, IntArray]],
    topology: Topology,
    name: str,
    copies: LocalCopies | None,
) -> Part:
    """Estimate the messages of pieces, in columns of senders, receivers and bytes."""
    sender, receiver, size_bytes = (concatenate(piece[i] for piece in pieces) for i in range(3))
    return message_cost(sender, receiver, size_bytes, topology, name, copies)


def estimate_change(change: LayoutChange, itemsize_bytes: int, topology: Topology) -> Estimate:
    """Estimate the seconds of the direct exchange of a tensor.

    Raises LayoutError for a rank outside the topology, or a link of unknown speed.

    >>> import reshard
    >>> from reshard.topology import Link
    >>> mesh = reshard.DeviceMesh.of(x=4)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e6, 1e-3))
    >>> estimate_change(LayoutChange(rows, columns), 4, topology).seconds_s
    0.003048
    """
    check_topology(topology)
    part = estimate_exchanges([change], itemsize_bytes, topology)
    return Estimate((part,), topology.overhead.call_s)


def check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise PlanError(f"topology={topology!r}: expected a Topology, such as one of Topology.of")


def estimate_transfers(
    sized_transfers: Sequence[tuple[Transfers, int]],
    topology: Topology,
    name: str,
    copies: LocalCopies | None = None,
) -> Part:
    """Estimate the messages of transfers, each given with the bytes of its elements."""
    pieces = [
        (rows.source_slot, rows.target_slot, rows.elements * size) for rows, size in sized_transfers
    ]
    return _estimate_pieces(pieces, topology, name, copies)
