"""Element types of results, and arithmetic in NumPy of types that NumPy lacks.

NumPy promotes only its own types. For types of `ml_dtypes` such as `bfloat16`, the rules for
combining them with Python numbers or with each other differ between functions, and the result is
`float32` or `float64` where every other library keeps the type. So operators that compute get such
operands as `float32`, which represents all of their numbers; results of the narrow type are rounded
once, at the end. Matrix products and sums therefore accumulate in `float32`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.core.result_types import kind_of, meant, stand_in

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
    given = [one.dtype for one in work.operands if one is not None]
    asked = [value for value in work.attributes.values() if isinstance(value, DType)]
    is_narrow = any(map(_is_narrow, [*given, *asked]))
    if not is_narrow or operator.name == "astype" or operator.family not in _COMPUTING:
        return operator.local_functions(work)
    wide = replace(
        work,
        operands=tuple(
            one.with_dtype(_WIDE) if one is not None and _is_narrow(one.dtype) else one
            for one in work.operands
        ),
        attributes={
            name: _WIDE if isinstance(value, DType) and _is_narrow(value) else value
            for name, value in work.attributes.items()
        },
    )

    @lru_cache(typed=True)
    def find_types(*numbers: Any) -> tuple[DType, ...]:
        return find_result_types(operator, work, numbers, 1)[0]

    def widen(function: Function) -> Function:
        def computed(*operands: Any) -> Any:
            pairs = list(zip(operands, work.operands, strict=True))
            arrays = [
                x.astype(np.float32) if one is not None and _is_narrow(one.dtype) else x
                for x, one in pairs
            ]
            types = find_types(*(x for x, one in pairs if one is None))
            found = function(*arrays)
            if not isinstance(found, tuple | list):
                return _round(found, types[0])
            every = [*types, *types[-1:] * (len(found) - len(types))]
            return tuple(_round(one, kind) for one, kind in zip(found, every, strict=True))

        return computed

    return [widen(function) for function in operator.local_functions(wide)]


def check_promotion(operator: Operator, work: LocalWork) -> None:
    """Raise UsageError for integers that PyTorch would promote to the narrower type.

    PyTorch does not promote `uint16`, `uint32` and `uint64`. It raises an error only if both
    operands have dimensions; if one is zero-dimensional, the result has the other's type.
    """
    if operator.family != "elementwise":
        return
    given = [one for one in work.operands if one is not None and "integer" in kind_of(one.dtype)]
    types = {one.dtype.name for one in given}
    if len(types) > 1 and not types.isdisjoint(_UNPROMOTED):
        said = ", ".join(f"{one.dtype.name}{list(one.shape)}" for one in given)
        raise UsageError(
            f"{work.name} of {said}: PyTorch promotes no {', '.join(sorted(_UNPROMOTED & types))}; "
            "give both one type, by sp.astype"
        )


def _is_narrow(dtype: DType) -> bool:
    """Return whether a type is a floating type that NumPy lacks."""
    return (
        dtype.itemsize_bytes < 4 and dtype.name != "float16" and kind_of(dtype) == "real floating"
    )


def _round(found: Any, kind: DType) -> Any:
    # Operands were widened to float32, so other types are the operator's own: booleans, indices.
    is_rounded = _is_narrow(kind) and found.dtype in (np.float32, np.float64)
    return found.astype(kind.numpy) if is_rounded else found


_FEW = 2
"""The number of elements along a dimension from which the type of a result is found."""


def find_result_types(
    operator: Operator, work: LocalWork, numbers: Sequence[Any], count: int
) -> tuple[tuple[DType, ...], bool]:
    """Return the results' element types, and whether there is a single result."""
    # 1. Types that the operator's record names; the last type applies to all further results.
    given = [one.dtype for one in work.operands if one is not None]
    if operator.result_types is not None:
        named = operator.result_types(given, work.attributes, work.library.name)
        return (*named, *named[-1:] * (count - len(named))), count == 1
    # 2. Otherwise the types that the library computes for a few elements.
    results, is_single = compute_few(operator, work, numbers)
    asked = [value for value in work.attributes.values() if isinstance(value, DType)]
    made = map(work.library.dtype_of, results)
    return tuple(meant(one, asked or given) for one in made), is_single


def compute_few(
    operator: Operator, work: LocalWork, numbers: Sequence[Any]
) -> tuple[tuple[Any, ...], bool]:
    """Compute a few elements; return the results, and whether there is a single result.

    NumPy computes with stand-ins for types that it lacks. Raises the library's error for types that
    it does not accept.
    """
    few = tuple(
        None if one is None else ArrayType([min(size, _FEW) for size in one.shape], one.dtype)
        for one in work.operands
    )
    is_numpy = work.library.name == "numpy"
    attributes = _replace_types(work.attributes) if is_numpy else work.attributes
    here = LocalWork(work.name, attributes, few, (), (), (0,), work.library)
    (function,) = operator.local_functions(here)
    waiting = list(numbers)
    arrays = [
        waiting.pop(0)
        if one is None
        else work.library.array(_make_elements(one, operator), None if is_numpy else one.dtype)
        for one in few
    ]
    with np.errstate(all="ignore"):
        found = function(*arrays)
    is_single = not isinstance(found, tuple | list)
    return (found,) if is_single else tuple(found), is_single


def _make_elements(kind: ArrayType, operator: Operator) -> Any:
    """Return ones, or identity matrices, which can be divided by and decomposed; indices are 0."""
    numpy = stand_in(kind.dtype)
    is_elementwise = operator.family == "elementwise"
    if numpy.kind in "iub" and not is_elementwise:
        return np.zeros(kind.shape, dtype=numpy)
    if kind.ndim < 2 or is_elementwise:
        return np.ones(kind.shape, dtype=numpy)
    unit = np.eye(*kind.shape[-2:], dtype=numpy)
    return np.broadcast_to(unit, kind.shape)


def _replace_types(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: as_dtype(stand_in(value)) if isinstance(value, DType) else value
        for name, value in attributes.items()
    }
