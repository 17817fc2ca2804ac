"""The states of a search: shardings over axes of prime size, and the problem between two of them.

A search moves *prime axes*, major to minor, so that it can move any part of any axis. Two meshes
over the same devices in the same order are split at the boundaries of both, and become a single
*prime mesh*::

    x=6           |           6           |       boundaries 1, 6
    y=2, z=3      |     2     |     3     |       boundaries 1, 2, 6
    prime axes    |  0: x:(1)2 = y  |  1: x:(2)3 = z  |

1. A boundary is the product of the axis sizes before it. Sub-axes in use add their boundaries.
2. If the boundaries of both meshes form a chain of divisors, there is a single prime mesh.
   Otherwise, or with devices in another order, each mesh has its own.
3. Between two boundaries a size is split into its prime factors, smallest first.

A *cut* of a dimension is a tuple of levels of prime axes, major to minor; a single level is a flat
cut by ceil. A `State` is a cut for each dimension over a prime mesh, and the prime axes along which
ranks hold contributions. Everything is counted in elements, with integers::

    10 over axes 0, 1 of sizes 2, 2       flat ((0, 1),)       3 3 3 1
                                          nested ((0,), (1,))  3 2 3 2

A `Problem` is two states, a limit on the shards between them, and a lower bound (`distance`): the
minimum number of elements that must still arrive.

1. If nothing is left to reduce, these are the elements that the target's boxes have in addition.
2. If `q` contributions are left, no rank has the reduced value of any element. Each element takes
   `q - 1` arrivals until the first rank has it, and another for each further rank of the target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard._records import Record
from reshard.cut_rules import Ceil
from reshard.errors import PlanError
from reshard.mesh import Axis, DeviceMesh
from reshard.runs import IntArray, find_distinct
from reshard.sharding import DimSpec, Level, ShardingSpec, join_axes


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, smallest first.

    >>> prime_factors(12), prime_factors(1)
    ([2, 2, 3], [])
    """
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors


