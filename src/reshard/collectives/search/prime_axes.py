"""Which small axes is a mesh made of, so that a search can move any part of any axis?

A search moves *atoms*: sub-axes of prime size, major to minor. Two meshes over the same devices
in the same order are cut at the boundaries of both, and become one frame::

    x=6           |           6           |       boundaries 1, 6
    y=2, z=3      |     2     |     3     |       boundaries 1, 2, 6
    atoms         |  0: x:(1)2 = y  |  1: x:(2)3 = z  |

1. A boundary is the product of the axis sizes before it. Sub-axes in use add theirs.
2. Where the boundaries of both meshes divide one another in a row, there is one frame. Where
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


class Frame:
    """A mesh as a row of atoms of prime size.

    Args:
        mesh: the devices; ranks are numbered here by their place in `ranks`.
        boundaries: rising, from 1 to the mesh's size, each a multiple of the one before.
        first: the number of the first atom, so that atoms of several frames differ.
        is_whole: whether what lies between two boundaries stays one atom, of whatever size.

    >>> frame = Frame(DeviceMesh.of(x=4, y=3), [1, 4, 12])
    >>> frame.sizes, [str(frame.axis(atom)) for atom in frame.atoms]
    ((2, 2, 3), ['x:(1)2', 'x:(2)2', 'y:(1)3'])
    >>> frame.atoms_of([Axis("y"), Axis("x")])
    (2, 0, 1)
    """

    def __init__(
        self, mesh: DeviceMesh, boundaries: Sequence[int], first: int = 0, *, is_whole: bool = False
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
            for size in whole if is_whole else prime_factors(high // low):
                begins.append(low)
                sizes.append(size)
                low *= size
            units.append(tuple(range(begin, first + len(sizes))))
        # The atoms between two boundaries: an axis, or the part of one that is in use.
        self.units = tuple(unit for unit in units if unit)
        self.begins = tuple(begins)
        self.sizes = tuple(sizes)
        self.atoms = tuple(range(first, first + len(sizes)))
        self.ranks = tuple(sorted(mesh.devices))
        place = np.argsort(np.array(mesh.devices, dtype=np.int64))
        # Digit of each rank along each atom, shape `(atoms, ranks)`.
        digits = [
            place // (mesh.size // (low * size)) % size
            for low, size in zip(begins, sizes, strict=True)
        ]
        self.digits: IntArray = np.array(digits, dtype=np.int64).reshape(len(sizes), mesh.size)

    def size(self, atom: int) -> int:
        """The prime size of an atom."""
        return self.sizes[atom - self.first]

    def digit(self, atom: int) -> IntArray:
        """Where each rank lies along an atom: shape `(ranks,)`."""
        digit: IntArray = self.digits[atom - self.first]
        return digit

    def axis(self, atom: int, mesh: DeviceMesh | None = None) -> Axis:
        """The atom as a sub-axis of this mesh, or of another one that the frame is for."""
        mesh = self.mesh if mesh is None else mesh
        begin, size = self.begins[atom - self.first], self.sizes[atom - self.first]
        starts = _starts(mesh)
        name = next(n for n in reversed(mesh.axis_names) if starts[n] <= begin)
        return Axis(name, begin // starts[name], size)

    def axes(self, atoms: Iterable[int], mesh: DeviceMesh | None = None) -> tuple[Axis, ...]:
        """Atoms as axes, those that follow one another joined, whole axes by their name."""
        mesh = self.mesh if mesh is None else mesh
        joined: list[Axis] = []
        for atom in atoms:
            axis = self.axis(atom, mesh)
            last = joined[-1] if joined else None
            if last is not None and last.name == axis.name:
                width = last.size or 1
                if axis.pre == last.pre * width:
                    joined[-1] = Axis(axis.name, last.pre, width * (axis.size or 1))
                    continue
            joined.append(axis)
        whole = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        return tuple(Axis(axis.name) if axis.size == whole[axis.name] else axis for axis in joined)

    def atoms_of(self, axes: Iterable[Axis], mesh: DeviceMesh | None = None) -> tuple[int, ...]:
        """The atoms that axes of a mesh are made of, major to minor."""
        mesh = self.mesh if mesh is None else mesh
        found: list[int] = []
        for axis in axes:
            low = _starts(mesh)[axis.name] * axis.pre
            high = low * mesh.axis_size(axis)
            found += [
                atom
                for atom, begin in zip(self.atoms, self.begins, strict=True)
                if low <= begin < high
            ]
        return tuple(found)

    def units_of(self, atoms: Sequence[int]) -> list[tuple[int, ...]]:
        """Atoms by the axis, or part of one, that they are of, in the order of their first ones."""
        unit_of = {atom: number for number, unit in enumerate(self.units) for atom in unit}
        found: dict[int, list[int]] = {}
        for atom in atoms:
            found.setdefault(unit_of[atom], []).append(atom)
        return [tuple(sorted(unit)) for unit in found.values()]


def _starts(mesh: DeviceMesh) -> dict[str, int]:
    """The product of the sizes before each axis."""
    starts, start = {}, 1
    for name, full in zip(mesh.axis_names, mesh.shape, strict=True):
        starts[name] = start
        start *= full
    return starts


def _boundaries(mesh: DeviceMesh, axes: Iterable[Axis]) -> set[int]:
    starts = _starts(mesh)
    found = {*starts.values(), mesh.size, 1}
    for axis in axes:
        low = starts[axis.name] * axis.pre
        found |= {low, low * mesh.axis_size(axis)}
    return found


def frames_of(source: ShardingSpec, target: ShardingSpec) -> tuple[Frame, ...]:
    """The frames of two shardings over the same devices: one where their axes agree, else two.

    >>> from reshard.sharding_text import spec
    >>> one = spec(DeviceMesh.of(x=6), "x")
    >>> two = spec(DeviceMesh.of(y=2, z=3), "y z")
    >>> len(frames_of(one, two)), len(frames_of(spec(DeviceMesh.of(x=3, y=2), "x"), two))
    (1, 2)
    """
    sides = []
    for spec in (source, target):
        used = [axis for dim in spec.dim_specs for axis in dim.axes] + list(spec.partial_axes)
        sides.append(_boundaries(spec.mesh, used))
    if source.mesh.devices == target.mesh.devices:
        together = sorted(sides[0] | sides[1])
        if all(high % low == 0 for low, high in itertools.pairwise(together)):
            return (Frame(source.mesh, together),)
    first = Frame(source.mesh, sorted(sides[0]))
    return first, Frame(target.mesh, sorted(sides[1]), len(first.atoms))
