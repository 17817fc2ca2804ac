"""Axes in the order of their mesh, for systems that have sets of axes where we have a sequence."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.mesh import Axis, DeviceMesh


def in_mesh_order(mesh: DeviceMesh, axes: Iterable[Axis]) -> list[Axis]:
    """The axes sorted as the mesh has them; sub-axes of one axis from major to minor.

    Raises:
        MeshError: an axis or sub-axis that the mesh has not.

    >>> in_mesh_order(DeviceMesh.of(x=8, y=2), [Axis("y"), Axis("x", 4, 2), Axis("x", 1, 2)])
    [x:(1)2, x:(4)2, y]
    """

    def place(axis: Axis) -> tuple[int, int]:
        mesh.axis_size(axis)
        return mesh.axis_names.index(axis.name), axis.pre

    return sorted(axes, key=place)
