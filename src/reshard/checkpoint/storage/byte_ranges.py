"""Coalescing: merging small pieces of files to byte ranges, and equal pieces to arrays.

::

    file      [piece][piece]   [piece]                  [piece]
    ranges    [------- range 1 ------]                  [range 2]

1. Pieces of a file that are close together are merged to a range, which a single call reads or
   writes.
2. As many ranges as fit share a buffer at a time.
3. Pieces of the same shape at equal distances in memory become an array with another dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from reshard.checkpoint.storage.local_files import AlignedBuffer, BufferRegion
from reshard.runs import IntArray


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of the file or object `name`."""

    name: str
    start: int
    stop: int


class CoalescedRange(NamedTuple):
    """A byte range of a file that contains the pieces `pieces`, in the order of the file."""

    file: int
    start_bytes: int
    size_bytes: int
    pieces: IntArray


def coalesce(
    file: IntArray, start: IntArray, size: IntArray, gap_bytes: int | IntArray, max_bytes: int
) -> Iterator[CoalescedRange]:
    """Yield ranges that cover all pieces, merging those that are close together.

    Args:
        file: the file number of each piece, shape `(pieces,)`.
        start: the first byte of each piece in its file, shape `(pieces,)`.
        size: the bytes of each piece, shape `(pieces,)`.
        gap_bytes: the maximum gap to merge over: a number, or an array with a gap for each piece.
        max_bytes: the maximum size of a range; a single piece may be larger.

    >>> files, starts, sizes = np.array([0, 0, 0]), np.array([90, 0, 10]), np.array([5, 10, 10])
    >>> [r.pieces.tolist() for r in coalesce(files, starts, sizes, 8, 100)]
    [[1, 2], [0]]
    """
    count = len(start)
    gaps = np.broadcast_to(np.asarray(gap_bytes, dtype=np.int64), start.shape)
    # The last key is the first to sort by.
    order = np.lexsort((start, file)) if count > 1 else np.arange(count)
    ends = np.append(np.flatnonzero(np.diff(file[order])) + 1, len(order)).tolist()
    low = 0
    for high in ends:
        of_file = order[low:high]
        begins = start[of_file]
        # Pieces of tied tensors may overlap, so compare with the greatest end so far.
        stops = begins + size[of_file]
        reach = np.maximum.accumulate(stops)
        breaks = np.flatnonzero(begins[1:] - reach[:-1] > gaps[of_file[:-1]]) + 1
        first = 0
        for last in (*breaks.tolist(), high - low):
            while first < last:
                limit = begins[first] + max_bytes
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
    """Yield the ranges with their regions of a buffer, as many at a time as fit."""
    packed: list[tuple[CoalescedRange, BufferRegion]] = []
    end = 0
    for joined in ranges:
        if packed and end + AlignedBuffer.capacity_for(joined.size_bytes) > buffer.capacity_bytes:
            yield packed
            packed, end = [], 0
        region = buffer.region(joined.start_bytes, joined.size_bytes, at=end)
        packed.append((joined, region))
        end = region.end_bytes
    if packed:
        yield packed


def split_equal_steps(*columns: IntArray) -> Iterator[tuple[int, int]]:
    """Yield the longest stretches, `(begin, end)`, in which every column has equal steps.

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
            # The step between two stretches belongs to neither: ignore a change right after it.
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
    """Return arrays of the same shape at equal distances in memory as a single array."""
    inner: list[int] = []
    step = storage.itemsize
    for size in reversed(shape):
        inner.insert(0, step)
        step *= size
    if strides is not None:
        inner = [stride * storage.itemsize for stride in strides]
    between = int(at[1] - at[0]) if len(at) > 1 else step
    return np.ndarray((len(at), *shape), storage, memory, int(at[0]), (between, *inner))
