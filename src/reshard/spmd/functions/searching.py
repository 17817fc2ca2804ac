"""The array API's functions that search, sort and make sets.

How many elements are not zero, or differ, only the elements tell: such results are found on the
whole array, and are not sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reshard.errors import UsageError
from reshard.spmd.functions import elementwise
from reshard.spmd.functions.array_arguments import of_arrays
from reshard.spmd.functions.cut_sorts import sorted_where_cut
from reshard.spmd.functions.elementwise import operands, whole
from reshard.spmd.functions.indexing import take
from reshard.spmd.functions.manipulation import broadcast_to, concat, reshape, take_ranges
from reshard.spmd.functions.statistics import any as any_of
from reshard.spmd.functions.statistics import check_some
from reshard.spmd.rules.shapes import axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call


@of_arrays
def argmax(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """The index of the maximum along an axis; in the flattened array when None."""
    return _find_place("argmax", x, axis, keepdims)


@of_arrays
def argmin(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """The index of the minimum along an axis; in the flattened array when None."""
    return _find_place("argmin", x, axis, keepdims)


def _find_place(name: str, x: Any, axis: int | None, keepdims: bool) -> Any:
    check_some(x, axis, name)
    if axis is not None:
        return call(name, (x,), {"axis": axis_of(x.ndim, axis), "keepdims": bool(keepdims)})
    # Without an axis: the place in the flattened array, in row-major order.
    found = call(name, (reshape(x, (-1,)),), {"axis": 0, "keepdims": False})
    return reshape(found, (1,) * x.ndim) if keepdims else found


@of_arrays
def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Sort along an axis in ascending order. A sharded axis may stay sharded: see `cut_sorts`."""
    return _put_in_order("sort", x, axis_of(x.ndim, axis), bool(descending))


@of_arrays
def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """The indices that sort along an axis; the sort is stable."""
    return _put_in_order("argsort", x, axis_of(x.ndim, axis), bool(descending))


def _put_in_order(name: str, x: Any, axis: int, descending: bool) -> Any:
    found = sorted_where_cut(name, x, axis, descending)
    return call(name, (x,), {"axis": axis}, {"descending": descending}) if found is None else found


@of_arrays
def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Any:
    """The insertion indices of `x2` in the sorted `x1`, or in `x1` sorted by `sorter`."""
    x1, x2 = operands(x1, x2)
    if sorter is not None:
        x1 = take(x1, sorter, axis=0)
    return call("searchsorted", (x1, x2), None, {"side": side})


@of_arrays
def nonzero(x: Any, /) -> tuple[Any, ...]:
    """The indices of nonzero elements, by dimension; not sharded."""
    if not x.ndim:
        raise UsageError("nonzero of an array of no dimensions; it has no indices: reshape it")
    return tuple(whole(x, one) for one in x.runner.library.namespace.nonzero(x.to_dense()))


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Any
    inverse_indices: Any


def _find_unique(x: Any) -> UniqueAll:
    """The result of `unique_all`, by NumPy in both libraries: PyTorch has no first indices."""
    library = x.runner.library
    values, indices, inverse, counts = np.unique(
        library.numpy(x.to_dense()),
        return_index=True,
        return_inverse=True,
        return_counts=True,
        equal_nan=False,
    )
    return UniqueAll(*(whole(x, one) for one in (values, indices, inverse, counts)))


@of_arrays
def unique_all(x: Any, /) -> UniqueAll:
    """The unique elements, their first indices, inverse indices and counts; not sharded."""
    found = _find_unique(x)
    return found._replace(inverse_indices=reshape(found.inverse_indices, x.shape))


@of_arrays
def unique_counts(x: Any, /) -> UniqueCounts:
    """The unique elements and their counts; not sharded."""
    found = _find_unique(x)
    return UniqueCounts(found.values, found.counts)


@of_arrays
def unique_inverse(x: Any, /) -> UniqueInverse:
    """The unique elements and the inverse indices; not sharded."""
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


@of_arrays
def unique_values(x: Any, /) -> Any:
    """The unique elements; not sharded."""
    return _find_unique(x).values


@of_arrays
def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Any:
    """The differences of neighbours along an axis, `n` times."""
    place = axis_of(x.ndim, axis)
    if not hasattr(n, "__index__") or n < 0:
        raise UsageError(f"differences taken {n!r} times; give a whole number of 0 or more")
    parts = []
    for one in (prepend, x, append):
        if one is None:
            continue
        (one,) = operands(x, one)[1:]
        # Numbers and NumPy's arrays before or behind the array.
        if not isinstance(one, ArrayValue):
            one = whole(x, np.asarray(one))
        if one.ndim == 0:
            one = broadcast_to(one, (*x.shape[:place], 1, *x.shape[place + 1 :]))
        parts.append(one)
    found = concat(parts, axis=place) if len(parts) > 1 else x
    for _ in range(n):
        size = found.shape[place]
        later = take_ranges(found, {place: (min(1, size), size, 1)})
        earlier = take_ranges(found, {place: (0, max(size - 1, 0), 1)})
        # Truth values cannot be subtracted; they differ, or they do not.
        if found.dtype.name == "bool":
            found = elementwise.not_equal(later, earlier)
        else:
            found = elementwise.subtract(later, earlier)
    return found


@of_arrays
def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
    """Whether each element of `x1` is in `x2`."""
    x1, x2 = operands(x1, x2)
    # Each of `x1` against all of `x2`, along a new last axis.
    flat = reshape(x2, (1,) * x1.ndim + (x2.size,))
    found = any_of(elementwise.equal(reshape(x1, (*x1.shape, 1)), flat), axis=-1)
    return elementwise.logical_not(found) if invert else found
