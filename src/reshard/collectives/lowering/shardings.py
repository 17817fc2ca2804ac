"""The shardings of a program in a form that other systems can express.

Other systems tie an operation to a single mesh. If the axes of the meshes of source and target
agree, all shardings are written over the source's mesh (`plain_shardings`). A replicated sharding
is the same over either mesh, and is written over its neighbour's. Axes of size 1 and marks for
propagation do not affect the location of elements, and are left out.

JAX and MLIR have whole mesh axes only. An axis of which a part is used is split (`WholeAxes`); the
device grid then has more axes, and the same devices in the same order::

    x=8 used as x:(2)2      x:(1)2, x:(2)2, x:(4)2

They also give every device an array of the same shape. A dimension of length `K` in `P` parts has
parts of `K ceildiv P`; the last ones have padding after the end of the tensor::

    10 over x=4     0 1 2 | 3 4 5 | 6 7 8 | 9 . .

Gathered parts may then be longer than the new part, and are truncated. A part may have to be padded
before it is sliced::

    10 over x=4 to 10           0 1 2 3 4 5 6 7 8 9 . .     truncated to 10
    10 to 10 over x=4           0 1 2 3 4 5 6 7 8 9         padded to 12

If `n` new parts together are as long as the old part, each begins at the right index. If they are
longer, they begin at wrong indices in every old part but the first, and all of the tensor must be
in the first old part (`lines_up`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from reshard.collectives.program import Program
from reshard.collectives.search.states import PrimeMesh, find_prime_meshes
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec


def plain_shardings(program: Program) -> tuple[ShardingSpec, ...]:
    """Return the shardings before, between and after the steps, over as few meshes as possible.

    >>> from reshard import spec
    >>> from reshard.collectives import find_program
    >>> meshes = DeviceMesh.of(x=4), DeviceMesh.of(a=2, b=2)
    >>> program = find_program(spec(meshes[0], "x, - ?!1"), spec(meshes[1], "b, -"), (4, 4))
    >>> [str(sharding) for sharding in plain_shardings(program)]
    ['x, -', 'x:(2)2 x:(1)2, -', 'x:(2)2, -']
    """
    specs = [program.source, *(step.target for step in program.steps)]
    prime_meshes = find_prime_meshes(program.source, program.target)
    if len(prime_meshes) == 1:
        mesh = program.source.mesh
        return tuple(_rewrite_on_mesh(spec, mesh, prime_meshes[0]) for spec in specs)
    meshes = [spec.mesh for spec in specs]
    # A replicated sharding at an end is the same over the mesh of its neighbour.
    for place, neighbour in ((0, 1), (-1, -2)):
        spec = specs[place]
        if len(specs) > 1 and not spec.partial_axes and not any(d.levels for d in spec.dim_specs):
            meshes[place] = meshes[neighbour]
    return tuple(
        _rewrite_on_mesh(spec, mesh, None) for spec, mesh in zip(specs, meshes, strict=True)
    )


def _rewrite_on_mesh(
    spec: ShardingSpec, mesh: DeviceMesh, prime_mesh: PrimeMesh | None
) -> ShardingSpec:
    def here(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        if prime_mesh is None or spec.mesh is mesh:
            # Axes of size 1 have no effect.
            return tuple(axis for axis in axes if spec.mesh.axis_size(axis) > 1)
        return prime_mesh.axes(prime_mesh.primes_of(axes, spec.mesh), mesh)

    dims = []
    for dim in spec.dim_specs:
        levels = [(here(level.axes), level.rule) for level in dim.levels]
        dims.append(DimSpec([Level(axes, rule) for axes, rule in levels if axes]))
    return ShardingSpec(mesh, dims, (), here(spec.partial_axes), spec.reduction, spec.only)


def with_own_mesh_names(specs: Sequence[ShardingSpec]) -> list[ShardingSpec]:
    """Return the shardings, with a second mesh of the same name renamed."""
    names: dict[DeviceMesh, DeviceMesh] = {}
    for mesh in dict.fromkeys(spec.mesh for spec in specs):
        name, taken = mesh.name, {other.name for other in names.values()}
        while name in taken:
            name += "_target"
        names[mesh] = mesh.replace(name=name)
    return [spec.replace(mesh=names[spec.mesh]) for spec in specs]


def remove_prefix(
    mesh: DeviceMesh, prefix: Iterable[Axis], axes: Iterable[Axis]
) -> tuple[Axis, ...] | None:
    """Return the rest of `axes` after `prefix`, or None if they do not begin with it.

    >>> mesh = DeviceMesh.of(x=4, y=2)
    >>> remove_prefix(mesh, [Axis("x", 1, 2)], [Axis("x"), Axis("y")])
    (x:(2)2, y)
    >>> remove_prefix(mesh, [Axis("y")], [Axis("x"), Axis("y")]) is None
    True
    """
    left = list(axes)
    for axis in prefix:
        size = mesh.axis_size(axis)
        if not left or (left[0].name, left[0].pre) != (axis.name, axis.pre):
            return None
        # `axis` is the major part of the next axis, of which the minor part remains.
        over, rest = divmod(mesh.axis_size(left[0]), size)
        if rest or not over:
            return None
        left[:1] = [Axis(axis.name, axis.pre * size, over)] if over > 1 else []
    return tuple(left)


def axes_dropped(short: ShardingSpec, long: ShardingSpec, dim: int) -> tuple[Axis, ...]:
    """Return the axes of a dimension of `long` after those of `short`.

    Raises:
        NotationError: axes of `short` that are not a prefix of those of `long`.
    """
    prefix, axes = (spec.dim_specs[dim].axes for spec in (short, long))
    rest = remove_prefix(long.mesh, prefix, axes)
    if rest is None:
        raise NotationError(f"the axes of dimension {dim} do not continue those of the other side")
    return rest


class WholeAxes:
    """A mesh whose axes are split so that its shardings use whole axes only.

    Args:
        mesh: the mesh of the shardings.
        specs: shardings over it.
        system: the name of the system, for error messages.

    Raises:
        NotationError: parts of an axis that do not divide one another.

    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=4, y=2)
    >>> whole = WholeAxes(mesh, [spec(mesh, "x:(2)2")], "JAX")
    >>> whole.mesh
    DeviceMesh(x_1_2=2,x_2_4=2,y=2)
    >>> whole.names([Axis("y"), Axis("x")])
    ['y', 'x_1_2', 'x_2_4']
    """

    def __init__(self, mesh: DeviceMesh, specs: Iterable[ShardingSpec], system: str) -> None:
        # Each axis is split at the begin and the end of every sub-axis in use.
        cuts = mesh.axis_boundaries(axis for spec in specs for axis in spec.used_axes)
        self._given = mesh
        self._parts: list[Axis] = []
        self._names: dict[tuple[str, int], str] = {}
        for name, ends in cuts.items():
            parts = list(itertools.pairwise(ends)) or [(1, 1)]
            if any(high % low for low, high in parts):
                raise NotationError(
                    f"the program cannot be expressed in {system}: it uses parts of axis {name} "
                    f"that begin at {ends[:-1]}, which do not divide one another; {system} has "
                    "whole axes"
                )
            for low, high in parts:
                self._parts.append(Axis(name, low, high // low))
                # Parts are named by their begin and end in the axis.
                word = name if len(parts) == 1 else f"{name}_{low}_{high}"
                # The name of a part must differ from those of other axes.
                while len(parts) > 1 and word in cuts:
                    word += "_"
                self._names[name, low] = word
        sizes = [mesh.axis_size(axis) for axis in self._parts]
        self.mesh = DeviceMesh(mesh.name, sizes, list(self._names.values()), mesh.devices)

    def names(self, axes: Iterable[Axis]) -> list[str]:
        """Return the names of the parts of axes of the given mesh, major to minor."""
        names = []
        for axis in axes:
            end = axis.pre * self._given.axis_size(axis)
            names += [
                self._names[part.name, part.pre]
                for part in self._parts
                if part.name == axis.name
                and axis.pre <= part.pre
                and (part.pre < end or self._given.axis_size(axis) == 1 == part.size)
            ]
        return names

    def spec(self, spec: ShardingSpec) -> ShardingSpec:
        """Return a sharding over the split mesh, with a single level in each dimension."""
        cuts = [self._axes(dim.axes) for dim in spec.dim_specs]
        dims = [DimSpec([Level(axes)] if axes else []) for axes in cuts]
        partial = self._axes(spec.partial_axes)
        return ShardingSpec(self.mesh, dims, (), partial, spec.reduction)

    def _axes(self, axes: Iterable[Axis]) -> list[Axis]:
        return [Axis(name) for name in self.names(axes)]


def parts_of(spec: ShardingSpec, dim: int) -> int:
    """Count the parts of a dimension."""
    return spec.mesh.joint_size(spec.dim_specs[dim].axes)


def part_length(spec: ShardingSpec, shape: tuple[int, ...], dim: int) -> int:
    """Return the length of a dimension of the largest shard."""
    return -(-shape[dim] // parts_of(spec, dim))


def ceil_shape(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the largest shard, which every device has.

    >>> from reshard import DeviceMesh
    >>> from reshard.sharding import spec
    >>> ceil_shape(spec(DeviceMesh.of(x=4, y=2), "x, y"), (10, 4))
    (3, 2)
    """
    return tuple(part_length(spec, shape, dim) for dim in range(len(shape)))


