"""Values of elements: casts, 8-bit floats, and quantized weights, with NumPy alone.

Types that NumPy lacks (bfloat16, float8) are computed on their bits.

*Casts* between floating-point types are correctly rounded:

1. Narrower types are widened exactly, to float32 or float64.
2. One rounding to the target, to nearest and ties to even: float16 by NumPy; bfloat16 on the bits
   of float32::

       0 10000010 1001001 1000000000000000     half way: add 0x7fff and the last bit that remains
       0 10000010 1001010                      a carry into the exponent is correct, too

3. float64 becomes bfloat16 through a float32 that is rounded to odd, so that it is rounded once.

*8-bit floats*: a value of `e` exponent bits with bias `b` and `m` mantissa bits is
`1.m * 2**(e - b)`, or `0.m * 2**(1 - b)` where `e` is 0. Types differ in the meaning of the
patterns in which all bits are 1.

*Block scaling*: the scale of a block is its largest absolute value divided by the largest number of
the target type, and elements are divided by it. Source: the weights of DeepSeek-V3, in blocks of
128 by 128 with float32 scales.

*Quantized weights*: the order of elements in a byte or an int32 depends on the format::

    e2m1 in a byte                 the first in the low four bits (MXFP4, NVFP4)
    k bits in an int32             the first in the lowest bits (GPTQ, compressed-tensors)
    AWQ, 4 bits in an int32        elements 0 2 4 6 1 3 5 7 from the lowest bits up
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.dtypes import DType, dtype
from reshard.errors import UsageError

QUANTIZATIONS = ("fp8-block128",)
"""Quantizations of matrices by name: float8 with a scale for each block of 128 by 128."""


def scale_blocks(
    rows: Any, width: int, greatest: float, largest: Callable[[Any], Any]
) -> list[Any]:
    """Divide a row of blocks by their scales, in place, for NumPy arrays and torch tensors alike.

    Args:
        rows: float32 of shape `(..., height, columns)`: an array of NumPy, or a tensor of torch.
        width: columns of a block.
        greatest: the largest number of the target type.
        largest: returns the maxima over the last two dimensions of an array.

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
        # A block of zeros is divided by 1.
        scale = scale + (scale == 0)
        block /= scale[..., None, None]
        scales.append(scale)
    return scales


#: Types between which elements are cast, by the names that users may give.
CAST_TYPES: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
STRETCH = 1 << 16
# An exponent whose bits are all 1: infinity or NaN.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


class CastCounts(Record):
    """Counts of a cast: finite elements that overflowed, and elements that were not finite."""

    overflowed: int = 0
    not_finite: int = 0

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(self.overflowed + other.overflowed, self.not_finite + other.not_finite)


def cast_type(name: object) -> DType:
    """Return the type that a user names: `bf16`, `bfloat16`, `torch.bfloat16`, or PyTorch's object.

    Raises:
        UsageError: any other type.

    >>> cast_type("bf16"), cast_type("torch.float16")
    (DType('bfloat16'), DType('float16'))
    """
    text = str(name).removeprefix("torch.")
    if text not in CAST_TYPES:
        raise UsageError(
            f"the type {str(name)!r}; elements are cast to bf16, fp16 or fp32 (bfloat16, float16, "
            f"float32). Weights are quantized by --quantize {QUANTIZATIONS[0]}, in Python "
            f"quantize={QUANTIZATIONS[0]!r}"
        )
    return dtype(CAST_TYPES[text])


def is_castable(kind: DType) -> bool:
    """Return whether elements of a type can be cast: floating point of 16 bits or more."""
    return kind.name in _FLOATS


