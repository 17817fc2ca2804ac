"""The array API's functions that only move elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from reshard.errors import ArrayIndexError, SpecError, UsageError
from reshard.spmd.functions import data_types
from reshard.spmd.functions.array_arguments import as_whole, of_arrays
from reshard.spmd.functions.elementwise import operands, whole
from reshard.spmd.rules.shapes import axis_of, broadcast_shape
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Axis = int | Sequence[int]
Range = tuple[int, int, int]
"""Start, stop and step along a dimension."""


def read_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Axes counted from the start, in their order. Raises SpecError for one that is not there."""
    asked = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    try:
        given = tuple(map(index, asked))
    except TypeError:
        raise SpecError(f"axes {asked} of {ndim} dimensions; name them by whole numbers") from None
    if any(not -ndim <= one < ndim for one in given):
        raise SpecError(f"axes {given} of {ndim} dimensions; give some of {-ndim} to {ndim - 1}")
    return tuple(one % ndim for one in given)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape of arrays of these shapes. Raises SpecError if there is none."""
    return broadcast_shape([tuple(_read_sizes(shape)) for shape in shapes])


@of_arrays
def broadcast_to(x: Any, /, shape: Sequence[int]) -> Any:
    """Broadcast the array to a shape."""
    wanted = tuple(_read_sizes(shape))
    return x if wanted == x.shape else call("broadcast_to", (x,), {"shape": wanted})


@of_arrays
def broadcast_arrays(*arrays: Any) -> list[Any]:
    """Broadcast arrays to their common shape."""
    shape = broadcast_shapes(*(one.shape for one in arrays))
    return [broadcast_to(one, shape) for one in arrays]


@of_arrays
def expand_dims(x: Any, /, axis: int = 0) -> Any:
    """Insert a dimension of size 1 at this position of the result.

    Raises ArrayIndexError for a place that the result has not.
    """
    place = as_whole(axis)
    if place is not None and not -x.ndim - 1 <= place <= x.ndim:
        raise ArrayIndexError(
            f"expand_dims of {x.ndim} dimensions at {place}; a place from {-x.ndim - 1} to "
            f"{x.ndim} was expected"
        )
    return call("expand_dims", (x,), {"axis": axis_of(x.ndim + 1, axis)})


@of_arrays
def squeeze(x: Any, /, axis: Axis) -> Any:
    """Remove dimensions of size 1. Raises SpecError for one of another size."""
    axes = read_axes(axis, x.ndim)
    if any(x.shape[one] != 1 for one in axes):
        raise SpecError(f"squeeze of axes {axes} of shape {list(x.shape)}; they must have size 1")
    return call("squeeze", (x,), {"axis": tuple(sorted(axes))}) if axes else x


@of_arrays
def permute_dims(x: Any, /, axes: Sequence[int]) -> Any:
    """Permute the dimensions: dimension `d` of the result is `axes[d]`."""
    if not isinstance(axes, Iterable):
        raise SpecError(f"permutation {axes!r} of {x.ndim} dimensions; name each of them once")
    return call("permute_dims", (x,), {"axes": tuple(axes)})


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
    for place, dim in sorted(zip(go, come, strict=True)):
        order.insert(place, dim)
    return permute_dims(x, order)


def _read_sizes(shape: int | Sequence[int]) -> list[int]:
    try:
        return [*map(index, shape)] if isinstance(shape, Iterable) else [index(shape)]
    except TypeError:
        raise SpecError(f"shape {shape!r}; whole numbers were expected") from None


@of_arrays
def reshape(x: Any, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Any:
    """Reshape in row-major order; one size may be -1.

    Raises SpecError for another number of elements.
    """
    wanted = _read_sizes(shape)
    if wanted.count(-1) == 1:
        rest = math.prod(size for size in wanted if size != -1)
        if not rest:
            raise SpecError(
                f"shape {shape} with a size -1 beside a 0: any size fits there; say which"
            )
        wanted[wanted.index(-1)] = math.prod(x.shape) // rest
    if math.prod(wanted) != math.prod(x.shape) or min(wanted, default=0) < 0:
        raise SpecError(
            f"{math.prod(x.shape)} elements of shape {list(x.shape)} do not make {shape}; "
            "give sizes of that product"
        )
    return x if tuple(wanted) == x.shape else call("reshape", (x,), {"shape": tuple(wanted)})


@of_arrays
def flip(x: Any, /, *, axis: Axis | None = None) -> Any:
    """Reverse the order of elements along axes; along all when None."""
    return call("flip", (x,), {"axis": read_axes(range(x.ndim) if axis is None else axis, x.ndim)})


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


def _promote(arrays: Sequence[Any]) -> list[Any]:
    if not isinstance(arrays, Iterable) or getattr(arrays, "shape", None) == ():
        raise SpecError(f"{arrays!r}, a {type(arrays).__name__}, to put together; give arrays")
    given = list(arrays)
    if not given:
        raise SpecError("no arrays to put together; give at least one")
    made = operands(*given)
    for one in made:
        if not isinstance(one, ArrayValue):
            raise UsageError(
                f"{one!r}, a {type(one).__name__}, to put together with arrays; an sp.array was "
                "expected: make it one by sp.array(...)"
            )
    wanted = data_types.result_type(*made)
    return [data_types.astype(one, wanted) for one in made]


@of_arrays
def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Any:
    """Concatenate arrays along an axis; they are flattened first if it is None."""
    made = _promote(arrays)
    if axis is None:
        # Flattened one by one, so that each keeps what cuts it can.
        made, axis = [reshape(one, (-1,)) for one in made], 0
    return call("concat", made, {"axis": axis_of(made[0].ndim, axis)})


@of_arrays
def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Any:
    """Join arrays of one shape along a new axis."""
    made = _promote(arrays)
    if len({one.shape for one in made}) != 1:
        raise SpecError(f"a stack of shapes {[one.shape for one in made]}; they must be equal")
    place = axis_of(made[0].ndim + 1, axis)
    return concat([expand_dims(one, axis=place) for one in made], axis=place)


def take_ranges(x: Any, ranges: Mapping[int, Range]) -> Any:
    """The indices `start, start + step, ...` below `stop` of some dimensions, all of the others.

    Steps are 1 or more.
    """
    items = [ranges.get(dim, (0, size, 1)) for dim, size in enumerate(x.shape)]
    # All of it: the array itself, and no operation.
    if all(one == (0, size, 1) for one, size in zip(items, x.shape, strict=True)):
        return x
    starts, stops, steps = zip(*items, strict=True)
    return call("slice", (x,), {"starts": starts, "limits": stops, "strides": steps})


@of_arrays
def unstack(x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Split into the arrays along an axis, and remove the axis."""
    place = axis_of(x.ndim, axis)
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

    `repeats` is one number, or one for each place of the axis.
    """
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    place = axis_of(x.ndim, axis)
    if isinstance(repeats, int):
        if repeats < 0:
            raise UsageError(f"{repeats} repeats; 0 or more were expected")
        shape = [*x.shape[: place + 1], repeats, *x.shape[place + 1 :]]
        # A dimension of repeats behind the axis, then merged with it: the rules of both keep cuts.
        wide = broadcast_to(expand_dims(x, axis=place + 1), shape)
        return reshape(wide, [*x.shape[:place], x.shape[place] * repeats, *x.shape[place + 1 :]])
    # Unequal repeats have no rule by factors; each element is looked up.
    places = _find_repeat_places(x, repeats, x.shape[place])
    return call("take", (x, places), {"axis": place})


def _find_repeat_places(x: ArrayValue, repeats: Any, size: int) -> Any:
    """The index of each element when each place is repeated so often."""
    times = repeats.to_dense() if isinstance(repeats, ArrayValue) else repeats
    try:
        found = np.repeat(np.arange(size), np.broadcast_to(np.asarray(times), (size,)))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"repeats {times!r} of {size} places: {error}; give one whole number, or one for each"
        ) from error
    return whole(x, found)


@of_arrays
def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Any]:
    """Coordinate arrays of a grid, from coordinate vectors."""
    if indexing not in ("xy", "ij"):
        raise UsageError(f"indexing {indexing!r}; it is 'xy' or 'ij'")
    count = len(arrays)
    dims = list(range(count))
    if indexing == "xy" and count > 1:
        dims[:2] = [1, 0]
    if any(one.ndim != 1 for one in arrays):
        shapes = ", ".join(str(list(one.shape)) for one in arrays)
        raise SpecError(f"meshgrid of shapes {shapes}; vectors were expected")
    shape = [0] * count
    for one, dim in zip(arrays, dims, strict=True):
        shape[dim] = one.shape[0]
    return [
        # -1 cannot be resolved for an empty vector: its size 0 is written out.
        broadcast_to(reshape(one, [-1 if d == dim else 1 for d in range(count)]), shape)
        if one.shape[0]
        else broadcast_to(reshape(one, [0 if d == dim else 1 for d in range(count)]), shape)
        for one, dim in zip(arrays, dims, strict=True)
    ]
