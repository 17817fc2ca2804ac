"""The shardings that a program passes, over as few meshes and in as few words as possible.

Other systems tie an operation to one mesh. Where the meshes of source and target have axes that
agree, all are written over the source's. A sharding that cuts nothing is the same over either
mesh, and is written over its neighbour's. Axes of size 1 and marks for propagation do not change
where elements are, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.collectives.program import Program
from reshard.collectives.search.prime_axes import PrimeMesh, find_prime_meshes
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec


def plain_shardings(program: Program) -> tuple[ShardingSpec, ...]:
    """The shardings before, between and after the steps: one more than there are steps.

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
    # An end that every rank holds in full is the same over its neighbour's mesh.
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
            # Axes of size 1 cut nothing.
            return tuple(axis for axis in axes if spec.mesh.axis_size(axis) > 1)
        return prime_mesh.axes(prime_mesh.primes_of(axes, spec.mesh), mesh)

    dims = []
    for dim in spec.dim_specs:
        levels = [(here(level.axes), level.rule) for level in dim.levels]
        dims.append(DimSpec([Level(axes, rule) for axes, rule in levels if axes]))
    return ShardingSpec(mesh, dims, (), here(spec.partial_axes), spec.reduction or "sum", spec.only)


def with_own_mesh_names(specs: Sequence[ShardingSpec]) -> list[ShardingSpec]:
    """The shardings, a second mesh of the same name called by another one."""
    names: dict[DeviceMesh, DeviceMesh] = {}
    for mesh in dict.fromkeys(spec.mesh for spec in specs):
        name, taken = mesh.name, {known.name for known in names.values()}
        while name in taken:
            name += "_target"
        names[mesh] = DeviceMesh(name, mesh.shape, mesh.axis_names, mesh.devices)
    return [
        ShardingSpec(
            names[spec.mesh],
            spec.dim_specs,
            (),
            spec.partial_axes,
            spec.reduction or "sum",
            spec.only,
        )
        for spec in specs
    ]


def axes_behind(
    mesh: DeviceMesh, front: Iterable[Axis], whole: Iterable[Axis]
) -> tuple[Axis, ...] | None:
    """What is left of `whole` behind `front`; None where it does not begin with that.

    >>> mesh = DeviceMesh.of(x=4, y=2)
    >>> axes_behind(mesh, [Axis("x", 1, 2)], [Axis("x"), Axis("y")])
    (x:(2)2, y)
    >>> axes_behind(mesh, [Axis("y")], [Axis("x"), Axis("y")]) is None
    True
    """
    left = list(whole)
    for axis in front:
        size = mesh.axis_size(axis)
        if not left or (left[0].name, left[0].pre) != (axis.name, axis.pre):
            return None
        # `axis` is the major part of what comes next: the rest of that is left over.
        over, rest = divmod(mesh.axis_size(left[0]), size)
        if rest or not over:
            return None
        left[:1] = [Axis(axis.name, axis.pre * size, over)] if over > 1 else []
    return tuple(left)


def axes_dropped(short: ShardingSpec, long: ShardingSpec, dim: int) -> tuple[Axis, ...]:
    """The axes of a dimension that `long` has behind those of `short`.

    Raises:
        NotationError: axes of `short` that are not the first ones of `long`.
    """
    axes = [spec.dim_specs[dim].axes for spec in (short, long)]
    found = axes_behind(long.mesh, *axes)
    if found is None:
        raise NotationError(f"the axes of dimension {dim} do not continue those of the other side")
    return found
