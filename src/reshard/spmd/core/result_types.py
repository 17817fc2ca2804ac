"""Element types of the results of operators, and arithmetic of types that NumPy lacks.

The record of an operator names the types of its results, by a function of this module. If it names
none, they are the types that the library gives: its promotions, found by computing a few elements.

NumPy promotes only its own types. For types of `ml_dtypes` such as `bfloat16`, the rules for
combining them with Python numbers or with each other differ between functions, and the result is
`float32` or `float64` where every other library keeps the type. So operators that compute get such
operands as `float32`, which represents all of their numbers; results of the narrow type are rounded
once, at the end. Matrix products and sums therefore accumulate in `float32`. In promotions
`float16` stands in for these types: it promotes as they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator, ResultTypes

_STAND_IN = as_dtype("float16")

BY_KIND: dict[str, tuple[DType, ...]] = {
    "bool": (as_dtype("bool"),),
    "signed integer": tuple(as_dtype(f"int{bits}") for bits in (8, 16, 32, 64)),
    "unsigned integer": tuple(as_dtype(f"uint{bits}") for bits in (8, 16, 32, 64)),
    "real floating": (as_dtype("float32"), as_dtype("float64")),
    "complex floating": (as_dtype("complex64"), as_dtype("complex128")),
}
"""The array API's types, by the names that `isdtype` takes."""

_KINDS = {dtype: kind for kind, types in BY_KIND.items() for dtype in types}


PYTHON_NUMBERS: tuple[type, ...] = (bool, int, float, complex)
"""The classes of numbers that take an array's type when they are combined with it."""


def as_python_number(value: Any) -> Any:
    """Convert a number of a subclass, such as a member of an `IntEnum`, to Python's own class.

    NumPy does not take other classes for numbers: it converts them to arrays of 64-bit types.

    >>> from enum import IntEnum
    >>> Axis = IntEnum("Axis", ["ROWS"])
    >>> as_python_number(Axis.ROWS), as_python_number("no number")
    (1, 'no number')
    """
    # NumPy's float64 is a float to Python, but an array without dimensions to NumPy.
    if isinstance(value, np.generic):
        return value
    kind = next((kind for kind in PYTHON_NUMBERS if isinstance(value, kind)), None)
    return value if kind is None or value.__class__ is kind else kind(value)


def kind_of(dtype: DType) -> str:
    """Return the kind of a type, as `isdtype` takes it.

    >>> kind_of(as_dtype("bfloat16"))
    'real floating'
    """
    known = _KINDS.get(dtype)
    if known is not None:
        return known
    # The array API lacks names for half precision and narrower types, which are floating as well.
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


def value_and_index(
    dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
) -> tuple[DType, ...]:
    """Return the types of elements of the first operand, and of their indices."""
    return dtypes[0], as_dtype("int64")


def _always(name: str) -> ResultTypes:
    return lambda dtypes, attributes, library: (as_dtype(name),)


boolean, index = _always("bool"), _always("int64")


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


def meant(computed: DType, types: Sequence[DType]) -> DType:
    """Return the type of a result from the computed type, which may be a stand-in.

    >>> bfloat16, float16 = as_dtype("bfloat16"), as_dtype("float16")
    >>> meant(float16, [bfloat16, as_dtype("int8")]), meant(float16, [bfloat16, float16])
    (DType('bfloat16'), DType('float32'))
    """
    # Element types are interned, so identity compares them.
    if computed is not _STAND_IN:
        return computed
    # float16 stands for itself, and for each type that NumPy lacks. Neither of two such types can
    # represent all numbers of the other.
    narrow = {dtype for dtype in types if dtype is _STAND_IN or not _is_numpys(dtype)}
    if len(narrow) > 1:
        return as_dtype("float32")
    return narrow.pop() if narrow else computed


def _is_numpys(dtype: DType) -> bool:
    """Return whether NumPy itself has the type; packages that add types keep NumPy's own names."""
    try:
        # Types that `ml_dtypes` registers have 2 here, and names unknown to NumPy raise TypeError.
        return np.dtype(dtype.name).isbuiltin == 1
    except TypeError:
        return False


_WIDE = as_dtype("float32")
_UNPROMOTED = {"uint16", "uint32", "uint64"}
_COMPUTING = ("elementwise", "products", "reductions", "windows", "networks", "linear algebra")
"""The families of operators that do arithmetic; the others only move or order elements."""


def widened_functions(operator: Operator, work: LocalWork) -> list[Function]:
    """Return an operator's NumPy functions, which compute in `float32` if a type is narrow.

    >>> import ml_dtypes
    >>> from reshard.spmd.core.backend import library
    >>> from reshard.spmd.core.operator import operators
    >>> numbers = np.array([1, 3], ml_dtypes.bfloat16)
    >>> kind = ArrayType((2,), as_dtype("bfloat16"))
    >>> work = LocalWork("multiply", {}, (kind, None), (), (), (0,), library("numpy"))
    >>> (function,) = widened_functions(operators["multiply"], work)
    >>> function(numbers, 0.5).dtype
    dtype(bfloat16)
    """
    operand_dtypes = [operand.dtype for operand in work.operands if operand is not None]
    asked = [value for value in work.attributes.values() if isinstance(value, DType)]
    is_narrow = any(map(_is_narrow, [*operand_dtypes, *asked]))
    if not is_narrow or operator.name == "astype" or operator.family not in _COMPUTING:
        return operator.local_functions(work)
    wide = replace(
        work,
        operands=tuple(
            operand.with_dtype(_WIDE)
            if operand is not None and _is_narrow(operand.dtype)
            else operand
            for operand in work.operands
        ),
        attributes={
            name: _WIDE if isinstance(value, DType) and _is_narrow(value) else value
            for name, value in work.attributes.items()
        },
    )

    # Typed, since 1, 1.0 and True are equal as keys, but promote differently.
    @lru_cache(typed=True)
    def find_types(*numbers: Any) -> tuple[DType, ...]:
        return find_result_types(operator, work, numbers, 1)[0]

    def widen(function: Function) -> Function:
        def computed(*operands: Any) -> Any:
            pairs = list(zip(operands, work.operands, strict=True))
            arrays = [
                x.astype(np.float32) if operand is not None and _is_narrow(operand.dtype) else x
                for x, operand in pairs
            ]
            types = find_types(*(x for x, operand in pairs if operand is None))
            result = function(*arrays)
            if not isinstance(result, tuple | list):
                return _round(result, types[0])
            # As in `find_result_types`, all further results have the last type.
            result_dtypes = [*types, *types[-1:] * (len(result) - len(types))]
            return tuple(
                _round(array, kind) for array, kind in zip(result, result_dtypes, strict=True)
            )

        return computed

    return [widen(function) for function in operator.local_functions(wide)]