def cast_elements(
    source: NDArray[Any], kind: DType, target: NDArray[Any], target_kind: DType
) -> CastCounts:
    """Write elements in another type, rounded to nearest, ties to even.

    Args:
        source: bare elements of `kind`, of shape `(n,)`.
        target: bare elements of `target_kind`, of shape `(n,)`; written in place.

    Raises:
        UsageError: types that cannot be cast.

    >>> import numpy as np
    >>> halves = np.empty(3, dtype=np.uint16)
    >>> cast_elements(np.array([1, 1.00390625, 1e30], np.float32), dtype("float32"), halves,
    ...     dtype("bfloat16"))
    CastCounts(overflowed=0, not_finite=0)
    >>> [hex(bits) for bits in halves.tolist()]
    ['0x3f80', '0x3f80', '0x714a']
    """
    for castable in (kind, target_kind):
        if not is_castable(castable):
            raise UsageError(
                f"elements of {castable.name} cannot be cast; only {', '.join(_FLOATS)} can"
            )
    if kind is target_kind:
        target[...] = source
        return CastCounts()
    counts = CastCounts()
    for begin in range(0, len(source), STRETCH):
        part, out = source[begin : begin + STRETCH], target[begin : begin + STRETCH]
        counts += _cast_stretch(part, kind.name, out, target_kind.name)
    return counts


