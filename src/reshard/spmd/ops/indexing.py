"""Reads and writes at indices: `x[...]`, `take`, `take_along_axis`, `scatter`, dynamic slices.

Slices, integers, `...` and `None` follow the array API; so do integer arrays on the leading
dimensions. The shape of a mask's selection depends on the elements, so it is computed from the full
array and is not sharded. In a backward pass, elements that were looked up get the cotangents of all
places that looked them up, added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.errors import ArrayIndexError, ShardError, SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.backend import library_of
from reshard.spmd.core.local_work import Function, LocalWork, has_plain_parts, have_plain_parts
from reshard.spmd.core.operator import OperatorClass, TapeStep, ship
from reshard.spmd.core.result_types import index, kind_of, of_first
from reshard.spmd.ops import data_types, elementwise, movement
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.arguments import has_entries, of_arrays, whole_numbers
from reshard.spmd.ops.elementwise import operands, where, whole
from reshard.spmd.ops.filling import zeros_like
from reshard.spmd.ops.movement import Range
from reshard.spmd.ops.reductions import sum as sum_over
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Inferred, Shape
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

# ---- take


@of_arrays
def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    """Take elements along an axis by index.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    if axis is None:
        if x.ndim != 1:
            raise SpecError(f"take of shape {list(x.shape)} needs an axis; give axis=")
        axis = 0
    place = rules.axis_of(x.ndim, axis)
    return call("take", places_in(x, place, indices), {"axis": place})


register = partial(ship, family="indexing")
_register_lookup = partial(
    register,
    linear=(0,),
    reads_part=True,
    result_types=of_first,
    note="a part gives the slices it has, zero for others; contributions are summed",
)


def take_rule(shapes: Sequence[Shape], axis: int | None = None) -> Inferred:
    """Infer slices of an axis at indices; the indices' dimensions replace the axis.

    A device that has some of the slices gives those, and zero for the others. The sharding of the
    indices takes precedence over the sharding of a table's rows.

    >>> print(take_rule([(100, 8), (4,)], axis=0).rule)
    ([k, j], [i]) -> ([i, j]) {i=4, j=8, k=100} reduction={k}
    """
    rules.counted("take", shapes, 2)
    shape, _ = shapes
    if axis is None and len(shape) != 1:
        raise SpecError(f"take of {shape} without an axis; say which axis the indices are of")
    place = rules.axis_of(len(shape), axis or 0)
    # All indices refer to the single element of such an axis.
    looked_up = "k" if shape[place] != 1 else ""
    return rules.from_pattern(
        "*a k *b, *i -> *a *i *b",
        shapes,
        lengths={"a": place},
        leading="i" if place == 0 else "",
        reduced=looked_up,
        adjusted=looked_up,
    )


def _take_kernel(work: LocalWork) -> Function | list[Function]:
    """Return kernels for slices of an axis at indices."""
    look_up, axis = work.library.namespace.take, work.attributes["axis"]

    def whole(x: Any, indices: Any) -> Any:
        # The array API defines `take` for indices of one dimension only.
        rows = look_up(x, indices.reshape(-1), axis=axis)
        return rows.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])

    return _look_up_own_rows(work, whole, axis)


def _look_up_own_rows(
    work: LocalWork, whole: Function, axis: int, is_along: bool = False
) -> Function | list[Function]:
    """Return kernels of a lookup along an axis: if it is sharded, a rank gives 0 for other rows.

    `checked_index` ensures that indices count from the start and are in range.
    """
    if not work.is_cut(0, axis):
        return whole
    library = work.library
    space = library.namespace

    def here(x: Any, indices: Any, start: int) -> Any:
        size = x.shape[axis]
        own = (indices >= start) & (indices < start + size)
        # A rank without rows returns zeros of the result's shape.
        if not size:
            shape = indices.shape if is_along else None
            rest = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
            return library.linked(library.filled(rest if shape is None else shape, 0, x), x)
        # Indices of other ranks' rows look up the first row, which is then replaced by 0. Zeros are
        # made from the indices, for their type and device.
        rows = whole(x, space.where(own, indices - start, 0 * indices))
        if not is_along:
            # Reshaped to broadcast over the dimensions around the axis, as in the result.
            own = own.reshape((1,) * axis + own.shape + (1,) * (x.ndim - axis - 1))
        return space.where(own, rows, library.filled((), 0, x))

    # Each rank has its own function, because its part has another offset.
    starts = work.starts_here(0, axis)
    return [lambda x, indices, start=start: here(x, indices, start) for start in starts]


