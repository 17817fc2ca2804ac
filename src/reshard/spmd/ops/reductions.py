"""Reductions: sums, extremes, means and variances over axes, and cumulative sums along an axis.

Over a sharded axis, each rank reduces its part: the result holds contributions, which are combined
when they are needed. A mean is a sum divided by the whole count, so that uneven parts have the
correct weights. The cotangent of a sum is broadcast to the elements that were added; the cotangent
of a maximum or minimum is shared evenly between equal elements.

Cumulative sums do not gather a sharded axis:

1. Each rank computes the running totals of its own part, as if it were the first part.
2. The last running total of every part but the last, which is the part's total, is sent to all
   ranks.
3. The running totals of the parts' totals are the totals before each part.
4. Each rank combines the total before its part with its own running totals.

        part 0     part 1     part 2
        1  2  3    4  5  6    7  8        an axis of 8 in 3 parts
        1  3  6    4  9 15    7 15        running totals of each part
        0          6         21           the total before each part
        1  3  6   10 15 21   28 36

So the ranks exchange an element per part instead of the whole axis. Floating-point numbers are not
added in sequential order; errors are equal or smaller. Source: Blelloch, Prefix Sums and Their
Applications, 1990.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import SpecError, UsageError
from reshard.execution.arrays import identity
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import (
    Function,
    LocalWork,
    find_function,
    has_plain_parts,
    own_attributes,
    part_lengths,
)
from reshard.spmd.core.operator import Infer, TapeStep, ship
from reshard.spmd.core.result_types import boolean, index, kind_of, of_first, total
from reshard.spmd.ops import data_types, elementwise, movement
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.data_types import astype, widen
from reshard.spmd.ops.elementwise import add, multiply, where, whole
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Axes, Inferred, Shape
from reshard.spmd.rules.templates import reduce_template
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Axis = int | Sequence[int] | None


# ---- sum


@of_arrays
def sum(x: Any, /, *, axis: Axis = None, dtype: object = None, keepdims: bool = False) -> Any:
    """Compute the sum over axes, over all when None."""
    wide = _find_total_type(x, dtype)
    return call("sum", (x,), _make_attributes(axis, keepdims), {"dtype": wide})


def _find_total_type(x: Any, dtype: object) -> DType:
    return total((x.dtype,), {"dtype": dtype}, x.runner.computing.name)[0]


def _make_attributes(axis: Axis, keepdims: bool) -> dict[str, Any]:
    return {"axis": tuple(axis) if isinstance(axis, list) else axis, "keepdims": bool(keepdims)}


register = partial(ship, family="reductions", example=([(4, 8)], {"axis": 1}))


def _make_reduction(reduction: str, *, adjusted: bool = False) -> Infer:
    def infer(shapes: Sequence[Shape], axis: Axes = None, keepdims: bool = False) -> Inferred:
        shape = rules.one_operand("a reduction", shapes)
        rule = reduce_template(
            len(shape),
            rules.axes_of(len(shape), axis),
            keepdims=keepdims,
            reduction_operator=reduction,
        ).rule(shape)
        # Adjusted factors are sharded only if the local function accounts for its part, as that of
        # a mean does.
        return Inferred(rule, rule.result_shapes, rule.reduction if adjusted else ())

    return infer


def _keep_dims(step: TapeStep, reduced: Any) -> Any:
    """Return a total, or its cotangent, with dimensions of size 1 in place of the reduced."""
    shape = step.operands[0].shape
    axes = rules.axes_of(len(shape), step.attributes["axis"])
    return movement.reshape(reduced, [1 if dim in axes else size for dim, size in enumerate(shape)])


register(
    "sum",
    _make_reduction("sum"),
    linear="each",
    result_types=total,
    pullback=lambda step, g, number: movement.broadcast_to(
        _keep_dims(step, g), step.operands[0].shape
    ),
)


# ---- prod


@of_arrays
def prod(x: Any, /, *, axis: Axis = None, dtype: object = None, keepdims: bool = False) -> Any:
    """Compute the product over axes, over all when None."""
    wide = _find_total_type(x, dtype)
    return call("prod", (x,), _make_attributes(axis, keepdims), {"dtype": wide})


def _pull_product(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    axis = step.attributes["axis"]
    # Avoids dividing by 0: a single 0 gets the product of the others; two or more all get 0.
    is_zero = e.equal(x, 0)
    others = where(is_zero, 1.0, x)
    product = prod(others, axis=axis, keepdims=True)
    zeros = sum(astype(is_zero, g.dtype), axis=axis, keepdims=True)
    of_zero = where(e.equal(zeros, 1), product, 0.0)
    slope = where(is_zero, of_zero, where(e.equal(zeros, 0), product / others, 0.0))
    return _keep_dims(step, g) * slope


register(
    "prod",
    _make_reduction("product"),
    commutes=("product",),
    result_types=total,
    pullback=_pull_product,
)


# ---- max


@of_arrays
def max(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Compute the maximum over axes, over all when None."""
    check_some(x, axis, "max")
    return call("max", (x,), _make_attributes(axis, keepdims))


