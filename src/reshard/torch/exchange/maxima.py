"""Maxima over ranks: of a few numbers, by which ranks agree before a run and confirm its end.

After each round a rank knows the numbers of twice as many ranks, and of some twice, which maxima do
not mind (dissemination, Hensgen, Finkel and Manber, 1988)::

    round 0    each rank tells the next one          knows 2
    round 1    each rank tells the second next       knows 4

What a round takes is mostly that a rank sleeps until another has told it. So few ranks that share
memory tell all others at once, in one round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.runs import IntArray
from reshard.torch.exchange.one_host.shared_memory import SharedMemory

# The most ranks that tell all others at once: each tells, and reads, as many notes.
MOST_AT_ONCE = 8


def list_distances(ranks: int) -> list[int]:
    """How far ahead of itself each rank tells another, round by round.

    >>> list_distances(1), list_distances(4), list_distances(5)
    ([], [1, 2], [1, 2, 4])
    """
    return [1 << number for number in range((ranks - 1).bit_length())]


def find_near_maxima(
    near: SharedMemory, numbers: IntArray, ranks: Sequence[int], position: int
) -> IntArray:
    """The greatest of each number, among ranks that all share memory.

    Args:
        near: of this rank, which is at `position` of `ranks`.
        numbers: as many on every rank, of at most `MOST_TOLD_BYTES`.

    Raises:
        RuntimeError: a rank is gone.
    """
    count = len(ranks)
    rounds = [[ahead] for ahead in list_distances(count)]
    if count <= MOST_AT_ONCE:
        rounds = [list(range(1, count))]
    for distances in rounds:
        receivers = [ranks[(position + ahead) % count] for ahead in distances]
        senders = [ranks[(position - ahead) % count] for ahead in distances]
        told = near.swap(numbers.tobytes(), receivers, senders)
        numbers = np.max([numbers, *(np.frombuffer(one, np.int64) for one in told)], axis=0)
    return numbers
