"""Parts of arrays by index: `x[...]`, `take`, `take_along_axis`.

Slices, integers, `...` and `None` follow the array API; so do integer arrays on the leading
dimensions. The shape of a mask's selection depends on the elements, so it is computed from the full
array and is not sharded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reshard.errors import ArrayIndexError, ShardError, SpecError, UsageError
from reshard.spmd.core.backend import library_of
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.functions.array_arguments import of_arrays
from reshard.spmd.functions.elementwise import operands, whole
from reshard.spmd.functions.manipulation import (
    Range,
    broadcast_shapes,
    broadcast_to,
    expand_dims,
    flip,
    reshape,
    squeeze,
    take_ranges,
)
from reshard.spmd.local.indexing import index_out_of_range
from reshard.spmd.rules.shapes import axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call


@of_arrays
def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    """Take elements along an axis by index.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    if axis is None:
        if x.ndim != 1:
            raise SpecError(f"take of shape {list(x.shape)} needs an axis; give axis=")
        axis = 0
    place = axis_of(x.ndim, axis)
    return call("take", places_in(x, place, indices), {"axis": place})


@of_arrays
def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """Take elements along an axis, by an index for each position of the other axes.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    place = axis_of(x.ndim, axis)
    x, chosen = places_in(x, place, indices)
    if chosen.ndim != x.ndim:
        raise SpecError(
            f"indices of shape {list(chosen.shape)} along axis {place} of {list(x.shape)}; give "
            "as many dimensions"
        )
    shape = broadcast_shapes(
        *((*given[:place], *given[place + 1 :]) for given in (x.shape, chosen.shape))
    )
    x, chosen = (
        broadcast_to(one, (*shape[:place], one.shape[place], *shape[place:])) for one in (x, chosen)
    )
    return call("take_along_axis", (x, chosen), {"axis": place})


def places_in(x: Any, axis: int, indices: Any) -> list[Any]:
    """An array and indices of an axis of it, as operands, the indices counted from its start.

    Raises:
        ArrayIndexError: an index that is out of range, on every process.
        UsageError: indices that are not an array of whole numbers.
    """
    size = x.shape[axis]
    # Indices of NumPy are known before anything runs: checked and counted here, with no operation.
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu":
        _check_known(indices, size)
        found = indices.astype(np.int64)
        return operands(x, np.where(found < 0, found + size, found))
    x, found = operands(x, indices)
    return [x, _count_from_start(found, size)]


def _count_from_start(indices: Any, size: int) -> Any:
    is_array = isinstance(indices, ArrayValue)
    kind = kind_of(indices.type.dtype) if is_array else type(indices).__name__
    if kind not in ("signed integer", "unsigned integer"):
        raise UsageError(f"indices of kind {kind}; give an array of whole numbers")
    return call("checked_index", (indices,), {"size": size})


def getitem(x: Any, key: Any) -> Any:
    """The value of `x[key]`.

    Raises:
        ArrayIndexError: an index that is out of range, too many of them, or no slice.
        ShardError: a key of a kind that arrays in shards do not take.
    """
    items = [_read_item(one) for one in (key if isinstance(key, tuple) else (key,))]
    if len(items) == 1 and _is_mask(items[0]):
        return _take_masked(x, items[0])
    if any(_is_mask(item) for item in items):
        raise ShardError("an index with a mask beside others; give the mask alone, or use sp.where")
    arrays = [place for place, item in enumerate(items) if _is_array(item)]
    # One array beside slices; then arrays and numbers for leading dimensions; then no arrays.
    if len(arrays) == 1 and not any(map(_is_number, items)):
        return _take_between(x, items, arrays[0])
    if arrays:
        return _gather(x, items)
    return _take_basic(x, items)


def _read_item(item: Any) -> Any:
    """A part of a key, lists as arrays. Raises ShardError for what no array is indexed by."""
    if isinstance(item, list | tuple):
        return np.asarray(item) if len(item) else np.zeros(0, np.int64)
    is_place = item is None or item is Ellipsis or isinstance(item, slice)
    if is_place or _is_array(item) or (hasattr(item, "__index__") and not isinstance(item, bool)):
        return item
    raise ShardError(
        f"index {item!r} of type {type(item).__name__}; give whole numbers, slices, ..., None, "
        "an array of whole numbers, or a mask alone"
    )


def _is_array(item: Any) -> bool:
    if isinstance(item, ArrayValue):
        return True
    return library_of(item) is not None and (len(item.shape) > 0 or _is_truth(item))


def _is_number(item: Any) -> bool:
    return not _is_array(item) and hasattr(item, "__index__")


def _is_truth(item: Any) -> bool:
    # A single truth value of NumPy is no array: it is refused, as Python's own are.
    is_bool = str(item.dtype).removeprefix("torch.") == "bool"
    return is_bool and not isinstance(item, np.generic)


def _is_mask(item: Any) -> bool:
    return _is_array(item) and _is_truth(item)


def _take_masked(x: Any, mask: Any) -> Any:
    given = tuple(mask.shape)
    fits = len(given) <= x.ndim and all(
        one in (size, 0) for one, size in zip(given, x.shape, strict=False)
    )
    if not fits:
        raise ArrayIndexError(
            f"a mask of shape {list(given)} for shape {list(x.shape)}; give one of its leading "
            "dimensions"
        )
    dense = x.to_dense()
    chosen = (
        mask.to_dense()
        if isinstance(mask, ArrayValue)
        else x.runner.library.array(mask, beside=dense)
    )
    return whole(x, dense[chosen])


def _take_between(x: Any, items: list[Any], place: int) -> Any:
    """Whole numbers in one array, beside slices, `...` and None: its dimensions stand in place."""
    others = [slice(None) if n == place else item for n, item in enumerate(items)]
    found = _take_basic(x, others)
    # What stands behind is counted from the end: `...` may be ahead.
    ahead = items[:place]
    axis = len(ahead) if Ellipsis not in ahead else found.ndim - (len(items) - place)
    return take(found, items[place], axis=axis)


def _gather(x: Any, items: list[Any]) -> Any:
    """Whole numbers in arrays, for the leading dimensions."""
    # What takes all of the trailing dimensions says nothing.
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
    # The place in the leading dimensions merged into one, in row-major order: one lookup for all.
    flat: Any = None
    for place, size in zip(places, x.shape, strict=False):
        if isinstance(place, ArrayValue):
            index = _count_from_start(place, size)
        else:
            index = _read_index(place, size)
        flat = index if flat is None else flat * size + index
    merged = reshape(x, (math.prod(x.shape[: len(items)]), *x.shape[len(items) :]))
    return call("take", (merged, flat), {"axis": 0})


def _read_index(item: Any, size: int) -> int:
    index = int(item.__index__())
    if not -size <= index < size:
        raise index_out_of_range(index, size)
    return index % size


def _refuse_indices(x: Any, count: int) -> ArrayIndexError:
    return ArrayIndexError(
        f"{count} indices for shape {list(x.shape)}; give at most {x.ndim}, one a dimension"
    )


def _check_known(indices: Any, size: int) -> None:
    """Refuses indices out of range, where they are known before anything is computed."""
    if isinstance(indices, np.ndarray) and indices.size and indices.dtype.kind in "iu":
        least, most = int(indices.min()), int(indices.max())
        if least < -size or most >= size:
            raise index_out_of_range(least if least < -size else most, size)


def _read_slice(item: slice, size: int) -> Range:
    """Start, stop and step of a slice of a dimension."""
    try:
        return item.indices(size)
    except (TypeError, ValueError) as error:
        said = ":".join("" if n is None else repr(n) for n in (item.start, item.stop, item.step))
        raise ArrayIndexError(
            f"slice {said} of a dimension of size {size}: {error}; give whole numbers or none, "
            "and a step that is not 0"
        ) from error


def _take_basic(x: Any, items: list[Any]) -> Any:
    # 1. Spell `...` out, so that each item but None has a dimension.
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
    # 2. Read the items: what is cut of each dimension, and which ones go, turn round or are new.
    cuts: dict[int, Range] = {}
    gone: list[int] = []
    turned: list[int] = []
    added: list[int] = []
    dim = 0
    for place, item in enumerate(items):
        if item is None:
            added.append(place - len(gone))
            continue
        if isinstance(item, slice):
            start, stop, step = _read_slice(item, x.shape[dim])
            if step < 0:
                turned.append(dim)
                count = len(range(start, stop, step))
                if count:
                    # The same elements in rising order; `flip` turns them round afterwards.
                    start, stop, step = start + (count - 1) * step, start + 1, -step
                else:
                    start, stop, step = 0, 0, 1
            cuts[dim] = (start, max(start, stop), step)
        else:
            index = _read_index(item, x.shape[dim])
            cuts[dim] = (index, index + 1, 1)
            gone.append(dim)
        dim += 1
    # 3. Carry it out: each is an operation of its own, and only what is needed is done.
    found = take_ranges(x, cuts)
    if turned:
        found = flip(found, axis=tuple(turned))
    if gone:
        found = squeeze(found, tuple(gone))
    for place in added:
        found = expand_dims(found, axis=place)
    return found