def _add_at(x: Any, indices: Any, updates: Any, axis: int) -> Any:
    """Return zeros like an array, with updates added to slices of an axis."""
    attributes = {"axis": axis, "mode": "add"}
    return call("scatter", (zeros_like(x), indices, updates), attributes)


_register_lookup(
    "take",
    take_rule,
    ([(100, 8), (4,)], {"axis": 0}),
    local=_take_kernel,
    knows_place=have_plain_parts,
    pullback=lambda step, g, number: _add_at(
        step.operands[0], step.operands[1], g, step.attributes["axis"]
    ),
)


# ---- take_along_axis


@of_arrays
def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """Take elements along an axis, by an index for each position of the other axes.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    place = rules.axis_of(x.ndim, axis)
    x, chosen = places_in(x, place, indices)
    if chosen.ndim != x.ndim:
        raise SpecError(
            f"indices of shape {list(chosen.shape)} along axis {place} of {list(x.shape)}; give "
            "as many dimensions"
        )
    shape = movement.broadcast_shapes(
        *((*sizes[:place], *sizes[place + 1 :]) for sizes in (x.shape, chosen.shape))
    )
    x, chosen = (
        movement.broadcast_to(array, (*shape[:place], array.shape[place], *shape[place:]))
        for array in (x, chosen)
    )
    return call("take_along_axis", (x, chosen), {"axis": place})


def take_along_axis_rule(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Infer an element of an axis for each index; the other dimensions broadcast.

    >>> print(take_along_axis_rule([(4, 8), (4, 3)]).rule)
    ([i, k], [i, j]) -> ([i, j]) {i=4, j=3, k=8} reduction={k}
    """
    rules.counted("take_along_axis", shapes, 2)
    place = rules.axis_of(len(shapes[0]), axis)
    looked_up = "k" if shapes[0][place] != 1 else ""
    return rules.from_pattern(
        "*a k *b, *a j *b -> *a j *b",
        shapes,
        lengths={"a": place},
        broadcast="ab",
        reduced=looked_up,
        adjusted=looked_up,
    )


def _take_along_kernel(work: LocalWork) -> Function | list[Function]:
    """Return kernels for an element of an axis for each index."""
    look_up, axis = work.library.namespace.take_along_axis, work.attributes["axis"]
    return _look_up_own_rows(
        work, lambda x, indices: look_up(x, indices, axis=axis), axis, is_along=True
    )


def add_along(x: Any, indices: Any, g: Any, axis: int) -> Any:
    """Return zeros like `x`, with updates added at indices along an axis, position by position."""
    axis %= x.ndim
    spec = x.type.spec
    size, count = x.shape[axis], indices.shape[axis]
    indices, g = movement.moveaxis(indices, axis, -1), movement.moveaxis(g, axis, -1)
    if count <= _FEW:
        # Each position is compared with the indices, so that positions may be sharded.
        places = whole(x, np.arange(size))
        if spec is not None and has_plain_parts(spec):
            places = places.shard(ShardingSpec(spec.mesh, [spec.dim_specs[axis]]))
        if count == 1:
            return movement.moveaxis(where(e.equal(places, indices), g, 0.0), -1, axis)
        chosen = e.equal(
            movement.expand_dims(places, axis=1), movement.expand_dims(indices, axis=-2)
        )
        updated = sum_over(where(chosen, movement.expand_dims(g, axis=-2), 0.0), axis=-1)
        return movement.moveaxis(updated, -1, axis)
    # All positions are flattened, so that each element has its own index.
    lead = g.shape[:-1]
    rows = int(np.prod(lead, dtype=np.int64))
    first = whole(x, np.arange(rows).reshape((*lead, 1)) * size)
    at = movement.reshape(movement.broadcast_to(indices, g.shape) + first, (-1,))
    line = movement.reshape(zeros_like(movement.moveaxis(x, axis, -1)), (-1,))
    updated = _add_at(line, at, movement.reshape(g, (-1,)), 0)
    return movement.moveaxis(movement.reshape(updated, (*lead, size)), -1, axis)