def check_promotion(operator: Operator, work: LocalWork) -> None:
    """Raise UsageError for integers that PyTorch would promote to the narrower type.

    PyTorch does not promote `uint16`, `uint32` and `uint64`. It raises an error only if both
    operands have dimensions; if one is zero-dimensional, the result has the other's type.
    """
    if operator.family != "elementwise":
        return
    integers = [
        operand
        for operand in work.operands
        if operand is not None and "integer" in kind_of(operand.dtype)
    ]
    types = {operand.dtype.name for operand in integers}
    if len(types) > 1 and not types.isdisjoint(_UNPROMOTED):
        said = ", ".join(f"{operand.dtype.name}{list(operand.shape)}" for operand in integers)
        raise UsageError(
            f"{work.name} of {said}: PyTorch promotes no {', '.join(sorted(_UNPROMOTED & types))}; "
            "give both one type, by sp.astype"
        )


def _is_narrow(dtype: DType) -> bool:
    """Return whether a type is a floating type that NumPy lacks."""
    return (
        dtype.itemsize_bytes < 4 and dtype.name != "float16" and kind_of(dtype) == "real floating"
    )


def _round(array: Any, kind: DType) -> Any:
    # Operands were widened to float32, so other types are the operator's own: booleans, indices.
    is_rounded = _is_narrow(kind) and array.dtype in (np.float32, np.float64)
    return array.astype(kind.numpy) if is_rounded else array


_FEW = 2
"""The number of elements along a dimension from which the type of a result is found."""


def find_result_types(
    operator: Operator, work: LocalWork, numbers: Sequence[Any], count: int
) -> tuple[tuple[DType, ...], bool]:
    """Return the results' element types, and whether there is a single result."""
    # 1. Types that the operator's record names; the last type applies to all further results.
    operand_dtypes = [operand.dtype for operand in work.operands if operand is not None]
    if operator.result_types is not None:
        named = operator.result_types(operand_dtypes, work.attributes, work.library.name)
        return (*named, *named[-1:] * (count - len(named))), count == 1
    # 2. Otherwise the types that the library computes for a few elements.
    results, is_single = compute_few(operator, work, numbers)
    asked = [value for value in work.attributes.values() if isinstance(value, DType)]
    dtypes = map(work.library.dtype_of, results)
    return tuple(meant(dtype, asked or operand_dtypes) for dtype in dtypes), is_single


def compute_few(
    operator: Operator, work: LocalWork, numbers: Sequence[Any]
) -> tuple[tuple[Any, ...], bool]:
    """Compute a few elements; return the results, and whether there is a single result.

    NumPy computes with stand-ins for types that it lacks. Raises the library's error for types that
    it does not accept.
    """
    few = tuple(
        None
        if operand is None
        else ArrayType([min(size, _FEW) for size in operand.shape], operand.dtype)
        for operand in work.operands
    )
    is_numpy = work.library.name == "numpy"
    attributes = {
        name: as_dtype(stand_in(value)) if is_numpy and isinstance(value, DType) else value
        for name, value in work.attributes.items()
    }
    here = LocalWork(work.name, attributes, few, (), (), (0,), work.library)
    (function,) = operator.local_functions(here)
    # Operands without a type are Python numbers, which are given in order: their kind decides
    # promotion, and their value may (a shape, an exponent below 0).
    waiting = list(numbers)
    arrays = [
        waiting.pop(0)
        if operand is None
        else work.library.array(
            _make_elements(operand, operator), None if is_numpy else operand.dtype
        )
        for operand in few
    ]
    # These elements are not the program's, so warnings about them would mislead.
    with np.errstate(all="ignore"):
        result = function(*arrays)
    is_single = not isinstance(result, tuple | list)
    return (result,) if is_single else tuple(result), is_single


def _make_elements(kind: ArrayType, operator: Operator) -> Any:
    """Return ones, or identity matrices, which can be divided by and decomposed; indices are 0."""
    numpy = stand_in(kind.dtype)
    is_elementwise = operator.family == "elementwise"
    # Integers may be indices. Index 0 is valid for every length of at least 1.
    if numpy.kind in "iub" and not is_elementwise:
        return np.zeros(kind.shape, dtype=numpy)
    if kind.ndim < 2 or is_elementwise:
        return np.ones(kind.shape, dtype=numpy)
    unit = np.eye(*kind.shape[-2:], dtype=numpy)
    return np.broadcast_to(unit, kind.shape)
