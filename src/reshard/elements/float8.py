"""Floating point of 8 and 4 bits: tables of what each pattern means, and rounding to float8.

A value of `e` exponent bits with bias `b` and `m` mantissa bits is `1.m * 2**(e - b)`, or
`0.m * 2**(1 - b)` where `e` is 0. Types differ in what the patterns of all ones mean.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType
from reshard.elements.casting import STRETCH
from reshard.errors import UsageError

# Exponent bits, mantissa bits, bias, patterns that are infinite, patterns that are no number.
_TYPES: dict[str, tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = {
    "float8_e4m3fn": (4, 3, 7, (), (0x7F, 0xFF)),
    "float8_e4m3fnuz": (4, 3, 8, (), (0x80,)),
    "float8_e5m2": (5, 2, 15, (0x7C, 0xFC), (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e5m2fnuz": (5, 2, 16, (), (0x80,)),
}
#: The greatest number of the type to which weights are quantised.
GREATEST_E4M3FN = 448.0
#: The sixteen values of e2m1, the elements of MXFP4 and NVFP4.
E2M1: NDArray[np.float32] = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=np.float32,
)


@cache
def float8_values(name: str) -> NDArray[np.float32]:
    """What each of the 256 patterns of an 8-bit type means, of shape `(256,)`.

    Raises:
        UsageError: a type that has no such table.

    >>> float8_values("float8_e4m3fn")[[0x00, 0x38, 0x7E, 0x81]].tolist()
    [0.0, 1.0, 448.0, -0.001953125]
    """
    if name == "float8_e8m0fnu":
        # An exponent alone; all ones are no number.
        exact = np.ldexp(1.0, np.arange(256) - 127)
        exact[255] = np.nan
        powers = exact.astype(np.float32)
        powers.flags.writeable = False
        return powers
    if name not in _TYPES:
        raise UsageError(f"no values are known of {name}; known are {', '.join(_TYPES)}")
    exponents, mantissas, bias, infinite, nothing = _TYPES[name]
    patterns = np.arange(256)
    exponent = patterns >> mantissas & (1 << exponents) - 1
    fraction = (patterns & (1 << mantissas) - 1) / (1 << mantissas)
    values = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    values[patterns >= 128] *= -1
    values[list(infinite)] = np.copysign(np.inf, values[list(infinite)])
    values[list(nothing)] = np.nan
    table: NDArray[np.float32] = values.astype(np.float32)
    table.flags.writeable = False
    return table


def decode_float8(bits: NDArray[Any], kind: DType) -> NDArray[np.float32]:
    """Elements of an 8-bit type as float32, exactly."""
    values: NDArray[np.float32] = float8_values(kind.name)[bits.view(np.uint8)]
    return values


def round_to_e4m3fn(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Patterns of float8_e4m3fn, rounded to nearest, ties to even; too great ones become 448.

    Source: `torch.Tensor.to(torch.float8_e4m3fn)`, which saturates too.

    >>> [hex(x) for x in round_to_e4m3fn(np.array([1, -0.001, 460, 1e9], np.float32)).tolist()]
    ['0x38', '0x81', '0x7e', '0x7e']
    """
    found = np.empty(values.shape, dtype=np.uint8)
    flat, out = np.ascontiguousarray(values).reshape(-1), found.reshape(-1)
    for begin in range(0, len(flat), STRETCH):
        out[begin : begin + STRETCH] = _round_stretch(flat[begin : begin + STRETCH])
    return found


def _round_stretch(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Three bits of 23 stay. The exponent's bias changes from 127 to 7.
    rounded = (magnitude >> np.uint32(20)) & np.uint32(1)
    rounded += np.uint32(0x7FFFF)
    rounded += magnitude
    rounded >>= np.uint32(20)
    rounded -= np.uint32((127 - 7) << 3)
    # Below 2**-6 a pattern is a number of 2**-9; the next pattern behind them is the least normal.
    least = np.uint32((127 - 6) << 23)
    small = np.rint(np.minimum(magnitude, least).view(np.float32) * np.float32(512))
    rounded = np.where(magnitude < least, small.astype(np.uint32), rounded)
    np.minimum(rounded, np.uint32(0x7E), out=rounded)
    is_nan = magnitude > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = 0x7F
    rounded |= bits >> np.uint32(24) & np.uint32(0x80)
    return rounded
