"""Traffic: how much each rank sends to each other.

A table of pairs, so that a hundred thousand ranks of which each talks to a few stay small. Ranks
can be taken together, by hosts or so that few enough remain to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.plans.source_selection import GroupTransfers
from reshard.runs import IntArray


@dataclass(frozen=True, eq=False)
class Traffic:
    """Amounts (elements or bytes) that pass between ranks, as columns of shape `(pairs,)`.

    Every pair is there once, sorted by sender, then receiver.
    """

    ranks: int
    sender: IntArray
    receiver: IntArray
    amount: IntArray

    @classmethod
    def gathered(
        cls, ranks: int, sender: IntArray, receiver: IntArray, amount: IntArray
    ) -> Traffic:
        """The traffic of `ranks` ranks that columns with repeated pairs add up to.

        >>> columns = (np.array([1, 0, 1]), np.array([0, 1, 0]), np.array([5, 2, 3]))
        >>> traffic = Traffic.gathered(2, *columns)
        >>> traffic.sender.tolist(), traffic.receiver.tolist(), traffic.amount.tolist()
        ([0, 1], [1, 0], [2, 8])
        """
        # A pair as one number, whose order is by sender and then receiver.
        pairs, place = np.unique(sender * ranks + receiver, return_inverse=True)
        total = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(total, place.reshape(-1), amount)
        return cls(ranks, pairs // ranks, pairs % ranks, total)

    @classmethod
    def of_transfers(cls, transfers: Transfers, ranks: int) -> Traffic:
        """The elements that transfers between `ranks` ranks move.

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
        """The bytes that transfers of tensors between `ranks` ranks move."""
        nothing = np.zeros(0, dtype=np.int64)
        # Empty columns first, so that there is something to join where there are no groups.
        columns = [(nothing, nothing, nothing)]
        for found in groups:
            moving = found.transfers.moving
            size_bytes = moving.elements * found.tensors.dtype.itemsize_bytes
            columns.append((moving.source_slot, moving.target_slot, size_bytes))
        sender, receiver, amount = zip(*columns, strict=True)
        return cls.gathered(
            ranks, np.concatenate(sender), np.concatenate(receiver), np.concatenate(amount)
        )

    def times(self, factor: int) -> Traffic:
        """The same traffic with amounts `factor` times as large, such as bytes for elements."""
        return replace(self, amount=self.amount * factor)

    @property
    def total(self) -> int:
        """All that passes."""
        return int(self.amount.sum())

    @cached_property
    def sent(self) -> IntArray:
        """Amounts that each rank sends: shape `(ranks,)`."""
        return self._sum_by(self.sender, self.amount)

    @cached_property
    def received(self) -> IntArray:
        """Amounts that each rank receives: shape `(ranks,)`."""
        return self._sum_by(self.receiver, self.amount)

    @cached_property
    def receivers(self) -> IntArray:
        """How many ranks each rank sends to: shape `(ranks,)`."""
        return self._sum_by(self.sender, np.ones_like(self.amount))

    @cached_property
    def senders(self) -> IntArray:
        """How many ranks each rank receives from: shape `(ranks,)`."""
        return self._sum_by(self.receiver, np.ones_like(self.amount))

    def kinds(self) -> list[RankKind]:
        """Ranks that send and receive alike, taken together; those that do neither left out.

        >>> ring = Traffic.gathered(3, np.arange(3), (np.arange(3) + 1) % 3, np.full(3, 7))
        >>> [(kind.ranks, kind.sends, kind.receivers) for kind in ring.kinds()]
        [((0, 1, 2), 7, 1)]
        """
        found: dict[tuple[int, ...], list[int]] = {}
        # Ranks are alike where all four numbers are; those with none have no part.
        columns = (self.sent, self.receivers, self.received, self.senders)
        for rank, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if any(numbers):
                found.setdefault(numbers, []).append(rank)
        kinds = [RankKind(tuple(ranks), *numbers) for numbers, ranks in found.items()]
        return sorted(kinds, key=lambda kind: kind.ranks)

    def _sum_by(self, rank: IntArray, amount: IntArray) -> IntArray:
        total = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(total, rank, amount)
        return total

    def taken_together(self, size: int) -> Traffic:
        """The traffic between groups of `size` neighbouring ranks, that inside one included.

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
        """The larger of what each of them sends and receives."""
        return max(self.sends, self.receives)


def busiest(amounts: IntArray) -> tuple[int, list[int]]:
    """The largest amount, and the ranks that have it.

    >>> busiest(np.array([3, 7, 7]))
    (7, [1, 2])
    """
    most = int(amounts.max(initial=0))
    return most, np.flatnonzero(amounts == most).tolist() if most else []
