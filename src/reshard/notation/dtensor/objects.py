"""Live objects of torch: DTensors and placements to shardings, and back.

A DTensor, or its spec, has a mesh, placements and perhaps an order of its axes; they are read
without importing torch. Placement objects are made of torch's own classes, which are imported
then. torch applies placement objects from left to right, so axes that cut in another order become
strides, where that leaves every element in its place::

    mesh ("dp": 2, "tp": 2), "tp / dp, -"     (_StridedShard(0, split_factor=2), Shard(0))

Source: `torch.distributed.tensor` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.errors import MissingExtraError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor.placements import Partial, Placement, Shard, StridedShard
from reshard.notation.dtensor.text import (
    DTensorPlacements,
    cannot_say,
    placements_of,
    sharding_of_placements,
)
from reshard.sharding import ShardingSpec


def mesh_of(mesh: Any) -> DeviceMesh:
    """The mesh of a torch `DeviceMesh`, with its ranks in its order; axes without a name get one.

    Raises:
        MeshError: names that are no axis names.
    """
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(ranks.ndim))
    return DeviceMesh("torch", tuple(ranks.shape), names, ranks.reshape(-1).tolist())


def sharding_of_dtensor(tensor: Any, mesh: DeviceMesh | None = None) -> ShardingSpec:
    """The sharding of a DTensor, or of a `DTensorSpec` that has a shape; torch is not imported.

    Any object with `placements`, a `shape`, and a `mesh` or `device_mesh` of torch will do.

    Args:
        tensor: the DTensor.
        mesh: what its mesh is, where that is known; it is found when None.

    Raises:
        NotationError: a placement that reshard has no word for.
    """
    spec = getattr(tensor, "_spec", tensor)
    if mesh is None:
        mesh = mesh_of(spec.mesh if hasattr(spec, "mesh") else spec.device_mesh)
    return sharding_of_placements(
        mesh,
        spec.placements,
        len(tensor.shape),
        getattr(spec, "shard_order", None),
    )


def to_placements(spec: ShardingSpec, shape: Sequence[int] | None = None) -> tuple[Any, ...]:
    """torch's placement objects for a sharding, one for each mesh axis. Imports torch.

    A dimension that axes cut in another order than the mesh's is written by `_StridedShard`, as
    torch does, where that puts the same elements of a tensor of `shape` in the same places.

    Args:
        spec: the sharding.
        shape: of the tensor; needed for an order other than the mesh's.

    Raises:
        NotationError: what DTensor cannot express, see `placements_of`.
        MissingExtraError: torch is not installed.
    """
    placements = find_placements(spec, shape)
    try:
        from torch.distributed.tensor import placement_types
    except ImportError as error:
        raise MissingExtraError(
            "placement objects need torch, which is not installed; `dtensor_text` writes them "
            "without it"
        ) from error
    objects: list[Any] = []
    for value in placements:
        if isinstance(value, Shard):
            objects.append(placement_types.Shard(value.dim))
        elif isinstance(value, StridedShard):
            objects.append(
                placement_types._StridedShard(value.dim, split_factor=value.split_factor)
            )
        elif isinstance(value, Partial):
            objects.append(placement_types.Partial(value.operation))
        else:
            objects.append(placement_types.Replicate())
    return tuple(objects)


def find_placements(
    spec: ShardingSpec, shape: Sequence[int] | None = None
) -> tuple[Placement, ...]:
    """Placements to be applied from left to right, as torch does, one for each mesh axis.

    Args:
        spec: the sharding.
        shape: of the tensor; needed where axes cut in another order than the mesh's.

    Raises:
        NotationError: what DTensor cannot express, see `placements_of`.

    >>> from reshard.sharding_text import spec
    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(*find_placements(spec(mesh, "tp / dp, -"), (8, 4)))
    _StridedShard(0, split_factor=2) Shard(0)
    """
    found = placements_of(spec)
    return found.placements if found.is_left_to_right else _find_strided(found, spec, shape)


def _find_strided(
    found: DTensorPlacements, spec: ShardingSpec, shape: Sequence[int] | None
) -> tuple[Placement, ...]:
    """Placements to be applied from left to right that give the layout of ordered ones.

    An axis that cuts what later axes of the mesh have cut before it takes their parts as its
    blocks. Source: `DTensorSpec._convert_shard_order_to_StridedShard`.
    """
    if shape is None:
        raise cannot_say(
            f"`{spec}` for any shape",
            "axes cut a dimension in another order than the mesh's; give the shape, so that "
            "`_StridedShard` can be tried",
        )
    placements = list(found.placements)
    for dim, axes in found.shard_order:
        for step, axis in enumerate(axes):
            blocks = 1
            # Axes that cut before this one, but stand behind it in the mesh, are applied after it.
            for earlier in axes[:step]:
                blocks *= spec.mesh.shape[earlier] if earlier > axis else 1
            if blocks > 1 and placements[axis] == Shard(dim):
                placements[axis] = StridedShard(dim, blocks)
    # Blocks are by ceil, so uneven shapes may be cut elsewhere: compared for this one.
    strided = sharding_of_placements(spec.mesh, placements, spec.ndim)
    if not _are_equal(strided.layout(shape), spec.layout(shape)):
        raise cannot_say(
            f"`{spec}` for shape {list(shape)}",
            "axes cut a dimension in another order than the mesh's, and `_StridedShard` cuts this "
            "shape elsewhere; pad it, or take a mesh whose axes are in that order",
        )
    return tuple(placements)


def _are_equal(one: Layout, other: Layout) -> bool:
    """Whether every rank holds the same elements in the same order; parts may be numbered anew."""
    for dim in range(one.ndim):
        pairs = np.stack((one.cell_part[:, dim], other.cell_part[:, dim]), axis=1)
        for part, counterpart in np.unique(pairs, axis=0).tolist():
            if one.tables[dim].runs_of(part) != other.tables[dim].runs_of(counterpart):
                return False
    return True
