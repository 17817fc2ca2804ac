"""Reading a box of a shard with little overhead.

The part of a shard that a rank needs is a box of it. In the file, which is row major, a box is a
number of equally long ranges::

      a shard in a file               rows 1..3, columns 2..4: three ranges
      . . . . . . . .
      . . # # # . . .                 trailing dimensions that are needed whole
      . . # # # . . .                 make a range longer
      . . # # # . . .

1. A box larger than the buffer is halved along its first dimension of more than one index.
2. If reading from its first to its last element wastes little (`MAX_WASTE` of the needed bytes), or
   if the ranges are shorter than a sector of a disk, the box is read at once.
3. Otherwise it is read range by range. All ranges are announced first, so that the disk works on
   many at once instead of one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile
from reshard.runs import IntArray

# The largest share of bytes read in vain, relative to those needed.
MAX_WASTE = 0.05
SECTOR_BYTES = 512
BUFFER_BYTES = 4 * 1024 * 1024


def read_box(
    file: SourceFile,
    start_bytes: int,
    view: View,
    local: tuple[int, ...],
    target: NDArray[Any],
    buffer: AlignedBuffer,
) -> None:
    """Fill `target` with a box of a shard.

    Args:
        file: holds the shard.
        start_bytes: the offset of element 0 of `view` in the file.
        view: the strides of the shard in the file.
        local: the begin of the box in the shard; it has the shape of `target`.
        target: bare elements; it need not be contiguous.
        buffer: room for `BUFFER_BYTES` at any file offset.

    Raises:
        RunError: the file cannot be read.
    """
    if not target.size:
        return
    itemsize = target.dtype.itemsize
    reach = reach_at_once(view.strides, target.shape, itemsize)
    needed_bytes = (target.size if reach is None else reach) * itemsize
    if needed_bytes > BUFFER_BYTES and target.size > 1:
        d = next(d for d, n in enumerate(target.shape) if n > 1)
        half = target.shape[d] // 2
        middle = (*local[:d], local[d] + half, *local[d + 1 :])
        low, high = np.split(target, [half], axis=d)
        read_box(file, start_bytes, view, local, low, buffer)
        read_box(file, start_bytes, view, middle, high, buffer)
        return
    first = view.offset + sum(a * s for a, s in zip(local, view.strides, strict=True))
    at = start_bytes + first * itemsize
    if reach is not None:
        # One read; the box is a strided view of it.
        region = buffer.region(at, needed_bytes)
        file.read_into(region, at)
        elements = np.frombuffer(region.memory, dtype=target.dtype)
        strides = [stride * itemsize for stride in view.strides]
        target[...] = as_strided(elements, target.shape, strides, writeable=False)
        return
    # Range by range, packed: that is the box in row-major order.
    ranges, length = _ranges(view.strides, target.shape)
    memory = buffer.region(0, needed_bytes).memory
    size = length * itemsize
    file.read_ranges(memory, (at + ranges * itemsize).tolist(), size)
    target[...] = np.frombuffer(memory, dtype=target.dtype).reshape(target.shape)


def bounding_range(
    view: View, local: Sequence[int], shape: Sequence[int], itemsize_bytes: int, joined_bytes: int
) -> tuple[int, int, int]:
    """Return the first byte and the end of a box of a shard in a file, and the bytes read.

    Args:
        view: the strides of the shard in the file.
        local: the begin of the box in the shard.
        shape: of the box.
        itemsize_bytes: of an element.
        joined_bytes: the largest gap between ranges that is read with them.

    >>> bounding_range(View(0, (200, 1)), (0, 10), (3, 70), 8, 0)
    (80, 3840, 1680)
    >>> bounding_range(View(0, (200, 1)), (0, 10), (3, 70), 8, 2000)
    (80, 3840, 3760)
    """
    first = view.offset + sum(a * s for a, s in zip(local, view.strides, strict=True))
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))
    at, size_bytes = first * itemsize_bytes, reach * itemsize_bytes
    inner, length = _dense_end(view.strides, shape)
    gap = view.strides[inner - 1] - length if inner else 0
    if reach_at_once(view.strides, shape, itemsize_bytes) or gap * itemsize_bytes <= joined_bytes:
        return at, at + size_bytes, size_bytes
    return at, at + size_bytes, math.prod(shape) * itemsize_bytes


def reach_at_once(strides: Sequence[int], shape: Sequence[int], itemsize_bytes: int) -> int | None:
    """Return the elements from the first to the last of a box, both included, if all are read.

    Return None if the gaps are so large that the ranges of the box are read one by one.

    >>> reach_at_once((100, 1), (3, 100), 8), reach_at_once((1000, 1), (3, 100), 8)
    (300, None)
    """
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if reach <= math.prod(shape) * (1 + MAX_WASTE):
        return reach
    # A disk reads whole sectors: shorter ranges cost as much as the bytes between them.
    _, length = _ranges(strides, shape)
    return reach if length * itemsize_bytes < SECTOR_BYTES else None


def _ranges(strides: Sequence[int], shape: Sequence[int]) -> tuple[IntArray, int]:
    """Return the begins of the contiguous ranges of a box, in row-major order, and their length.

    >>> _ranges((8, 1), (3, 2))
    (array([ 0,  8, 16]), 2)
    """
    inner, length = _dense_end(strides, shape)
    begin = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape[:inner], strides[:inner], strict=True):
        # An outer sum in row-major order of the ranges so far and the indices of this dimension.
        begin = (begin[:, None] + np.arange(size) * stride).reshape(-1)
    return begin, length


def _dense_end(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of dimensions outside of a contiguous range, and the range's length."""
    dense, inner = 1, len(shape)
    # Trailing dimensions that are dense in the file are part of one range.
    while inner > 0 and (shape[inner - 1] == 1 or strides[inner - 1] == dense):
        inner -= 1
        dense *= shape[inner]
    return inner, dense
