"""Tensors of PyTorch: DTensors described as layouts, and models filled from checkpoints.

torch is imported here, so this package is only for programs that have it.
"""

from reshard.torch.distributed_tensor import layout_of, rank_of, sharding_of
from reshard.torch.loading import LoadReport, load

__all__ = ["LoadReport", "layout_of", "load", "rank_of", "sharding_of"]