def _extremum_kernel(work: LocalWork) -> list[Function]:
    """Reduce a part; a part without elements gives the identity, which any number replaces."""
    function = partial(
        find_function(work, work.library.namespace, work.name), **own_attributes(work)
    )
    functions: list[Function] = []
    for shape, result in zip(work.operand_shapes_here(), work.result_shapes_here(()), strict=True):
        # Libraries raise for the maximum of no elements; the identity does not change other ranks'
        # contributions.
        is_empty = bool(work.result_specs) and 0 in shape
        functions.append(partial(_fill_identity, work, result) if is_empty else function)
    return functions


def _fill_identity(work: LocalWork, shape: tuple[int, ...], x: Any) -> Any:
    """Return the minimum of the type for `max`, and the maximum for `min`."""
    filled = work.library.filled(shape, identity(work.name, work.library.dtype_of(x)), x)
    return work.library.linked(filled, x)


def _pull_extreme(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    equal = e.equal(x, _keep_dims(step, step.result))
    # Counts need a wider type: float16 ends at 65,504, bfloat16 lacks odd integers above 256.
    wide = g.dtype if g.dtype.itemsize_bytes > 2 else "float32"
    count = sum(astype(equal, wide), axis=step.attributes["axis"], keepdims=True)
    # If no element equals the result, it is NaN.
    share = astype(_keep_dims(step, g), wide) / where(e.equal(count, 0), 1.0, count)
    return where(equal, astype(share, g.dtype), 0.0)


register(
    "max",
    _make_reduction("max"),
    commutes=("max",),
    local=_extremum_kernel,
    result_types=of_first,
    pullback=_pull_extreme,
)


# ---- min


@of_arrays
def min(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Compute the minimum over axes, over all when None."""
    check_some(x, axis, "min")
    return call("min", (x,), _make_attributes(axis, keepdims))


register(
    "min",
    _make_reduction("min"),
    commutes=("min",),
    local=_extremum_kernel,
    result_types=of_first,
    pullback=_pull_extreme,
)


def check_ordered(x: Any, name: str) -> None:
    """Raise UsageError for complex numbers."""
    if kind_of(x.dtype) == "complex floating":
        raise UsageError(f"{name} of {x.dtype}: complex numbers have no order; take real or abs")


def check_some(x: Any, axis: Axis, name: str) -> None:
    """Raise UsageError for an extremum of complex numbers, or of no elements."""
    check_ordered(x, name)
    if 0 in x.shape and not _count_reduced(x.shape, axis):
        raise UsageError(
            f"{name} over axes {axis} of shape {list(x.shape)}, which have no elements; at least "
            "one was expected"
        )


def _count_reduced(shape: Sequence[int], axis: Axis) -> int:
    """Return the number of elements that are reduced to each element of the result."""
    return math.prod(shape[dim] for dim in rules.axes_of(len(shape), axis))


# ---- all


@of_arrays
def all(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return whether all elements are true over axes, over all when None."""
    return call("all", (_as_truth(x),), _make_attributes(axis, keepdims))


def _as_truth(x: Any) -> Any:
    return x if x.dtype.name == "bool" else data_types.astype(x, data_types.bool)


register(
    "all",
    _make_reduction("min"),
    commutes=("min",),
    result_types=boolean,
    note="truth values: contributions combine by min",
    is_constant=True,
)


# ---- any


@of_arrays
def any(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return whether any element is true over axes, over all when None."""
    return call("any", (_as_truth(x),), _make_attributes(axis, keepdims))


register(
    "any",
    _make_reduction("max"),
    commutes=("max",),
    result_types=boolean,
    note="truth values: contributions combine by max",
    is_constant=True,
)


@of_arrays
def count_nonzero(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Count nonzero elements over axes, over all when None."""
    # Booleans are added as int64.
    return sum(_as_truth(x), axis=axis, keepdims=keepdims)


@of_arrays
def mean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Compute the mean over axes, over all when None; of integers in `float64`.

    Floats narrower than 4 bytes are summed as `float32`, and the mean has their type.
    """
    result = _take_mean(_widen(x), axis, keepdims)
    return result if _is_whole(x) else data_types.astype(result, x.dtype)


def _take_mean(x: Any, axis: Axis, keepdims: bool) -> Any:
    total = sum(x, axis=axis, keepdims=keepdims)
    return elementwise.divide(total, _choose_divisor(_count_reduced(x.shape, axis)))


def _choose_divisor(count: float) -> float:
    # The mean of no elements is NaN: 0 / nan gives it without a warning.
    return count if count > 0 else math.nan


def _widen(x: Any) -> Any:
    """Cast to a type whose sums neither wrap around nor overflow early."""
    if _is_whole(x):
        return data_types.astype(x, data_types.float64)
    return widen(x)


def _is_whole(x: Any) -> object:
    return kind_of(x.dtype) in ("bool", "signed integer", "unsigned integer")


@of_arrays
def var(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Compute the variance over axes, over all when None, divided by `count - correction`."""
    result = _take_var(_widen(x), axis, correction, keepdims)
    return result if _is_whole(x) else data_types.astype(result, x.dtype)


def _take_var(x: Any, axis: Axis, correction: float, keepdims: bool) -> Any:
    if not isinstance(correction, int | float):
        raise UsageError(f"a correction {correction!r} of a variance; a number was expected")
    # Two passes: the mean of squares minus the square of the mean would suffer from cancellation.
    apart = elementwise.subtract(x, _take_mean(x, axis, True))
    squares = elementwise.square(elementwise.abs(apart))
    count = _count_reduced(x.shape, axis) - correction
    return elementwise.divide(sum(squares, axis=axis, keepdims=keepdims), _choose_divisor(count))


@of_arrays
def std(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Compute the standard deviation: the square root of `var`."""
    result = elementwise.sqrt(_take_var(_widen(x), axis, correction, keepdims))
    return result if _is_whole(x) else data_types.astype(result, x.dtype)


# ---- argmax


@of_arrays
def argmax(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the index of the maximum along an axis; in the flattened array when None."""
    return _find_place("argmax", x, axis, keepdims)


def _find_place(name: str, x: Any, axis: int | None, keepdims: bool) -> Any:
    check_some(x, axis, name)
    if axis is not None:
        return call(name, (x,), {"axis": rules.axis_of(x.ndim, axis), "keepdims": bool(keepdims)})
    # Without an axis, the result is the index in the flattened array, in row-major order.
    index = call(name, (movement.reshape(x, (-1,)),), {"axis": 0, "keepdims": False})
    return movement.reshape(index, (1,) * x.ndim) if keepdims else index


def whole_axes(shapes: Sequence[Shape], axis: Axes = None, keepdims: bool = False) -> Inferred:
    """Infer a reduction whose parts do not combine: each device needs the axes whole.

    >>> print(whole_axes([(4, 8)], axis=1).rule)
    ([i, j]) -> ([i]) {i=4, j=8} need_replication={j}
    """
    shape = rules.one_operand("a reduction", shapes)
    dims = range(len(shape))
    ones = {dim: f"one {dim}" for dim in rules.axes_of(len(shape), axis)}
    left = [ones.get(dim, dim) for dim in dims if keepdims or dim not in ones]
    order = [factor for dim in dims for factor in (dim, ones.get(dim, dim))]
    return rules.from_dims(
        [dims], [left], [shape], order=order, sizes=dict.fromkeys(ones.values(), 1)
    )


_PLACE = "an index says nothing without its value"
register("argmax", whole_axes, result_types=index, note=_PLACE, is_constant=True)


# ---- argmin


@of_arrays
def argmin(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the index of the minimum along an axis; in the flattened array when None."""
    return _find_place("argmin", x, axis, keepdims)


register("argmin", whole_axes, result_types=index, note=_PLACE, is_constant=True)


# ---- cumulative_sum


@of_arrays
def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: object = None, include_initial: bool = False
) -> Any:
    """Compute the cumulative sum along an axis."""
    return _take_totals("cumulative_sum", x, axis, dtype, include_initial)


def _take_totals(name: str, x: Any, axis: int | None, dtype: object, include_initial: bool) -> Any:
    if axis is None:
        if x.ndim != 1:
            raise UsageError(f"{name} of shape {list(x.shape)} needs an axis; give axis=")
        axis = 0
    wide = _find_total_type(x, dtype)
    x = data_types.astype(x, wide)
    place = rules.axis_of(x.ndim, axis)
    # The result is an element longer than the parts, so the operator works on the whole axis.
    if include_initial:
        return call(name, (x,), {"axis": place, "include_initial": True}, {"dtype": wide})
    return running_totals(name, x, place)


register_cumulative = partial(ship, family="windows", example=([(4, 8)], {"axis": 1}))


def cumulative_rule(
    shapes: Sequence[Shape],
    axis: int | None = None,
    include_initial: bool = False,
    parts: Sequence[int] | None = None,
) -> Inferred:
    """Infer running totals along an axis, which is an element longer with the initial value.

    With lengths of parts, the totals restart at each part: a device needs only its own part.

    >>> print(cumulative_rule([(4, 8)], axis=1).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    >>> print(cumulative_rule([(4, 8)], axis=1, parts=(3, 3, 2)).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8}
    """
    shape = rules.one_operand("a cumulative operator", shapes)
    if axis is None and len(shape) != 1:
        raise SpecError(f"running totals of {shape} without an axis; say along which")
    place = rules.axis_of(len(shape), axis or 0)
    if parts is not None:
        if include_initial or builtins.sum(parts) != shape[place]:
            raise SpecError(f"parts {tuple(parts)} of {shape[place]}; their sum must be that size")
        dims = range(len(shape))
        # `_begins_at_parts` checks whether the ranks' parts are these: only then may the axis be
        # cut.
        return rules.from_dims([dims], [dims], [shape], adjusted=[place])
    result = (*shape[:place], shape[place] + bool(include_initial), *shape[place + 1 :])
    return rules.kept(shape, result, moved=[] if result[place] == 1 else [place])


def _totals_kernel(work: LocalWork) -> Function:
    """Return a kernel of running totals along an axis, which restart at each part if given."""
    options = own_attributes(work)
    parts, axis = options.pop("parts", None), options["axis"]
    scan = partial(find_function(work, work.library.namespace, work.name), **options)
    if parts is None or work.is_cut(0, axis):
        # Each rank has exactly one of the parts, so its running totals do not restart.
        return scan
    ends = np.cumsum(parts).tolist()
    windows = [
        (slice(None),) * axis + (slice(end - size, end),)
        for end, size in zip(ends, parts, strict=True)
    ]
    concat = work.library.namespace.concat
    return lambda x: concat([scan(x[window]) for window in windows], axis=axis)


def _begins_at_parts(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    """Return whether totals restart exactly where ranks' parts begin, so ranks are independent."""
    if attributes.get("parts") is None or not builtins.all(map(has_plain_parts, specs)):
        return False
    axis = attributes["axis"]
    return part_lengths(specs[0], axis, shapes[0][axis]) == tuple(attributes["parts"])


_TOTALS = "totals of other parts are needed"


def _pull_running_sum(step: TapeStep, g: Any, number: int) -> Any:
    axis, parts = step.attributes["axis"], step.attributes.get("parts")
    # The cotangents of all later positions are added up, from the end.
    # The initial value is a constant, whose cotangent is dropped.
    turned = movement.flip(_without_initial(step, g), axis=axis)
    more = {} if parts is None else {"parts": tuple(reversed(parts))}
    return movement.flip(call("cumulative_sum", (turned,), {"axis": axis, **more}), axis=axis)


def _without_initial(step: TapeStep, g: Any) -> Any:
    axis = step.attributes["axis"]
    if not step.attributes.get("include_initial"):
        return g
    return movement.take_ranges(g, {axis: (1, g.shape[axis], 1)})


register_cumulative(
    "cumulative_sum",
    cumulative_rule,
    linear="each",
    local=_totals_kernel,
    knows_place=_begins_at_parts,
    result_types=total,
    note=_TOTALS,
    pullback=_pull_running_sum,
)


# ---- cumulative_prod


@of_arrays
def cumulative_prod(
    x: Any, /, *, axis: int | None = None, dtype: object = None, include_initial: bool = False
) -> Any:
    """Compute the cumulative product along an axis."""
    return _take_totals("cumulative_prod", x, axis, dtype, include_initial)


def _pull_running_product(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    axis, size = step.attributes["axis"], step.operands[0].shape[step.attributes["axis"]]
    g = movement.moveaxis(_without_initial(step, g), axis, -1)
    # [..., i, j]: the factors except the i-th, their running products, those from the i-th on. This
    # avoids a division by a factor, which may be 0.
    ones = whole(x, np.eye(size, dtype=bool))
    factors = where(ones, 1.0, movement.expand_dims(movement.moveaxis(x, axis, -1), axis=-2))
    places = np.arange(size)
    parts = step.attributes.get("parts")
    more = {} if parts is None else {"parts": parts}
    part_of = np.zeros(size, int) if parts is None else np.repeat(np.arange(len(parts)), parts)
    is_after = (places[None, :] >= places[:, None]) & (part_of[None, :] == part_of[:, None])
    products = call("cumulative_prod", (factors,), {"axis": x.ndim, **more})
    slopes = where(whole(x, is_after), products, 0.0) * movement.expand_dims(g, axis=-2)
    return movement.moveaxis(sum(slopes, axis=-1), -1, axis)


register_cumulative(
    "cumulative_prod",
    cumulative_rule,
    commutes=("product",),
    local=_totals_kernel,
    knows_place=_begins_at_parts,
    result_types=total,
    note=_TOTALS,
    pullback=_pull_running_product,
)

_COMBINE = {"cumulative_sum": add, "cumulative_prod": multiply}


def running_totals(name: str, x: Any, axis: int) -> Any:
    """Compute running totals along an axis, in the sharding of `x`.

    Args:
        name: `cumulative_sum` or `cumulative_prod`.
        x: an array, in its totals' element type.
        axis: counted from the start.
    """
    # The type is named, because libraries otherwise add integers in their widest type.
    dtype = {"dtype": x.dtype}
    parts = _find_parts(x, axis)
    # A single operation is used if the axis is not sharded, if sums are pending, or if parts are so
    # short that exchanging their totals saves nothing.
    if len(parts) < 2 or x.type.spec.partial_axes or 2 * (len(parts) - 1) >= x.shape[axis]:
        return call(name, (x,), {"axis": axis}, dtype)
    spec = x.type.spec
    # Step 1 of the module: `own` has the sharding of `x`.
    own = call(name, (x,), {"axis": axis, "parts": parts}, dtype)
    # Step 2: the last position of each part but the last; each rank contributes those it has.
    ends = whole(x, np.cumsum(parts)[:-1] - 1)
    ahead = call("take", (own, ends), {"axis": axis}).reduced()
    # Step 3: exclusive totals of the parts, the first of which is 0 (or 1).
    before = call(name, (ahead,), {"axis": axis, "include_initial": True}, dtype)
    # Step 4: the number of each position's part, sharded like the axis, looks up the total before.
    part_of = whole(x, np.repeat(np.arange(len(parts)), parts))
    along = ShardingSpec(spec.mesh, [spec.dim_specs[axis]])
    offsets = call("take", (before, part_of.shard(along)), {"axis": axis})
    return _COMBINE[name](own, offsets)


def _find_parts(x: Any, axis: int) -> tuple[int, ...]:
    """Return the lengths of the nonempty parts in order; empty if a part is not an interval."""
    spec = x.type.spec if isinstance(x, ArrayValue) else None
    if spec is None or not has_plain_parts(spec):
        return ()
    return part_lengths(spec, axis, x.shape[axis])
