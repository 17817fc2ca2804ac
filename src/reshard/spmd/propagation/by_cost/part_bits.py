"""Part bits: sets of parts of axes as bits of integers, for arrays of such sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from reshard.runs import IntArray
from reshard.spmd.propagation.axis_parts import Part, Parts, Sharding, size_of

BitArray = np.ndarray[tuple[int, ...], np.dtype[Any]]
"""Sets of parts of axes, see `PartBits`."""


class PartBits:
    """Sets of parts of axes as the bits of integers, for arrays of such sets.

    Parts are told apart by their axis and range alone, not by the level that they belong to.

    >>> whole = Sharding((((0, 1, 2, 0),), ((1, 1, 4, 0),)), (True, True))
    >>> bits = PartBits([whole])
    >>> both = bits.of(((0, 1, 2, 0), (1, 1, 4, 0)))
    >>> bits.parts(both), bits.sizes(np.array([0, both])).tolist()
    (((0, 1, 2, 0), (1, 1, 4, 0)), [1, 8])
    """

    def __init__(self, shardings: Iterable[Sharding]) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._parts: list[Part] = []
        for sharding in shardings:
            for part in itertools.chain(*sharding.dims, sharding.partial):
                if self._numbers.setdefault(part[:3], len(self._parts)) == len(self._parts):
                    self._parts.append(part)
        # Python's integers, which are slower, where there are more parts than bits.
        self.dtype: type = np.int64 if len(self._parts) < 63 else object

    def of(self, parts: Parts) -> int:
        """The bits of some parts."""
        return sum(1 << self._numbers[part[:3]] for part in parts)

    def of_partial(self, shardings: Iterable[Sharding]) -> BitArray:
        """The bits of the axes along which each sharding is partial."""
        return np.array([self.of(one.partial) for one in shardings], dtype=self.dtype)

    def parts(self, mask: int) -> Parts:
        """The parts whose bits are set, in the order of the mesh."""
        return tuple(sorted(p for n, p in enumerate(self._parts) if mask >> n & 1))

    def sizes(self, masks: BitArray) -> IntArray:
        """Into how many pieces each set of parts cuts."""
        different, place = np.unique(masks, return_inverse=True)
        found = [size_of(self.parts(mask)) for mask in different.tolist()]
        return np.array(found, dtype=np.int64)[place].reshape(masks.shape)
