"""Cumulative sums along a sharded axis, without gathering it.

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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import (
    Function,
    LocalWork,
    find_function,
    has_plain_parts,
    own_attributes,
    part_lengths,
)
from reshard.spmd.core.operator import Example, Infer, Operator, TapeStep, ship
from reshard.spmd.core.result_types import total
from reshard.spmd.ops import data_types
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.elementwise import add, multiply, where, whole
from reshard.spmd.ops.movement import expand_dims, flip, moveaxis, take_ranges
from reshard.spmd.ops.reductions import _find_total_type
from reshard.spmd.ops.reductions import sum as sum_over
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape, axis_of, kept, one_operand
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

# ---- cumulative_sum


@of_arrays
def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: object = None, include_initial: bool = False
) -> Any:
    """The cumulative sum along an axis."""
    return _take_totals("cumulative_sum", x, axis, dtype, include_initial)


def _take_totals(name: str, x: Any, axis: int | None, dtype: object, include_initial: bool) -> Any:
    if axis is None:
        if x.ndim != 1:
            raise UsageError(f"{name} of shape {list(x.shape)} needs an axis; give axis=")
        axis = 0
    wide = _find_total_type(name, x, dtype)
    x = data_types.astype(x, wide)
    place = axis_of(x.ndim, axis)
    # The result is an element longer than the parts, so the operator works on the whole axis.
    if include_initial:
        return call(name, (x,), {"axis": place, "include_initial": True}, {"dtype": wide})
    return running_totals(name, x, place)


def register_cumulative(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return ship(Operator(name, "windows", infer, example=example, **options))


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
    shape = one_operand("a cumulative operator", shapes)
    if axis is None and len(shape) != 1:
        raise SpecError(f"running totals of {shape} without an axis; say along which")
    place = axis_of(len(shape), axis or 0)
    if parts is not None:
        if include_initial or sum(parts) != shape[place]:
            raise SpecError(f"parts {tuple(parts)} of {shape[place]}; their sum must be that size")
        builder = RuleBuilder([shape], [shape])
        for dim in range(len(shape)):
            # `_begins_at_parts` checks whether the ranks' parts are these: only then may the axis
            # be cut.
            builder.factor([dim], [dim], adjusted=dim == place)
        return builder.build()
    result = (*shape[:place], shape[place] + bool(include_initial), *shape[place + 1 :])
    return kept(shape, result, moved=[] if result[place] == 1 else [place])


_TOTALLED: Example = ([(4, 8)], {"axis": 1})


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
    if attributes.get("parts") is None or not all(map(has_plain_parts, specs)):
        return False
    axis = attributes["axis"]
    return part_lengths(specs[0], axis, shapes[0][axis]) == tuple(attributes["parts"])


_TOTALS = "totals of other parts are needed"


def _pull_running_sum(step: TapeStep, g: Any, number: int) -> Any:
    axis, parts = step.attributes["axis"], step.attributes.get("parts")
    # The cotangents of all later positions are added up, from the end.
    turned = flip(_without_initial(step, g), axis=axis)
    more = {} if parts is None else {"parts": tuple(reversed(parts))}
    return flip(call("cumulative_sum", (turned,), {"axis": axis, **more}), axis=axis)


def _without_initial(step: TapeStep, g: Any) -> Any:
    axis = step.attributes["axis"]
    if not step.attributes.get("include_initial"):
        return g
    return take_ranges(g, {axis: (1, g.shape[axis], 1)})


register_cumulative(
    "cumulative_sum",
    cumulative_rule,
    _TOTALLED,
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
    """The cumulative product along an axis."""
    return _take_totals("cumulative_prod", x, axis, dtype, include_initial)


def _pull_running_product(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    axis, size = step.attributes["axis"], step.operands[0].shape[step.attributes["axis"]]
    g = moveaxis(_without_initial(step, g), axis, -1)
    # [..., i, j]: the factors except the i-th, their running products, those from the i-th on. This
    # avoids a division by a factor, which may be 0.
    ones = whole(x, np.eye(size, dtype=bool))
    factors = where(ones, 1.0, expand_dims(moveaxis(x, axis, -1), axis=-2))
    places = np.arange(size)
    parts = step.attributes.get("parts")
    more = {} if parts is None else {"parts": parts}
    part_of = np.zeros(size, int) if parts is None else np.repeat(np.arange(len(parts)), parts)
    behind = (places[None, :] >= places[:, None]) & (part_of[None, :] == part_of[:, None])
    products = call("cumulative_prod", (factors,), {"axis": x.ndim, **more})
    slopes = where(whole(x, behind), products, 0.0) * expand_dims(g, axis=-2)
    return moveaxis(sum_over(slopes, axis=-1), -1, axis)


register_cumulative(
    "cumulative_prod",
    cumulative_rule,
    _TOTALLED,
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