def as_float32(source: NDArray[Any], kind: DType) -> NDArray[np.float32]:
    """Return elements of a narrower type exactly, and float64 rounded, as float32."""
    if kind.name == "bfloat16":
        return np.left_shift(source.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    values: NDArray[np.float32] = source.view(kind.name).astype(np.float32)
    return values


def _cast_stretch(part: NDArray[Any], kind: str, out: NDArray[Any], target: str) -> CastCounts:
    # NumPy warns of overflow and of signalling NaNs; both are counted below.
    with np.errstate(all="ignore"):
        if target == "bfloat16":
            wide = _round_to_odd(part.view(np.float64)) if kind == "float64" else part
            if kind == "float16":
                wide = part.view(np.float16).astype(np.float32)
            _round_to_bfloat16(wide.view(np.uint32), out.view(np.uint16))
        else:
            wide = as_float32(part, dtype(kind)) if kind == "bfloat16" else part.view(kind)
            np.copyto(out.view(target), wide, casting="same_kind")
        return _count(part, kind, out, target)


def _round_to_bfloat16(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
    # A NaN whose mantissa overflows would become a number: use the quiet NaN of its sign.
    is_nan = np.isnan(bits.view(np.float32))
    if is_nan.any():
        out[is_nan] = (bits[is_nan] >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7FC0)


def _round_to_odd(wide: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 towards zero, with the last bit set if anything was cut off."""
    narrow = wide.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    # The bits of a float grow with its magnitude, in both signs: 1 less is the next number towards
    # zero, and below an infinity the largest number.
    bits -= (np.abs(back) > np.abs(wide)).astype(np.uint32)
    bits |= ((back != wide) & ~np.isnan(wide)).astype(np.uint32)
    return narrow


def _count(part: NDArray[Any], kind: str, out: NDArray[Any], target: str) -> CastCounts:
    if target in _EXPONENTS:
        exponent = np.uint16(_EXPONENTS[target])
        special = int(np.count_nonzero((out.view(np.uint16) & exponent) == exponent))
    else:
        special = int(np.count_nonzero(~np.isfinite(out.view(target))))
    if not special:
        return CastCounts()
    wide = as_float32(part, dtype(kind)) if kind == "bfloat16" else part.view(kind)
    before = int(np.count_nonzero(~np.isfinite(wide)))
    return CastCounts(special - before, before)


# Exponent bits, mantissa bits, bias, infinite patterns, NaN patterns.
_TYPES: dict[str, tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = {
    "float8_e4m3fn": (4, 3, 7, (), (0x7F, 0xFF)),
    "float8_e4m3fnuz": (4, 3, 8, (), (0x80,)),
    "float8_e5m2": (5, 2, 15, (0x7C, 0xFC), (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e5m2fnuz": (5, 2, 16, (), (0x80,)),
}
#: The largest number of the type to which weights are quantized.
MAX_E4M3FN = 448.0
#: The sixteen values of e2m1, the elements of MXFP4 and NVFP4.
E2M1: NDArray[np.float32] = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=np.float32,
)


@cache
def float8_values(name: str) -> NDArray[np.float32]:
    """Return the values of the 256 patterns of an 8-bit type, of shape `(256,)`.

    Raises:
        UsageError: a type without such a table.

    >>> float8_values("float8_e4m3fn")[[0x00, 0x38, 0x7E, 0x81]].tolist()
    [0.0, 1.0, 448.0, -0.001953125]
    """
    if name == "float8_e8m0fnu":
        # The type has exponent bits only; all bits 1 is NaN.
        exact = np.ldexp(1.0, np.arange(256) - 127)
        exact[255] = np.nan
        powers = exact.astype(np.float32)
        powers.flags.writeable = False
        return powers
    if name not in _TYPES:
        raise UsageError(f"the values of {name} are unknown; known types are {', '.join(_TYPES)}")
    exponents, mantissas, bias, infinite, nans = _TYPES[name]
    patterns = np.arange(256)
    exponent = patterns >> mantissas & (1 << exponents) - 1
    fraction = (patterns & (1 << mantissas) - 1) / (1 << mantissas)
    values = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    values[patterns >= 128] *= -1
    values[list(infinite)] = np.copysign(np.inf, values[list(infinite)])
    values[list(nans)] = np.nan
    table: NDArray[np.float32] = values.astype(np.float32)
    table.flags.writeable = False
    return table


def decode_float8(bits: NDArray[Any], kind: DType) -> NDArray[np.float32]:
    """Return elements of an 8-bit type as float32, exactly."""
    values: NDArray[np.float32] = float8_values(kind.name)[bits.view(np.uint8)]
    return values


def round_to_e4m3fn(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to float8_e4m3fn, to nearest with ties to even; larger values saturate at 448.

    Source: `torch.Tensor.to(torch.float8_e4m3fn)`, which saturates too.

    >>> [hex(x) for x in round_to_e4m3fn(np.array([1, -0.001, 460, 1e9], np.float32)).tolist()]
    ['0x38', '0x81', '0x7e', '0x7e']
    """
    patterns = np.empty(values.shape, dtype=np.uint8)
    flat, out = np.ascontiguousarray(values).reshape(-1), patterns.reshape(-1)
    for begin in range(0, len(flat), STRETCH):
        out[begin : begin + STRETCH] = _round_stretch(flat[begin : begin + STRETCH])
    return patterns


def _round_stretch(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Three of 23 bits remain. The bias of the exponent changes from 127 to 7.
    rounded = (magnitude >> np.uint32(20)) & np.uint32(1)
    rounded += np.uint32(0x7FFFF)
    rounded += magnitude
    rounded >>= np.uint32(20)
    rounded -= np.uint32((127 - 7) << 3)
    # Below 2**-6 a pattern is a multiple of 2**-9; the next pattern is the smallest normal.
    least = np.uint32((127 - 6) << 23)
    small = np.rint(np.minimum(magnitude, least).view(np.float32) * np.float32(512))
    rounded = np.where(magnitude < least, small.astype(np.uint32), rounded)
    np.minimum(rounded, np.uint32(0x7E), out=rounded)
    is_nan = magnitude > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = 0x7F
    rounded |= bits >> np.uint32(24) & np.uint32(0x80)
    return rounded


# The positions of the elements, from the lowest bits up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of bytes with two elements each, along the last dimension.

    >>> unpack_e2m1(np.array([0x21, 0x9F], np.uint8)).tolist()
    [0.5, 1.0, -6.0, -0.5]
    """
    values = np.empty((*packed.shape, 2), dtype=np.float32)
    values[..., 0] = E2M1[packed & 0x0F]
    values[..., 1] = E2M1[packed >> 4]
    return values.reshape(*packed.shape[:-1], -1)


def unpack_integers(
    packed: NDArray[Any], bits: int, dimension: int, *, is_awq: bool = False
) -> NDArray[np.float32]:
    """Return the unsigned integers of int32 words, along a dimension, as float32.

    >>> unpack_integers(np.array([[0x76543210]], np.uint32), 4, 1).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """
    words = np.moveaxis(packed.view(np.uint32), dimension, -1)
    count = 32 // bits
    values = np.empty((*words.shape, count), dtype=np.float32)
    for position in range(count):
        at = _AWQ_ORDER[position] if is_awq else position
        values[..., at] = words >> np.uint32(bits * position) & np.uint32((1 << bits) - 1)
    return np.moveaxis(values.reshape(*words.shape[:-1], -1), -1, dimension)
