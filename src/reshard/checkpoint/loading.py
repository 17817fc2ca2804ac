"""A tensor of a checkpoint, whole, in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.block_io import BlockReader, Workspace, open_sources
from reshard.checkpoint.contents import Checkpoint


def read_tensor(checkpoint: Checkpoint, name: str) -> NDArray[Any]:
    """The named tensor, put together from its shards, as a NumPy array.

    Types that NumPy has not (bfloat16, float8) are those of ml_dtypes.

    Raises:
        CheckpointError: no tensor of that name.
        MissingExtraError: ml_dtypes is needed and not installed.
        DigestError: bytes that are not what the manifest recorded.
        RunError: a file that cannot be read.
    """
    tensor = checkpoint[name]
    array = np.empty(math.prod(tensor.shape), dtype=tensor.dtype.storage)
    files = open_sources(checkpoint)
    reader = BlockReader(tensor, files)
    workspace = Workspace(reader.grid.largest_bytes, reader.span_bytes)
    try:
        at = 0
        for block in range(reader.grid.count):
            # Without a recorded digest there is nothing to check, and no hash library needed.
            if tensor.digest is not None:
                memory, _ = reader.read_checked(block, workspace)
            else:
                memory = reader.read(block, workspace)
            elements = reader.array(memory, (-1,))
            array[at : at + len(elements)] = elements
            at += len(elements)
            del memory, elements
    finally:
        workspace.close()
        files.close()
    return array.view(tensor.dtype.numpy).reshape(tensor.shape)
