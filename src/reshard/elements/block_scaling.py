"""Quantisation with a scale for each block: one kernel, for NumPy arrays and torch tensors.

The scale of a block is its greatest absolute value divided by the greatest number of the target's
type; elements are divided by it. Source: the weights of DeepSeek-V3, in blocks of 128 by 128 with
float32 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

QUANTIZATIONS = ("fp8-block128",)
"""What matrices can be made, by name: float8 with a scale for each block of 128 by 128."""


def scale_blocks(
    rows: Any, width: int, greatest: float, largest: Callable[[Any], Any]
) -> list[Any]:
    """Divide a row of blocks by their scales, in place.

    Args:
        rows: float32 of shape `(..., height, columns)`: an array of NumPy, or a tensor of torch.
        width: columns of a block.
        greatest: number of the target's type.
        largest: the maxima over the last two dimensions of an array.

    Returns:
        The scales, of shape `(...)` each, block by block.

    >>> import numpy as np
    >>> rows = np.array([[448, -224, 1, 1], [0, 0, -7, 0]], np.float32)
    >>> scales = scale_blocks(rows, 2, 448, lambda block: block.max(axis=(-2, -1)))
    >>> [float(scale) for scale in scales], rows.tolist()
    ([1.0, 0.015625], [[448.0, -224.0, 64.0, 64.0], [0.0, 0.0, -448.0, 0.0]])
    """
    scales = []
    for left in range(0, rows.shape[-1], width):
        block = rows[..., left : left + width]
        scale = largest(abs(block)) / greatest
        # A block of zeros is divided by one.
        scale = scale + (scale == 0)
        block /= scale[..., None, None]
        scales.append(scale)
    return scales
