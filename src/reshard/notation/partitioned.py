"""The placement of a dimension that is made of partitions of different sizes.

A `PartitionedShard` shards a dimension of consecutive partitions (the experts of a
mixture, for example) over a mesh axis. *Unaligned*, every rank has a slice of every partition;
*aligned*, every rank has whole partitions::

    partitions of 6, 10, 12 and 4 over 2 ranks

    unaligned, a slice of each by ceil     |000111|0000011111|000000111111|0011|
    unaligned, slices given by a matrix    |000011|0000001111|000011111111|0011|
    aligned                                |000000|0000000000|111111111111|1111|

Source: the proposal of a `PartitionedShard` placement for DTensor.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any, cast

from reshard._records import Record
from reshard.cut_rules import Blocks, CutRule, Pieces, WholeBlocks
from reshard.errors import NotationError

Splits = tuple[int, ...] | tuple[tuple[int, ...], ...]


class _UnalignedRows(tuple[tuple[int, ...], ...]):
    """The rows of an unaligned shard.

    Rows are only numbers: an aligned shard that gets these from `dataclasses.replace` would read
    other partitions from them without an error.
    """

    __slots__ = ()


class PartitionedShard(Record):
    """A dimension of partitions, sharded over a mesh axis.

    Args:
        dim: the dimension; negative numbers count from the end.
        num_partitions: how many partitions there are.
        splits: the size of each partition, shape `(num_partitions,)`; or, unaligned, how much
            each rank has of it, shape `(ranks, num_partitions)`, or the same in a flat list, rank
            after rank. A row of an aligned shard has the partitions of its rank, each in as many
            pieces as there are ranks. Lists, or arrays of NumPy or torch.
        aligned: whether ranks have whole partitions, by ceil of their number. Splits of an
            unaligned shard that is made aligned, as `dataclasses.replace(shard, aligned=True)`
            does, keep its partitions.

    Raises:
        NotationError: splits of another shape, or negative sizes.

    >>> shard = PartitionedShard(0, 4, [[4, 6, 4, 2], [2, 4, 8, 2]])
    >>> shard.partition_sizes
    (6, 10, 12, 4)
    >>> shard == PartitionedShard(0, 4, [4, 6, 4, 2, 2, 4, 8, 2])
    True
    >>> shard.rule.table(32, 2).local_lengths.tolist()
    [16, 16]
    >>> rows = [[4, 2, 6, 4], [4, 8, 2, 2]]
    >>> PartitionedShard(0, 4, rows, aligned=True).partition_sizes
    (6, 10, 12, 4)
    >>> print(PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True))
    PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True)
    """

    dim: int
    num_partitions: int
    splits: Splits
    aligned: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "num_partitions"):
            number = _as_tuples(getattr(self, name), name)
            if not isinstance(number, int):
                raise NotationError(f"{name} {number} of a PartitionedShard must be a number")
            object.__setattr__(self, name, number)
        splits = _as_tuples(self.splits, "splits")
        if self.aligned and isinstance(self.splits, _UnalignedRows):
            splits = tuple(map(sum, zip(*self.splits, strict=True)))
        # Shown in errors until the splits have been checked.
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "splits", self._check_splits(splits))

    def _check_splits(self, splits: object) -> Splits:
        count = self.num_partitions
        items = splits if isinstance(splits, tuple) else (splits,)
        rows = tuple(item for item in items if isinstance(item, tuple))
        sizes = tuple(item for item in items if isinstance(item, int))
        if not isinstance(splits, tuple) or (rows and sizes):
            raise self._refusal(
                "are numbers and rows; give a number per partition, or a row per rank"
            )
        if not rows and len(sizes) != count:
            if not count or len(sizes) % count or not sizes:
                raise self._refusal(
                    f"give {len(sizes)} sizes for {count} partitions; give {count}, or as many for "
                    f"every rank, such as {2 * count} for 2 ranks"
                )
            # A flat list is a row for each rank, rank after rank.
            lengths = self._row_lengths(len(sizes) // count)
            stops = tuple(itertools.accumulate(lengths))
            rows = tuple(sizes[stop - n : stop] for stop, n in zip(stops, lengths, strict=True))
        expected = self._row_lengths(len(rows)) if rows else [count]
        for row, length in zip(rows or (sizes,), expected, strict=True):
            if not all(isinstance(size, int) for size in row):
                raise self._refusal("are nested deeper than a row per rank; give such rows")
            if len(row) != length:
                raise self._refusal(
                    f"give {len(row)} sizes where rank {rows.index(row)} has {length}: "
                    f"{length // len(rows)} of {count} whole partitions, each in {len(rows)} pieces"
                    if self.aligned and rows
                    else f"give {len(row)} sizes for {count} partitions; give a size for each"
                )
            if any(size < 0 for size in row):
                raise self._refusal("must not be negative")
        return (rows if self.aligned else _UnalignedRows(rows)) if rows else sizes

    def _row_lengths(self, ranks: int) -> list[int]:
        """Return how many sizes each rank's row has."""
        if not self.aligned:
            return [self.num_partitions] * ranks
        # Ranks have whole partitions by ceil, so the last ranks may have fewer, or none. Each
        # partition has a piece from every rank.
        own = -(-self.num_partitions // ranks)
        counts = (min(own, max(self.num_partitions - own * rank, 0)) for rank in range(ranks))
        return [count * ranks for count in counts]

    def _refusal(self, problem: str) -> NotationError:
        return NotationError(f"the splits {self.splits} of a PartitionedShard {problem}")

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...] | None:
        """The splits of each rank, or None if they are sizes of whole partitions."""
        if self.splits and isinstance(self.splits[0], tuple):
            return self.splits
        return None

    @property
    def partition_sizes(self) -> tuple[int, ...]:
        """The size of each partition, shape `(num_partitions,)`."""
        if self.by_rank is not None and self.aligned:
            ranks, pieces = len(self.by_rank), [size for row in self.by_rank for size in row]
            return tuple(sum(pieces[at : at + ranks]) for at in range(0, len(pieces), ranks))
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
        """Return the placement with this rule over `parts` ranks, or None if there is none.

        >>> PartitionedShard.from_rule(0, WholeBlocks((4, 2)), 2)
        PartitionedShard(dim=0, num_partitions=2, splits=(4, 2), aligned=True)
        """
        placement = None
        if isinstance(rule, WholeBlocks):
            placement = cls(dim, len(rule.sizes), rule.sizes, aligned=True)
        elif isinstance(rule, Blocks):
            placement = cls(dim, len(rule.sizes), rule.sizes)
        elif isinstance(rule, Pieces) and all(len(block) == parts for block in rule.pieces):
            rows = tuple(tuple(block[part] for block in rule.pieces) for part in range(parts))
            placement = cls(dim, len(rule.pieces), rows)
        # The rule may have counts or an inner rule, which a placement does not express.
        return placement if placement is not None and placement.rule == rule else None

    def __str__(self) -> str:
        aligned = ", aligned=True" if self.aligned else ""
        return f"PartitionedShard({self.dim}, {self.num_partitions}, {self.splits}{aligned})"


def _as_tuples(value: Any, what: str) -> Any:
    """Return a whole number, or nested lists or an array of them as tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(_as_tuples(item, what) for item in value)
    try:
        return operator.index(value)
    except TypeError:
        raise NotationError(
            f"{what} of a PartitionedShard: {value!r} is not a whole number; give ints, in lists "
            "or an array"
        ) from None
