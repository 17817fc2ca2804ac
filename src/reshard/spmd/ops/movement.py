"""Operators that move elements and compute nothing: reshapes, broadcasts, slices, concatenation.

The derivative of each moves the cotangent back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, cast

import numpy as np

from reshard._validation import check_int
from reshard.errors import ArrayIndexError, SpecError, UsageError
from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import Function, LocalWork, find_function
from reshard.spmd.core.operator import OperatorClass, TapeStep, ship
from reshard.spmd.core.result_types import promoted
from reshard.spmd.ops import data_types
from reshard.spmd.ops.arguments import as_whole, has_entries, of_arrays, whole_pairs
from reshard.spmd.ops.elementwise import operands, whole
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Axes, Inferred, Shape
from reshard.spmd.rules.templates import (
    Template,
    broadcast_with_shapes_template,
    dimensions,
    reshape_template,
    transpose_template,
)
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Axis = int | Sequence[int]
Range = tuple[int, int, int]
"""Start, stop and step along a dimension."""


def read_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return axes counted from the start, in their order. Raises SpecError for a missing axis."""
    asked: tuple[Any, ...] = tuple(cast(Any, axis)) if has_entries(axis) else (axis,)
    try:
        axes = tuple(map(index, asked))
    except TypeError:
        raise SpecError(f"axes {asked} of {ndim} dimensions; name them by whole numbers") from None
    if any(not -ndim <= dim < ndim for dim in axes):
        raise SpecError(f"axes {axes} of {ndim} dimensions; give some of {-ndim} to {ndim - 1}")
    return tuple(dim % ndim for dim in axes)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the common shape to which shapes broadcast. Raises SpecError if there is none."""
    return rules.broadcast_shape([tuple(_read_sizes(shape)) for shape in shapes])


def _read_sizes(shape: int | Sequence[int]) -> list[int]:
    try:
        return [*map(index, shape)] if isinstance(shape, Iterable) else [index(shape)]
    except TypeError:
        raise SpecError(f"shape {shape!r}; whole numbers were expected") from None


# ---- broadcast_to


@of_arrays
def broadcast_to(x: Any, /, shape: Sequence[int]) -> Any:
    """Broadcast the array to a shape."""
    sizes = tuple(_read_sizes(shape))
    return x if sizes == x.shape else call("broadcast_to", (x,), {"shape": sizes})


register = partial(
    ship,
    family="movement",
    linear="each",
    commutes=("max", "min", "product"),
    result_types=promoted,
)
"""Registers an operator that only moves elements: operands stay partial, by any reduction."""


def broadcast_to_rule(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """Infer NumPy's broadcast to a shape."""
    operand = rules.one_operand("broadcast_to", shapes)
    return _infer_by_template(broadcast_with_shapes_template(operand, tuple(shape)), operand)


def _infer_by_template(template: Template, shape: Shape) -> Inferred:
    rule = template.rule(shape)
    return Inferred(rule, rule.result_shapes)


_BROADCASTING = OperatorClass.BROADCASTING


def _to_shape_kernel(work: LocalWork) -> list[Function]:
    """Return kernels that reshape or broadcast to the result's shape on each rank."""
    function = find_function(work, work.library.namespace, work.name)
    shapes = work.result_shapes_here(work.attributes["shape"])
    # Ranks with equal shapes have the same kernel.
    kernels: dict[Shape, Function] = {
        shape: lambda x, shape=shape: function(x, shape) for shape in shapes
    }
    return [kernels[shape] for shape in shapes]


register(
    "broadcast_to",
    broadcast_to_rule,
    ([(1, 8)], {"shape": (2, 4, 8)}),
    operator_class=_BROADCASTING,
    local=_to_shape_kernel,
    pullback=lambda step, g, number: summed_to(g, step.operands[0].shape),
)


@of_arrays
def broadcast_arrays(*arrays: Any) -> list[Any]:
    """Broadcast arrays to their common shape."""
    shape = broadcast_shapes(*(array.shape for array in arrays))
    return [broadcast_to(array, shape) for array in arrays]


# ---- expand_dims


