"""Local functions of operators that move elements: reshapes, slices, padding, diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import Function, LocalWork, find_function

Pairs = Sequence[tuple[int, int]]


def to_shape(work: LocalWork) -> list[Function]:
    """A reshape or broadcast, to the shape that the result has on each rank."""
    function = find_function(work, work.library.namespace, work.name)
    return [
        lambda x, shape=shape: function(x, shape)
        for shape in work.result_shapes_here(work.attributes["shape"])
    ]


def concat(work: LocalWork) -> Function:
    """Parts one behind the other along an axis."""
    function = find_function(work, work.library.namespace, work.name)
    axis = work.attributes["axis"]
    return lambda *parts: function(parts, axis=axis)


def slice_ranges(work: LocalWork) -> Function:
    """Ranges of dimensions, with steps."""
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


def diagonal(work: LocalWork) -> Function:
    """The diagonals of matrices."""
    return partial(work.library.namespace.linalg.diagonal, offset=work.attributes["offset"])


def pad(work: LocalWork) -> Function:
    """A number around the array."""
    pairs, value = work.attributes["pad_width"], work.attributes["constant_values"]
    return lambda x: pad_array(work.library, x, pairs, value)


def pad_array(library: Library, x: Any, pairs: Pairs, value: float = 0) -> Any:
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