_FEW = 16
"""The maximum number of indices along an axis that are compared with all positions."""

_register_lookup(
    "take_along_axis",
    take_along_axis_rule,
    ([(4, 8), (4, 3)], {"axis": 1}),
    local=_take_along_kernel,
    knows_place=have_plain_parts,
    pullback=lambda step, g, number: add_along(
        step.operands[0], step.operands[1], g, step.attributes["axis"]
    ),
)


def places_in(x: Any, axis: int, indices: Any) -> list[Any]:
    """Convert an array and indices of an axis to operands; the indices count from its start.

    Raises:
        ArrayIndexError: an index that is out of range, on every process.
        UsageError: indices that are not an array of whole numbers.
    """
    size = x.shape[axis]
    # NumPy indices are known before anything runs: they are checked here, without an operation.
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu":
        _check_known(indices, size)
        # Narrow integers could wrap around when the size is added.
        positions = indices.astype(np.int64)
        return operands(x, np.where(positions < 0, positions + size, positions))
    x, positions = operands(x, indices)
    return [x, _count_from_start(positions, size)]


def _check_known(indices: Any, size: int) -> None:
    """Raise ArrayIndexError for indices out of range that are known before the computation."""
    if isinstance(indices, np.ndarray) and indices.size and indices.dtype.kind in "iu":
        least, most = int(indices.min()), int(indices.max())
        if least < -size or most >= size:
            raise index_out_of_range(least if least < -size else most, size)


def _count_from_start(indices: Any, size: int) -> Any:
    is_array = isinstance(indices, ArrayValue)
    kind = kind_of(indices.type.dtype) if is_array else type(indices).__name__
    if kind not in ("signed integer", "unsigned integer"):
        raise UsageError(f"indices of kind {kind}; give an array of whole numbers")
    return call("checked_index", (indices,), {"size": size})


def checked_index_rule(shapes: Sequence[Shape], size: int) -> Inferred:
    """Infer indices of an axis of this size, counted from its start and checked to be in range.

    >>> print(checked_index_rule([(4, 3)], size=10).rule)
    ([i, j]) -> ([i, j]) {i=4, j=3}
    """
    return rules.kept(rules.one_operand("checked_index", shapes))


def _checked_index_kernel(work: LocalWork) -> Function:
    """Return a kernel that counts indices from the start, and raises if any is out of range."""
    space, size = work.library.namespace, work.attributes["size"]
    (operand,) = work.operands
    # An unsigned integer that becomes negative as an int64 is too large, and out of range.
    is_signed = operand is not None and not operand.dtype.name.startswith("uint")
    least = -size if is_signed else 0

    def count_from_start(indices: Any) -> Any:
        # Narrow integers could wrap around when the size is added.
        positions = space.asarray(indices, dtype=space.int64)
        if 0 in positions.shape:
            return positions
        for end in (int(space.min(positions)), int(space.max(positions))):
            if not least <= end < size:
                raise index_out_of_range(end, size)
        return space.where(positions < 0, positions + size, positions)

    return count_from_start


def index_out_of_range(index: int, size: int) -> ArrayIndexError:
    """Return the error for an index that is out of range."""
    expected = f"give one of {-size} to {size - 1}" if size else "it has no elements"
    return ArrayIndexError(f"index {index} of a dimension of size {size}; {expected}")


register(
    "checked_index",
    checked_index_rule,
    ([(4,)], {"size": 10}),
    local=_checked_index_kernel,
    fails="any",
    result_types=index,
    note="indices counted from the start; one out of range is refused on every rank",
    is_constant=True,
)