def check_ceil(where: str, system: str, spec: ShardingSpec, shape: tuple[int, ...]) -> None:
    """Raise NotationError for a sharding with other shards than a single level by ceil.

    Several levels are equal to a single level if the sizes divide.
    """
    for dim, cut in enumerate(spec.dim_specs):
        is_flat = len(cut.levels) < 2 or shape[dim] % parts_of(spec, dim) == 0
        if not is_flat or spec.only or any(not level.rule.is_default for level in cut.levels):
            raise NotationError(
                f"{where} cannot be expressed in {system}: `{spec}` does not shard shape "
                f"{list(shape)} into blocks in order, each as long as the first; {system} has no "
                "other shards"
            )
    if not math.prod(shape):
        raise NotationError(
            f"{where} cannot be expressed in {system}: a tensor of shape {list(shape)} has no "
            "elements to move; leave it out"
        )


def lines_up(short: ShardingSpec, long: ShardingSpec, shape: tuple[int, ...], dim: int) -> bool:
    """Return whether the parts of `long` are at the same offsets in padded parts of `short`.

    `long` shards the dimension by more axes than `short`.

    >>> from reshard import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> half, quarter = spec(mesh, "x"), spec(mesh, "x y")
    >>> lines_up(half, quarter, (12,), 0), lines_up(half, quarter, (10,), 0)
    (True, False)
    """
    length = part_length(short, shape, dim)
    count = parts_of(long, dim) // parts_of(short, dim)
    return count * part_length(long, shape, dim) == length or shape[dim] <= length
