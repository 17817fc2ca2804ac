"""The array API's functions for searching, sorting and sets.

The number of nonzero or unique elements depends on the elements: such results are computed from the
whole array, and are not sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Example, Infer, Operator, TapeStep, ship
from reshard.spmd.core.result_types import index, of_first, value_and_index
from reshard.spmd.ops import elementwise, reductions
from reshard.spmd.ops.arguments import of_arrays, whole_number
from reshard.spmd.ops.elementwise import operands, whole
from reshard.spmd.ops.indexing import add_along, take
from reshard.spmd.ops.movement import broadcast_to, concat, reshape, take_ranges
from reshard.spmd.ops.reductions import any as any_of
from reshard.spmd.ops.sharded_sort import order_of, sorted_along, sorted_where_cut
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape, axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

# ---- sort


@of_arrays
def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Sort along an axis in ascending order. A sharded axis may stay so: see `sharded_sort`."""
    return _put_in_order("sort", x, axis_of(x.ndim, axis), bool(descending))


def _put_in_order(name: str, x: Any, axis: int, descending: bool) -> Any:
    found = sorted_where_cut(name, x, axis, descending)
    return call(name, (x,), {"axis": axis}, {"descending": descending}) if found is None else found


def register_ordering(name: str, infer: Infer | None, **options: Any) -> Operator:
    return ship(Operator(name, "ordering", infer, **options))


def ordered(
    shapes: Sequence[Shape], axis: int = -1, descending: bool = False, stable: bool = True
) -> Inferred:
    """Infer operands of equal shape, sorted in the order of the first along an axis.

    >>> print(ordered([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not shapes or len(set(shapes)) > 1:
        raise SpecError(f"a sort of {', '.join(map(str, shapes))}; one shape was expected")
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    builder = RuleBuilder(shapes, shapes)
    alone = all(size == 1 for dim, size in enumerate(shape) if dim != place)
    for dim in range(len(shape)):
        builder.factor(
            [dim] * len(shapes),
            [dim] * len(shapes),
            kind="need_replication" if dim == place else "pass_through",
            # A one-dimensional array has no other dimension that could be sharded instead.
            blocked=alone and dim == place,
        )
    return builder.build()


def _sort_kernel(work: LocalWork) -> Function:
    """Return a kernel that sorts along an axis."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: sorted_along(space, x, axis, descending)


_EXAMPLE: Example = ([(4, 8)], {"axis": 1})


def _pull_sort(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes["axis"]
    order = argsort(step.operands[0], axis=axis, descending=step.attributes["descending"])
    # The position to which each element was moved is the argsort of the order.
    return call("take_along_axis", (g, argsort(order, axis=axis)), {"axis": axis})


register_ordering(
    "sort",
    ordered,
    local=_sort_kernel,
    result_types=of_first,
    example=_EXAMPLE,
    note="further operands are put in the first's order",
    pullback=_pull_sort,
)


# ---- argsort


@of_arrays
def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """The indices that sort along an axis; the sort is stable."""
    return _put_in_order("argsort", x, axis_of(x.ndim, axis), bool(descending))


def _argsort_kernel(work: LocalWork) -> Function:
    """Return a kernel for the indices that sort an axis; equal elements keep their order."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: order_of(space, x, axis, descending)


register_ordering(
    "argsort",
    ordered,
    local=_argsort_kernel,
    result_types=index,
    example=_EXAMPLE,
    is_constant=True,
)


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


@of_arrays
def unique_all(x: Any, /) -> UniqueAll:
    """The unique elements, their first indices, inverse indices and counts; not sharded."""
    found = _find_unique(x)
    return found._replace(inverse_indices=reshape(found.inverse_indices, x.shape))


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
def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
    """Whether each element of `x1` is in `x2`."""
    x1, x2 = operands(x1, x2)
    # Each element of `x1` is compared with all of `x2`, along a new last axis.
    flat = reshape(x2, (1,) * x1.ndim + (x2.size,))
    found = any_of(elementwise.equal(reshape(x1, (*x1.shape, 1)), flat), axis=-1)
    return elementwise.logical_not(found) if invert else found


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
        # Prepended and appended values may be numbers and NumPy arrays.
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
        # Booleans cannot be subtracted; their difference is whether they differ.
        if found.dtype.name == "bool":
            found = elementwise.not_equal(later, earlier)
        else:
            found = elementwise.subtract(later, earlier)
    return found


# ---- top_k


@of_arrays
def top_k(x: Any, k: int, /, *, axis: int = -1) -> tuple[Any, Any]:
    """The `k` largest elements along an axis, in descending order, and their indices."""
    reductions.check_ordered(x, "top_k")
    attributes = {"k": whole_number("the largest", k), "axis": axis_of(x.ndim, axis)}
    found: tuple[Any, Any] = call("top_k", (x,), attributes)
    return found


def top_k_rule(shapes: Sequence[Shape], k: int, axis: int = -1) -> Inferred:
    """Infer the `k` largest elements along an axis, and their indices.

    >>> print(top_k_rule([(4, 8)], k=3).rule)
    ([i, j]) -> ([i, j], [i, j]) {i=4, j=8} need_replication={j} blocked={j}
    """
    if len(shapes) != 1:
        raise SpecError(f"{len(shapes)} operands for top_k; 1 was expected")
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    if not 0 <= k <= shape[place]:
        raise SpecError(f"top {k} of {shape[place]}; 0 to {shape[place]} were expected")
    builder = RuleBuilder([shape], [(*shape[:place], k, *shape[place + 1 :])] * 2)
    for dim in range(len(shape)):
        here = dim == place
        builder.factor(
            [dim],
            [dim, dim],
            kind="need_replication" if here else "pass_through",
            blocked=here,
        )
    return builder.build()


def _top_k_kernel(work: LocalWork) -> Function:
    """Return a kernel for the largest elements along an axis and their indices; ties by index."""
    space, k, axis = work.library.namespace, work.attributes["k"], work.attributes["axis"]

    def function(x: Any) -> tuple[Any, Any]:
        flipped = space.flip(x, axis=axis)
        places = space.flip(space.argsort(flipped, axis=axis, stable=True), axis=axis)
        places = x.shape[axis] - 1 - places[(slice(None),) * axis + (slice(0, k),)]
        return space.take_along_axis(x, places, axis=axis), places

    return function


def _pull_largest(step: TapeStep, g: Any, number: int) -> Any:
    return add_along(step.operands[0], step.results[1], g[0], step.attributes["axis"])


register_ordering(
    "top_k",
    top_k_rule,
    local=_top_k_kernel,
    result_types=value_and_index,
    example=([(4, 8)], {"k": 3}),
    note="results are the values and their indices",
    pullback=_pull_largest,
)


# ---- unique_all


_COUNTS = "how many there are depends on the values"

register_ordering(
    "unique_all",
    None,
    note=_COUNTS,
    no_pullback="how many results there are depends on the elements, which are read",
)


# ---- unique_counts


register_ordering(
    "unique_counts",
    None,
    note=_COUNTS,
    no_pullback="how many results there are depends on the elements, which are read",
)


# ---- unique_inverse


register_ordering(
    "unique_inverse",
    None,
    note=_COUNTS,
    no_pullback="how many results there are depends on the elements, which are read",
)


# ---- unique_values


register_ordering(
    "unique_values",
    None,
    note=_COUNTS,
    no_pullback="how many results there are depends on the elements, which are read",
)
