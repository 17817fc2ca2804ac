"""What one rank computes of a convolution, a pooling, and of parts whose place is a number.

A convolution is a matrix product for each place of its window, of the input moved by that place:
as many products as the window has places, and no copies of the input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reshard.spmd.shards.library import Library

Function = Callable[..., Any]
Pairs = Sequence[tuple[int, int]]


def padded(library: Library, x: Any, pairs: Pairs, value: float = 0) -> Any:
    """An array with a number around it."""
    if not any(before or after for before, after in pairs):
        return x
    shape = [size + sum(pair) for size, pair in zip(x.shape, pairs, strict=True)]
    made = library.filled(tuple(shape), value, x)
    window = tuple(
        slice(before, before + size) for size, (before, _) in zip(x.shape, pairs, strict=True)
    )
    made[window] = x
    return made


def _moved(
    x: Any, sizes: Sequence[int], places: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Any:
    """What the windows have at one of their places."""
    windows = [
        slice(place * gap, place * gap + (size - 1) * step + 1, step)
        for size, place, step, gap in zip(sizes, places, steps, gaps, strict=True)
    ]
    return x[(..., *windows)]


def _window_counts(
    space: Sequence[int], window: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> list[int]:
    return [
        max((size - gap * (wide - 1) - 1) // step + 1, 0)
        for size, wide, step, gap in zip(space, window, steps, gaps, strict=True)
    ]


def convolution(
    library: Library,
    strides: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
) -> Function:
    """The convolution of a rank's channels; their groups follow from both operands."""
    space = library.namespace

    def function(x: Any, kernel: Any) -> Any:
        x = padded(library, x, [(0, 0), (0, 0), *padding])
        window = kernel.shape[2:]
        counts = _window_counts(x.shape[2:], window, strides, dilation)
        outputs, each = kernel.shape[:2]
        groups = x.shape[1] // each if each else 1
        made = library.filled((x.shape[0], outputs, *counts), 0, x)
        if 0 in (*made.shape, groups, each):
            return made
        weights = kernel.reshape((groups, outputs // groups, each, *window))
        pixels = math.prod(counts)
        for places in itertools.product(*map(range, window)):
            part = _moved(x, counts, places, strides, dilation)
            part = part.reshape((x.shape[0], groups, each, pixels))
            made = made + space.matmul(weights[(..., *places)], part).reshape(made.shape)
        return made

    return function


def pooling(
    library: Library, name: str, window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> Function:
    """The greatest number, or the mean, of each window over the last dimensions."""
    space = library.namespace
    combine = space.maximum if name == "max_pool" else space.add

    def function(x: Any) -> Any:
        lead = len(x.shape) - len(window)
        outside = _least(library, x) if name == "max_pool" else 0
        x = padded(library, x, [(0, 0)] * lead + list(padding), outside)
        gaps = (1,) * len(window)
        counts = _window_counts(x.shape[lead:], window, strides, gaps)
        made: Any = None
        for places in itertools.product(*map(range, window)):
            part = _moved(x, counts, places, strides, gaps)
            made = part if made is None else combine(made, part)
        return made if name == "max_pool" else made / math.prod(window)

    return function


def _least(library: Library, x: Any) -> float:
    """What no number is less than."""
    name = library.dtype_of(x).name
    return int(np.iinfo(name).min) if "int" in name else -math.inf


def dynamic_slice(sizes: Sequence[int], shape: Sequence[int]) -> Function:
    """A rectangle; dimensions that it takes whole may be cut."""

    def function(x: Any, *starts: Any) -> Any:
        window = tuple(
            slice(None) if size == whole else _inside(start, size, whole)
            for start, size, whole in zip(starts, sizes, shape, strict=True)
        )
        return x[window]

    return function


def _inside(start: Any, size: int, whole: int) -> slice:
    first = min(max(int(start), 0), whole - size)
    return slice(first, first + size)


def dynamic_update_slice(library: Library, sizes: Sequence[int], shape: Sequence[int]) -> Function:
    """A copy with a rectangle replaced."""

    def function(x: Any, update: Any, *starts: Any) -> Any:
        window = tuple(
            slice(None) if size == whole else _inside(start, size, whole)
            for start, size, whole in zip(starts, sizes, shape, strict=True)
        )
        made = library.namespace.asarray(x, copy=True)
        made[window] = update
        return made

    return function


def scatter(library: Library, axis: int, mode: str) -> Function:
    """A copy with slices of an axis set, or added to."""
    space = library.namespace

    def function(x: Any, indices: Any, updates: Any) -> Any:
        made = space.moveaxis(space.asarray(x, copy=True), axis, 0)
        count = len(indices.shape)
        order = [*range(axis, axis + count), *range(axis)]
        order += range(axis + count, len(updates.shape))
        values = space.permute_dims(updates, tuple(order))
        flat = indices.reshape(-1)
        values = values.reshape((flat.shape[0], *made.shape[1:]))
        if mode == "set":
            made[flat] = values
        elif library.name == "numpy":
            space.add.at(made, flat, values)
        else:
            made.index_put_((flat,), values, accumulate=True)
        return space.moveaxis(made, 0, axis)

    return function


def top_k(library: Library, k: int, axis: int) -> Function:
    """The largest along an axis, and where they were; of equal ones the first."""
    space = library.namespace

    def function(x: Any) -> tuple[Any, Any]:
        turned = space.flip(x, axis=axis)
        places = space.flip(space.argsort(turned, axis=axis, stable=True), axis=axis)
        places = x.shape[axis] - 1 - places[(slice(None),) * axis + (slice(0, k),)]
        return space.take_along_axis(x, places, axis=axis), places

    return function