@of_arrays
def expand_dims(x: Any, /, axis: int = 0) -> Any:
    """Insert a dimension of size 1 at this position of the result.

    Raises ArrayIndexError for a position that the result does not have.
    """
    place = as_whole(axis)
    if place is not None and not -x.ndim - 1 <= place <= x.ndim:
        raise ArrayIndexError(
            f"expand_dims of {x.ndim} dimensions at {place}; a place from {-x.ndim - 1} to "
            f"{x.ndim} was expected"
        )
    return call("expand_dims", (x,), {"axis": rules.axis_of(x.ndim + 1, axis)})


def expand_dims_rule(shapes: Sequence[Shape], axis: Axes = 0) -> Inferred:
    """Infer new dimensions of size 1 at these positions of the result.

    >>> print(expand_dims_rule([(4, 8)], axis=1).rule)
    ([i, k]) -> ([i, j, k]) {i=4, j=1, k=8}
    """
    shape = rules.one_operand("expand_dims", shapes)
    positions = [axis] if isinstance(axis, int) else list(axis or ())
    added = dimensions(len(shape) + len(positions), positions)
    dims = range(len(shape) + len(added))
    return rules.from_dims(
        [[dim for dim in dims if dim not in added]], [dims], [shape], sizes=dict.fromkeys(added, 1)
    )


_REARRANGING = OperatorClass.REARRANGING


def _reshape_back(step: TapeStep, g: Any, number: int) -> Any:
    return reshape(g, step.operands[0].shape)


register(
    "expand_dims",
    expand_dims_rule,
    ([(4, 8)], {"axis": 1}),
    operator_class=_REARRANGING,
    pullback=_reshape_back,
)


# ---- squeeze


@of_arrays
def squeeze(x: Any, /, axis: Axis) -> Any:
    """Remove dimensions of size 1. Raises SpecError for a dimension of another size."""
    axes = read_axes(axis, x.ndim)
    if any(x.shape[dim] != 1 for dim in axes):
        raise SpecError(f"squeeze of axes {axes} of shape {list(x.shape)}; they must have size 1")
    # Sorted, so that equal calls are compiled once.
    return call("squeeze", (x,), {"axis": tuple(sorted(axes))}) if axes else x


def squeeze_rule(shapes: Sequence[Shape], axis: Axes = None) -> Inferred:
    """Infer the removal of dimensions of size 1; of all of them when not given.

    >>> print(squeeze_rule([(4, 1, 8)], axis=1).rule)
    ([i, j, k]) -> ([i, k]) {i=4, j=1, k=8} need_replication={j}
    """
    shape = rules.one_operand("squeeze", shapes)
    ones = [dim for dim, size in enumerate(shape) if size == 1]
    gone = ones if axis is None else rules.axes_of(len(shape), axis)
    if not set(gone) <= set(ones):
        raise SpecError(f"dimensions {gone} of {shape} to squeeze; each must have size 1")
    dims = range(len(shape))
    return rules.from_dims([dims], [[dim for dim in dims if dim not in gone]], [shape], order=dims)


register(
    "squeeze",
    squeeze_rule,
    ([(4, 1, 8)], {"axis": 1}),
    operator_class=_REARRANGING,
    pullback=_reshape_back,
)


# ---- permute_dims


@of_arrays
def permute_dims(x: Any, /, axes: Sequence[int]) -> Any:
    """Permute the dimensions: dimension `d` of the result is `axes[d]`."""
    if not has_entries(axes):
        raise SpecError(f"permutation {axes!r} of {x.ndim} dimensions; name each of them once")
    return call("permute_dims", (x,), {"axes": tuple(axes)})


def permute_dims_rule(shapes: Sequence[Shape], axes: Sequence[int] | None = None) -> Inferred:
    """Infer a result whose dimension `d` is the operand's `axes[d]`; reversed when not given."""
    shape = rules.one_operand("permute_dims", shapes)
    permutation = range(len(shape))[::-1] if axes is None else axes
    return _infer_by_template(transpose_template(len(shape), tuple(permutation)), shape)


def _permute_back(step: TapeStep, g: Any, number: int) -> Any:
    axes = [axis % g.ndim for axis in step.attributes["axes"]]
    return permute_dims(g, [axes.index(dim) for dim in range(g.ndim)])


register(
    "permute_dims",
    permute_dims_rule,
    ([(2, 4, 8)], {"axes": (2, 0, 1)}),
    operator_class=_REARRANGING,
    pullback=_permute_back,
)


