"""Casts between floating-point types, correctly rounded, without a package that has bfloat16.

1. Narrower types are widened exactly, to float32 or float64.
2. One rounding to the target, to nearest and ties to even: float16 by NumPy; bfloat16 on the bits
   of float32::

       0 10000010 1001001 1000000000000000     half way: add 0x7fff and the last bit that stays
       0 10000010 1001010                      carries make the exponent right too

3. float64 becomes bfloat16 through a float32 that is rounded to odd, so that it is rounded once.

Work is done in stretches that fit into a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType, dtype
from reshard.elements.block_scaling import QUANTIZATIONS
from reshard.errors import UsageError

#: Types between which elements are cast, by what users may call them.
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
# All ones: infinity or not a number.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


@dataclass(frozen=True, slots=True)
class CastCounts:
    """What became of elements: finite ones that overflowed, and those that were not finite."""

    overflowed: int = 0
    not_finite: int = 0

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(self.overflowed + other.overflowed, self.not_finite + other.not_finite)


def cast_type(name: object) -> DType:
    """Return the type that a user names: `bf16`, `bfloat16`, `torch.bfloat16`, or PyTorch's object.

    Raises:
        UsageError: none of those to which elements are cast.

    >>> cast_type("bf16"), cast_type("torch.float16")
    (DType('bfloat16'), DType('float16'))
    """
    text = str(name).removeprefix("torch.")
    if text not in CAST_TYPES:
        raise UsageError(
            f"the type {str(name)!r}; elements are cast to bf16, fp16 or fp32 (bfloat16, float16, "
            f"float32). Weights are quantised by --quantize {QUANTIZATIONS[0]}, in Python "
            f"quantize={QUANTIZATIONS[0]!r}"
        )
    return dtype(CAST_TYPES[text])


def is_castable(kind: DType) -> bool:
    """Whether elements of a type are cast: floating point of 16 bits or more."""
    return kind.name in _FLOATS


def cast_elements(
    source: NDArray[Any], kind: DType, target: NDArray[Any], target_kind: DType
) -> CastCounts:
    """Write elements in another type, rounded to nearest, ties to even.

    Args:
        source: bare elements of `kind`, of shape `(n,)`.
        target: bare elements of `target_kind`, of shape `(n,)`; it is written.

    Raises:
        UsageError: types between which nothing is cast.

    >>> import numpy as np
    >>> halves = np.empty(3, dtype=np.uint16)
    >>> cast_elements(np.array([1, 1.00390625, 1e30], np.float32), dtype("float32"), halves,
    ...     dtype("bfloat16"))
    CastCounts(overflowed=0, not_finite=0)
    >>> [hex(bits) for bits in halves.tolist()]
    ['0x3f80', '0x3f80', '0x714a']
    """
    for one in (kind, target_kind):
        if not is_castable(one):
            raise UsageError(f"elements of {one.name} are not cast; only {', '.join(_FLOATS)} are")
    if kind is target_kind:
        target[...] = source
        return CastCounts()
    counts = CastCounts()
    for begin in range(0, len(source), STRETCH):
        part, out = source[begin : begin + STRETCH], target[begin : begin + STRETCH]
        counts += _cast_stretch(part, kind.name, out, target_kind.name)
    return counts


def as_float32(source: NDArray[Any], kind: DType) -> NDArray[np.float32]:
    """Elements of a narrower type, exactly; float64 rounded."""
    if kind.name == "bfloat16":
        return np.left_shift(source.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    values: NDArray[np.float32] = source.view(kind.name).astype(np.float32)
    return values


def _cast_stretch(part: NDArray[Any], kind: str, out: NDArray[Any], target: str) -> CastCounts:
    # NumPy warns of overflow and of signalling NaNs; both are counted here.
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
    # A NaN whose bits carry would become a number: it becomes the quiet one of its sign.
    is_nan = np.isnan(bits.view(np.float32))
    if is_nan.any():
        out[is_nan] = (bits[is_nan] >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7FC0)


def _round_to_odd(wide: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 towards zero, with the last bit set where something was cut off."""
    narrow = wide.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
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
