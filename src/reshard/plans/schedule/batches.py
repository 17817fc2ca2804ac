"""How is a job cut into batches, so that no rank stages more than a limit at any time?

What a rank sends is packed first, and what it receives is unpacked afterwards: both lie in memory
beyond the caller's source and target. A batch is the work between two such moments. Its staging
on a rank is the bytes that the rank sends and receives in it; what is sent or received in place
stages less.

1. Tensors are taken in the order of the job. One that fits in the room left on every rank goes
   into the batch whole.
2. One that fits in an empty batch closes this one and begins the next.
3. One that fits in none is cut, see `slices`: every transfer advances at its own even pace, and
   the slice ends where some rank's room does.

All follows from the job, so ranks agree without talking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.transfers import Transfers
from reshard.plans.job import Job
from reshard.plans.schedule.slices import Pace, Slice
from reshard.runs import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TensorTransfers:
    """The transfers of one tensor between all ranks, and the bytes of an element."""

    name: str
    itemsize_bytes: int
    transfers: Transfers


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A tensor's part in a batch: its number in `job.items`, and which of its work is done."""

    item: int
    slice: Slice


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Work that is done at once. `staging_bytes` is what each rank stages: shape `(ranks,)`."""

    items: tuple[BatchItem, ...]
    staging_bytes: IntArray

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank stages."""
        return int(self.staging_bytes.max(initial=0))


def batches(job: Job, limit_bytes: int, alignment_bytes: int = 1) -> tuple[Batch, ...]:
    """A job's work in batches, one after another; in none does a rank stage more than a limit.

    Args:
        job: what to do.
        limit_bytes: the most that any rank may stage in a batch, sent and received together.
        alignment_bytes: each transfer's piece takes a multiple of it in the staging memory.

    Raises:
        PlanError: a limit too small for any cut; the message says the least that would do.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("x, -", "-, x"))
    >>> from reshard.dtypes import dtype
    >>> job = Job([reshard.JobItem.between_ranks(n, dtype("int8"), rows, columns) for n in "ab"])
    >>> [batch.peak_bytes for batch in batches(job, 64)]
    [64]
    >>> [batch.peak_bytes for batch in batches(job, 24)]
    [24, 24, 16]
    """
    ranks = max(
        (max(item.change.source.slots, item.change.target.slots) for item in job.items), default=0
    )
    tensors = [
        TensorTransfers(
            item.name,
            item.dtype.itemsize_bytes,
            job.transfers.get(item.name, Transfers.none(item.change.source.ndim)),
        )
        for item in job.items
    ]
    return transfer_batches(tensors, ranks, limit_bytes, alignment_bytes)


def transfer_batches(
    tensors: Iterable[TensorTransfers], ranks: int, limit_bytes: int, alignment_bytes: int = 1
) -> tuple[Batch, ...]:
    """The same for any transfers, such as those of one stage: of all `ranks`, tensor by tensor."""
    if limit_bytes < 0:
        raise PlanError(f"a limit of {limit_bytes} bytes; it must be at least 0")
    if alignment_bytes < 1:
        raise PlanError(f"an alignment of {alignment_bytes} bytes; it must be at least 1")
    works = [_Work.of(tensor, alignment_bytes, ranks) for tensor in tensors]
    found: list[Batch] = []
    items: list[BatchItem] = []
    staged = np.zeros(ranks, dtype=np.int64)

    def close() -> None:
        nonlocal items, staged
        found.append(Batch(tuple(items), staged))
        items, staged = [], np.zeros(ranks, dtype=np.int64)

    for number, work in enumerate(works):
        # This batch has the tensor's work from `begin` to `start`, beside the `others`.
        begin = start = 0
        others = staged
        while start < work.end:
            stop = work.furthest(start, limit_bytes - staged)
            if stop == start or (stop < work.end and work.fits(limit_bytes)):
                if start > begin:
                    items.append(BatchItem(number, Slice(begin, start)))
                if not items:
                    raise _too_small(works, limit_bytes)
                close()
                begin, others = start, staged
            else:
                start = stop
                staged = others + work.staging_bytes(begin, start)
        items.append(BatchItem(number, Slice(begin)))
    if items:
        close()
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What one tensor stages on each rank, from any position to any other."""

    name: str
    moving: Transfers
    pace: Pace
    end: int
    itemsize_bytes: int
    alignment_bytes: int
    whole_bytes: IntArray

    @classmethod
    def of(cls, tensor: TensorTransfers, alignment_bytes: int, ranks: int) -> _Work:
        moving = tensor.transfers.moving
        pace, end = Pace.of(moving), Pace.end(tensor.transfers)
        nothing = np.zeros(ranks, dtype=np.int64)
        itemsize_bytes = tensor.itemsize_bytes
        work = cls(tensor.name, moving, pace, end, itemsize_bytes, alignment_bytes, nothing)
        work.whole_bytes[:] = work.staging_bytes(0, end)
        return work

    def fits(self, limit_bytes: int) -> bool:
        """Whether an empty batch has room for the whole tensor."""
        return int(self.whole_bytes.max(initial=0)) <= limit_bytes

    def staging_bytes(self, start: int, stop: int) -> IntArray:
        """What each rank sends and receives between two positions: shape `(ranks,)`."""
        rows = self.pace.rows_before(stop) - self.pace.rows_before(start)
        size_bytes = self._aligned(rows * self.pace.row_elements)
        staged = np.zeros_like(self.whole_bytes)
        np.add.at(staged, self.moving.source_slot, size_bytes)
        np.add.at(staged, self.moving.target_slot, size_bytes)
        return staged

    def _aligned(self, elements: IntArray) -> IntArray:
        """The bytes that pieces of so many elements take in the staging memory."""
        size_bytes = elements * self.itemsize_bytes
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def furthest(self, start: int, room_bytes: IntArray) -> int:
        """A position up to which the work from `start` fits in the room of every rank.

        It is the end wherever that fits, and `start` only where not even the next row does.
        """
        stop = self.end
        staged = self.whole_bytes if start == 0 else self.staging_bytes(start, stop)
        least = 0
        while (staged > room_bytes).any():
            if stop == least:
                return start
            least = least or self.pace.next_finish(start)
            # The fullest rank says how much further than it can this would go.
            fullest = int(np.argmax(staged / np.maximum(room_bytes, 0.5)))
            share = (stop - start) * max(int(room_bytes[fullest]), 0) // int(staged[fullest])
            stop = max(least, min(start + share, stop - 1))
            staged = self.staging_bytes(start, stop)
        return stop

    def most_at_once_bytes(self) -> int:
        """The most that a rank stages for rows that no cut can separate."""
        most = 0
        for rank, staged in enumerate(self.whole_bytes.tolist()):
            if staged > most:
                of_rank = (self.moving.source_slot == rank) | (self.moving.target_slot == rank)
                at = np.flatnonzero(of_rank)
                transfer, position, rows = self.pace.finishes(at)
                size = self._aligned(rows * self.pace.row_elements[transfer])
                _, number = np.unique(position, return_inverse=True)
                together = np.zeros(int(number.max()) + 1, dtype=np.int64)
                np.add.at(together, number, size)
                most = max(most, int(together.max()))
        return most


def _too_small(works: list[_Work], limit_bytes: int) -> PlanError:
    needs = [(work.most_at_once_bytes(), work.name) for work in works if not work.fits(limit_bytes)]
    needed, name = max(needs, key=lambda need: need[0])
    return PlanError(
        f"a limit of {limit_bytes} bytes is too small to move {len(works)} tensors in batches; "
        f"the least that would do is {needed} bytes, which {name!r} needs"
    )
