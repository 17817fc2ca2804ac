"""All-reduce of maxima of a few integers, by which ranks agree before a run and confirm its end.

By dissemination (Hensgen, Finkel and Manber, 1988), a rank has the numbers of twice as many ranks
after each round. It may receive some numbers twice, which does not change a maximum::

    round 0    each rank sends to the next           has 2
    round 1    each rank sends to the second next    has 4

Most of the time is spent waking ranks, once for each message. So if three ranks or a few more share
memory, the first rank receives from all others and sends the result to them::

    1, 2, 3 -> 0 -> 1, 2, 3     6 messages between four ranks, where dissemination takes 8
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from reshard.runs import IntArray
from reshard.torch.exchange.connections import Message
from reshard.torch.exchange.one_host.shared_memory import SharedMemory

# How long a rank waits for another after a third has ended: that rank may have finished, so that
# the awaited message is already in flight.
PATIENCE_S = 4.0
# Tags of exchanges count from 0.
_MAXIMA_TAG = 1 << 30
# The maximum number of ranks whose first rank reduces for all.
MAX_BY_FIRST = 8


def list_distances(ranks: int) -> list[int]:
    """Return the distance to the receiver of each round.

    >>> list_distances(1), list_distances(4), list_distances(5)
    ([], [1, 2], [1, 2, 4])
    """
    return [1 << number for number in range((ranks - 1).bit_length())]


def reduce_near_max(
    near: SharedMemory, numbers: IntArray, ranks: Sequence[int], position: int
) -> IntArray:
    """Return the maximum of each number over ranks that all share memory.

    Args:
        near: of this rank, which is at `position` of `ranks`.
        numbers: as many on every rank, of at most `MAX_NOTE_BYTES`.

    Raises:
        RuntimeError: a rank is lost.
    """
    # A rank waits for few peers, which may be late, and would not notice that others have ended.
    near.check_ends()
    count = len(ranks)
    if 2 < count <= MAX_BY_FIRST:
        maxima = _reduce_by_first(near, numbers.tobytes(), ranks, position, _find_greatest)
        return np.frombuffer(maxima, np.int64)

    def swap(own: IntArray, receiver: int, sender: int) -> IntArray:
        (maxima,) = near.swap(own.tobytes(), [ranks[receiver]], [ranks[sender]], PATIENCE_S)
        return np.frombuffer(maxima, np.int64)

    return _disseminate(numbers, position, count, swap)


def gather_near(near: SharedMemory, own: bytes, ranks: Sequence[int], position: int) -> bytes:
    """Return the notes of ranks that all share memory, in their order; see `reduce_near_max`.

    Args:
        own: of this rank, as long on every rank; all together at most `MAX_NOTE_BYTES`.
    """
    near.check_ends()
    return _reduce_by_first(near, own, ranks, position, b"".join)


def reduce_far_max(
    connections: Any, numbers: IntArray, position: int, ranks: int, until_s: float
) -> IntArray:
    """Return the maximum of each number over ranks that are connected.

    Args:
        connections: `Connections`, or a process group of torch, whose messages have no timeout.
        numbers: as many on every rank.
        position: of this rank among so many `ranks`.
        until_s: of `time.monotonic`, when the time to wait is up.

    Raises:
        RuntimeError: a rank is lost.
    """
    senders = [(position - ahead) % ranks for ahead in list_distances(ranks)]
    # In a list: an error keeps its frames' objects, and a work would keep connections open.
    works: list[Any] = []

    def swap(own: IntArray, receiver: int, sender: int) -> IntArray:
        arriving = np.empty_like(own)
        works.append(connections.send([torch.from_numpy(own)], receiver, _MAXIMA_TAG))
        works.append(connections.recv([torch.from_numpy(arriving)], sender, _MAXIMA_TAG))
        while works:
            if isinstance(works[-1], Message):
                works.pop().wait(until_s, senders, PATIENCE_S)
            else:
                works.pop().wait()
        return arriving

    try:
        return _disseminate(numbers, position, ranks, swap)
    finally:
        works.clear()


def _disseminate(
    numbers: IntArray,
    position: int,
    ranks: int,
    swap: Callable[[IntArray, int, int], IntArray],
) -> IntArray:
    """Reduce in rounds; `swap` sends the numbers to a rank and returns those of another."""
    for ahead in list_distances(ranks):
        received = swap(numbers, (position + ahead) % ranks, (position - ahead) % ranks)
        numbers = np.maximum(numbers, received)
    return numbers


def _reduce_by_first(
    near: SharedMemory,
    own: bytes,
    ranks: Sequence[int],
    position: int,
    combine: Callable[[list[bytes]], bytes],
) -> bytes:
    """Return the reduction of all ranks' notes, which the first rank computes for all."""
    first, others = ranks[0], ranks[1:]
    if position:
        (reduced,) = near.swap(own, [first], [first])
        return reduced
    # No rank has the result before this rank does, so a rank that ends now has failed.
    reduced = combine([own, *near.swap(b"", [], others, patience_s=0)])
    near.swap(reduced, others, [])
    return reduced


def _find_greatest(notes: Sequence[bytes]) -> bytes:
    # For a few short arrays, stacking them takes longer than the maxima.
    return reduce(np.maximum, [np.frombuffer(note, np.int64) for note in notes]).tobytes()
