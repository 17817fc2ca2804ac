"""MLIR's names of element types, which Shardy and the `shard` dialect share."""

from __future__ import annotations

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import NotationError

ELEMENTS = {
    "bool": "i1",
    "bfloat16": "bf16",
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"ui{bits}" for bits in (8, 16, 32, 64)},
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    **{
        f"float8_{kind}": f"f8{kind.upper()}"
        for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu", "e3m4", "e4m3")
    },
}
"""Our name of a dtype, and MLIR's."""


def element_text(dtype: DType | str, system: str) -> str:
    """MLIR's word for a dtype. Raises NotationError where it has none.

    >>> element_text("bfloat16", "MLIR")
    'bf16'
    """
    element = as_dtype(dtype).name
    if element not in ELEMENTS:
        raise NotationError(
            f"{system}'s tensors have no elements of {element!r}; they have {', '.join(ELEMENTS)}"
        )
    return ELEMENTS[element]
