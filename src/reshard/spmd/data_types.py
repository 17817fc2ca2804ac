"""Element types by the names of the array API: constants, and what is asked of types.

Types are reshard's own `DType`s, the same for arrays of NumPy and of PyTorch.

>>> result_type(int16, float32), isdtype(uint8, "integral")
(DType('float32'), True)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.spmd.array_value import ArrayValue
from reshard.spmd.operation_call import call

bool = as_dtype("bool")
int8, int16, int32, int64 = (as_dtype(f"int{bits}") for bits in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (as_dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
float32, float64 = as_dtype("float32"), as_dtype("float64")
complex64, complex128 = as_dtype("complex64"), as_dtype("complex128")

BY_KIND: dict[str, tuple[DType, ...]] = {
    "bool": (bool,),
    "signed integer": (int8, int16, int32, int64),
    "unsigned integer": (uint8, uint16, uint32, uint64),
    "real floating": (float32, float64),
    "complex floating": (complex64, complex128),
}
"""The standard's types, by the names that `isdtype` takes."""

_JOINED = {
    "integral": ("signed integer", "unsigned integer"),
    "numeric": ("signed integer", "unsigned integer", "real floating", "complex floating"),
}


def kind_of(dtype: DType) -> str:
    """The kind of a type, as `isdtype` takes it.

    >>> kind_of(as_dtype("bfloat16"))
    'real floating'
    """
    for kind, types in BY_KIND.items():
        if dtype in types:
            return kind
    return "complex floating" if dtype.name.startswith("complex") else "real floating"


def _type_of(value: Any) -> DType:
    return value.dtype if isinstance(value, ArrayValue) else as_dtype(value)  # type: ignore[attr-defined]


def astype(x: Any, dtype: object, /, *, copy: object = True, device: object = None) -> Any:
    """The same numbers as elements of another type.

    Partial sums stay partial where the new type loses nothing: a float to a wider one.
    """
    wanted = as_dtype(dtype)
    if wanted is x.dtype:
        return x
    kinds = (kind_of(x.dtype), kind_of(wanted))
    floats = ("real floating", "complex floating")
    is_wider = kinds[0] in floats and kinds[1] in floats and _holds(x.dtype, wanted)
    attributes: dict[str, Any] = {"dtype": wanted, "widening": is_wider}
    return call("astype", (x,), attributes)


def _holds(dtype: DType, wanted: DType) -> object:
    return np.can_cast(dtype.numpy, wanted.numpy)


def can_cast(from_: Any, to: object, /) -> object:
    """Whether every number of one type (or array) is one of another type too."""
    return np.can_cast(_type_of(from_).numpy, as_dtype(to).numpy)


def finfo(type: Any, /) -> Any:
    """What a floating type can hold: see `numpy.finfo`."""
    return np.finfo(_type_of(type).numpy)


def iinfo(type: Any, /) -> Any:
    """What a type of whole numbers can hold: see `numpy.iinfo`."""
    return np.iinfo(_type_of(type).numpy)


def isdtype(dtype: object, kind: Any) -> object:
    """Whether a type is another one, of a kind, or one of several.

    Raises UsageError for an unknown kind.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    known = as_dtype(dtype)
    if isinstance(kind, str):
        if kind not in BY_KIND and kind not in _JOINED:
            raise UsageError(
                f"unknown kind {kind!r}; it is one of {', '.join([*BY_KIND, *_JOINED])}"
            )
        return kind_of(known) in _JOINED.get(kind, (kind,))
    return known is as_dtype(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The type that operands of these types (arrays, types, numbers) make together."""
    given = []
    for value in arrays_and_dtypes:
        is_number = isinstance(value, int | float | complex) and not isinstance(value, DType)
        given.append(value if is_number else _type_of(value).numpy)
    return as_dtype(np.result_type(*given))
