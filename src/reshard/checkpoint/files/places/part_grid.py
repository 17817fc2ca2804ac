"""Parts of files: equal ranges of each, but for the last one, in which a store takes them.

Parts are numbered through all files, in their order: file `n` has those from `first[n]` on. How
long they are follows from the size of the file alone, so every run of a conversion has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.runs import IntArray

#: Stores take no shorter ones (5 MiB), and a request costs as much as some mebibytes.
LEAST_PART_BYTES = 8 << 20
#: Of one file, in all stores.
MOST_PARTS = 10_000
_STEP_BYTES = 1 << 20


def part_bytes_of(size_bytes: int) -> int:
    """How long the parts of a file are.

    >>> part_bytes_of(1 << 30) >> 20, part_bytes_of(10**12) >> 20
    (8, 96)
    """
    least = -(-size_bytes // MOST_PARTS)
    if least <= LEAST_PART_BYTES:
        return LEAST_PART_BYTES
    return -(-least // _STEP_BYTES) * _STEP_BYTES


class PartGrid:
    """The parts of files.

    Args:
        sizes: of the files, in bytes.
        part_bytes: how long the parts of each are.

    >>> grid = PartGrid([10, 0, 25], [10, 10, 10])
    >>> grid.count, grid.range_of(3), grid.parts_of(2)
    (4, (2, 20, 25), range(1, 4))
    >>> grid.touched(np.array([2]), np.array([5]), np.array([21]))
    (array([0, 0, 0]), array([1, 2, 3]))
    """

    def __init__(self, sizes: Sequence[int], part_bytes: Sequence[int]) -> None:
        self.sizes = np.array(sizes, dtype=np.int64)
        self.part_bytes = np.array(part_bytes, dtype=np.int64)
        counts = -(-self.sizes // self.part_bytes)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def count(self) -> int:
        """How many parts there are."""
        return int(self.first[-1])

    def parts_of(self, file: int) -> range:
        """The parts of a file."""
        return range(int(self.first[file]), int(self.first[file + 1]))

    def range_of(self, part: int) -> tuple[int, int, int]:
        """The file of a part, its first byte there, and its end."""
        file = int(np.searchsorted(self.first, part, "right")) - 1
        start = (part - int(self.first[file])) * int(self.part_bytes[file])
        return file, start, min(start + int(self.part_bytes[file]), int(self.sizes[file]))

    def touched(self, file: IntArray, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
        """The parts in which ranges of files have bytes: the number of the range, and the part.

        A part is there once for each range. Empty ranges have none.
        """
        there = np.flatnonzero(stop > start)
        of, low, high = file[there], start[there], stop[there]
        first = self.first[of] + low // self.part_bytes[of]
        counts = self.first[of] + (high - 1) // self.part_bytes[of] - first + 1
        ranges = np.repeat(there, counts)
        begins = np.cumsum(counts) - counts
        parts = np.arange(len(ranges)) - np.repeat(begins - first, counts)
        return ranges, parts
