"""Element types of the results of operators, which their records name.

If a record names none, the results have the types that the library gives: NumPy's promotions, found
by computing a few elements. `float16` stands in for types that NumPy lacks: it promotes as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype

ResultTypes = Callable[[Sequence[DType], Mapping[str, Any], str], tuple[DType, ...]]
"""From arrays' element types, attributes and the library's name to the results' element types.

The last type applies to all further results.
"""

_STAND_IN = as_dtype("float16")

BY_KIND: dict[str, tuple[DType, ...]] = {
    "bool": (as_dtype("bool"),),
    "signed integer": tuple(as_dtype(f"int{bits}") for bits in (8, 16, 32, 64)),
    "unsigned integer": tuple(as_dtype(f"uint{bits}") for bits in (8, 16, 32, 64)),
    "real floating": (as_dtype("float32"), as_dtype("float64")),
    "complex floating": (as_dtype("complex64"), as_dtype("complex128")),
}
"""The array API's types, by the names that `isdtype` takes."""


def kind_of(dtype: DType) -> str:
    """Return the kind of a type, as `isdtype` takes it.

    >>> kind_of(as_dtype("bfloat16"))
    'real floating'
    """
    for kind, types in BY_KIND.items():
        if dtype in types:
            return kind
    return "complex floating" if dtype.name.startswith("complex") else "real floating"


def promoted(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Return the type to which the operands' types promote.

    >>> promoted([as_dtype("int8"), as_dtype("float32")], {}, "numpy")
    (DType('float32'),)
    """
    return (meant(as_dtype(np.result_type(*map(stand_in, dtypes))), dtypes),)


def of_first(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Return the type of the first operand."""
    return (dtypes[0],)


def boolean(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Truth values."""
    return (as_dtype("bool"),)


def index(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Indices."""
    return (as_dtype("int64"),)


def value_and_index(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Elements of the first operand, and their indices."""
    return dtypes[0], as_dtype("int64")


def asked(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Return the type that the attribute `dtype` names."""
    return (as_dtype(attributes["dtype"]),)


def total(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Return the type of a sum or product: as asked, else at least the default integer type.

    >>> total([as_dtype("int8")], {}, "numpy"), total([as_dtype("float32")], {}, "numpy")
    ((DType('int64'),), (DType('float32'),))
    """
    if attributes.get("dtype") is not None:
        return asked(dtypes, attributes, library)
    kind = kind_of(dtypes[0])
    # PyTorch has uint64, but cannot add it.
    # Like NumPy's sum: integers narrower than the default integer would wrap around.
    if kind in ("bool", "signed integer") or (kind == "unsigned integer" and library == "torch"):
        return (as_dtype("int64"),)
    return (as_dtype("uint64"),) if kind == "unsigned integer" else (dtypes[0],)


def stand_in(dtype: DType) -> np.dtype[Any]:
    """Return the type of NumPy that promotes as a type does."""
    return dtype.numpy if _is_numpys(dtype) else _STAND_IN.numpy


def meant(found: DType, given: Sequence[DType]) -> DType:
    """Return the type of a result from the computed type, which may be a stand-in.

    >>> bfloat16, float16 = as_dtype("bfloat16"), as_dtype("float16")
    >>> meant(float16, [bfloat16, as_dtype("int8")]), meant(float16, [bfloat16, float16])
    (DType('bfloat16'), DType('float32'))
    """
    if found is not _STAND_IN:
        return found
    # float16 stands for itself, and for each type that NumPy lacks. Neither of two such types can
    # represent all numbers of the other.
    narrow = {one for one in given if one is _STAND_IN or not _is_numpys(one)}
    if len(narrow) > 1:
        return as_dtype("float32")
    return narrow.pop() if narrow else found


def _is_numpys(dtype: DType) -> bool:
    """Return whether NumPy itself has the type; packages that add types keep NumPy's own names."""
    try:
        return np.dtype(dtype.name).isbuiltin == 1
    except TypeError:
        return False
