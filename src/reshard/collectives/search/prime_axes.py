"""The axes of a mesh cut into sub-axes of prime size, so that a search can move any part of any.

A search moves *prime axes*, major to minor. Two meshes over the same devices in the same order
are cut at the boundaries of both, and become one *prime mesh*::

    x=6           |           6           |       boundaries 1, 6
    y=2, z=3      |     2     |     3     |       boundaries 1, 2, 6
    prime axes    |  0: x:(1)2 = y  |  1: x:(2)3 = z  |

1. A boundary is the product of the axis sizes before it. Sub-axes in use add theirs.
2. Where the boundaries of both meshes divide one another in a row, there is one prime mesh. Where
   they do not, or where the devices are in another order, each mesh has its own.
3. Between two boundaries a size is split into its prime factors, smallest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from reshard.mesh import Axis, DeviceMesh
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec


def prime_factors(number: int) -> list[int]:
    """The prime factors, smallest first.

    >>> prime_factors(12), prime_factors(1)
    ([2, 2, 3], [])
    """
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found


class PrimeMesh:
    """A mesh as a row of prime axes of prime size.

    Args:
        mesh: the devices; ranks are numbered here by their place in `ranks`.
        boundaries: rising, from 1 to the mesh's size, each a multiple of the one before.
        first: the number of the first prime axis, so that those of several prime meshes differ.
        has_whole_axes: whether what lies between two boundaries stays one axis, of whatever size.

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
        # The prime axes between two boundaries: an axis, or the part of one that is in use.
        self.units = tuple(unit for unit in units if unit)
        self.begins = tuple(begins)
        self.sizes = tuple(sizes)
        self.primes = tuple(range(first, first + len(sizes)))
        self.ranks = tuple(sorted(mesh.devices))
        # The place of each rank in the mesh, in the order of the ranks.
        place = np.argsort(np.array(mesh.devices, dtype=np.int64))
        # Digit of each rank along each prime axis, shape `(primes, ranks)`.
        digits = [
            place // (mesh.size // (low * size)) % size
            for low, size in zip(begins, sizes, strict=True)
        ]
        self.digits: IntArray = np.array(digits, dtype=np.int64).reshape(len(sizes), mesh.size)

    def size(self, prime: int) -> int:
        """The prime size of a prime axis."""
        return self.sizes[prime - self.first]

    def digit(self, prime: int) -> IntArray:
        """Where each rank lies along a prime axis: shape `(ranks,)`."""
        digit: IntArray = self.digits[prime - self.first]
        return digit

    def axis(self, prime: int, mesh: DeviceMesh | None = None) -> Axis:
        """The prime axis as a sub-axis of this mesh, or of another with the same devices."""
        mesh = self.mesh if mesh is None else mesh
        begin, size = self.begins[prime - self.first], self.sizes[prime - self.first]
        starts = _find_starts(mesh)
        # The last axis that starts at or before the prime axis is the one that it is a part of.
        name = next(n for n in reversed(mesh.axis_names) if starts[n] <= begin)
        return Axis(name, begin // starts[name], size)

    def axes(self, primes: Iterable[int], mesh: DeviceMesh | None = None) -> tuple[Axis, ...]:
        """Prime axes as axes, those that follow one another joined, whole axes by their name."""
        mesh = self.mesh if mesh is None else mesh
        joined: list[Axis] = []
        for prime in primes:
            axis = self.axis(prime, mesh)
            last = joined[-1] if joined else None
            if last is not None and last.name == axis.name:
                width = last.size or 1
                if axis.pre == last.pre * width:
                    joined[-1] = Axis(axis.name, last.pre, width * (axis.size or 1))
                    continue
            joined.append(axis)
        whole = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        return tuple(Axis(axis.name) if axis.size == whole[axis.name] else axis for axis in joined)

    def primes_of(self, axes: Iterable[Axis], mesh: DeviceMesh | None = None) -> tuple[int, ...]:
        """The prime axes that axes of a mesh are made of, major to minor."""
        mesh = self.mesh if mesh is None else mesh
        found: list[int] = []
        for axis in axes:
            low = _find_starts(mesh)[axis.name] * axis.pre
            high = low * mesh.axis_size(axis)
            found += [
                prime
                for prime, begin in zip(self.primes, self.begins, strict=True)
                if low <= begin < high
            ]
        return tuple(found)

    def units_of(self, primes: Sequence[int]) -> list[tuple[int, ...]]:
        """Prime axes by the axis, or part of one, that they are in, in the order of their first."""
        unit_of = {prime: number for number, unit in enumerate(self.units) for prime in unit}
        found: dict[int, list[int]] = {}
        for prime in primes:
            found.setdefault(unit_of[prime], []).append(prime)
        return [tuple(sorted(unit)) for unit in found.values()]


def _find_starts(mesh: DeviceMesh) -> dict[str, int]:
    """The product of the sizes before each axis."""
    starts, start = {}, 1
    for name, full in zip(mesh.axis_names, mesh.shape, strict=True):
        starts[name] = start
        start *= full
    return starts


def _find_boundaries(mesh: DeviceMesh, axes: Iterable[Axis]) -> set[int]:
    starts = _find_starts(mesh)
    found = {*starts.values(), mesh.size, 1}
    for axis in axes:
        low = starts[axis.name] * axis.pre
        found |= {low, low * mesh.axis_size(axis)}
    return found


def find_prime_meshes(source: ShardingSpec, target: ShardingSpec) -> tuple[PrimeMesh, ...]:
    """The prime meshes of two shardings on the same devices: one where their axes agree, else two.

    >>> from reshard.sharding import spec
    >>> one = spec(DeviceMesh.of(x=6), "x")
    >>> two = spec(DeviceMesh.of(y=2, z=3), "y z")
    >>> other = spec(DeviceMesh.of(x=3, y=2), "x")
    >>> len(find_prime_meshes(one, two)), len(find_prime_meshes(other, two))
    (1, 2)
    """
    sides = []
    for spec in (source, target):
        used = [axis for dim in spec.dim_specs for axis in dim.axes] + list(spec.partial_axes)
        sides.append(_find_boundaries(spec.mesh, used))
    if source.mesh.devices == target.mesh.devices:
        together = sorted(sides[0] | sides[1])
        # Boundaries that divide one another belong to one grid, finer than both meshes.
        if all(high % low == 0 for low, high in itertools.pairwise(together)):
            return (PrimeMesh(source.mesh, together),)
    first = PrimeMesh(source.mesh, sorted(sides[0]))
    return first, PrimeMesh(target.mesh, sorted(sides[1]), len(first.primes))
