"""Reductions, and cumulative sums: the array API's statistical and utility functions.

Over an axis that is cut, each rank reduces its part: the result holds contributions, combined
when they are needed. A mean is a sum divided by the whole count, so that uneven parts weigh what
they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.spmd.core.operator import operators
from reshard.spmd.core.result_types import kind_of, promoted
from reshard.spmd.functions import data_types, elementwise
from reshard.spmd.functions.array_arguments import of_arrays
from reshard.spmd.functions.manipulation import reshape
from reshard.spmd.functions.running_totals import running_totals
from reshard.spmd.functions.wide_types import widen
from reshard.spmd.rules.shapes import axes_of, axis_of
from reshard.spmd.shards.operation_call import call

Axis = int | Sequence[int] | None


def _make_attributes(axis: Axis, keepdims: bool) -> dict[str, Any]:
    return {"axis": tuple(axis) if isinstance(axis, list) else axis, "keepdims": bool(keepdims)}


def _count_reduced(shape: Sequence[int], axis: Axis) -> int:
    """The number of elements that are reduced to one."""
    return math.prod(shape[one] for one in axes_of(len(shape), axis))


def _find_total_type(name: str, x: Any, dtype: object) -> DType:
    """The element type of a total, as the operator's row has it."""
    types = operators[name].result_types or promoted
    return types((x.dtype,), {"dtype": dtype}, x.runner.computing.name)[0]


@of_arrays
def sum(x: Any, /, *, axis: Axis = None, dtype: object = None, keepdims: bool = False) -> Any:
    """The sum over axes, over all when None."""
    wide = _find_total_type("sum", x, dtype)
    return call("sum", (x,), _make_attributes(axis, keepdims), {"dtype": wide})


@of_arrays
def prod(x: Any, /, *, axis: Axis = None, dtype: object = None, keepdims: bool = False) -> Any:
    """The product over axes, over all when None."""
    wide = _find_total_type("prod", x, dtype)
    return call("prod", (x,), _make_attributes(axis, keepdims), {"dtype": wide})


@of_arrays
def max(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """The maximum over axes, over all when None."""
    check_some(x, axis, "max")
    return call("max", (x,), _make_attributes(axis, keepdims))


@of_arrays
def min(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """The minimum over axes, over all when None."""
    check_some(x, axis, "min")
    return call("min", (x,), _make_attributes(axis, keepdims))


def check_ordered(x: Any, name: str) -> None:
    """Raises UsageError for complex numbers."""
    if kind_of(x.dtype) == "complex floating":
        raise UsageError(f"{name} of {x.dtype}: complex numbers have no order; take real or abs")


def check_some(x: Any, axis: Axis, name: str) -> None:
    """Raises UsageError for an extremum of complex numbers, and for one of no elements."""
    check_ordered(x, name)
    if not _count_reduced(x.shape, axis):
        raise UsageError(
            f"{name} over axes {axis} of shape {list(x.shape)}, which have no elements; at least "
            "one was expected"
        )


@of_arrays
def all(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether all elements are true over axes, over all when None."""
    return call("all", (_as_truth(x),), _make_attributes(axis, keepdims))


@of_arrays
def any(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether any element is true over axes, over all when None."""
    return call("any", (_as_truth(x),), _make_attributes(axis, keepdims))


def _as_truth(x: Any) -> Any:
    return x if x.dtype.name == "bool" else data_types.astype(x, data_types.bool)


@of_arrays
def count_nonzero(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """The number of nonzero elements over axes, over all when None."""
    # Truth values add up as int64.
    return sum(_as_truth(x), axis=axis, keepdims=keepdims)


@of_arrays
def mean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """The mean over axes, over all when None; of integers in `float64`.

    Floats narrower than 4 bytes are summed as `float32`, and the mean has their type.
    """
    found = _take_mean(_widen(x), axis, keepdims)
    return found if _is_whole(x) else data_types.astype(found, x.dtype)


def _take_mean(x: Any, axis: Axis, keepdims: bool) -> Any:
    total = sum(x, axis=axis, keepdims=keepdims)
    return elementwise.divide(total, _choose_divisor(_count_reduced(x.shape, axis)))


def _is_whole(x: Any) -> object:
    return kind_of(x.dtype) in ("bool", "signed integer", "unsigned integer")


def _widen(x: Any) -> Any:
    """The same numbers in a type whose sums neither wrap around nor overflow early."""
    if _is_whole(x):
        return data_types.astype(x, data_types.float64)
    return widen(x)


def _choose_divisor(count: float) -> float:
    # Without elements there is no mean: 0 / nan is no number, without a warning.
    return count if count > 0 else math.nan


@of_arrays
def var(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """The variance over axes, over all when None, divided by `count - correction`."""
    found = _take_var(_widen(x), axis, correction, keepdims)
    return found if _is_whole(x) else data_types.astype(found, x.dtype)


def _take_var(x: Any, axis: Axis, correction: float, keepdims: bool) -> Any:
    if not isinstance(correction, int | float):
        raise UsageError(f"a correction {correction!r} of a variance; a number was expected")
    # Two passes: the mean of squares less the square of the mean would cancel.
    apart = elementwise.subtract(x, _take_mean(x, axis, True))
    squares = elementwise.square(elementwise.abs(apart))
    count = _count_reduced(x.shape, axis) - correction
    return elementwise.divide(sum(squares, axis=axis, keepdims=keepdims), _choose_divisor(count))


@of_arrays
def std(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """The standard deviation: the square root of `var`."""
    found = elementwise.sqrt(_take_var(_widen(x), axis, correction, keepdims))
    return found if _is_whole(x) else data_types.astype(found, x.dtype)


@of_arrays
def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: object = None, include_initial: bool = False
) -> Any:
    """The cumulative sum along an axis."""
    return _take_totals("cumulative_sum", x, axis, dtype, include_initial)


@of_arrays
def cumulative_prod(
    x: Any, /, *, axis: int | None = None, dtype: object = None, include_initial: bool = False
) -> Any:
    """The cumulative product along an axis."""
    return _take_totals("cumulative_prod", x, axis, dtype, include_initial)


def _take_totals(name: str, x: Any, axis: int | None, dtype: object, include_initial: bool) -> Any:
    if axis is None:
        if x.ndim != 1:
            raise UsageError(f"{name} of shape {list(x.shape)} needs an axis; give axis=")
        axis = 0
    wide = _find_total_type(name, x, dtype)
    x = data_types.astype(x, wide)
    place = axis_of(x.ndim, axis)
    # One element more than the parts have: the operator works on the whole axis.
    if include_initial:
        return call(name, (x,), {"axis": place, "include_initial": True}, {"dtype": wide})
    return running_totals(name, x, place)


def summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    """The sum over all dimensions that were broadcast from a shape.

    >>> import reshard.spmd as sp
    >>> summed_to(sp.ones((2, 3)), (3,)).to_dense().tolist()
    [2.0, 2.0, 2.0]
    """
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    # Sizes of 1 in the middle are kept by their own sum; those ahead go.
    inner = tuple(
        lead + dim for dim, size in enumerate(shape) if size == 1 and x.shape[lead + dim] != 1
    )
    found = sum(x, axis=inner, keepdims=True) if inner else x
    found = sum(found, axis=tuple(range(lead))) if lead else found
    return found if found.shape == shape else reshape(found, shape)
