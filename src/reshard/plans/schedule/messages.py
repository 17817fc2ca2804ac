"""Messages of an exchange between ranks: their sizes, what travels in each, and their order.

Both ends of a message find the same, from what both know of a plan, so nothing but elements is
sent. How large messages are follows from the limit of memory (`limit_message_bytes`).

1. The pieces between two ranks are taken in the order of their place in the tensor
   (`order_transfers`).
2. Small pieces are packed together, each at an aligned place; one larger than a message is cut
   into messages of its own (`group_pieces`).
3. All messages of an exchange have one order, which both ends of each know (`order_message`):
   contributions by their order of combination, then the first few of all pairs before the next of
   any, then those to the next rank before those to the one behind it. Ranks that treat theirs in
   this order, with room for one at least, never wait for each other in a ring.
4. Where the contributions to every region are cut alike (`are_cut_alike`), all of a region may
   travel before the next region does, so that it is combined while it is in a cache::

       order of messages    region 0 of ranks 1, 2, 3 | region 1 of ranks 1, 2, 3 | ...

5. What needs memory beside its messages waits in batches, one after another in the same memory
   (`fill_batches`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from reshard._validation import check_int
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray

Bytes = TypeVar("Bytes", int, IntArray)

# Every piece in a packed message begins where any dtype may.
ALIGNMENT_BYTES = 16
# The most bytes of a message. Smaller ones would be in a nearer cache when they are sent or
# unpacked, but gloo takes about 0.1 ms of processor time for each.
MESSAGE_BYTES = 1 << 22
# The same between ranks that share memory: what is packed is mostly in a cache when it is unpacked.
NEAR_MESSAGE_BYTES = 1 << 21
# Pieces as large as this are not worth packing with others.
LARGE_PIECE_BYTES = 1 << 18
# The fewest messages that have to fit in a limit: two in each direction.
_LEAST_MESSAGES = 4
# Each message takes about 0.1 ms, whatever its bytes. Smaller ones than these are refused where
# they would be more than so many.
SMALL_MESSAGE_BYTES, MOST_SMALL_MESSAGES = 1 << 16, 1 << 14


def limit_message_bytes(extra_bytes: int, peers: int = 1, moved_bytes: int = 0) -> int:
    """The most bytes of a message, so that enough of them for `peers` fit in a limit.

    `moved_bytes` is what a rank sends, or receives, as far as it is known.

    Raises:
        UsageError: a limit that is no whole number, that has no room for the smallest messages, or
            for so small ones only that the time for each is what counts.

    >>> limit_message_bytes(64 << 20) == MESSAGE_BYTES
    True
    >>> limit_message_bytes(100)
    16
    """
    extra_bytes = check_int(extra_bytes, "extra_bytes")
    places = _LEAST_MESSAGES * max(peers, 1)
    each = extra_bytes // places // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    least_each = min(align(-(-moved_bytes // MOST_SMALL_MESSAGES)), SMALL_MESSAGE_BYTES)
    least = places * max(least_each, ALIGNMENT_BYTES)
    if each < ALIGNMENT_BYTES:
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little to send and receive with; give at least {least}"
        )
    if each < least_each:
        raise UsageError(
            f"extra_bytes={extra_bytes}: {moved_bytes} bytes would travel in messages of {each}, "
            f"each of which takes about 0.1 ms; give at least {least}"
        )
    return min(each, MESSAGE_BYTES)


def align(size_bytes: Bytes) -> Bytes:
    """The next multiple of the alignment, or those of an array."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def order_transfers(rows: Transfers) -> list[int]:
    """The rows in the order both ends of a message list them."""
    columns = [rows.target_cell, rows.source_cell, rows.order, *rows.start.T[::-1]]
    order: list[int] = np.lexsort(columns).tolist()
    return order


def group_pieces(
    sizes_bytes: Sequence[int], message_bytes: int
) -> tuple[list[list[int]], list[int]]:
    """The pieces that travel together, message by message, and those that travel alone, by number.

    The messages of those that travel together come first. One that travels alone is cut into as
    many messages as it needs.

    >>> group_pieces([40, 1 << 20, 40, 40], 112)
    ([[0, 2], [3]], [1])
    """
    large_bytes = min(LARGE_PIECE_BYTES, message_bytes)
    if len(sizes_bytes) == 1:
        # A tensor alone mostly has one piece for each other rank.
        return ([], [0]) if sizes_bytes[0] >= large_bytes else ([[0]], [])
    sizes = np.array(sizes_bytes, dtype=np.int64)
    is_large = sizes >= large_bytes
    small = np.flatnonzero(~is_large)
    # Where each begins, and ends, if all small ones lie one behind the other.
    begin = np.concatenate(([0], np.cumsum(align(sizes[small]))))
    end = begin[:-1] + sizes[small]
    together: list[list[int]] = []
    first = 0
    while first < len(small):
        behind = int(np.searchsorted(end, begin[first] + message_bytes, side="right"))
        together.append(small[first:behind].tolist())
        first = behind
    return together, np.flatnonzero(is_large).tolist()


def order_message(
    order: int,
    number: int,
    sender: int,
    receiver: int,
    ranks: int,
    in_a_turn: int = 1,
    by_region: bool = False,
) -> tuple[int, ...]:
    """The place of a message in the order of all, to sort by; no two messages have the same.

    Args:
        order: of its contributions.
        number: among the messages of these contributions between its two ranks.
        sender, receiver: among `ranks`.
        in_a_turn: how many messages go to one rank before those to another.
        by_region: whether all contributions to a region travel before the next region does.
    """
    # The next rank first, then the one behind it: all ranks send to different ones at a time.
    shift = (receiver - sender) % ranks
    if by_region:
        return (number, order, shift, sender)
    return (order, number // in_a_turn, shift, number, sender)


@functools.lru_cache(maxsize=256)
def are_cut_alike(change: LayoutChange) -> bool:
    """Whether each rank gets the same boxes of every contribution, each from one rank.

    Messages of one number then carry the same region of all contributions.
    """
    rows = change.transfers
    boxes: dict[int, dict[int, list[Any]]] = {}
    senders: set[tuple[int, int, int]] = set()
    for row in order_transfers(rows):
        order, receiver = int(rows.order[row]), int(rows.target_slot[row])
        box = (int(rows.target_cell[row]), rows.start[row].tolist(), rows.shape[row].tolist())
        boxes.setdefault(receiver, {}).setdefault(order, []).append(box)
        senders.add((receiver, order, int(rows.source_slot[row])))
    orders = len(set(rows.order.tolist()))
    is_alike = all(list(of.values()) == [of[min(of)]] * orders for of in boxes.values())
    # To each receiver every order has one sender, and every sender one order.
    by_order = {(receiver, order) for receiver, order, _ in senders}
    by_sender = {(receiver, sender) for receiver, _, sender in senders}
    return is_alike and len(by_order) == len(by_sender) == len(senders)


def fill_batches(sizes_bytes: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """The batch of each name, from 0 up: in their order, as many in each as fit in the memory.

    What does not fit by itself is alone.

    >>> fill_batches({"a": 6, "b": 4, "c": 1, "d": 11}, 10)
    {'a': 0, 'b': 0, 'c': 1, 'd': 2}
    """
    found = {}
    number, filled_bytes = 0, 0
    for name, size_bytes in sizes_bytes.items():
        if filled_bytes and filled_bytes + size_bytes > limit_bytes:
            number, filled_bytes = number + 1, 0
        filled_bytes += size_bytes
        found[name] = number
    return found
