"""How is a dimension cut that is made of partitions of different sizes?

A `PartitionedShard` cuts one dimension, made of consecutive partitions (the experts of a
mixture, say), over one mesh axis. *Unaligned*, every rank has a slice of every partition;
*aligned*, every rank has whole partitions::

    partitions of 6, 10, 12 and 4 over 2 ranks

    unaligned, a slice of each by ceil     |000111|0000011111|000000111111|0011|
    unaligned, slices as a matrix says     |000011|0000001111|000011111111|0011|
    aligned                                |000000|0000000000|111111111111|1111|

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from reshard.block_rules import Blocks, Pieces, WholeBlocks
from reshard.cut_rules import CutRule
from reshard.errors import NotationError

Splits = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PartitionedShard:
    """A dimension of partitions, cut over one mesh axis.

    Args:
        dim: the dimension; a negative one counts from the end.
        num_partitions: how many partitions there are.
        splits: the size of each partition, shape `(num_partitions,)`; or, unaligned, how much
            each rank has of it, shape `(ranks, num_partitions)`.
        aligned: whether ranks have whole partitions, by ceil of their number.

    Raises:
        NotationError: splits of another shape, negative ones, or a matrix when aligned.

    >>> shard = PartitionedShard(0, 4, [(4, 6, 4, 2), (2, 4, 8, 2)])
    >>> shard.partition_sizes
    (6, 10, 12, 4)
    >>> shard.rule.table(32, 2).local_lengths.tolist()
    [16, 16]
    >>> print(PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True))
    PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True)
    """

    dim: int
    num_partitions: int
    splits: Splits
    aligned: bool = False

    def __post_init__(self) -> None:
        given = tuple(
            tuple(int(size) for size in item) if isinstance(item, Sequence) else int(item)
            for item in self.splits
        )
        object.__setattr__(self, "splits", given)
        rows = [item for item in given if isinstance(item, tuple)]
        sizes = [item for item in given if not isinstance(item, tuple)]
        if rows and sizes:
            raise self._wrong("are numbers and rows; give one number a partition, or a row a rank")
        for row in rows or [tuple(sizes)]:
            if len(row) != self.num_partitions:
                raise self._wrong(
                    f"give {len(row)} sizes for {self.num_partitions} partitions; give one for each"
                )
            if any(size < 0 for size in row):
                raise self._wrong("must not be negative")
        if rows and self.aligned:
            raise self._wrong(
                "are a row for each rank, but aligned partitions are never cut; give their sizes, "
                f"{self.partition_sizes}"
            )

    def _wrong(self, problem: str) -> NotationError:
        return NotationError(f"the splits {self.splits} of a PartitionedShard {problem}")

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...] | None:
        """How much each rank has of each partition, where the splits say so."""
        if self.splits and isinstance(self.splits[0], tuple):
            return self.splits
        return None

    @property
    def partition_sizes(self) -> tuple[int, ...]:
        """The size of each partition, shape `(num_partitions,)`."""
        if self.by_rank is not None:
            return tuple(map(sum, zip(*self.by_rank, strict=True)))
        return cast(tuple[int, ...], self.splits)

    @property
    def rule(self) -> CutRule:
        """The cut rule over the axis."""
        if self.aligned:
            return WholeBlocks(self.partition_sizes)
        if self.by_rank is not None:
            return Pieces.from_splits(self.by_rank)
        return Blocks(self.partition_sizes)

    @classmethod
    def from_rule(cls, dim: int, rule: CutRule, parts: int) -> PartitionedShard | None:
        """The placement whose rule over `parts` ranks is `rule`; None where there is none.

        >>> PartitionedShard.from_rule(0, WholeBlocks((4, 2)), 2)
        PartitionedShard(dim=0, num_partitions=2, splits=(4, 2), aligned=True)
        """
        found = None
        if isinstance(rule, WholeBlocks):
            found = cls(dim, len(rule.sizes), rule.sizes, aligned=True)
        elif isinstance(rule, Blocks):
            found = cls(dim, len(rule.sizes), rule.sizes)
        elif isinstance(rule, Pieces) and all(len(block) == parts for block in rule.pieces):
            rows = tuple(tuple(block[part] for block in rule.pieces) for part in range(parts))
            found = cls(dim, len(rule.pieces), rows)
        return found if found is not None and found.rule == rule else None

    def __str__(self) -> str:
        aligned = ", aligned=True" if self.aligned else ""
        return f"PartitionedShard({self.dim}, {self.num_partitions}, {self.splits}{aligned})"