class PrimeMesh:
    """A mesh as a sequence of axes of prime size.

    Args:
        mesh: the devices; ranks are numbered here by their index in `ranks`.
        boundaries: ascending, from 1 to the mesh's size, each a multiple of the preceding boundary.
        first: the number of the first prime axis, so that several prime meshes have distinct ones.
        has_whole_axes: whether each interval between boundaries is a single axis of any size.

    >>> prime_mesh = PrimeMesh(DeviceMesh.of(x=4, y=3), [1, 4, 12])
    >>> prime_mesh.sizes, [str(prime_mesh.axis(prime)) for prime in prime_mesh.primes]
    ((2, 2, 3), ['x:(1)2', 'x:(2)2', 'y:(1)3'])
    >>> prime_mesh.primes_of([Axis("y"), Axis("x")])
    (2, 0, 1)
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        boundaries: Sequence[int],
        first: int = 0,
        *,
        has_whole_axes: bool = False,
    ) -> None:
        self.mesh = mesh
        self.boundaries = tuple(boundaries)
        self.first = first
        begins: list[int] = []
        sizes: list[int] = []
        units: list[tuple[int, ...]] = []
        for low, high in itertools.pairwise(boundaries):
            begin = first + len(sizes)
            whole = [high // low] if high > low else []
            for size in whole if has_whole_axes else prime_factors(high // low):
                begins.append(low)
                sizes.append(size)
                low *= size
            units.append(tuple(range(begin, first + len(sizes))))
        # The prime axes between two boundaries: those of an axis, or of a part of an axis in use.
        self.units = tuple(unit for unit in units if unit)
        self.begins = tuple(begins)
        self.sizes = tuple(sizes)
        self.primes = tuple(range(first, first + len(sizes)))
        self.ranks = tuple(sorted(mesh.devices))
        # The index of each rank in the mesh, in the order of the ranks.
        index = np.argsort(np.array(mesh.devices, dtype=np.int64))
        # The coordinate of each rank along each prime axis, shape `(primes, ranks)`.
        digits = [
            index // (mesh.size // (low * size)) % size
            for low, size in zip(begins, sizes, strict=True)
        ]
        self.digits: IntArray = np.array(digits, dtype=np.int64).reshape(len(sizes), mesh.size)

    def size(self, prime: int) -> int:
        """Return the size of a prime axis."""
        return self.sizes[prime - self.first]

    def digit(self, prime: int) -> IntArray:
        """Return the coordinate of each rank along a prime axis: shape `(ranks,)`."""
        digit: IntArray = self.digits[prime - self.first]
        return digit

    def axis(self, prime: int, mesh: DeviceMesh | None = None) -> Axis:
        """Return a prime axis as a sub-axis of this mesh, or of another with the same devices."""
        mesh = self.mesh if mesh is None else mesh
        begin, size = self.begins[prime - self.first], self.sizes[prime - self.first]
        starts = _find_starts(mesh)
        # It is a part of the last axis that starts at or before it.
        name = next(n for n in reversed(mesh.axis_names) if starts[n] <= begin)
        return Axis(name, begin // starts[name], size)

    def axes(self, primes: Iterable[int], mesh: DeviceMesh | None = None) -> tuple[Axis, ...]:
        """Return prime axes as axes; adjacent ones are joined, whole axes have their name only."""
        mesh = self.mesh if mesh is None else mesh
        joined = join_axes(self.axis(prime, mesh) for prime in primes)
        whole = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        return tuple(Axis(axis.name) if axis.size == whole[axis.name] else axis for axis in joined)

    def primes_of(self, axes: Iterable[Axis], mesh: DeviceMesh | None = None) -> tuple[int, ...]:
        """Return the prime axes in axes of a mesh, major to minor."""
        mesh = self.mesh if mesh is None else mesh
        primes: list[int] = []
        for axis in axes:
            low = _find_starts(mesh)[axis.name] * axis.pre
            high = low * mesh.axis_size(axis)
            primes += [
                prime
                for prime, begin in zip(self.primes, self.begins, strict=True)
                if low <= begin < high
            ]
        return tuple(primes)

    def units_of(self, primes: Sequence[int]) -> list[tuple[int, ...]]:
        """Group prime axes by the axis, or the part of an axis in use, that contains them."""
        unit_of = {prime: number for number, unit in enumerate(self.units) for prime in unit}
        groups: dict[int, list[int]] = {}
        for prime in primes:
            groups.setdefault(unit_of[prime], []).append(prime)
        return [tuple(sorted(unit)) for unit in groups.values()]


def _find_starts(mesh: DeviceMesh) -> dict[str, int]:
    """Return the product of the sizes before each axis."""
    starts, start = {}, 1
    for name, full in zip(mesh.axis_names, mesh.shape, strict=True):
        starts[name] = start
        start *= full
    return starts


def find_prime_meshes(source: ShardingSpec, target: ShardingSpec) -> tuple[PrimeMesh, ...]:
    """Return the prime meshes of two shardings on the same devices: one if axes agree, else two.

    >>> from reshard.sharding import spec
    >>> one = spec(DeviceMesh.of(x=6), "x")
    >>> two = spec(DeviceMesh.of(y=2, z=3), "y z")
    >>> other = spec(DeviceMesh.of(x=3, y=2), "x")
    >>> len(find_prime_meshes(one, two)), len(find_prime_meshes(other, two))
    (1, 2)
    """
    sides = []
    for spec in (source, target):
        starts, ends_of = _find_starts(spec.mesh), spec.mesh.axis_boundaries(spec.used_axes)
        sides.append({1, *(starts[name] * end for name, ends in ends_of.items() for end in ends)})
    if source.mesh.devices == target.mesh.devices:
        together = sorted(sides[0] | sides[1])
        # A chain of divisors is a grid that refines both meshes.
        if all(high % low == 0 for low, high in itertools.pairwise(together)):
            return (PrimeMesh(source.mesh, together),)
    first = PrimeMesh(source.mesh, sorted(sides[0]))
    return first, PrimeMesh(target.mesh, sorted(sides[1]), len(first.primes))


Cut = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """A sharding over the prime axes of a prime mesh."""

    prime_mesh: int
    cuts: tuple[Cut, ...]
    partial: frozenset[int] = frozenset()

    @property
    def used(self) -> frozenset[int]:
        """The prime axes that cut a dimension."""
        return frozenset(prime for cut in self.cuts for level in cut for prime in level)


def flatten_cut(cut: Cut) -> tuple[int, ...]:
    """Return the prime axes of all levels, major to minor.

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
        """The elements in each rank's box: shape `(ranks,)`."""
        sizes: IntArray = (self.high - self.low).prod(axis=0)
        return sizes


