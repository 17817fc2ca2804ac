"""Identities of transfers: names that sender and receiver both know without talking.

A piece is named by where it goes: the tensor, the target rank, the box of the tensor before it
was divided among senders, and what it is combined with. A part of a box adds its range of
elements. Both ends know all of it. Nothing of it says who sends, nor which other ranks there
are: ranks that are added to the target leave the names of the others as they are.
"""

from __future__ import annotations

import hashlib

from reshard.plans.senders.sender_transfers import GroupTransfers
from reshard.runs import IntArray


def transfer_identities(name: str, found: GroupTransfers, rows: IntArray) -> list[str]:
    """The identity of each of the given rows: 32 hexadecimal digits.

    Pieces that differ in the tensor, the receiver, the unsplit box, the contribution, the
    receiver's cell or the range of elements have different ones.
    """
    transfers = found.transfers
    target = found.tensors.change.target
    box = found.box[rows]
    whole = zip(found.whole_start[box].tolist(), found.whole_shape[box].tolist(), strict=True)
    elements = transfers.shape[rows].prod(axis=1)
    cell = transfers.target_cell[rows]
    # A cell's place on its slot, not its number: further slots change that.
    first = target.cell_slot.searchsorted(target.cell_slot[cell])
    ranges = zip(
        found.first_element[rows].tolist(),
        elements.tolist(),
        found.whole_shape[box].prod(axis=1).tolist(),
        strict=True,
    )
    ends = zip(
        transfers.target_slot[rows].tolist(),
        (cell - first).tolist(),
        transfers.order[rows].tolist(),
        strict=True,
    )
    identities = []
    for end, (start, shape), (begin, count, total) in zip(ends, whole, ranges, strict=True):
        part = "" if count == total else f"{begin}:{begin + count}"
        text = f"{name}\0{end}{start}{shape}{part}"
        identities.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    return identities
