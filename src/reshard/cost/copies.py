"""The copies that ranks make in their own memory, in addition to what they send.

A piece that is contiguous in memory is sent or received in place. Any other piece is packed before
it is sent, or unpacked after it has arrived. Elements that stay on a rank are copied from source
to target. A copy of `n` bytes in `r` contiguous runs takes `r * latency + n / bandwidth`. For
contributions that are reduced into the target, the time of the bytes is multiplied by a factor.
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


_COLUMNS = ("rank", "size_bytes", "runs", "combined_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class LocalCopies:
    """Copies as columns of shape `(copies,)`.

    Args:
        rank: who copies.
        size_bytes: of each.
        runs: in how many they lie.
        combined_bytes: how many of the bytes are combined with what is there; none when None.

    Raises UsageError for columns of different lengths, or a number below 0.

    >>> LocalCopies([1, 1], [3000, 1000], [3, 1]).by_rank(2)[0].tolist()
    [0, 4000]
    """

    rank: IntArray
    size_bytes: IntArray
    runs: IntArray
    combined_bytes: IntArray | None = None

    def __post_init__(self) -> None:
        if self.combined_bytes is None:
            object.__setattr__(self, "combined_bytes", np.zeros(len(self.rank), dtype=np.int64))
        for name in _COLUMNS:
            column = np.array(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, column)
        columns = [getattr(self, name) for name in _COLUMNS]
        if any(column.ndim != 1 or len(column) != len(self.rank) for column in columns):
            raise UsageError(
                f"copies of shapes {[column.shape for column in columns]}; as many entries "
                "in each were expected"
            )
        if len(self.rank) and min(int(column.min()) for column in columns) < 0:
            raise UsageError("copies with a number below 0; ranks, bytes and runs are 0 or more")

    @classmethod
    def none(cls) -> LocalCopies:
        """No copies."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing)

    @classmethod
    def joined(cls, parts: Iterable[LocalCopies]) -> LocalCopies:
        """All of several."""
        every = [cls.none(), *parts]
        return cls(*(np.concatenate([getattr(part, name) for part in every]) for name in _COLUMNS))

    def by_rank(self, ranks: int) -> tuple[IntArray, IntArray, IntArray]:
        """Bytes, runs and combined bytes of each rank, of shapes `(ranks,)`."""
        size_bytes, runs, combined_bytes = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        for name, total in zip(_COLUMNS[1:], (size_bytes, runs, combined_bytes), strict=True):
            np.add.at(total, self.rank, getattr(self, name))
        return size_bytes, runs, combined_bytes


def copy_s(copies: LocalCopies, ranks: int, link: Link | None, combining: float) -> FloatArray:
    """Seconds of each rank's copies, of shape `(ranks,)`; 0 where no link says how fast they are.

    `combining` is how many times as long it takes to combine bytes as to copy them.
    """
    if link is None:
        return np.zeros(ranks)
    size_bytes, runs, combined_bytes = copies.by_rank(ranks)
    weighted = (size_bytes - combined_bytes) + combined_bytes * combining
    seconds_s: FloatArray = runs * link.latency_s + weighted / link.bandwidth_bytes_per_s
    return seconds_s