def getitem(x: Any, key: Any) -> Any:
    """Return `x[key]`.

    Raises:
        ArrayIndexError: an index that is out of range, too many indices, or an invalid slice.
        ShardError: a key of a kind that sharded arrays do not support.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    if _BASIC.issuperset(map(type, items)):
        return _take_basic(x, items)
    items = [_read_item(item) for item in items]
    if len(items) == 1 and _is_mask(items[0]):
        return _take_masked(x, items[0])
    if any(_is_mask(item) for item in items):
        raise ShardError("an index with a mask beside others; give the mask alone, or use sp.where")
    arrays = [place for place, item in enumerate(items) if _is_array(item)]
    # Three cases: an array and slices, arrays and numbers for leading dimensions, no arrays.
    if len(arrays) == 1 and not any(map(_is_number, items)):
        return _take_between(x, items, arrays[0])
    if arrays:
        return _gather(x, items)
    return _take_basic(x, items)


_BASIC = frozenset([slice, int, type(None), type(Ellipsis)])
"""The types of the items of most keys, which need no reading."""


def _take_basic(x: Any, items: list[Any]) -> Any:
    # 1. Expand `...`, so that each item except None has a dimension.
    used = len(items) - items.count(None) - items.count(Ellipsis)
    if used > x.ndim:
        raise _refuse_indices(x, used)
    if items.count(Ellipsis) > 1:
        raise ArrayIndexError(
            f"{items.count(Ellipsis)} times ... in an index; it stands for all dimensions that are "
            "not named, so give it at most once"
        )
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    # 2. Read the items: the range of each dimension, and the removed, reversed and new dimensions.
    cuts: dict[int, Range] = {}
    gone: list[int] = []
    turned: list[int] = []
    added: list[int] = []
    dim = 0
    for place, item in enumerate(items):
        if item is None:
            # Dimensions that were removed before it do not count.
            added.append(place - len(gone))
            continue
        if isinstance(item, slice):
            start, stop, step = _read_slice(item, x.shape[dim])
            if step < 0:
                turned.append(dim)
                count = len(range(start, stop, step))
                if count:
                    # The same elements in ascending order; `flip` reverses them afterwards.
                    start, stop, step = start + (count - 1) * step, start + 1, -step
                else:
                    start, stop, step = 0, 0, 1
            # A stop before the start takes nothing, as in Python.
            cuts[dim] = (start, max(start, stop), step)
        else:
            index = _read_index(item, x.shape[dim])
            cuts[dim] = (index, index + 1, 1)
            gone.append(dim)
        dim += 1
    # 3. Execute a separate operation for each kind of change that is needed.
    # Ranges and reversals count the array's dimensions; new ones are counted after the removal.
    result = movement.take_ranges(x, cuts)
    if turned:
        result = movement.flip(result, axis=tuple(turned))
    if gone:
        result = call("squeeze", (result,), {"axis": tuple(gone)})
    for place in added:
        result = movement.expand_dims(result, axis=place)
    return result


def _refuse_indices(x: Any, count: int) -> ArrayIndexError:
    return ArrayIndexError(
        f"{count} indices for shape {list(x.shape)}; give at most {x.ndim}, one a dimension"
    )


def _read_slice(item: slice, size: int) -> Range:
    """Return the start, stop and step of a slice of a dimension."""
    try:
        return item.indices(size)
    except (TypeError, ValueError) as error:
        said = ":".join("" if n is None else repr(n) for n in (item.start, item.stop, item.step))
        raise ArrayIndexError(
            f"slice {said} of a dimension of size {size}: {error}; give whole numbers or none, "
            "and a step that is not 0"
        ) from error


def _read_index(item: Any, size: int) -> int:
    index = int(item.__index__())
    if not -size <= index < size:
        raise index_out_of_range(index, size)
    return index % size


def _read_item(item: Any) -> Any:
    """Read an item of a key; lists become arrays. Raises ShardError for unsupported values."""
    if isinstance(item, list | tuple):
        # NumPy gives an empty list float64, which cannot be an index.
        return np.asarray(item) if len(item) else np.zeros(0, np.int64)
    is_place = item is None or item is Ellipsis or isinstance(item, slice)
    if (
        is_place
        or _is_array(item)
        or (hasattr(item, "__index__") and not isinstance(item, bool | np.bool))
    ):
        return item
    raise ShardError(
        f"index {item!r} of type {type(item).__name__}; give whole numbers, slices, ..., None, "
        "an array of whole numbers, or a mask alone"
    )


def _is_array(item: Any) -> bool:
    if isinstance(item, ArrayValue):
        return True
    return library_of(item) is not None and (len(item.shape) > 0 or _is_truth(item))


def _is_truth(item: Any) -> bool:
    # A NumPy bool scalar is not an array: it is rejected like a Python bool.
    is_bool = str(item.dtype).removeprefix("torch.") == "bool"
    return is_bool and not isinstance(item, np.generic)


def _is_mask(item: Any) -> bool:
    return _is_array(item) and _is_truth(item)


def _take_masked(x: Any, mask: Any) -> Any:
    mask_shape = tuple(mask.shape)
    fits = len(mask_shape) <= x.ndim and all(
        # A mask of size 0 selects nothing, and is allowed by the array API.
        length in (size, 0)
        for length, size in zip(mask_shape, x.shape, strict=False)
    )
    if not fits:
        raise ArrayIndexError(
            f"a mask of shape {list(mask_shape)} for shape {list(x.shape)}; give one of its "
            "leading dimensions"
        )
    dense = x.to_dense()
    chosen = (
        mask.to_dense()
        if isinstance(mask, ArrayValue)
        else x.runner.library.array(mask, like=dense)
    )
    return whole(x, dense[chosen])


def _take_between(x: Any, items: list[Any], place: int) -> Any:
    """Index by an integer array and slices, `...` and None; its dimensions replace the indexed."""
    others = [slice(None) if n == place else item for n, item in enumerate(items)]
    sliced = _take_basic(x, others)
    # If `...` comes before the array, its axis is counted from the end.
    ahead = items[:place]
    axis = len(ahead) if Ellipsis not in ahead else sliced.ndim - (len(items) - place)
    return take(sliced, items[place], axis=axis)


def _gather(x: Any, items: list[Any]) -> Any:
    """Index the leading dimensions by integer arrays."""
    # Trailing items that select whole dimensions have no effect.
    while items and items[-1] is Ellipsis:
        items.pop()
    while items and isinstance(items[-1], slice) and items[-1] == slice(None):
        items.pop()
    if any(item is None or item is Ellipsis or isinstance(item, slice) for item in items):
        raise ShardError(
            "an index with arrays beside slices, None or ...; give arrays and whole numbers for "
            "the leading dimensions alone, or use take along an axis"
        )
    if len(items) > x.ndim:
        raise _refuse_indices(x, len(items))
    for item, size in zip(items, x.shape, strict=False):
        _check_known(item, size)
    places = operands(x, *items)[1:]
    # The leading dimensions are merged in row-major order, so that a single lookup suffices.
    flat: Any = None
    for place, size in zip(places, x.shape, strict=False):
        if isinstance(place, ArrayValue):
            index = _count_from_start(place, size)
        else:
            index = _read_index(place, size)
        flat = index if flat is None else flat * size + index
    merged = movement.reshape(x, (math.prod(x.shape[: len(items)]), *x.shape[len(items) :]))
    return call("take", (merged, flat), {"axis": 0})


def _is_number(item: Any) -> bool:
    return not _is_array(item) and hasattr(item, "__index__")


# ---- scatter


@of_arrays
def scatter(x: Any, indices: Any, updates: Any, /, *, axis: int = 0, mode: str = "set") -> Any:
    """Replace slices along an axis, at indices, by updates, or add the updates ("add").

    `updates` have the indices' dimensions in the axis's place. Of updates at equal indices, any is
    set.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    if mode not in ("set", "add"):
        raise SpecError(f"mode {mode!r} of scatter; it is 'set' or 'add'")
    place = rules.axis_of(x.ndim, axis)
    x, chosen = places_in(x, place, indices)
    _, updates = operands(x, updates)
    _check_fits("scatter", x, updates)
    return call("scatter", operands(x, chosen, updates), {"axis": place, "mode": mode})


