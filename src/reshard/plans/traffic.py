"""Traffic: the elements or bytes that each rank sends to each other rank.

Only pairs that communicate are stored, so that the traffic of a hundred thousand ranks with a few
peers each stays small. Ranks can be merged into groups, such as hosts, to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard._records import Record
from reshard.geometry.transfers import Transfers
from reshard.plans.source_selection import GroupTransfers
from reshard.runs import IntArray, concatenate, find_distinct, sum_by


class Traffic(Record, eq=False):
    """Amounts (elements or bytes) sent between ranks, as columns of shape `(pairs,)`.

    Pairs are unique, sorted by sender, then receiver.
    """

    ranks: int
    sender: IntArray
    receiver: IntArray
    amount: IntArray

    @classmethod
    def gathered(
        cls, ranks: int, sender: IntArray, receiver: IntArray, amount: IntArray
    ) -> Traffic:
        """Sum columns with repeated pairs into the traffic of `ranks` ranks.

        >>> columns = (np.array([1, 0, 1]), np.array([0, 1, 0]), np.array([5, 2, 3]))
        >>> traffic = Traffic.gathered(2, *columns)
        >>> traffic.sender.tolist(), traffic.receiver.tolist(), traffic.amount.tolist()
        ([0, 1], [1, 0], [2, 8])
        """
        # Pairs as single numbers, ordered by sender and then receiver.
        pairs, _, index = find_distinct(sender * ranks + receiver)
        total = sum_by(len(pairs), index, amount)
        return cls(ranks, pairs // ranks, pairs % ranks, total)

    @classmethod
    def of_transfers(cls, transfers: Transfers, ranks: int) -> Traffic:
        """Return the elements that transfers move between `ranks` ranks.

        >>> from reshard.layout import Layout
        >>> from reshard.geometry.layout_change import LayoutChange
        >>> half = Layout.flat_ranges((6,), {0: (0, 3), 1: (3, 6)})
        >>> plan = LayoutChange(half, Layout.replicated((6,), 2))
        >>> Traffic.of_transfers(plan.transfers, 2).amount.tolist()
        [3, 3]
        """
        moving = transfers.moving
        return cls.gathered(ranks, moving.source_slot, moving.target_slot, moving.elements)

    @classmethod
    def of_groups(cls, groups: Iterable[GroupTransfers], ranks: int) -> Traffic:
        """Return the bytes that transfers of tensors move between `ranks` ranks."""
        columns = []
        for group in groups:
            moving = group.transfers.moving
            size_bytes = moving.elements * group.tensors.dtype.itemsize_bytes
            columns.append((moving.source_slot, moving.target_slot, size_bytes))
        return cls.gathered(
            ranks, *(concatenate(column[i] for column in columns) for i in range(3))
        )

    def times(self, factor: int) -> Traffic:
        """Multiply all amounts, for instance from elements to bytes."""
        return replace(self, amount=self.amount * factor)

    @property
    def total(self) -> int:
        """The sum of all amounts."""
        return int(self.amount.sum())

    @cached_property
    def sent(self) -> IntArray:
        """The amount that each rank sends: shape `(ranks,)`."""
        return self._sum_by(self.sender, self.amount)

    @cached_property
    def received(self) -> IntArray:
        """The amount that each rank receives: shape `(ranks,)`."""
        return self._sum_by(self.receiver, self.amount)

    @cached_property
    def receivers(self) -> IntArray:
        """The number of ranks that each rank sends to: shape `(ranks,)`."""
        return self._sum_by(self.sender, np.ones_like(self.amount))

    @cached_property
    def senders(self) -> IntArray:
        """The number of ranks that each rank receives from: shape `(ranks,)`."""
        return self._sum_by(self.receiver, np.ones_like(self.amount))

    def kinds(self) -> list[RankKind]:
        """Group ranks that send and receive the same amounts; idle ranks are left out.

        >>> ring = Traffic.gathered(3, np.arange(3), (np.arange(3) + 1) % 3, np.full(3, 7))
        >>> [(kind.ranks, kind.sends, kind.receivers) for kind in ring.kinds()]
        [((0, 1, 2), 7, 1)]
        """
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        columns = (self.sent, self.receivers, self.received, self.senders)
        for rank, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if any(numbers):
                ranks_of.setdefault(numbers, []).append(rank)
        kinds = [RankKind(tuple(ranks), *numbers) for numbers, ranks in ranks_of.items()]
        return sorted(kinds, key=lambda kind: kind.ranks)

    def _sum_by(self, rank: IntArray, amount: IntArray) -> IntArray:
        return sum_by(self.ranks, rank, amount)

    def taken_together(self, size: int) -> Traffic:
        """Merge groups of `size` adjacent ranks; traffic within a group is included.

        >>> ring = Traffic.gathered(4, np.arange(4), (np.arange(4) + 1) % 4, np.full(4, 7))
        >>> halves = ring.taken_together(2)
        >>> list(zip(halves.sender.tolist(), halves.receiver.tolist(), halves.amount.tolist()))
        [(0, 0, 7), (0, 1, 7), (1, 0, 7), (1, 1, 7)]
        """
        groups = -(-self.ranks // size)
        return Traffic.gathered(groups, self.sender // size, self.receiver // size, self.amount)


class RankKind(NamedTuple):
    """Ranks that send and receive the same amounts, to and from the same numbers of ranks."""

    ranks: tuple[int, ...]
    sends: int
    receivers: int
    receives: int
    senders: int

    @property
    def load(self) -> int:
        """The larger of the amounts that each rank sends and receives."""
        return max(self.sends, self.receives)


def find_top_ranks(amounts: IntArray) -> tuple[int, list[int]]:
    """Return the largest amount and the ranks that have it.

    >>> find_top_ranks(np.array([3, 7, 7]))
    (7, [1, 2])
    """
    largest = int(amounts.max(initial=0))
    return largest, np.flatnonzero(amounts == largest).tolist() if largest else []
