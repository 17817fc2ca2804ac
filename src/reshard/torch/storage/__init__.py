"""PyTorch models and state dicts: load them from checkpoints, and save them.

loading   fill a module or a state dict from a checkpoint
reader    read checkpoints of any format and sharding with `torch.distributed.checkpoint.load`
writer    write new checkpoints with its `save`, on all ranks
places    find the offsets of a save's tensors in new files
saves     complete a save in a folder or in an object store, to which ranks upload while they write
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.torch.storage.reader import torch_type

__all__ = ["torch_type"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.torch.storage.reader": ["torch_type"],
    },
)