def _check_fits(name: str, x: Any, updates: Any) -> None:
    """Raise UsageError for updates that would be rounded, such as 0.5 in an integer array."""
    kinds = [
        _KINDS.index(kind_of(array.dtype)) for array in (x, updates) if hasattr(array, "dtype")
    ]
    if len(kinds) == 2 and kinds[1] > kinds[0]:
        raise UsageError(
            f"{name} of updates of {updates.dtype} into {x.dtype} would round them; cast one of "
            "both with sp.astype"
        )


def scatter_rule(shapes: Sequence[Shape], axis: int = 0, mode: str = "set") -> Inferred:
    """Infer an array with slices of an axis, at indices, replaced by updates or combined with them.

    Operands are the array, the indices and the updates. The updates have the array's dimensions,
    with the indices' dimensions in the axis's place. Each device applies the updates of its slices.

    >>> print(scatter_rule([(100, 8), (4,), (4, 8)]).rule)
    ([k, j], [i], [i, j]) -> ([k, j]) {i=4, j=8, k=100} need_replication={i}
    """
    rules.counted("scatter", shapes, 3)
    shape, indices, updates = shapes
    place = rules.axis_of(len(shape), axis)
    if updates != shape[:place] + indices + shape[place + 1 :]:
        raise SpecError(
            f"scatter into {shape} of updates {updates} at {indices}; updates of "
            f"{shape[:place] + indices + shape[place + 1 :]} were expected"
        )
    # Any index may refer to a device's part, so devices need all indices and updates.
    pattern = "*a k *b, *i, *a *i *b -> *a k *b"
    return rules.from_pattern(pattern, shapes, lengths={"a": place}, order="aib", adjusted="k")


