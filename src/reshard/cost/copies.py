"""What do ranks copy in their own memory, beside what they send?

A piece that lies in one run of memory is sent from there, and received there. Any other is packed
before it is sent, or unpacked when it has arrived; what stays on a rank is copied from its source
to its target. A copy of `n` bytes in `r` runs takes `r * latency + n / bandwidth`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UsageError
from reshard.runs import IntArray
from reshard.topology import Link

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies as columns of shape `(copies,)`: the rank, its bytes, and in how many runs they lie.

    Raises UsageError for columns of different lengths, or a number below 0.

    >>> Copies([1, 1], [3000, 1000], [3, 1]).by_rank(2)[0].tolist()
    [0, 4000]
    """

    rank: IntArray
    size_bytes: IntArray
    runs: IntArray

    def __post_init__(self) -> None:
        for name in ("rank", "size_bytes", "runs"):
            column = np.array(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, column)
        columns = (self.rank, self.size_bytes, self.runs)
        if any(column.ndim != 1 or len(column) != len(self.rank) for column in columns):
            raise UsageError(
                f"copies of shapes {[column.shape for column in columns]}; one rank, one size and "
                "one number of runs for each were expected"
            )
        if len(self.rank) and min(int(column.min()) for column in columns) < 0:
            raise UsageError("copies with a number below 0; ranks, bytes and runs are 0 or more")

    @classmethod
    def none(cls) -> Copies:
        """No copies."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing)

    @classmethod
    def joined(cls, parts: Iterable[Copies]) -> Copies:
        """All of several."""
        every = [cls.none(), *parts]
        return cls(
            np.concatenate([part.rank for part in every]),
            np.concatenate([part.size_bytes for part in every]),
            np.concatenate([part.runs for part in every]),
        )

    def by_rank(self, ranks: int) -> tuple[IntArray, IntArray]:
        """Bytes and runs of each rank, of shapes `(ranks,)`."""
        size_bytes = np.zeros(ranks, dtype=np.int64)
        runs = np.zeros_like(size_bytes)
        np.add.at(size_bytes, self.rank, self.size_bytes)
        np.add.at(runs, self.rank, self.runs)
        return size_bytes, runs


def copy_s(size_bytes: IntArray, runs: IntArray, link: Link | None) -> FloatArray:
    """Seconds of copies, of the shape of `size_bytes`; 0 where no link says how fast they are."""
    if link is None:
        return np.zeros(len(size_bytes))
    seconds_s: FloatArray = runs * link.latency_s + size_bytes / link.bandwidth_bytes_per_s
    return seconds_s
