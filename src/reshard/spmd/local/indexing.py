"""Local functions of operators that read or write at indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import ArrayIndexError
from reshard.spmd.core.local_work import Function, LocalWork


def index_out_of_range(index: int, size: int) -> ArrayIndexError:
    """The error for an index that is out of range."""
    expected = f"give one of {-size} to {size - 1}" if size else "it has no elements"
    return ArrayIndexError(f"index {index} of a dimension of size {size}; {expected}")


def checked_index(work: LocalWork) -> Function:
    """Indices counted from the start. Raises ArrayIndexError for one out of range."""
    space, size = work.library.namespace, work.attributes["size"]
    (operand,) = work.operands
    # Where numbers have no sign, what looks like -1 as an int64 is far out of range.
    is_signed = operand is not None and not operand.dtype.name.startswith("uint")
    least = -size if is_signed else 0

    def count_from_start(indices: Any) -> Any:
        # Narrow ones could not be counted from the start without wrapping around.
        found = space.asarray(indices, dtype=space.int64)
        if 0 in found.shape:
            return found
        for index in (int(space.min(found)), int(space.max(found))):
            if not least <= index < size:
                raise index_out_of_range(index, size)
        return space.where(found < 0, found + size, found)

    return count_from_start


def take(work: LocalWork) -> Function | list[Function]:
    """Slices of an axis at indices."""
    take, axis = work.library.namespace.take, work.attributes["axis"]

    def whole(x: Any, indices: Any) -> Any:
        found = take(x, indices.reshape(-1), axis=axis)
        return found.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])

    return _look_up_own_rows(work, whole, axis)


def take_along_axis(work: LocalWork) -> Function | list[Function]:
    """An element of an axis for each index."""
    take, axis = work.library.namespace.take_along_axis, work.attributes["axis"]
    return _look_up_own_rows(
        work, lambda x, indices: take(x, indices, axis=axis), axis, is_along=True
    )


def _look_up_own_rows(
    work: LocalWork, whole: Function, axis: int, is_along: bool = False
) -> Function | list[Function]:
    """Lookup along an axis that is cut: each rank finds its own rows, and gives zero for others.

    They are counted from the start and in range, by `checked_index`.
    """
    if not work.is_cut(0, axis):
        return whole
    library = work.library
    space = library.namespace

    def here(x: Any, indices: Any, start: int) -> Any:
        size = x.shape[axis]
        own = (indices >= start) & (indices < start + size)
        # A rank without rows has nothing to look up: zeros of the result's shape.
        if not size:
            shape = indices.shape if is_along else None
            rest = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
            return library.linked(library.filled(rest if shape is None else shape, 0, x), x)
        # Indices of others' rows look up the first one, which is then replaced by zero.
        found = whole(x, space.where(own, indices - start, 0 * indices))
        if not is_along:
            # Spread over the dimensions around the axis, as the indices' are in the result.
            own = own.reshape((1,) * axis + own.shape + (1,) * (x.ndim - axis - 1))
        return space.where(own, found, library.filled((), 0, x))

    # A function a rank: each begins elsewhere.
    starts = work.starts_here(0, axis)
    return [lambda x, indices, start=start: here(x, indices, start) for start in starts]


def _operand_shape(work: LocalWork, number: int) -> tuple[int, ...]:
    one = work.operands[number]
    return () if one is None else one.shape


def dynamic_slice(work: LocalWork) -> Function:
    """A rectangle; dimensions that it takes whole may be cut."""
    sizes, shape = work.attributes["sizes"], _operand_shape(work, 0)
    return lambda x, *starts: x[_find_window(starts, sizes, shape)]


def dynamic_update_slice(work: LocalWork) -> Function:
    """A copy with a rectangle replaced."""
    sizes, shape = _operand_shape(work, 1), _operand_shape(work, 0)
    library = work.library

    def function(x: Any, update: Any, *starts: Any) -> Any:
        updated = library.copied(x)
        updated[_find_window(starts, sizes, shape)] = update
        return updated

    return function


def _find_window(
    starts: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...]:
    """The rectangle that begins at `starts`, moved inside; all of what it takes whole."""
    window = []
    for start, size, whole in zip(starts, sizes, shape, strict=True):
        first = min(max(int(start), 0), whole - size)
        window.append(slice(None) if size == whole else slice(first, first + size))
    return tuple(window)


def scatter(work: LocalWork) -> Function | list[Function]:
    """A copy with slices of an axis set, or added to; of an axis that is cut the rank's own."""
    library, axis, mode = work.library, work.attributes["axis"], work.attributes["mode"]
    space = library.namespace

    is_cut = work.is_cut(0, axis)

    def function(x: Any, indices: Any, updates: Any, start: int = 0) -> Any:
        # The axis goes first, and so do the indices' dimensions of the updates.
        made = space.moveaxis(library.copied(x), axis, 0)
        count = len(indices.shape)
        order = [*range(axis, axis + count), *range(axis)]
        order += range(axis + count, len(updates.shape))
        values = space.permute_dims(updates, tuple(order))
        flat = indices.reshape(-1)
        values = values.reshape((flat.shape[0], *made.shape[1:]))
        if is_cut:
            own = (flat >= start) & (flat < start + made.shape[0])
            flat, values = flat[own] - start, values[own]
        if mode == "set":
            made[flat] = values
        # `made[flat] += values` would add only one update of equal indices.
        elif library.name == "numpy":
            space.add.at(made, flat, values)
        else:
            made.index_put_((flat,), values, accumulate=True)
        return space.moveaxis(made, 0, axis)

    if not is_cut:
        return function
    # A function a rank: each begins elsewhere.
    starts = work.starts_here(0, axis)
    return [lambda x, i, u, start=start: function(x, i, u, start) for start in starts]
