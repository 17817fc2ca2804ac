"""Which pieces of partitions does a rank send to which rank, knowing only its own?

A dimension is made of partitions, and every rank of a mesh axis has a piece of each. The pieces
lie on a rank in one of two orders: *unaligned*, those that are the rank's own; *aligned*, all
pieces of the partitions that are dealt to it::

    splits of rank 0: 4 6 4 2, of rank 1: 2 4 8 2

                unaligned                    aligned
    rank 0      P00 P01 P02 P03              P00 P10 P01 P11        4+2, 6+4
    rank 1      P10 P11 P12 P13              P02 P12 P03 P13        4+8, 2+2

1. Partitions are dealt by ceil of their number: rank `b // ceil(partitions / ranks)` owns `b`.
2. A rank knows its row of the splits (what it has, unaligned) and the columns of the partitions
   it owns (what others have of them). It needs no more to know whom it sends what, and where
   what it receives belongs.
3. Both ends list the pieces between them by partition, so nothing but elements is sent.

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray


@dataclass(frozen=True, slots=True)
class Dealing:
    """`partitions` dealt whole to `ranks`, by ceil of their number.

    >>> [list(Dealing(5, 3).owned(rank)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """

    partitions: int
    ranks: int

    @property
    def most(self) -> int:
        """The most partitions that a rank owns."""
        return -(-self.partitions // self.ranks)

    def owned(self, rank: int) -> range:
        """The partitions that a rank owns."""
        begin, stop = rank * self.most, (rank + 1) * self.most
        return range(min(begin, self.partitions), min(stop, self.partitions))

    def owners(self) -> IntArray:
        """The rank that owns each partition: shape `(partitions,)`."""
        return np.arange(self.partitions, dtype=np.int64) // max(self.most, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """What one rank knows of the sizes of pieces.

    Attributes:
        dealing: of the partitions.
        rank: whose knowledge it is, counted along the mesh axis.
        row: what it has of every partition, unaligned: shape `(partitions,)`.
        columns: what every rank has of the partitions it owns: shape `(owned, ranks)`.
    """

    dealing: Dealing
    rank: int
    row: IntArray
    columns: IntArray

    @classmethod
    def of_matrix(cls, dealing: Dealing, rank: int, matrix: Sequence[Sequence[int]]) -> Splits:
        """The part of a whole matrix, of a row a rank, that one rank needs.

        >>> splits = Splits.of_matrix(Dealing(4, 2), 1, [(4, 6, 4, 2), (2, 4, 8, 2)])
        >>> splits.row.tolist(), splits.columns.tolist()
        ([2, 4, 8, 2], [[4, 8], [2, 2]])
        """
        table = np.array(matrix, dtype=np.int64).reshape(dealing.ranks, dealing.partitions)
        owned = dealing.owned(rank)
        return cls(dealing, rank, table[rank], table.T[owned.start : owned.stop])

    def of_side(self, aligned: bool) -> tuple[int, ...]:
        """The sizes of the pieces as they lie in the local tensor of one side."""
        return tuple((self.columns if aligned else self.row).ravel().tolist())

    def transfers(
        self, dim: int, shape: Sequence[int], slots: Sequence[int], is_aligning: bool
    ) -> tuple[Transfers, Transfers]:
        """What the rank receives (what stays included), and what it sends to others.

        Args:
            dim: the dimension of the partitions.
            shape: of a local tensor; its length along `dim` does not matter.
            slots: of the ranks along the axis.
            is_aligning: from unaligned to aligned, else from aligned to unaligned.
        """
        owned = np.array(self.dealing.owned(self.rank), dtype=np.int64)
        # Unaligned, one piece a partition. Aligned, one a rank for each partition that is owned.
        apart = _Pieces(np.arange(self.dealing.partitions), self.dealing.owners(), self.row)
        together = _Pieces(
            np.repeat(owned, self.dealing.ranks),
            np.tile(np.arange(self.dealing.ranks), len(owned)),
            self.columns.ravel(),
        )
        before, after = (apart, together) if is_aligning else (together, apart)
        # The pieces that stay are in both lists, in the same order.
        kept_before = before.begin[before.peer == self.rank]
        stays = after.peer == self.rank
        source_begin = np.zeros(len(after.peer), dtype=np.int64)
        source_begin[stays] = kept_before
        place = np.array(slots, dtype=np.int64)
        here = np.full(len(after.peer), place[self.rank])
        received = _rows(after, dim, shape, place[after.peer], here, source_begin, after.begin)
        here = np.full(len(before.peer), place[self.rank])
        nowhere = np.zeros_like(before.begin)
        sent = _rows(before, dim, shape, here, place[before.peer], before.begin, nowhere)
        return received, sent.moving


class _Pieces:
    """Pieces one behind another in a local tensor, each with the rank at its other end."""

    def __init__(self, partition: IntArray, peer: IntArray, size: IntArray) -> None:
        self.partition = partition
        self.peer = peer
        self.size = size
        self.begin: IntArray = np.cumsum(size) - size


def _rows(
    pieces: _Pieces,
    dim: int,
    shape: Sequence[int],
    source_slot: IntArray,
    target_slot: IntArray,
    source_begin: IntArray,
    target_begin: IntArray,
) -> Transfers:
    count = len(pieces.size)
    nothing = np.zeros(count, dtype=np.int64)

    def along(value: IntArray) -> IntArray:
        column = np.zeros((count, len(shape)), dtype=np.int64)
        column[:, dim] = value
        return column

    extent = np.tile(np.array(shape, dtype=np.int64), (count, 1))
    extent[:, dim] = pieces.size
    rows = Transfers(
        source_slot,
        target_slot,
        nothing,
        nothing,
        nothing,
        source_slot == target_slot,
        # Nobody knows where a piece lies in the whole tensor; its partition orders it as well.
        along(pieces.partition),
        extent,
        along(source_begin),
        along(target_begin),
    )
    return rows.take(rows.elements > 0)
