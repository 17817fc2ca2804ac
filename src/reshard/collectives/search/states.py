"""What does a search know of a sharding? Where its boxes are, and what two have in common.

A *cut* of one dimension is levels of atoms, major to minor; one level is a flat cut by ceil. A
`State` is one cut a dimension over one frame, and the atoms along which ranks hold
contributions. Everything is counted in elements, with integers::

    10 over atoms 0, 1 of sizes 2, 2      flat ((0, 1),)       3 3 3 1
                                          nested ((0,), (1,))  3 2 3 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.collectives.search.prime_axes import Frame
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray
from reshard.sharding import DimSpec, Level, ShardingSpec

Cut = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """A sharding over the atoms of a frame."""

    frame: int
    cuts: tuple[Cut, ...]
    pending: frozenset[int] = frozenset()

    @property
    def used(self) -> frozenset[int]:
        """The atoms that cut a dimension."""
        return frozenset(atom for cut in self.cuts for level in cut for atom in level)


def flat_atoms(cut: Cut) -> tuple[int, ...]:
    """The atoms of all levels, major to minor.

    >>> flat_atoms(((0, 1), (2,)))
    (0, 1, 2)
    """
    return tuple(atom for level in cut for atom in level)


class Boxes(NamedTuple):
    """The box of every rank: `low[d, r]:high[d, r]` along each dimension."""

    low: IntArray
    high: IntArray

    @property
    def elements(self) -> IntArray:
        """Elements in each rank's box: shape `(ranks,)`."""
        sizes: IntArray = (self.high - self.low).prod(axis=0)
        return sizes


def overlaps(one: Boxes, other: Boxes) -> IntArray:
    """How many elements two boxes of each rank share; broadcasts over leading ranks.

    Shapes `(dims, ...)` to `(...)`.
    """
    shared = np.minimum(one.high, other.high) - np.maximum(one.low, other.low)
    count: IntArray = np.maximum(shared, 0).prod(axis=0)
    return count


class Held:
    """What groups of ranks hold of one dimension: parts that do not overlap.

    Args:
        group: the number of each rank's group.
        low, high: each rank's part. Ranks of a group may have the same one.
        length: of the dimension.

    >>> ranks = np.array([0, 0, 1, 1]), np.array([0, 3, 6, 9]), np.array([3, 6, 9, 10])
    >>> held = Held(*ranks, length=10)
    >>> (held.below(np.array([10, 5, 10, 8])) - held.below(np.zeros(4, dtype=int))).tolist()
    [6, 5, 4, 2]
    """

    def __init__(self, group: IntArray, low: IntArray, high: IntArray, length: int) -> None:
        self._width = length + 1
        self._begin = group * self._width
        has_any = high > low
        self._keys, first = np.unique((self._begin + low)[has_any], return_index=True)
        self._ends = (self._begin + high)[has_any][first]
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._keys)])

    def below(self, index: IntArray) -> IntArray:
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
    """The shardings of one tensor over some frames, with their boxes."""

    def __init__(self, frames: Sequence[Frame], shape: Sequence[int]) -> None:
        self.frames = tuple(frames)
        self.shape = tuple(shape)
        self.ranks = self.frames[0].ranks
        self._intervals: dict[tuple[int, int, Cut], tuple[IntArray, IntArray]] = {}
        self._held: dict[tuple[int, int, Cut, frozenset[int]], Held] = {}
        self._sorted: dict[tuple[int, int, Cut], bytes] = {}
        self._boxes: dict[tuple[int, tuple[Cut, ...]], Boxes] = {}
        self._totals: dict[tuple[int, tuple[Cut, ...]], int] = {}

    def intervals(self, frame: int, length: int, cut: Cut) -> tuple[IntArray, IntArray]:
        """Where each rank's part of a dimension begins and ends: two of shape `(ranks,)`."""
        key = (frame, length, cut)
        if key not in self._intervals:
            here = self.frames[frame]
            low = np.zeros(len(self.ranks), dtype=np.int64)
            high = np.full(len(self.ranks), length, dtype=np.int64)
            for level in cut:
                index, parts = np.zeros(len(self.ranks), dtype=np.int64), 1
                for atom in level:
                    size = here.size(atom)
                    index = index * size + here.digit(atom)
                    parts *= size
                chunk = -(-(high - low) // parts)
                low = np.minimum(low + index * chunk, high)
                high = np.minimum(low + chunk, high)
            self._intervals[key] = low, high
        return self._intervals[key]

    def held(self, frame: int, length: int, cut: Cut, atoms: frozenset[int]) -> Held:
        """What the groups of ranks that differ along `atoms` hold of a dimension."""
        used = flat_atoms(cut)
        key = (frame, length, cut, atoms.intersection(used))
        if key not in self._held:
            here = self.frames[frame]
            group = np.zeros(len(self.ranks), dtype=np.int64)
            for atom in used:
                if atom not in atoms:
                    group = group * here.size(atom) + here.digit(atom)
            self._held[key] = Held(group, *self.intervals(frame, length, cut), length)
        return self._held[key]

    def boxes(self, state: State) -> Boxes:
        """The box of every rank under a state."""
        key = (state.frame, state.cuts)
        if key not in self._boxes:
            pairs = [
                self.intervals(state.frame, length, cut)
                for length, cut in zip(self.shape, state.cuts, strict=True)
            ]
            sides = [
                np.array([pair[side] for pair in pairs], dtype=np.int64).reshape(
                    len(pairs), len(self.ranks)
                )
                for side in (0, 1)
            ]
            self._boxes[key] = Boxes(*sides)
        return self._boxes[key]

    def total(self, state: State) -> int:
        """Elements that all ranks hold together."""
        key = (state.frame, state.cuts)
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

    def pieces(self, state: State) -> tuple[bytes, ...]:
        """For each dimension, what tells apart cuts into other parts: equal for equal parts."""
        return tuple(
            self._pieces(state.frame, length, cut)
            for length, cut in zip(self.shape, state.cuts, strict=True)
        )

    def _pieces(self, frame: int, length: int, cut: Cut) -> bytes:
        key = (frame, length, cut)
        if key not in self._sorted:
            low, high = self.intervals(frame, length, cut)
            order = np.lexsort((high, low))
            self._sorted[key] = low[order].tobytes() + high[order].tobytes()
        return self._sorted[key]

    def parts(self, state: State, dim: int) -> int:
        """Into how many parts a dimension is cut."""
        here = self.frames[state.frame]
        count = 1
        for atom in flat_atoms(state.cuts[dim]):
            count *= here.size(atom)
        return count

    def spec(
        self, state: State, reduction: str | None, mesh: DeviceMesh | None = None
    ) -> ShardingSpec:
        """A state as a sharding over its frame's mesh, or over another that the frame is for."""
        frame = self.frames[state.frame]
        mesh = frame.mesh if mesh is None else mesh
        dims = [DimSpec([Level(frame.axes(level, mesh)) for level in cut]) for cut in state.cuts]
        partial = frame.axes(sorted(state.pending), mesh)
        return ShardingSpec(mesh, dims, (), partial, reduction or "sum")

    def state(self, frame: int, spec: ShardingSpec) -> State:
        """A sharding as a state over one of the frames."""
        here = self.frames[frame]
        cuts = []
        for dim in spec.dim_specs:
            levels = [here.atoms_of(level.axes, spec.mesh) for level in dim.levels]
            cuts.append(tuple(level for level in levels if level))
        return State(frame, tuple(cuts), frozenset(here.atoms_of(spec.partial_axes, spec.mesh)))
