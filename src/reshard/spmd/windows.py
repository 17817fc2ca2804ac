"""Convolution and pooling, padding, and parts of arrays whose place is a number of the program.

Batch and channels stay in shards; dimensions that a window moves over are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.array_arguments import of_arrays
from reshard.spmd.elementwise import operands
from reshard.spmd.indexing import cut, places_in
from reshard.spmd.operation_call import call
from reshard.spmd.operators.shapes import axis_of

Sizes = int | Sequence[int]
Padding = int | Sequence[Sequence[int]]


def _each(value: Sizes, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _pairs(value: Padding, count: int) -> tuple[tuple[int, int], ...]:
    if isinstance(value, int):
        return ((value, value),) * count
    return tuple((before, after) for before, after in value)


@of_arrays
def convolution(
    x: Any,
    kernel: Any,
    /,
    *,
    strides: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """`[n, g c, *space]` by `[g o, c, *window]` is `[n, g o, *space]`.

    Channels may be cut: those of the input hold contributions, those of the output are apart.
    """
    x, kernel = operands(x, kernel)
    count = x.ndim - 2
    attributes = {
        "strides": _each(strides, count),
        "padding": _pairs(padding, count),
        "dilation": _each(dilation, count),
        "groups": int(groups),
    }
    return call("convolution", (x, kernel), attributes)


def _pooled(
    name: str, x: Any, window: Sequence[int], strides: Sizes | None, padding: Padding
) -> Any:
    count = len(window)
    attributes = {
        "window": tuple(window),
        "strides": tuple(window) if strides is None else _each(strides, count),
        "padding": _pairs(padding, count),
    }
    return call(name, (x,), attributes)


@of_arrays
def max_pool(
    x: Any, /, window: Sequence[int], *, strides: Sizes | None = None, padding: Padding = 0
) -> Any:
    """The greatest number in each window over the last dimensions."""
    return _pooled("max_pool", x, window, strides, padding)


@of_arrays
def avg_pool(
    x: Any, /, window: Sequence[int], *, strides: Sizes | None = None, padding: Padding = 0
) -> Any:
    """The mean of each window over the last dimensions, padding counted as zeros."""
    return _pooled("avg_pool", x, window, strides, padding)


@of_arrays
def pad(x: Any, /, pad_width: Sequence[Sequence[int]], *, constant_values: float = 0) -> Any:
    """A number added `(before, after)` each dimension."""
    pairs = _pairs(pad_width, x.ndim)
    if len(pairs) != x.ndim:
        raise SpecError(f"pads {list(pairs)} of {x.ndim} dimensions; give a pair for each")
    return call("pad", (x,), {"pad_width": pairs, "constant_values": constant_values})


@of_arrays
def split(x: Any, indices_or_sections: Sizes, /, *, axis: int = 0) -> tuple[Any, ...]:
    """Parts of an axis: so many equal ones, or those that begin at the given indices."""
    place = axis_of(x.ndim, axis)
    size = x.shape[place]
    if isinstance(indices_or_sections, int):
        if size % indices_or_sections:
            raise SpecError(f"{size} in {indices_or_sections} equal parts; give a divisor")
        step = size // indices_or_sections
        ends = [step * (number + 1) for number in range(indices_or_sections)]
    else:
        ends = [*indices_or_sections, size]
    parts, start = [], 0
    for end in ends:
        stop = min(max(end, start), size)
        parts.append(cut(x, {place: (start, stop, 1)}))
        start = stop
    return tuple(parts)


@of_arrays
def scatter(x: Any, indices: Any, updates: Any, /, *, axis: int = 0, mode: str = "set") -> Any:
    """The array with slices of an axis, at indices, replaced by updates, or added to ("add").

    `updates` have the indices' dimensions in the axis's place. Of equal indices one is set.

    Raises ArrayIndexError, on every process, for an index that is out of range.
    """
    if mode not in ("set", "add"):
        raise SpecError(f"mode {mode!r} of scatter; it is 'set' or 'add'")
    place = axis_of(x.ndim, axis)
    x, chosen = places_in(x, place, indices)
    return call("scatter", operands(x, chosen, updates), {"axis": place, "mode": mode})


@of_arrays
def dynamic_slice(x: Any, starts: Sequence[Any], /, sizes: Sequence[int]) -> Any:
    """A rectangle of these sizes that begins at scalars, moved inside where it reaches beyond."""
    return call("dynamic_slice", operands(x, *starts), {"sizes": tuple(sizes)})


@of_arrays
def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any], /) -> Any:
    """The array with a rectangle replaced, moved inside where it reaches beyond."""
    return call("dynamic_update_slice", operands(x, update, *starts))
