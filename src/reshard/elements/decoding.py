"""Values of quantised weights, from boxes of their stored tensors.

Each function gives the float32 values of packed or 8-bit elements; scales and zero points are
applied behind them. The order of elements in a byte or an int32 is the format's:

    e2m1 in a byte                 the first in the low four bits (MXFP4, NVFP4)
    k bits in an int32             the first in the lowest bits (GPTQ, compressed-tensors)
    AWQ, 4 bits in an int32        elements 0 2 4 6 1 3 5 7 from the lowest bits up
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.elements.float8 import E2M1

# Of the element in the lowest bits, the next, and so on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of bytes of two, along the last dimension.

    >>> unpack_e2m1(np.array([0x21, 0x9F], np.uint8)).tolist()
    [0.5, 1.0, -6.0, -0.5]
    """
    found = np.empty((*packed.shape, 2), dtype=np.float32)
    found[..., 0] = E2M1[packed & 0x0F]
    found[..., 1] = E2M1[packed >> 4]
    return found.reshape(*packed.shape[:-1], -1)


def unpack_integers(
    packed: NDArray[Any], bits: int, dimension: int, *, is_awq: bool = False
) -> NDArray[np.float32]:
    """Unsigned integers of int32 words, along a dimension, as float32.

    >>> unpack_integers(np.array([[0x76543210]], np.uint32), 4, 1).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    words = np.moveaxis(packed.view(np.uint32), dimension, -1)
    count = 32 // bits
    found = np.empty((*words.shape, count), dtype=np.float32)
    for place in range(count):
        at = _AWQ_ORDER[place] if is_awq else place
        found[..., at] = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return np.moveaxis(found.reshape(*words.shape[:-1], -1), -1, dimension)
