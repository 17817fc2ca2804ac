"""DTensors of torch as layouts: how a live one is cut, and the part of this process.

Placements are read by `reshard.notation.dtensor.text`, which says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.layout import Layout
from reshard.notation.dtensor import objects as dtensor_objects
from reshard.notation.dtensor import text as dtensor
from reshard.sharding import ShardingSpec


def sharding_of_placements(torch_mesh: Any, placements: Sequence[Any], ndim: int) -> ShardingSpec:
    """What placements over a torch `DeviceMesh` mean for a tensor of `ndim` dimensions.

    Raises:
        NotationError: a placement that reshard has no word for, several different reductions, or
            another number of placements than the mesh's.
    """
    return dtensor.sharding_of_placements(dtensor_objects.mesh_of(torch_mesh), placements, ndim)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a DTensor over ranks; a plain tensor is whole, on rank 0 of 1."""
    if isinstance(tensor, DTensor):
        return dtensor_objects.sharding_of_dtensor(tensor).layout(tuple(tensor.shape))
    return Layout.whole(tuple(tensor.shape), [0], 1)


def rank_of(tensor: torch.Tensor) -> int:
    """The rank that this process is in `layout_of(tensor)`."""
    if isinstance(tensor, DTensor):
        return int(torch.distributed.get_rank())
    return 0