def _adds(**attributes: Any) -> bool:
    # Setting is not linear: contributions that are set do not add up to the updates.
    return bool(attributes.get("mode", "set") == "add")


def _scatter_kernel(work: LocalWork) -> Function | list[Function]:
    """Return kernels that copy an array and set, or add to, the slices that the rank has."""
    library, axis, mode = work.library, work.attributes["axis"], work.attributes["mode"]
    space = library.namespace

    is_cut = work.is_cut(0, axis)

    def function(x: Any, indices: Any, updates: Any, start: int = 0) -> Any:
        # The axis is moved to the front, and so are the indices' dimensions of the updates.
        # A copy, since arrays are immutable.
        result = space.moveaxis(library.copied(x), axis, 0)
        count = len(indices.shape)
        order = [*range(axis, axis + count), *range(axis)]
        order += range(axis + count, len(updates.shape))
        values = space.permute_dims(updates, tuple(order))
        flat = indices.reshape(-1)
        values = values.reshape((flat.shape[0], *result.shape[1:]))
        if is_cut:
            own = (flat >= start) & (flat < start + result.shape[0])
            flat, values = flat[own] - start, values[own]
        if mode == "set":
            result[flat] = values
        # `made[flat] += values` would add a single update of those at equal indices.
        elif library.name == "numpy":
            space.add.at(result, flat, values)
        else:
            result.index_put_((flat,), values, accumulate=True)
        return space.moveaxis(result, 0, axis)

    if not is_cut:
        return function
    # Each rank has its own function, because its part has another offset.
    starts = work.starts_here(0, axis)
    return [lambda x, i, u, start=start: function(x, i, u, start) for start in starts]


def _pull_scatter(step: TapeStep, g: Any, number: int) -> Any:
    x, indices, updates = step.operands
    axis, mode = step.attributes["axis"], step.attributes["mode"]
    if mode == "add":
        return g if number == 0 else call("take", (g, indices), {"axis": axis})
    if number == 0:
        return call("scatter", (g, indices, zeros_like(updates)), {"axis": axis, "mode": "set"})
    taken = call("take", (g, indices), {"axis": axis})
    # A single update of those at equal indices was set. The same scatter of numbers shows which.
    flat = movement.reshape(indices, (-1,))
    numbers = whole(x, np.arange(flat.shape[0]))
    marks = whole(x, np.full(x.shape[axis], -1))
    marked = call("scatter", (marks, flat, numbers), {"axis": 0, "mode": "set"})
    was_set = e.equal(call("take", (marked, flat), {"axis": 0}), numbers)
    trailing = (1,) * (updates.ndim - axis - indices.ndim)
    return where(movement.reshape(was_set, indices.shape + trailing), taken, 0.0)


register(
    "scatter",
    scatter_rule,
    ([(100, 8), (4,), (4, 8)], {"axis": 0}),
    linear=(0, 2),
    linear_if=_adds,
    local=_scatter_kernel,
    knows_place=have_plain_parts,
    result_types=of_first,
    note="a part keeps the updates of its own slices; linear where it adds",
    pullback=_pull_scatter,
)


