"""Which layout does a DTensor have?

A DTensor has a mesh and one placement for each mesh dimension. They are applied from left to
right, each to what those before it left, so a tensor dimension that several mesh dimensions
shard is cut in levels, by ceil (`torch.chunk`)::

    mesh ("dp": 2, "tp": 2), [Shard(0), Shard(0)]           "dp / tp, ..."
    the same, [_StridedShard(0, split_factor=2), Shard(0)]   "dp@stride2 / tp, ..."
    the same, [Partial("sum"), Shard(1)]                     "-, tp | sum(dp)"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.block_rules import Strided
from reshard.errors import SpecError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

_REDUCTIONS = {"sum": "sum", "avg": "mean", "max": "max", "min": "min", "product": "product"}


def mesh_of(mesh: Any) -> DeviceMesh:
    """The mesh of a torch `DeviceMesh`, with its ranks in its order."""
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(ranks.ndim))
    return DeviceMesh("torch", tuple(ranks.shape), names, ranks.reshape(-1).tolist())


def sharding_of(tensor: DTensor) -> ShardingSpec:
    """The sharding of a DTensor, over its mesh. Raises as `sharding_of_placements`."""
    return sharding_of_placements(tensor.device_mesh, tensor.placements, tensor.ndim)


def sharding_of_placements(torch_mesh: Any, placements: Sequence[Any], ndim: int) -> ShardingSpec:
    """What placements over a torch `DeviceMesh` mean for a tensor of `ndim` dimensions.

    Raises:
        SpecError: a placement that is neither sharded, replicated nor partial by a reduction
            that reshard has, or several different reductions.
    """
    mesh = mesh_of(torch_mesh)
    if len(placements) != len(mesh.axis_names):
        raise SpecError(
            f"{len(placements)} placements {list(placements)} for a mesh of "
            f"{len(mesh.axis_names)} dimensions; give one for each"
        )
    levels: list[list[Level]] = [[] for _ in range(ndim)]
    partial: list[str] = []
    reductions: set[str] = set()
    for axis, placement in zip(mesh.axis_names, placements, strict=True):
        stride = getattr(placement, "split_factor", None)
        if stride is not None:
            levels[placement.dim % ndim].append(Level([axis], Strided(int(stride))))
        elif placement.is_shard():
            levels[placement.dim % ndim].append(Level([axis]))
        elif placement.is_partial():
            operation = str(getattr(placement, "reduce_op", placement))
            if operation not in _REDUCTIONS:
                raise SpecError(
                    f"placement {placement} on mesh dimension {axis!r}: the reductions are "
                    f"{', '.join(_REDUCTIONS)}; redistribute the tensor first"
                )
            partial.append(axis)
            reductions.add(_REDUCTIONS[operation])
        elif not placement.is_replicate():
            raise SpecError(f"placement {placement} on mesh dimension {axis!r} is not known")
    if len(reductions) > 1:
        raise SpecError(
            f"placements {list(placements)} reduce in several ways; a tensor is partial in one"
        )
    reduction = reductions.pop() if reductions else "sum"
    return ShardingSpec(mesh, [DimSpec(of_dim) for of_dim in levels], (), partial, reduction)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a DTensor over ranks; a plain tensor is whole, on slot 0 of 1."""
    if isinstance(tensor, DTensor):
        return sharding_of(tensor).layout(tuple(tensor.shape))
    return Layout.whole(tuple(tensor.shape), [0], 1)


def rank_of(tensor: torch.Tensor) -> int:
    """The slot of `layout_of(tensor)` that this process holds."""
    if isinstance(tensor, DTensor):
        return int(torch.distributed.get_rank())
    return 0