def count_overlaps(left: RankBoxes, right: RankBoxes) -> IntArray:
    """Count the elements in the intersection of two boxes of each rank.

    Shapes `(dims, ...)` are broadcast and reduced to `(...)`.
    """
    shared = np.minimum(left.high, right.high) - np.maximum(left.low, right.low)
    count: IntArray = np.maximum(shared, 0).prod(axis=0)
    return count


class GroupIntervals:
    """The parts of a dimension that groups of ranks hold, which do not overlap.

    Args:
        group: the number of each rank's group.
        low, high: each rank's part. Ranks of a group may have the same part.
        length: of the dimension.

    >>> ranks = np.array([0, 0, 1, 1]), np.array([0, 3, 6, 9]), np.array([3, 6, 9, 10])
    >>> held = GroupIntervals(*ranks, length=10)
    >>> (held.count_below(np.array([10, 5, 10, 8])) - held.count_below(np.zeros(4, int))).tolist()
    [6, 5, 4, 2]
    """

    def __init__(self, group: IntArray, low: IntArray, high: IntArray, length: int) -> None:
        self._width = length + 1
        # Groups are concatenated on a line, so that a single search serves all.
        self._begin = group * self._width
        has_any = high > low
        self._keys, first, _ = find_distinct((self._begin + low)[has_any])
        self._ends = (self._begin + high)[has_any][first]
        # Prefix sums of the lengths, so that a count is a difference of two of them.
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._keys)])

    def count_below(self, index: IntArray) -> IntArray:
        """Count the indices below `index` that each rank's group and all earlier groups hold.

        Shape `(ranks,)`. Only differences of two counts are meaningful.
        """
        if not len(self._keys):
            return np.zeros_like(index)
        key = self._begin + index
        count = np.searchsorted(self._keys, key, side="right")
        last = np.maximum(count - 1, 0)
        # Only the last part that begins below the index may extend beyond it.
        excess = np.where(count > 0, np.maximum(self._ends[last] - key, 0), 0)
        below: IntArray = self._before[count] - excess
        return below


