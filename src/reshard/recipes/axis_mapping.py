"""Mapping the axes of a recipe, and shardings over them, to the axes of a mesh.

Each axis of a recipe is mapped to axes of the mesh: usually to the axis of its name, to none
if the mesh lacks it, or to several (`Recipe.map_axes`)::

    mapping  ep -> dp tp    etp -> none      "ep, etp, -"           ->   "dp tp, -, -"
    dp=2, tp=4                               "-, - | only(ep=5)"    ->   "-, - | only(dp=1 tp=1)"

Flax calls such a mapping *logical axis rules*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from reshard.errors import RecipeError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec, spec

AxisMapping = Mapping[str, tuple[Axis, ...]]


def map_sharding(
    mesh: DeviceMesh,
    written: ShardingSpec,
    mapping: AxisMapping | None,
    only: Sequence[tuple[str, tuple[int, ...]]],
) -> ShardingSpec:
    """Return `written` over `mesh`; levels whose axes are mapped to no axis are dropped.

    Without a `mapping` it names axes of the mesh itself. Its tensors are at the coordinates
    `only` of axes of the mesh.
    """

    def map_all(axes: Iterable[Axis]) -> list[Axis]:
        return [mapped for axis in axes for mapped in _map_axis(axis, mapping)]

    dim_specs = []
    for dim in written.dim_specs:
        levels = [(map_all(level.axes), level.rule) for level in dim.levels]
        # An axis without axes of the mesh has size 1, so its level divides nothing.
        mapped_levels = [Level(axes, rule) for axes, rule in levels if axes]
        dim_specs.append(DimSpec(mapped_levels, dim.is_open, dim.priority))
    return ShardingSpec(
        mesh,
        dim_specs,
        map_all(written.replicated_axes),
        map_all(written.partial_axes),
        written.reduction,
        only,
    )


def _map_axis(axis: Axis, mapping: AxisMapping | None) -> tuple[Axis, ...]:
    """Return the mesh axes for an axis that a rule names."""
    if mapping is None:
        return (axis,)
    result = mapping[axis.name]
    if axis.is_full or not result:
        return result
    # A part of several axes, or a part of a part, would not be a part of a mesh axis.
    if len(result) > 1 or not result[0].is_full:
        raise RecipeError(
            f"the part {axis} of an axis that is mapped to {' '.join(map(str, result))}; map it to "
            "a single whole axis of the mesh"
        )
    return (Axis(result[0].name, axis.pre, axis.size),)


def map_coordinates(
    mesh: DeviceMesh, only: Iterable[tuple[str, tuple[int, ...]]], mapping: AxisMapping | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield coordinates of a recipe's axes as coordinates of the axes of a mesh.

    Raises:
        RecipeError: axes of the mesh that cannot express them.

    >>> mesh = DeviceMesh.of(dp=2, tp=4)
    >>> list(map_coordinates(mesh, [("ep", (5,))], {"ep": (Axis("dp"), Axis("tp"))}))
    [('dp', (1,)), ('tp', (1,))]
    """
    for axis, coordinates in only:
        axes = _map_axis(Axis(axis), mapping)
        # The mesh lacks the axis: every rank holds the tensor.
        if not axes:
            continue
        if not all(axis.is_full for axis in axes):
            raise RecipeError(
                f"tensors are distributed over axis {axis!r}, mapped to "
                f"{' '.join(map(str, axes))}; map it to whole axes of the mesh"
            )
        # A coordinate of the joint axis is a coordinate of each mesh axis, major to minor. `only`
        # restricts axes separately, so the coordinates must be a product.
        columns = np.unravel_index(coordinates, [mesh.axis_size(mesh_axis) for mesh_axis in axes])
        chosen = [tuple(sorted({int(at) for at in column})) for column in columns]
        if math.prod(map(len, chosen)) != len(coordinates):
            raise RecipeError(
                f"coordinates {list(coordinates)} of axis {axis!r}, mapped to "
                f"{' '.join(map(str, axes))}, are not a product of coordinates of these; map "
                "it to a single axis"
            )
        yield from ((mesh_axis.name, at) for mesh_axis, at in zip(axes, chosen, strict=True))


def find_used_axes(sharding: ShardingSpec) -> set[str]:
    """Return the mesh axes that shard a tensor, or along which only some ranks hold it."""
    axes = [axis for dim in sharding.dim_specs for axis in dim.axes]
    used = {axis.name for axis in (*axes, *sharding.partial_axes)}
    return used | {axis for axis, _ in sharding.only}


def read_sharding(mesh: DeviceMesh, text: str, ndim: int) -> ShardingSpec:
    """Parse the text of a rule for tensors of `ndim` dimensions.

    A scalar cannot be sharded: a rule for any number of dimensions leaves it whole.
    """
    result = spec(mesh, text, ndim=ndim)
    if ndim or "..." not in text or not result.dim_specs:
        return result
    return result.with_dims(())
