"""DTensors of torch as layouts: how a live one is cut, and the part of this process.

Placements are read by `reshard.notation.dtensor`, which says what they mean.
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

# Torch works out the ranks of a mesh each time they are asked for, which takes longer than all
# else of a small redistribution. Those of a part of a mesh depend on the rank that asks.
_MESHES: weakref.WeakKeyDictionary[Any, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of(torch_mesh: Any) -> DeviceMesh:
    """The mesh of a torch `DeviceMesh`, as this process is in it."""
    known = _MESHES.setdefault(torch_mesh, {})
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank not in known:
        known[rank] = dtensor.mesh_of(torch_mesh)
    return known[rank]


def sharding_of_placements(torch_mesh: Any, placements: Sequence[Any], ndim: int) -> ShardingSpec:
    """What placements over a torch `DeviceMesh` mean for a tensor of `ndim` dimensions.

    Raises:
        NotationError: a placement that reshard has no word for, several different reductions, or
            another number of placements than the mesh's.
    """
    return dtensor.sharding_of_placements(mesh_of(torch_mesh), placements, ndim)


def sharding_of_dtensor(tensor: DTensor) -> ShardingSpec:
    """How a DTensor is cut. Raises as `sharding_of_placements`."""
    return dtensor.sharding_of_dtensor(tensor, mesh_of(tensor.device_mesh))


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a DTensor over ranks; a plain tensor is on rank 0 of 1 alone."""
    if isinstance(tensor, DTensor):
        return sharding_of_dtensor(tensor).layout(tuple(tensor.shape))
    return Layout.whole(tuple(tensor.shape), [0], 1)


def rank_of(tensor: torch.Tensor) -> int:
    """The rank of this process in `layout_of(tensor)`."""
    if isinstance(tensor, DTensor):
        return int(dist.get_rank())
    return 0