# ---- dynamic_slice


@of_arrays
def dynamic_slice(x: Any, starts: Sequence[Any], /, sizes: Sequence[int]) -> Any:
    """Take a slice of fixed size that starts at scalars, which are clamped to stay inside."""
    lengths = whole_numbers("sizes", sizes, x.ndim)
    return call("dynamic_slice", _add_starts([x], starts), {"sizes": lengths})


def _add_starts(arrays: Sequence[Any], starts: Sequence[Any]) -> list[Any]:
    """Return the operands. Raises UsageError if the starts of a rectangle are not integers."""
    if not has_entries(starts):
        raise UsageError(f"a rectangle that begins at {starts!r}; give a start for each dimension")
    inputs = operands(*arrays, *starts)
    for start in inputs[len(arrays) :]:
        kind = kind_of(start.type.dtype) if isinstance(start, ArrayValue) else ""
        is_number = isinstance(start, int) or kind in ("signed integer", "unsigned integer")
        if not is_number or getattr(start, "shape", ()) != ():
            raise UsageError(
                f"a rectangle that begins at {start!r}; give a whole number, or an array of one "
                "without dimensions, for each dimension"
            )
    return inputs


def dynamic_slice_rule(shapes: Sequence[Shape], sizes: Sequence[int]) -> Inferred:
    """Infer a rectangle of these sizes that starts at scalars, with a scalar per dimension.

    >>> print(dynamic_slice_rule([(4, 8), (), ()], sizes=[4, 3]).rule)
    ([i, j], [], []) -> ([i, j]) {i=4, j=8} need_replication={j} blocked={j}
    """
    shape, dims = shapes[0], range(len(shapes[0]))
    rules.counted("dynamic_slice", shapes, 1 + len(shape))
    if len(sizes) != len(shape) or any(a > b for a, b in zip(sizes, shape, strict=True)):
        raise SpecError(f"dynamic slice of sizes {tuple(sizes)} from {shape}; it must fit inside")
    # The start is a value, so the part that has the rectangle is not known before execution.
    short = [dim for dim in dims if sizes[dim] != shape[dim]]
    operands, results = [dims, *[()] * len(shape)], [tuple(sizes)]
    return rules.from_dims(operands, [dims], shapes, results, whole=short, blocked=short)


_KEPT = ("max", "min", "product")


def _dynamic_slice_kernel(work: LocalWork) -> Function:
    """Return a kernel that takes a rectangle; dimensions that it takes whole may be sharded."""
    sizes, shape = work.attributes["sizes"], _operand_shape(work, 0)
    return lambda x, *starts: x[_find_window(starts, sizes, shape)]


def _operand_shape(work: LocalWork, number: int) -> tuple[int, ...]:
    operand = work.operands[number]
    return () if operand is None else operand.shape


def _find_window(
    starts: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...]:
    """Return the slices of a rectangle, clamped to stay inside; whole dimensions are kept whole."""
    window = []
    for start, size, length in zip(starts, sizes, shape, strict=True):
        first = min(max(int(start), 0), length - size)
        window.append(slice(None) if size == length else slice(first, first + size))
    return tuple(window)


def _pull_window(step: TapeStep, g: Any, number: int) -> Any:
    x, *starts = step.operands
    return call("dynamic_update_slice", (zeros_like(x), g, *starts)) if number == 0 else None


register(
    "dynamic_slice",
    dynamic_slice_rule,
    ([(4, 8), (), ()], {"sizes": (4, 3)}),
    linear=(0,),
    commutes=_KEPT,
    operator_class=OperatorClass.SLICING,
    local=_dynamic_slice_kernel,
    reads_part=True,
    result_types=of_first,
    pullback=_pull_window,
)


# ---- dynamic_update_slice


@of_arrays
def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any], /) -> Any:
    """Replace a slice of an array; its start is clamped to stay inside."""
    x, update = operands(x, update)
    _check_fits("dynamic_update_slice", x, update)
    return call("dynamic_update_slice", _add_starts([x, update], starts))


