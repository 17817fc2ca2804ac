"""How is the work of one tensor cut into slices, so that all its transfers advance together?

A tensor too large for the memory at hand moves slice by slice. Cutting the tensor itself would
leave most ranks idle while one sends; so every transfer is cut, each at its own even pace::

    position     0 ......... start ........ stop .......... 65536
    transfer 0   |=============|##############|===============|    rows along its longest side
    transfer 1   |======|######|=======|                           (# is what the slice has)

1. A transfer's box is cut along its longest dimension, between rows: a piece of it is a box again.
2. Each has a head start of its own, a fraction of a row that is a hash of where it is, so that
   transfers of few rows do not all have them at the same position.
3. Where contributions are combined, the first of every element comes before the second of any:
   each has a lap of 65536 positions to itself.

A cut follows from the transfer's own columns, so both of its ends find it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray, ragged_arange

POSITIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Slice:
    """A tensor's work from position `start` to `stop`; to its end where `stop` is None.

    Raises PlanError where it does not end behind its beginning.

    >>> Slice().is_whole, Slice(512, 1024).is_whole
    (True, False)
    """

    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise PlanError(
                f"a slice from position {self.start} to {self.stop}; it must begin at 0 or later, "
                "and end behind its beginning"
            )

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.start == 0 and self.stop is None


def restrict(transfers: Transfers, part: Slice) -> Transfers:
    """The rows of each transfer that belong to a slice; transfers without any are left out.

    Give it any of a tensor's transfers, one rank's or all. Those that stay are cut as well.
    Slices that follow one another from 0 to the end have every element once.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> transfers = reshard.plan(rows, columns).transfers
    >>> halves = Slice(0, POSITIONS // 2), Slice(POSITIONS // 2)
    >>> [int(restrict(transfers, half).elements.sum()) for half in halves]
    [32, 32]
    """
    if part.is_whole or not len(transfers):
        return transfers
    pace = Pace.of(transfers)
    first, last = pace.rows_before(part.start), pace.rows_before(part.stop)
    kept = np.flatnonzero(last > first)
    chosen, first, count = transfers.take(kept), first[kept], (last - first)[kept]
    # A scalar has one row, and no dimension to cut it in.
    along = np.zeros_like(chosen.shape, dtype=bool)
    if along.shape[1]:
        along[np.arange(len(kept)), pace.dimension[kept]] = True
    ahead = np.where(along, first[:, None], 0)
    return chosen.replace(
        start=chosen.start + ahead,
        shape=np.where(along, count[:, None], chosen.shape),
        source_start=chosen.source_start + ahead,
        target_start=chosen.target_start + ahead,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """How transfers advance: columns of shape `(transfers,)`.

    `rows` along `dimension`, of `row_elements` each; the first position of the `lap`, and how
    far into its first row a transfer is there (`head_start` of 65536).
    """

    dimension: IntArray
    rows: IntArray
    row_elements: IntArray
    lap: IntArray
    head_start: IntArray

    @classmethod
    def of(cls, transfers: Transfers) -> Pace:
        """The pace of each transfer."""
        count, ndim = transfers.shape.shape
        if ndim == 0:
            dimension, rows = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
        else:
            dimension = transfers.shape.argmax(axis=1)
            rows = transfers.shape[np.arange(count), dimension]
        row_elements = transfers.elements // rows
        lap = transfers.order * POSITIONS
        return cls(dimension, rows, row_elements, lap, _scattered(transfers))

    @staticmethod
    def end(transfers: Transfers) -> int:
        """The position at which all of a tensor's transfers are done."""
        return POSITIONS * (int(transfers.order.max(initial=0)) + 1)

    def rows_before(self, position: int | None) -> IntArray:
        """The rows of each transfer that are done when a position is reached."""
        if position is None:
            return self.rows
        run = np.clip(position - self.lap, 0, POSITIONS)
        return (run * self.rows + self.head_start) // POSITIONS

    def next_finish(self, start: int) -> int:
        """The first position behind `start` at which some transfer has one row more."""
        done = self.rows_before(start)
        open_ = done < self.rows
        rows, goal = self.rows[open_], (done[open_] + 1) * POSITIONS - self.head_start[open_]
        return int((self.lap[open_] + -(-goal // rows)).min())

    def finishes(self, chosen: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """When rows of the chosen transfers are done: the transfer, the position, how many."""
        steps = np.minimum(self.rows[chosen], POSITIONS)
        transfer, step = np.repeat(chosen, steps), ragged_arange(steps)
        rows, head_start = self.rows[transfer], self.head_start[transfer]
        # One row after another; where there are more rows than positions, one position after
        # another.
        goal = (step + 1) * POSITIONS - head_start
        run = np.where(rows <= POSITIONS, -(-goal // rows), step + 1)
        done = (run * rows + head_start) // POSITIONS
        before = np.where(rows <= POSITIONS, step, ((run - 1) * rows + head_start) // POSITIONS)
        return transfer, self.lap[transfer] + run, done - before


def _scattered(transfers: Transfers) -> IntArray:
    """A number below 65536 for each transfer, from where it is; neighbours' are far apart.

    Source: multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = transfers.source_slot.astype(np.uint64)
    for column in (transfers.target_slot, *transfers.start.T):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * golden + column.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * golden
    return (mixed >> np.uint64(48)).astype(np.int64)
