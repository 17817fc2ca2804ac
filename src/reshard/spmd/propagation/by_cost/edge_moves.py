"""Edge moves: data that operators need from other shards, such as a convolution's halo.

An operand moves to what its operator reads, and from there to what that runs with. Where it lies as
it is read, it keeps the second as well, for all operators that need the same edges::

    value x: y --- edges ---> convolution          moved once
                         ---> its gradient
    value x: x --- reads y --- edges ---> ...      edges of an array that is not kept: each time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.dtypes import DType
from reshard.spmd.propagation.axis_parts import Sharding, are_alike
from reshard.spmd.propagation.by_cost.cost_candidates import PlacedRun
from reshard.spmd.propagation.by_cost.cost_model import CostModel
from reshard.spmd.propagation.by_cost.cost_table import FloatArray

NO_EDGES = -1
EdgePair = tuple[int, Sharding]
"""What is read, by its number, and what the operator runs with."""


@dataclass(slots=True)
class KnownEdges:
    """The edges of all values of one shape and element type, by numbers, and their seconds."""

    model: CostModel
    shape: tuple[int, ...]
    element: DType
    pairs: dict[EdgePair, int] = field(default_factory=dict)
    seconds_s: list[float] = field(default_factory=list)

    def number(self, read: int, sharding: Sharding, runs_with: Sharding) -> int:
        """The number of what a way needs beside what it reads; `NO_EDGES` if it needs nothing."""
        if are_alike(sharding, runs_with):
            return NO_EDGES
        found = self.pairs.setdefault((read, runs_with), len(self.pairs))
        if found == len(self.seconds_s):
            # They are few, so that their programs are found at once.
            self.seconds_s.append(
                self.model.program_s(sharding, runs_with, self.shape, self.element)
            )
        return found


@dataclass(frozen=True, slots=True, eq=False)
class EdgeMoves:
    """The edges that equal operations need of equal values, for all choices at once.

    Args:
        known: of values like them.
        own: the shardings that such a value may have, by their numbers.
        reads: which each way reads.
        others: the edges that each way needs, or `NO_EDGES`.
        is_read: whether these are the edges of the value as it lies, which it keeps; else those of
            the array that it is moved to.
    """

    known: KnownEdges
    own: tuple[int, ...]
    reads: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool

    @classmethod
    def of(
        cls,
        known: KnownEdges,
        own: tuple[int, ...],
        reads: tuple[int, ...],
        shardings: Sequence[Sharding],
        placed: Sequence[PlacedRun | None],
        position: int,
    ) -> tuple[EdgeMoves, ...]:
        """Those of an operand, kept and not, if there are any.

        Args:
            known, own, reads: of the value.
            shardings: that each way reads.
            placed: what each way runs with, as its rule says when None.
            position: of the operand.
        """
        others = tuple(
            [
                NO_EDGES if one is None else known.number(number, sharding, one.runs_with[position])
                for number, sharding, one in zip(reads, shardings, placed, strict=True)
            ]
        )
        if all(other == NO_EDGES for other in others):
            return ()
        return tuple([cls(known, own, reads, others, is_kept) for is_kept in (True, False)])

    @property
    def seconds_s(self) -> FloatArray:
        """A row for each sharding of the value, a column for each way."""
        every_s = [
            0.0 if other == NO_EDGES else self.known.seconds_s[other] for other in self.others
        ]
        lies_so = np.equal(np.array(self.own)[:, None], np.array(self.reads))
        return np.where(lies_so == self.is_read, np.array(every_s), 0.0)

    def seconds_to(self, targets: tuple[int, ...]) -> FloatArray:
        """For each sharding of the value, a row, some edges that it keeps."""
        read_by = {number: read for (read, _), number in self.known.pairs.items()}
        every_s = np.array([self.known.seconds_s[target] for target in targets])
        reads = np.array([read_by[target] for target in targets])
        return np.where(np.equal(np.array(self.own)[:, None], reads), every_s, 0.0)

    def target(self, row: int, column: int) -> int | None:
        """The edges that are moved in a way; None where there are none."""
        other = self.others[column]
        lies_so = self.own[row] == self.reads[column]
        return other if other != NO_EDGES and lies_so == self.is_read else None
