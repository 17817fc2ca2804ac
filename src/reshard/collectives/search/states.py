"""The states of a search: shardings over prime axes, and what two of them have in common.

A *cut* of one dimension is levels of prime axes, major to minor; one level is a flat cut by ceil. A
`State` is one cut a dimension over one prime mesh, and the prime axes along which ranks hold
contributions. Everything is counted in elements, with integers::

    10 over axes 0, 1 of sizes 2, 2       flat ((0, 1),)       3 3 3 1
                                          nested ((0,), (1,))  3 2 3 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.collectives.search.prime_axes import PrimeMesh
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray
from reshard.sharding import DimSpec, Level, ShardingSpec

Cut = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """A sharding over the prime axes of a prime mesh."""

    prime_mesh: int
    cuts: tuple[Cut, ...]
    pending: frozenset[int] = frozenset()

    @property
    def used(self) -> frozenset[int]:
        """The prime axes that cut a dimension."""
        return frozenset(prime for cut in self.cuts for level in cut for prime in level)


def flatten_cut(cut: Cut) -> tuple[int, ...]:
    """The prime axes of all levels, major to minor.

    >>> flatten_cut(((0, 1), (2,)))
    (0, 1, 2)
    """
    return tuple(prime for level in cut for prime in level)


class RankBoxes(NamedTuple):
    """The box of every rank: `low[d, r]:high[d, r]` along each dimension."""

    low: IntArray
    high: IntArray

    @property
    def elements(self) -> IntArray:
        """Elements in each rank's box: shape `(ranks,)`."""
        sizes: IntArray = (self.high - self.low).prod(axis=0)
        return sizes


def overlaps(one: RankBoxes, other: RankBoxes) -> IntArray:
    """How many elements two boxes of each rank share; broadcasts over leading ranks.

    Shapes `(dims, ...)` to `(...)`.
    """
    shared = np.minimum(one.high, other.high) - np.maximum(one.low, other.low)
    count: IntArray = np.maximum(shared, 0).prod(axis=0)
    return count


class GroupIntervals:
    """What groups of ranks hold of one dimension: parts that do not overlap.

    Args:
        group: the number of each rank's group.
        low, high: each rank's part. Ranks of a group may have the same one.
        length: of the dimension.

    >>> ranks = np.array([0, 0, 1, 1]), np.array([0, 3, 6, 9]), np.array([3, 6, 9, 10])
    >>> found = GroupIntervals(*ranks, length=10)
    >>> (found.count_below(np.array([10, 5, 10, 8])) - found.count_below(np.zeros(4, int))).tolist()
    [6, 5, 4, 2]
    """

    def __init__(self, group: IntArray, low: IntArray, high: IntArray, length: int) -> None:
        self._width = length + 1
        # Groups end to end on one line, each as wide as the dimension: one search serves all.
        self._begin = group * self._width
        has_any = high > low
        self._keys, first = np.unique((self._begin + low)[has_any], return_index=True)
        self._ends = (self._begin + high)[has_any][first]
        # Lengths of all parts before each, so that a count is a difference of two of these.
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._keys)])

    def count_below(self, index: IntArray) -> IntArray:
        """How much each rank's group holds below an index, of shape `(ranks,)`, and all groups
        before it: to be subtracted from one another.
        """
        if not len(self._keys):
            return np.zeros_like(index)
        key = self._begin + index
        count = np.searchsorted(self._keys, key, side="right")
        last = np.maximum(count - 1, 0)
        # The last part that begins below the index may reach over it; none of another group does.
        over = np.where(count > 0, np.maximum(self._ends[last] - key, 0), 0)
        found: IntArray = self._before[count] - over
        return found


