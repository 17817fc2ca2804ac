"""DTensors of torch as layouts: their shardings, and the part of this process.

Placements are read by `reshard.notation.dtensor`, which documents their meaning.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.sharding import ShardingSpec

# Cached, since torch computes the ranks of a mesh on each access, which takes longer than the rest
# of a small redistribution. The ranks of a submesh depend on the accessing rank.
_MESHES: weakref.WeakKeyDictionary[Any, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of(torch_mesh: Any) -> DeviceMesh:
    """Return the mesh of a torch `DeviceMesh`, as seen from this process."""
    known = _MESHES.setdefault(torch_mesh, {})
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank not in known:
        known[rank] = dtensor.mesh_of(torch_mesh)
    return known[rank]


def sharding_of_placements(torch_mesh: Any, placements: Sequence[Any], ndim: int) -> ShardingSpec:
    """Return the sharding by placements over a `DeviceMesh`, for `ndim` dimensions.

    Raises:
        NotationError: a placement that reshard cannot represent, several different reductions, or
            more or fewer placements than the mesh has dimensions.
    """
    return dtensor.sharding_of_placements(mesh_of(torch_mesh), placements, ndim)


def sharding_of_dtensor(tensor: DTensor) -> ShardingSpec:
    """Return the sharding of a DTensor. Raises as `sharding_of_placements`."""
    return dtensor.sharding_of_dtensor(tensor, mesh_of(tensor.device_mesh))


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a DTensor over ranks; a plain tensor is on rank 0 of a single rank."""
    if isinstance(tensor, DTensor):
        return sharding_of_dtensor(tensor).layout(tuple(tensor.shape))
    return Layout.whole(tuple(tensor.shape), [0], 1)


def rank_of(tensor: torch.Tensor) -> int:
    """Return the rank of this process in `layout_of(tensor)`."""
    if isinstance(tensor, DTensor):
        return int(dist.get_rank())
    return 0