class Space:
    """The shardings of a tensor over some prime meshes, with their boxes."""

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
        """Return the begin and the end of each rank's part of a dimension: shape `(ranks,)`."""
        key = (prime_mesh, length, cut)
        if key not in self._intervals:
            here = self.prime_meshes[prime_mesh]
            low = np.zeros(len(self.ranks), dtype=np.int64)
            high = np.full(len(self.ranks), length, dtype=np.int64)
            # Each level divides the rank's part of the level above by ceil.
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
        """Return the parts of a dimension that groups of ranks along `primes` hold."""
        used = flatten_cut(cut)
        key = (prime_mesh, length, cut, primes.intersection(used))
        if key not in self._group_intervals:
            here = self.prime_meshes[prime_mesh]
            # The ranks of a group agree along all other axes of the cut.
            group = np.zeros(len(self.ranks), dtype=np.int64)
            for prime in used:
                if prime not in primes:
                    group = group * here.size(prime) + here.digit(prime)
            self._group_intervals[key] = GroupIntervals(
                group, *self.intervals(prime_mesh, length, cut), length
            )
        return self._group_intervals[key]

    def boxes(self, state: State) -> RankBoxes:
        """Return the box of every rank under a state."""
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
        """Count the elements that all ranks hold together."""
        key = (state.prime_mesh, state.cuts)
        if key not in self._totals:
            self._totals[key] = int(self.boxes(state).elements.sum())
        return self._totals[key]

    def largest(self, state: State) -> int:
        """Count the elements of the largest shard."""
        return int(self.boxes(state).elements.max())

    def shared(self, left: State, right: State) -> int:
        """Count the elements that ranks hold under both states, summed over ranks."""
        return int(count_overlaps(self.boxes(left), self.boxes(right)).sum())

    def arriving(self, before: State, after: State) -> int:
        """Count the elements that ranks hold after and not before, summed over ranks."""
        return self.total(after) - self.shared(before, after)

    def distinct_parts(self, state: State) -> tuple[bytes, ...]:
        """Return a key of the parts of each dimension, equal for cuts with equal parts."""
        return tuple(
            self._find_part_bytes(state.prime_mesh, length, cut)
            for length, cut in zip(self.shape, state.cuts, strict=True)
        )

    def _find_part_bytes(self, prime_mesh: int, length: int, cut: Cut) -> bytes:
        key = (prime_mesh, length, cut)
        if key not in self._part_bytes:
            low, high = self.intervals(prime_mesh, length, cut)
            # Sorted, because the assignment of parts to ranks does not matter.
            order = np.lexsort((high, low))
            self._part_bytes[key] = low[order].tobytes() + high[order].tobytes()
        return self._part_bytes[key]

    def parts(self, state: State, dim: int) -> int:
        """Count the parts of a dimension."""
        here = self.prime_meshes[state.prime_mesh]
        count = 1
        for prime in flatten_cut(state.cuts[dim]):
            count *= here.size(prime)
        return count

    def spec(
        self, state: State, reduction: str | None, mesh: DeviceMesh | None = None
    ) -> ShardingSpec:
        """Return a state as a sharding over the mesh of its prime mesh, or over another mesh."""
        prime_mesh = self.prime_meshes[state.prime_mesh]
        mesh = prime_mesh.mesh if mesh is None else mesh
        dims = [
            DimSpec([Level(prime_mesh.axes(level, mesh)) for level in cut]) for cut in state.cuts
        ]
        partial = prime_mesh.axes(sorted(state.partial), mesh)
        return ShardingSpec(mesh, dims, (), partial, reduction)

    def state(self, prime_mesh: int, spec: ShardingSpec) -> State:
        """Return a sharding as a state over a prime mesh."""
        here = self.prime_meshes[prime_mesh]
        cuts = []
        for dim in spec.dim_specs:
            levels = [here.primes_of(level.axes, spec.mesh) for level in dim.levels]
            cuts.append(tuple(level for level in levels if level))
        return State(
            prime_mesh, tuple(cuts), frozenset(here.primes_of(spec.partial_axes, spec.mesh))
        )


JOINT = "joint"
CLASSICAL = "classical"
# The sets of steps that a program may have.
STEPS = {
    JOINT: "every collective; an exchange only where no other program exists",
    CLASSICAL: "no joint all-to-all and no exchange",
    "all": "an exchange too, wherever it moves less",
    "mlir": "the basis of MLIR's notes, whatever the memory",
}
# Sums over ranks must stay below this.
MAX_COUNT = 1 << 62