@of_arrays
def matrix_transpose(x: Any, /) -> Any:
    """Transpose the last two dimensions."""
    if x.ndim < 2:
        raise SpecError(f"shape {list(x.shape)} is no matrix; 2 or more dimensions were expected")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


@of_arrays
def moveaxis(x: Any, source: Axis, destination: Axis, /) -> Any:
    """Move dimensions to other positions; the others keep their order."""
    come, go = read_axes(source, x.ndim), read_axes(destination, x.ndim)
    if len(come) != len(go) or len(set(come)) != len(come) or len(set(go)) != len(go):
        raise SpecError(f"axes {come} to {go}; give as many places as axes, each once")
    order = [dim for dim in range(x.ndim) if dim not in come]
    # In increasing order, so that no insertion shifts an earlier axis.
    for place, dim in sorted(zip(go, come, strict=True)):
        order.insert(place, dim)
    return permute_dims(x, order)


# ---- reshape


@of_arrays
def reshape(x: Any, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Any:
    """Reshape in row-major order; a size may be -1.

    Raises SpecError for another number of elements.
    """
    sizes = _read_sizes(shape)
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        if not rest:
            raise SpecError(
                f"shape {shape} with a size -1 beside a 0: any size fits there; say which"
            )
        sizes[sizes.index(-1)] = math.prod(x.shape) // rest
    if math.prod(sizes) != math.prod(x.shape) or min(sizes, default=0) < 0:
        raise SpecError(
            f"{math.prod(x.shape)} elements of shape {list(x.shape)} do not make {shape}; "
            "give sizes of that product"
        )
    return x if tuple(sizes) == x.shape else call("reshape", (x,), {"shape": tuple(sizes)})


def reshape_rule(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """Infer the same elements in row-major order; a single size may be -1.

    >>> print(reshape_rule([(4, 6)], shape=(2, -1)).rule)
    ([ij, k]) -> ([i, jk]) {i=2, j=2, k=6}
    """
    source = rules.one_operand("reshape", shapes)
    target = tuple(shape)
    if target.count(-1) == 1:
        others = math.prod(size for size in target if size != -1)
        if others == 0 or math.prod(source) % others:
            raise SpecError(f"shape {source} cannot be reshaped to {target}: -1 has no one size")
        # -1 stands for what the other sizes leave.
        target = tuple(math.prod(source) // others if size == -1 else size for size in target)
    return _infer_by_template(reshape_template(source, target), source)


register(
    "reshape",
    reshape_rule,
    ([(4, 6)], {"shape": (2, 12)}),
    operator_class=_REARRANGING,
    local=_to_shape_kernel,
    note="a dimension that splits or merges has several factors; parts agree where sizes divide",
    pullback=_reshape_back,
)


# ---- flip


@of_arrays
def flip(x: Any, /, *, axis: Axis | None = None) -> Any:
    """Reverse the order of elements along axes; along all when None."""
    return call("flip", (x,), {"axis": read_axes(range(x.ndim) if axis is None else axis, x.ndim)})


def flip_rule(shapes: Sequence[Shape], axis: Axes = None) -> Inferred:
    """Infer axes in reverse order."""
    shape = rules.one_operand("flip", shapes)
    return rules.kept(shape, moved=rules.axes_of(len(shape), axis))


_ROWS: Sequence[Shape] = [(4, 8)]

register(
    "flip",
    flip_rule,
    (_ROWS, {"axis": 1}),
    pullback=lambda step, g, number: flip(g, axis=step.attributes["axis"]),
)


# ---- roll


@of_arrays
def roll(x: Any, /, shift: Axis, *, axis: Axis | None = None) -> Any:
    """Shift elements along axes, cyclically."""
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    axes = read_axes(axis, x.ndim)
    shifts = tuple(_read_sizes(shift))
    if not axes and len(shifts) <= 1:
        return x
    if shifts and axes and 1 in (len(shifts), len(axes)):
        # As NumPy broadcasts them: an axis that is named again is moved again.
        count = max(len(shifts), len(axes))
        shifts, axes = shifts * (count // len(shifts)), axes * (count // len(axes))
    if len(shifts) != len(axes):
        raise SpecError(f"shifts {shifts} of axes {axes}; give one for all, or one for each")
    return call("roll", (x,), {"shift": shifts, "axis": axes})


def roll_rule(shapes: Sequence[Shape], shift: int | Sequence[int], axis: Axes = None) -> Inferred:
    """Infer axes that are shifted cyclically; without axes, the flattened array is shifted.

    >>> print(roll_rule([(4, 8)], shift=1, axis=1).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = rules.one_operand("roll", shapes)
    named = [axis] if isinstance(axis, int) else axis
    moved = (
        range(len(shape)) if named is None else {rules.axis_of(len(shape), dim) for dim in named}
    )
    return rules.kept(shape, moved=list(moved))


def _roll_back(step: TapeStep, g: Any, number: int) -> Any:
    shifts = tuple(-shift for shift in step.attributes["shift"])
    return roll(g, shifts, axis=step.attributes["axis"])


register("roll", roll_rule, (_ROWS, {"shift": 1, "axis": 1}), pullback=_roll_back)


# ---- concat


@of_arrays
def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """Concatenate arrays along an axis; they are flattened first if it is None."""
    promoted = _promote(arrays)
    if axis is None:
        # Arrays are flattened separately, so that each keeps its sharding if possible.
        promoted, axis = [reshape(array, (-1,)) for array in promoted], 0
    return call("concat", promoted, {"axis": rules.axis_of(promoted[0].ndim, axis)})


def _promote(arrays: Sequence[Any]) -> list[Any]:
    if not has_entries(arrays):
        raise SpecError(f"{arrays!r}, a {type(arrays).__name__}, to put together; give arrays")
    values = list(arrays)
    if not values:
        raise SpecError("no arrays to put together; give at least one")
    converted = operands(*values)
    for array in converted:
        if not isinstance(array, ArrayValue):
            raise UsageError(
                f"{array!r}, a {type(array).__name__}, to put together with arrays; an sp.array "
                "was expected: make it one by sp.array(...)"
            )
    dtype = data_types.result_type(*converted)
    return [data_types.astype(array, dtype) for array in converted]


def concat_rule(shapes: Sequence[Shape], axis: int | None = 0) -> Inferred:
    """Infer the concatenation of arrays along an axis; all are flattened when it is None.

    >>> print(concat_rule([(4, 8), (4, 3)], axis=1).rule)
    ([i, j], [i, j]) -> ([i, j]) {i=4, j=11} need_replication={j}
    """
    check_some("concat", shapes)
    if axis is None:
        # Elements of flattened arrays are at places that no part of them shares with the result.
        result = (sum(math.prod(shape) for shape in shapes),)
        return Inferred(rules.replicated_rule(shapes, [result]), (result,))
    rank = len(shapes[0])
    place = rules.axis_of(rank, axis)
    if (
        any(len(shape) != rank for shape in shapes)
        or len({shape[:place] + shape[place + 1 :] for shape in shapes}) > 1
    ):
        raise SpecError(f"concat of {', '.join(map(str, shapes))}; they may differ in axis {axis}")
    # The factor has the result's size, since the operands' pieces end elsewhere than its parts.
    total = sum(shape[place] for shape in shapes)
    dims = range(rank)
    return rules.from_dims(
        [dims] * len(shapes), [dims], shapes, sizes={place: total}, whole=[place]
    )


def check_some(name: str, shapes: Sequence[Shape]) -> None:
    if not shapes:
        raise SpecError(f"{name} of no arrays; one or more were expected")


def _concat_kernel(work: LocalWork) -> Function:
    """Return a kernel that concatenates parts along an axis."""
    function = find_function(work, work.library.namespace, work.name)
    axis = work.attributes["axis"]
    return lambda *parts: function(parts, axis=axis)


def _take_part(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes["axis"]
    sizes = [operand.shape[axis] for operand in step.operands]
    start = sum(sizes[:number])
    return take_ranges(g, {axis: (start, start + sizes[number], 1)})


register(
    "concat",
    concat_rule,
    ([(4, 8), (4, 3)], {"axis": 1}),
    local=_concat_kernel,
    note="pieces do not meet the parts of the whole",
    pullback=_take_part,
)


@of_arrays
def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Any:
    """Join arrays of equal shape along a new axis."""
    promoted = _promote(arrays)
    if len({array.shape for array in promoted}) != 1:
        raise SpecError(
            f"a stack of shapes {[array.shape for array in promoted]}; they must be equal"
        )
    place = rules.axis_of(promoted[0].ndim + 1, axis)
    return concat([expand_dims(array, axis=place) for array in promoted], axis=place)


def take_ranges(x: Any, ranges: Mapping[int, Range]) -> Any:
    """Take the indices `start, start + step, ...` below `stop` of the dimensions in `ranges`.

    Steps are 1 or more.
    """
    items = [ranges.get(dim, (0, size, 1)) for dim, size in enumerate(x.shape)]
    # If all ranges are whole, return the array itself, without an operation.
    if all(item == (0, size, 1) for item, size in zip(items, x.shape, strict=True)):
        return x
    starts, stops, steps = zip(*items, strict=True)
    return call("slice", (x,), {"starts": starts, "limits": stops, "strides": steps})


def slice_rule(
    shapes: Sequence[Shape],
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Inferred:
    """Infer a rectangle, with a positive step per dimension.

    >>> print(slice_rule([(4, 8)], [0, 1], [4, 7], [1, 2]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = rules.one_operand("slice", shapes)
    steps = (1,) * len(shape) if strides is None else tuple(strides)
    if not len(starts) == len(limits) == len(steps) == len(shape):
        raise SpecError(f"slice {starts} to {limits} of {shape}; give each per dimension")
    for start, limit, step, size in zip(starts, limits, steps, shape, strict=True):
        if not (0 <= start <= limit <= size and step > 0):
            raise SpecError(f"slice {start}:{limit}:{step} of {size}; it must lie inside")
    # Divided rounding up, because the last step may be shorter.
    result = tuple(
        -((start - limit) // step) for start, limit, step in zip(starts, limits, steps, strict=True)
    )
    return rules.kept(shape, result, moved=[d for d, size in enumerate(shape) if result[d] != size])


def _slice_kernel(work: LocalWork) -> Function:
    """Return kernels that take ranges of dimensions, with steps."""
    attributes = work.attributes
    (operand,) = work.operands
    shape = () if operand is None else operand.shape
    # A dimension that is taken whole may be cut: each rank takes all of its own part.
    windows = tuple(
        slice(None) if (start, stop, step) == (0, size, 1) else slice(start, stop, step)
        for start, stop, step, size in zip(
            attributes["starts"], attributes["limits"], attributes["strides"], shape, strict=True
        )
    )
    return lambda x: x[windows]


def _pull_slice(step: TapeStep, g: Any, number: int) -> Any:
    attributes = step.attributes
    ranges = zip(attributes["starts"], attributes["limits"], attributes["strides"], strict=True)
    return put_ranges(g, step.operands[0].shape, list(ranges))


def put_ranges(x: Any, shape: Sequence[int], ranges: Sequence[tuple[int, int, int]]) -> Any:
    """Return zeros, with elements at every `step`-th position from `start` on in each dimension.

    >>> import reshard.spmd as sp
    >>> put_ranges(sp.array([1, 2]), (6,), [(1, 6, 3)]).to_dense().tolist()
    [0, 1, 0, 0, 2, 0]
    """
    for dim, (_, _, step) in enumerate(ranges):
        if step == 1 or x.shape[dim] == 0:
            continue
        # Each element is followed by `step - 1` zeros, except the last element.
        spread = pad(
            expand_dims(x, axis=dim + 1),
            [(0, (step - 1) * (d == dim + 1)) for d in range(x.ndim + 1)],
        )
        count = x.shape[dim]
        x = reshape(spread, (*x.shape[:dim], count * step, *x.shape[dim + 1 :]))
        # Without the zeros after the last element.
        x = take_ranges(x, {dim: (0, (count - 1) * step + 1, 1)})
    pairs = [
        (start if here else 0, size - here - (start if here else 0))
        for (start, _, _), here, size in zip(ranges, x.shape, shape, strict=True)
    ]
    return pad(x, pairs) if any(itertools.chain(*pairs)) else x


register(
    "slice",
    slice_rule,
    (_ROWS, {"starts": [0, 1], "limits": [4, 7]}),
    local=_slice_kernel,
    reads_part=True,
    note="a dimension taken whole passes through",
    pullback=_pull_slice,
)


@of_arrays
def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Split into the arrays along an axis, and remove the axis."""
    place = rules.axis_of(x.ndim, axis)
    return tuple(
        squeeze(take_ranges(x, {place: (index, index + 1, 1)}), place)
        for index in range(x.shape[place])
    )


@of_arrays
def tile(x: Any, repetitions: int | Sequence[int], /) -> Any:
    """Repeat the whole array along each dimension."""
    times = tuple(_read_sizes(repetitions))
    if min(times, default=0) < 0:
        raise UsageError(f"tile of {repetitions!r} repetitions; 0 or more were expected")
    times = (1,) * (x.ndim - len(times)) + times
    shape = (1,) * (len(times) - x.ndim) + x.shape
    # A dimension of repetitions before each of the array's, which broadcasting fills.
    pairs = [size for pair in zip(times, shape, strict=True) for size in pair]
    apart = reshape(x, [size if n % 2 else 1 for n, size in enumerate(pairs)])
    return reshape(broadcast_to(apart, pairs), [a * b for a, b in zip(times, shape, strict=True)])


@of_arrays
def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Any:
    """Repeat each element along an axis; of the flattened array when None.

    `repeats` is a single number, or a number for each position of the axis.
    """
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    place = rules.axis_of(x.ndim, axis)
    if isinstance(repeats, int):
        if repeats < 0:
            raise UsageError(f"{repeats} repeats; 0 or more were expected")
        shape = [*x.shape[: place + 1], repeats, *x.shape[place + 1 :]]
        # Add a dimension of repeats after the axis, and merge them: both rules keep shardings.
        wide = broadcast_to(expand_dims(x, axis=place + 1), shape)
        return reshape(wide, [*x.shape[:place], x.shape[place] * repeats, *x.shape[place + 1 :]])
    # Unequal repeats have no rule by factors; each element is looked up.
    places = _find_repeat_places(x, repeats, x.shape[place])
    return call("take", (x, places), {"axis": place})


def _find_repeat_places(x: ArrayValue, repeats: Any, size: int) -> Any:
    """Return the index of each element of the result of `repeat`."""
    times = repeats.to_dense() if isinstance(repeats, ArrayValue) else repeats
    try:
        indices = np.repeat(np.arange(size), np.broadcast_to(np.asarray(times), (size,)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"repeats {times!r} of {size} places: {error}; give one whole number, or one for each"
        ) from error
    return whole(x, indices)


@of_arrays
def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Any]:
    """Create the coordinate arrays of a grid, from coordinate vectors."""
    if indexing not in ("xy", "ij"):
        raise UsageError(f"indexing {indexing!r}; it is 'xy' or 'ij'")
    count = len(arrays)
    dims = list(range(count))
    if indexing == "xy" and count > 1:
        # As NumPy, "xy" swaps the first two dimensions, for pictures by row and column.
        dims[:2] = [1, 0]
    if any(array.ndim != 1 for array in arrays):
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise SpecError(f"meshgrid of shapes {shapes}; vectors were expected")
    shape = [0] * count
    for array, dim in zip(arrays, dims, strict=True):
        shape[dim] = array.shape[0]
    return [
        # -1 cannot be resolved for an empty vector: its size 0 is written out.
        broadcast_to(reshape(array, [-1 if d == dim else 1 for d in range(count)]), shape)
        if array.shape[0]
        else broadcast_to(reshape(array, [0 if d == dim else 1 for d in range(count)]), shape)
        for array, dim in zip(arrays, dims, strict=True)
    ]


Sizes = int | Sequence[int]


# ---- pad


@of_arrays
def pad(x: Any, /, pad_width: Sequence[Sequence[int]], *, constant_values: float = 0) -> Any:
    """Pad each dimension with a number, `(before, after)`."""
    pairs = whole_pairs("pads", pad_width, x.ndim)
    return call("pad", (x,), {"pad_width": pairs, "constant_values": constant_values})


def pad_rule(
    shapes: Sequence[Shape],
    pad_width: Sequence[Sequence[int]],
    mode: str = "constant",
    constant_values: float = 0,
    interior: Sequence[int] | None = None,
) -> Inferred:
    """Infer `(before, after)` more elements per dimension, and `interior` between neighbours.

    >>> print(pad_rule([(4, 8)], [(0, 0), (1, 2)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = rules.one_operand("pad", shapes)
    between = (0,) * len(shape) if interior is None else tuple(interior)
    if len(pad_width) != len(shape) or len(between) != len(shape):
        raise SpecError(f"pad of {shape} by {pad_width}; give (before, after) per dimension")
    result = tuple(
        before + size + after + inner * max(size - 1, 0)
        for size, (before, after), inner in zip(shape, pad_width, between, strict=True)
    )
    touched = [
        dim
        for dim, (ends, inner) in enumerate(zip(pad_width, between, strict=True))
        if any(ends) or inner
    ]
    return rules.kept(shape, result, moved=touched)


def _pads_with_zero(**attributes: Any) -> bool:
    return attributes.get("mode", "constant") == "constant" and not attributes.get(
        "constant_values", 0
    )


def _pad_kernel(work: LocalWork) -> Function:
    """Return a kernel that pads the array with a number."""
    pairs, value = work.attributes["pad_width"], work.attributes["constant_values"]
    return lambda x: pad_array(work.library, x, pairs, value)


def pad_array(library: Library, x: Any, pairs: _Pairs, value: float = 0) -> Any:
    """Return an array padded with a number."""
    if not any(before or after for before, after in pairs):
        return x
    shape = [size + sum(pair) for size, pair in zip(x.shape, pairs, strict=True)]
    padded = library.filled(tuple(shape), value, x)
    window = tuple(
        slice(before, before + size) for size, (before, _) in zip(x.shape, pairs, strict=True)
    )
    padded[window] = x
    return padded


_Pairs = Sequence[tuple[int, int]]


def _unpad(step: TapeStep, g: Any, number: int) -> Any:
    pairs = zip(step.attributes["pad_width"], g.shape, strict=True)
    return take_ranges(
        g, {dim: (before, size - after, 1) for dim, ((before, after), size) in enumerate(pairs)}
    )


register(
    "pad",
    pad_rule,
    (_ROWS, {"pad_width": [(0, 0), (1, 2)]}),
    commutes=(),
    linear_if=_pads_with_zero,
    local=_pad_kernel,
    note="linear where it pads with zero",
    pullback=_unpad,
)


@of_arrays
def split(x: Any, indices_or_sections: Sizes, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Split along an axis: into a number of equal parts, or before the given indices.

    Indices are those of slices: below 0 they count from the end.
    """
    place = rules.axis_of(x.ndim, axis)
    size = x.shape[place]
    if hasattr(indices_or_sections, "__index__"):
        count = check_int(indices_or_sections, "number of equal parts", minimum=1)
        if size % count:
            raise SpecError(f"{size} in {count} equal parts; give a divisor")
        # Where each part but the last ends.
        ends = [size // count * (number + 1) for number in range(count - 1)]
    elif isinstance(indices_or_sections, Iterable):
        ends = [check_int(end, "start of a part", minimum=-size) for end in indices_or_sections]
    else:
        raise UsageError(f"split at {indices_or_sections!r}; give whole numbers, or how many parts")
    parts = []
    for first, last in itertools.pairwise([0, *ends, size]):
        # As NumPy: counted from the end where negative, clipped, and empty where they do not rise.
        start, stop, _ = slice(first, last).indices(size)
        parts.append(take_ranges(x, {place: (start, max(start, stop), 1)}))
    return tuple(parts)


def summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over all dimensions that were broadcast from a shape.

    >>> import reshard.spmd as sp
    >>> summed_to(sp.ones((2, 3)), (3,)).to_dense().tolist()
    [2.0, 2.0, 2.0]
    """
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    # Dimensions that were broadcast from size 1 are summed and kept; leading dimensions that
    # broadcasting added are summed and removed.
    inner = tuple(
        lead + dim for dim, size in enumerate(shape) if size == 1 and x.shape[lead + dim] != 1
    )
    # Found by name, because the module of sums imports this module.
    # Its type is named, because a sum widens narrow integers otherwise.
    if inner:
        x = call("sum", (x,), {"axis": inner, "keepdims": True}, {"dtype": x.dtype})
    if lead:
        axes = tuple(range(lead))
        x = call("sum", (x,), {"axis": axes, "keepdims": False}, {"dtype": x.dtype})
    return x if x.shape == shape else reshape(x, shape)
