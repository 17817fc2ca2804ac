"""Reading a box of a shard with little overhead.

A rank needs a box of a shard. The file stores the shard in row-major order, so the box consists of
ranges of equal length::

      a shard in a file               rows 1..3, columns 2..4: three ranges
      . . . . . . . .
      . . # # # . . .                 trailing dimensions that are needed whole
      . . # # # . . .                 make a range longer
      . . # # # . . .

1. A box larger than the buffer is halved along its first dimension with more than one index.
2. If reading from its first to its last element wastes little (`MAX_WASTE` of the needed bytes), or
   if the ranges are shorter than a sector of a disk, the box is read at once.
3. Otherwise it is read range by range. All ranges are announced to the system first, so that the
   disk reads many of them at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.checkpoint.storage.byte_ranges import ByteRange
from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile
from reshard.checkpoint.storage.remote_files import JOINED_BYTES
from reshard.geometry.regions import Region
from reshard.runs import IntArray

if TYPE_CHECKING:
    from reshard.checkpoint.storage.shared_read_cache import ReadSpan

# The maximum number of unneeded bytes read, relative to the needed bytes.
MAX_WASTE = 0.05
SECTOR_BYTES = 512
BUFFER_BYTES = 4 * 1024 * 1024


def read_region(
    file: SourceFile,
    start_bytes: int,
    region: Region,
    target: NDArray[Any],
    buffer: AlignedBuffer,
) -> None:
    """Fill `target` with a region of a shard.

    Args:
        file: contains the shard.
        start_bytes: the offset in the file of element 0 of the shard.
        region: its offset and strides are in elements of the shard.
        target: an array of the region's shape; it need not be contiguous.
        buffer: room for `BUFFER_BYTES` at any file offset.

    Raises:
        RunError: the file cannot be read.
    """
    if not target.size:
        return
    itemsize = target.dtype.itemsize
    extent = extent_at_once(region, itemsize)
    needed_bytes = (target.size if extent is None else extent) * itemsize
    if needed_bytes > BUFFER_BYTES and target.size > 1:
        d = next(d for d, n in enumerate(target.shape) if n > 1)
        half = target.shape[d] // 2
        middle = region.start[d] + half
        low, high = np.split(target, [half], axis=d)
        lower, upper = (region.start[d], middle), (middle, region.stop[d])
        read_region(file, start_bytes, region.narrow(d, *lower), low, buffer)
        read_region(file, start_bytes, region.narrow(d, *upper), high, buffer)
        return
    at = start_bytes + region.offset * itemsize
    if extent is not None:
        # One read; the box is a strided view of it.
        memory = buffer.region(at, needed_bytes)
        file.read_into(memory, at)
        elements = np.frombuffer(memory.memory, dtype=target.dtype)
        strides = [stride * itemsize for stride in region.strides]
        target[...] = as_strided(elements, target.shape, strides, writeable=False)
        return
    # Range by range, packed: that is the box in row-major order.
    ranges, length = _ranges(region)
    packed = buffer.region(0, needed_bytes).memory
    file.read_ranges(packed, (at + ranges * itemsize).tolist(), length * itemsize)
    target[...] = np.frombuffer(packed, dtype=target.dtype).reshape(target.shape)


def remote_span(path: str, start_bytes: int, region: Region, itemsize_bytes: int) -> ReadSpan:
    """Return the range of an object that contains a region of a shard, and the bytes read of it.

    The arguments are those of `read_region`, and the size of an element.

    >>> near, far = (Region.dense((3, size), "shard").narrow(1, 10, 80) for size in (200, 40_000))
    >>> tuple(remote_span("a", 0, near, 8)[0]), remote_span("a", 0, near, 8)[1]
    (('a', 80, 3840), 3760)
    >>> tuple(remote_span("a", 0, far, 8)[0]), remote_span("a", 0, far, 8)[1]
    (('a', 80, 640640), 1680)
    """
    low, high = region.bounds
    start, stop = start_bytes + low * itemsize_bytes, start_bytes + (high + 1) * itemsize_bytes
    inner, length = _dense_end(region)
    gap = region.strides[inner - 1] - length if inner else 0
    is_at_once = extent_at_once(region, itemsize_bytes) or gap * itemsize_bytes <= JOINED_BYTES
    size = stop - start if is_at_once else region.elements * itemsize_bytes
    return ByteRange(path, start, stop), size


def split_region(
    region: Region, itemsize_bytes: int, max_bytes: int, *, is_hull: bool = False
) -> Iterator[Region]:
    """Yield pieces of a region of at most `max_bytes`, so that threads share the work.

    If `is_hull`, the bytes between its elements in the file count too.
    """
    # Split the outermost dimension, so each piece is as contiguous in the file as the whole.
    # Dimensions of size 1 cannot be split.
    long = next((d for d, size in enumerate(region.shape) if size > 1), None)
    if long is None:
        yield region
        return
    low, high = region.start[long], region.stop[long]
    row = region.strides[long] if is_hull else region.elements // (high - low)
    if row * (high - low) * itemsize_bytes <= max_bytes:
        yield region
        return
    step = max(1, max_bytes // (row * itemsize_bytes))
    for begin in range(low, high, step):
        part = region.narrow(long, begin, min(begin + step, high))
        yield from split_region(part, itemsize_bytes, max_bytes, is_hull=is_hull)


def extent_at_once(region: Region, itemsize_bytes: int) -> int | None:
    """Return the number of elements from a region's first to its last, if read as a single range.

    Return None if the gaps are so large that the ranges of the region are read separately.

    >>> wide = Region.dense((3, 1000), "shard").narrow(1, 0, 100)
    >>> extent_at_once(Region.dense((3, 100), "shard"), 8), extent_at_once(wide, 8)
    (300, None)
    """
    low, high = region.bounds
    extent = high + 1 - low
    if extent <= region.elements * (1 + MAX_WASTE):
        return extent
    # A disk reads whole sectors, so skipping the gaps between shorter ranges saves no time.
    _, length = _dense_end(region)
    return extent if length * itemsize_bytes < SECTOR_BYTES else None


def _ranges(region: Region) -> tuple[IntArray, int]:
    """Return the begins of the contiguous ranges of a region, in row-major order, and their length.

    The begins are relative to the region's offset.

    >>> _ranges(Region.dense((3, 8), "shard").narrow(1, 2, 4))
    (array([ 0,  8, 16]), 2)
    """
    # Not `Region.runs`: NumPy computes thousands of ranges faster.
    inner, length = _dense_end(region)
    begin = np.zeros(1, dtype=np.int64)
    for size, stride in zip(region.shape[:inner], region.strides[:inner], strict=True):
        # An outer sum in row-major order of the ranges so far and the indices of this dimension.
        begin = (begin[:, None] + np.arange(size) * stride).reshape(-1)
    return begin, length


def _dense_end(region: Region) -> tuple[int, int]:
    """Return the number of dimensions outside of a contiguous range, and the range's length."""
    shape, dense, inner = region.shape, 1, len(region.start)
    # Trailing dimensions that are dense in the file are part of one range.
    while inner > 0 and (shape[inner - 1] == 1 or region.strides[inner - 1] == dense):
        inner -= 1
        dense *= shape[inner]
    return inner, dense
