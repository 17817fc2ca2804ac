"""Ranges of files that many small pieces share, and the arrays that these are in memory.

::

    file      [piece][piece]   [piece]                  [piece]
    ranges    [--------- one ---------]                 [ two ]

1. Pieces of a file that lie near together are one range, which is read or written by one call.
2. As many ranges as a buffer has room for lie in it at once.
3. Pieces of one shape at equal distances in memory are one array of a dimension more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.checkpoint.storage.local_files import AlignedBuffer, BufferRegion
from reshard.runs import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class CoalescedRange:
    """Bytes of a file that hold the pieces `pieces`, in the order in which they lie there."""

    file: int
    start_bytes: int
    size_bytes: int
    pieces: IntArray


def coalesce(
    file: IntArray, start: IntArray, size: IntArray, gap_bytes: int | IntArray, most_bytes: int
) -> Iterator[CoalescedRange]:
    """The pieces that lie together, up to `most_bytes` of them or one piece.

    Args:
        file: the number of the file of each piece, shape `(pieces,)`.
        start, size: where in the file each begins, and how long it is, in bytes: the same shape.
        gap_bytes: how much may lie between a piece and the next; one number, or one for each.
        most_bytes: that a range has, unless it is one piece.

    >>> files, starts, sizes = np.array([0, 0, 0]), np.array([90, 0, 10]), np.array([5, 10, 10])
    >>> [one.pieces.tolist() for one in coalesce(files, starts, sizes, 8, 100)]
    [[1, 2], [0]]
    """
    count = len(start)
    gaps = np.broadcast_to(np.asarray(gap_bytes, dtype=np.int64), start.shape)
    order = np.lexsort((start, file)) if count > 1 else np.arange(count)
    ends = np.append(np.flatnonzero(np.diff(file[order])) + 1, len(order)).tolist()
    low = 0
    for high in ends:
        of_file = order[low:high]
        begins = start[of_file]
        # Tied tensors may overlap: what counts is how far all before reach.
        stops = begins + size[of_file]
        reach = np.maximum.accumulate(stops)
        breaks = np.flatnonzero(begins[1:] - reach[:-1] > gaps[of_file[:-1]]) + 1
        first = 0
        for last in (*breaks.tolist(), high - low):
            while first < last:
                limit = begins[first] + most_bytes
                stop = first + int(np.searchsorted(reach[first:last], limit, "right"))
                stop = max(stop, first + 1)
                begin = int(begins[first])
                yield CoalescedRange(
                    int(file[of_file[0]]),
                    begin,
                    int(stops[first:stop].max()) - begin,
                    of_file[first:stop],
                )
                first = stop
        low = high


def pack_rounds(
    ranges: Iterator[CoalescedRange], buffer: AlignedBuffer
) -> Iterator[list[tuple[CoalescedRange, BufferRegion]]]:
    """The ranges with their places in a buffer, as many at a time as it has room for."""
    together: list[tuple[CoalescedRange, BufferRegion]] = []
    end = 0
    for one in ranges:
        if together and end + AlignedBuffer.capacity_for(one.size_bytes) > buffer.capacity_bytes:
            yield together
            together, end = [], 0
        region = buffer.region(one.start_bytes, one.size_bytes, at=end)
        together.append((one, region))
        end = region.end_bytes
    if together:
        yield together


def split_equal_steps(*columns: IntArray) -> Iterator[tuple[int, int]]:
    """The longest stretches, `(begin, end)`, in which every column has equal steps.

    >>> list(split_equal_steps(np.array([0, 4, 8, 9, 20]), np.array([0, 1, 2, 3, 4])))
    [(0, 3), (3, 5)]
    """
    count, begin = len(columns[0]), 0
    if count > 2:
        changes = np.zeros(count - 2, dtype=bool)
        for column in columns:
            steps = np.diff(column)
            changes |= steps[1:] != steps[:-1]
        for change in np.flatnonzero(changes).tolist():
            # The step before the change ends a stretch, unless it belongs to the one before.
            if change >= begin:
                yield begin, change + 2
                begin = change + 2
    if begin < count:
        yield begin, count


def strided_arrays(
    memory: memoryview,
    storage: np.dtype[Any],
    shape: tuple[int, ...],
    at: IntArray,
    strides: tuple[int, ...] | None = None,
) -> np.ndarray[Any, Any]:
    """Arrays of one shape at equal distances in memory, as one of a dimension more."""
    inner: list[int] = []
    step = storage.itemsize
    for size in reversed(shape):
        inner.insert(0, step)
        step *= size
    if strides is not None:
        inner = [stride * storage.itemsize for stride in strides]
    between = int(at[1] - at[0]) if len(at) > 1 else step
    return np.ndarray((len(at), *shape), storage, memory, int(at[0]), (between, *inner))