class Problem(Record):
    """Two states of a tensor, and the limits of a program between them."""

    space: Space
    source: State
    target: State
    live_shard: int
    steps: str = JOINT

    @cached_property
    def target_total(self) -> int:
        """The elements that all ranks hold in the end."""
        return self.space.total(self.target)

    def contributions_left(self, state: State) -> int:
        """Count the contributions that remain to be combined into each of the target's."""
        prime_mesh = self.space.prime_meshes[state.prime_mesh]
        return math.prod(prime_mesh.size(prime) for prime in state.partial - self.target.partial)

    def distance(self, state: State) -> int:
        """Return the minimum number of elements that must still arrive, summed over ranks."""
        left = self.contributions_left(state)
        if left == 1:
            return self.target_total - self.space.shared(state, self.target)
        prime_mesh = self.space.prime_meshes[self.target.prime_mesh]
        # Combining `left` contributions of an element takes `left - 1` arrivals. A copy of the
        # result is in place where it was combined.
        copies = math.prod(prime_mesh.size(prime) for prime in self.target.partial)
        return self.target_total + (left - 2) * math.prod(self.space.shape) * copies

    def is_reached(self, state: State) -> bool:
        """Return whether every rank holds exactly its target shard."""
        return (
            state.partial == self.target.partial
            and self.space.total(state) == self.target_total
            and self.space.shared(state, self.target) == self.target_total
        )

    def fits(self, state: State) -> bool:
        """Return whether the largest shard of a state is within the limit."""
        return self.space.largest(state) <= self.live_shard

    @cached_property
    def nested_cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """The cuts of the source and the target with several levels, for each dimension."""
        pairs = zip(self.source.cuts, self.target.cuts, strict=True)
        return tuple(tuple(cut for cut in pair if len(cut) > 1) for pair in pairs)

    def extensions(self, dim: int, cut: Cut, prime: int) -> tuple[Cut, ...]:
        """Return a cut with another minor axis: in its last level, or in a level of its own.

        New levels are tried only if the source or the target has several levels.
        """
        cuts: list[Cut] = [(*cut[:-1], (*cut[-1], prime))] if cut else [((prime,),)]
        if cut and self.nested_cuts[dim]:
            cuts.append((*cut, (prime,)))
        return tuple(cuts)


def drop_minor_axis(cut: Cut) -> Cut:
    """Return a cut without its minor prime axis."""
    last = cut[-1][:-1]
    return (*cut[:-1], last) if last else cut[:-1]


def make_problem(
    source: ShardingSpec,
    target: ShardingSpec,
    shape: Sequence[int],
    live_shard: int | None = None,
    steps: str = JOINT,
) -> Problem | None:
    """Return the problem of two shardings, or None if only a direct exchange is possible.

    That is the case for shardings over different devices, for dimensions sharded by a rule other
    than ceil, for a sharding on some coordinates only, for a target that is partial where the
    source is not, and for counts that exceed 64 bits.

    Raises:
        PlanError: a limit that the source or the target itself exceeds.
    """
    layouts = [spec.layout(shape) for spec in (source, target)]
    needed = max(int(layout.cell_shape.prod(axis=1).max()) for layout in layouts)
    limit = needed if live_shard is None else live_shard
    if limit < needed:
        raise PlanError(
            f"live_shard={limit}: the shards of source and target have up to {needed} elements "
            "themselves; allow at least as many"
        )
    rules = [lv.rule for spec in (source, target) for dim in spec.dim_specs for lv in dim.levels]
    if (
        sorted(source.mesh.devices) != sorted(target.mesh.devices)
        or any(rule != Ceil() for rule in rules)
        or math.prod(shape) * source.mesh.size**2 >= MAX_COUNT
        or source.only
        or target.only
        or (target.partial_axes and source.reduction != target.reduction)
    ):
        return None
    prime_meshes = find_prime_meshes(source, target)
    space = Space(prime_meshes, shape)
    first, last = space.state(0, source), space.state(len(prime_meshes) - 1, target)
    # A replicated state is the same over the axes of either mesh.
    if not last.used and not last.partial:
        last = last._replace(prime_mesh=0)
    elif not first.used and not first.partial:
        first = first._replace(prime_mesh=last.prime_mesh)
    if not last.partial <= first.partial:
        return None
    return Problem(space, first, last, limit, steps)
