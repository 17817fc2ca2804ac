"""A mesh cut into whole axes, so that no sharding of a program uses a part of one.

JAX and MLIR have whole mesh axes only. An axis of which a part is used is split there; the
device grid has more axes then, and the same devices in the same order::

    x=8 used as x:(2)2      x:(1)2, x:(2)2, x:(4)2
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec


class WholeAxes:
    """The axes of the mesh that is written: those of a mesh, split where a part is used.

    Args:
        mesh: the mesh of the shardings.
        specs: shardings over it.
        system: that is written for, for messages.

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
        # Each axis is split where any sub-axis that is in use begins or ends.
        cuts = {name: {1, size} for name, size in zip(mesh.axis_names, mesh.shape, strict=True)}
        for spec in specs:
            used = [axis for dim in spec.dim_specs for axis in dim.axes]
            for axis in (*used, *spec.partial_axes):
                cuts[axis.name] |= {axis.pre, axis.pre * mesh.axis_size(axis)}
        self._given = mesh
        self._parts: list[Axis] = []
        self._names: dict[tuple[str, int], str] = {}
        for name, found in cuts.items():
            ends = sorted(found)
            parts = list(itertools.pairwise(ends)) or [(1, 1)]
            if any(high % low for low, high in parts):
                raise NotationError(
                    f"the program cannot be expressed in {system}: it uses parts of axis {name} "
                    f"that begin at {ends[:-1]}, which do not divide one another; {system} has "
                    "whole axes"
                )
            for low, high in parts:
                self._parts.append(Axis(name, low, high // low))
                # Parts are named by where they begin and end in their axis.
                word = name if len(parts) == 1 else f"{name}_{low}_{high}"
                # A part must not have the name of another axis.
                while len(parts) > 1 and word in cuts:
                    word += "_"
                self._names[name, low] = word
        sizes = [mesh.axis_size(axis) for axis in self._parts]
        self.mesh = DeviceMesh(mesh.name, sizes, list(self._names.values()), mesh.devices)

    def names(self, axes: Iterable[Axis]) -> list[str]:
        """The names of what axes of the given mesh are made of, major to minor."""
        found = []
        for axis in axes:
            end = axis.pre * self._given.axis_size(axis)
            found += [
                self._names[part.name, part.pre]
                for part in self._parts
                if part.name == axis.name
                and axis.pre <= part.pre
                and (part.pre < end or self._given.axis_size(axis) == 1 == part.size)
            ]
        return found

    def spec(self, spec: ShardingSpec) -> ShardingSpec:
        """A sharding over the mesh that is written; every dimension cut by one level."""
        cuts = [self._axes(dim.axes) for dim in spec.dim_specs]
        dims = [DimSpec([Level(axes)] if axes else []) for axes in cuts]
        partial = self._axes(spec.partial_axes)
        return ShardingSpec(self.mesh, dims, (), partial, spec.reduction or "sum")

    def _axes(self, axes: Iterable[Axis]) -> list[Axis]:
        return [Axis(name) for name in self.names(axes)]