def dynamic_update_slice_rule(shapes: Sequence[Shape]) -> Inferred:
    """Infer an array with a rectangle replaced, from the array, the rectangle and its start.

    >>> print(dynamic_update_slice_rule([(4, 8), (4, 3), (), ()]).rule)
    ([i, j], [i, k], [], []) -> ([i, j]) {i=4, j=8, k=3} need_replication={k}
    """
    shape, update = shapes[:2]
    rules.counted("dynamic_update_slice", shapes, 2 + len(shape))
    if len(update) != len(shape) or any(a > b for a, b in zip(update, shape, strict=True)):
        raise SpecError(f"an update {update} of {shape}; it must fit inside")
    dims = range(len(shape))
    short = [dim for dim in dims if update[dim] != shape[dim]]
    of_update = [f"update {dim}" if dim in short else dim for dim in dims]
    order = [factor for pair in zip(dims, of_update, strict=True) for factor in pair]
    operands = [dims, of_update, *[()] * len(shape)]
    return rules.from_dims(operands, [dims], shapes, order=order, adjusted=short)


def _dynamic_update_kernel(work: LocalWork) -> Function:
    """Return a kernel that copies an array and replaces a rectangle."""
    sizes, shape = _operand_shape(work, 1), _operand_shape(work, 0)
    library = work.library

    def function(x: Any, update: Any, *starts: Any) -> Any:
        updated = library.copied(x)
        updated[_find_window(starts, sizes, shape)] = update
        return updated

    return function


def _pull_written_window(step: TapeStep, g: Any, number: int) -> Any:
    _, update, *starts = step.operands
    if number == 0:
        return call("dynamic_update_slice", (g, zeros_like(update), *starts))
    return call("dynamic_slice", (g, *starts), {"sizes": update.shape})


register(
    "dynamic_update_slice",
    dynamic_update_slice_rule,
    ([(4, 8), (4, 3), (), ()], {}),
    linear=(0, 1),
    commutes=_KEPT,
    operator_class=OperatorClass.SLICING,
    local=_dynamic_update_kernel,
    result_types=of_first,
    note="a part takes what of the update lies in it",
    pullback=_pull_written_window,
)


# Kinds in the order of promotion: updates of a later kind than the array's would be rounded.
_KINDS = ("bool", "unsigned integer", "signed integer", "real floating", "complex floating")


@of_arrays
def embedding(indices: Any, table: Any, /) -> Any:
    """Look up rows of a table `[v, d]`, which may be sharded: each rank returns its own rows."""
    table, indices = operands(table, indices)
    return take(table, indices, axis=0)


@of_arrays
def one_hot(indices: Any, num_classes: int, /, *, axis: int = -1, dtype: object = None) -> Any:
    """Encode indices as one-hot vectors: the classes are a new dimension.

    The encoding of an index that is not a class is all zeros.
    """
    num_classes = check_int(num_classes, "num_classes")
    if kind_of(indices.dtype) not in ("signed integer", "unsigned integer"):
        raise UsageError(f"one_hot of {indices.dtype}; give an array of whole numbers")
    place = rules.axis_of(indices.ndim + 1, axis)
    shape = [num_classes if dim == place else 1 for dim in range(indices.ndim + 1)]
    classes = whole(indices, np.arange(num_classes).reshape(shape))
    encoded = elementwise.equal(movement.expand_dims(indices, axis=place), classes)
    return data_types.astype(encoded, data_types.float32 if dtype is None else dtype)


# ---- searchsorted


def searchsorted_rule(shapes: Sequence[Shape], side: str = "left") -> Inferred:
    """Infer insertion indices from a sorted vector, the values, and optionally its order.

    >>> print(searchsorted_rule([(8,), (4,)]).rule)
    ([j], [i]) -> ([i]) {i=4, j=8} need_replication={j}
    """
    return rules.from_pattern(f"*_, *i{', *_' * (len(shapes) > 2)} -> *i", shapes)


register(
    "searchsorted", searchsorted_rule, ([(8,), (4,)], {}), result_types=index, is_constant=True
)


# ---- nonzero


register(
    "nonzero",
    None,
    note="how many there are depends on the values",
    no_pullback="how many results there are depends on the elements, which are read",
)
