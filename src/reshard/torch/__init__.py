"""Tensors of PyTorch: DTensors described as layouts, moved between ranks, filled from checkpoints.

torch is imported here, so this package is only for programs that have it.
"""

from reshard.torch.distributed_tensor import layout_of, rank_of, sharding_of
from reshard.torch.loading import LoadReport, load
from reshard.torch.redistribution import Redistribution, redistribute

__all__ = [
    "LoadReport",
    "Redistribution",
    "layout_of",
    "load",
    "rank_of",
    "redistribute",
    "sharding_of",
]