class Space:
    """The shardings of one tensor over some prime meshes, with their boxes."""

    def __init__(self, prime_meshes: Sequence[PrimeMesh], shape: Sequence[int]) -> None:
        self.prime_meshes = tuple(prime_meshes)
        self.shape = tuple(shape)
        self.ranks = self.prime_meshes[0].ranks
        self._intervals: dict[tuple[int, int, Cut], tuple[IntArray, IntArray]] = {}
        self._group_intervals: dict[tuple[int, int, Cut, frozenset[int]], GroupIntervals] = {}
        self._part_bytes: dict[tuple[int, int, Cut], bytes] = {}
        self._boxes: dict[tuple[int, tuple[Cut, ...]], RankBoxes] = {}
        self._totals: dict[tuple[int, tuple[Cut, ...]], int] = {}

    def intervals(self, prime_mesh: int, length: int, cut: Cut) -> tuple[IntArray, IntArray]:
        """Where each rank's part of a dimension begins and ends: two of shape `(ranks,)`."""
        key = (prime_mesh, length, cut)
        if key not in self._intervals:
            here = self.prime_meshes[prime_mesh]
            low = np.zeros(len(self.ranks), dtype=np.int64)
            high = np.full(len(self.ranks), length, dtype=np.int64)
            # Each level cuts by ceil what the level above has left to the rank.
            for level in cut:
                index, parts = np.zeros(len(self.ranks), dtype=np.int64), 1
                for prime in level:
                    size = here.size(prime)
                    index = index * size + here.digit(prime)
                    parts *= size
                chunk = -(-(high - low) // parts)
                low = np.minimum(low + index * chunk, high)
                high = np.minimum(low + chunk, high)
            self._intervals[key] = low, high
        return self._intervals[key]

    def intervals_of_groups(
        self, prime_mesh: int, length: int, cut: Cut, primes: frozenset[int]
    ) -> GroupIntervals:
        """What the groups of ranks that differ along `primes` hold of a dimension."""
        used = flatten_cut(cut)
        key = (prime_mesh, length, cut, primes.intersection(used))
        if key not in self._group_intervals:
            here = self.prime_meshes[prime_mesh]
            # Ranks of one group agree along all other axes of the cut.
            group = np.zeros(len(self.ranks), dtype=np.int64)
            for prime in used:
                if prime not in primes:
                    group = group * here.size(prime) + here.digit(prime)
            self._group_intervals[key] = GroupIntervals(
                group, *self.intervals(prime_mesh, length, cut), length
            )
        return self._group_intervals[key]

    def boxes(self, state: State) -> RankBoxes:
        """The box of every rank under a state."""
        key = (state.prime_mesh, state.cuts)
        if key not in self._boxes:
            pairs = [
                self.intervals(state.prime_mesh, length, cut)
                for length, cut in zip(self.shape, state.cuts, strict=True)
            ]
            sides = [
                np.array([pair[side] for pair in pairs], dtype=np.int64).reshape(
                    len(pairs), len(self.ranks)
                )
                for side in (0, 1)
            ]
            self._boxes[key] = RankBoxes(*sides)
        return self._boxes[key]

    def total(self, state: State) -> int:
        """Elements that all ranks hold together."""
        key = (state.prime_mesh, state.cuts)
        if key not in self._totals:
            self._totals[key] = int(self.boxes(state).elements.sum())
        return self._totals[key]

    def largest(self, state: State) -> int:
        """Elements of the largest shard."""
        return int(self.boxes(state).elements.max())

    def shared(self, one: State, other: State) -> int:
        """Elements that ranks hold under both, summed over ranks."""
        return int(overlaps(self.boxes(one), self.boxes(other)).sum())

    def arriving(self, before: State, after: State) -> int:
        """Elements that ranks hold after and not before, summed over ranks."""
        return self.total(after) - self.shared(before, after)

    def distinct_parts(self, state: State) -> tuple[bytes, ...]:
        """For each dimension, a key of its parts: equal where two cuts give equal parts."""
        return tuple(
            self._find_part_bytes(state.prime_mesh, length, cut)
            for length, cut in zip(self.shape, state.cuts, strict=True)
        )

    def _find_part_bytes(self, prime_mesh: int, length: int, cut: Cut) -> bytes:
        key = (prime_mesh, length, cut)
        if key not in self._part_bytes:
            low, high = self.intervals(prime_mesh, length, cut)
            # Sorted, since which rank has which part makes no difference.
            order = np.lexsort((high, low))
            self._part_bytes[key] = low[order].tobytes() + high[order].tobytes()
        return self._part_bytes[key]

    def parts(self, state: State, dim: int) -> int:
        """Into how many parts a dimension is cut."""
        here = self.prime_meshes[state.prime_mesh]
        count = 1
        for prime in flatten_cut(state.cuts[dim]):
            count *= here.size(prime)
        return count

    def spec(
        self, state: State, reduction: str | None, mesh: DeviceMesh | None = None
    ) -> ShardingSpec:
        """A state as a sharding over the mesh of its prime mesh, or over another of its devices."""
        prime_mesh = self.prime_meshes[state.prime_mesh]
        mesh = prime_mesh.mesh if mesh is None else mesh
        dims = [
            DimSpec([Level(prime_mesh.axes(level, mesh)) for level in cut]) for cut in state.cuts
        ]
        partial = prime_mesh.axes(sorted(state.pending), mesh)
        return ShardingSpec(mesh, dims, (), partial, reduction or "sum")

    def state(self, prime_mesh: int, spec: ShardingSpec) -> State:
        """A sharding as a state over one of the prime meshes."""
        here = self.prime_meshes[prime_mesh]
        cuts = []
        for dim in spec.dim_specs:
            levels = [here.primes_of(level.axes, spec.mesh) for level in dim.levels]
            cuts.append(tuple(level for level in levels if level))
        return State(
            prime_mesh, tuple(cuts), frozenset(here.primes_of(spec.partial_axes, spec.mesh))
        )
