"""Which elements does a route copy, in how few NumPy copies?

A route is a product of the pieces of its dimensions. Interleaved cuts have many pieces in a
dimension, and mostly at equal distances::

    rows of the source    0 1 | . . | 2 3 | . . | 4 5 | . .     3 pieces of 2 rows, 4 apart
    rows of the target    0 1   2 3   4 5                       the same, 2 apart

1. Pieces of one length and at equal distances, in source and target, become one *window*: a view
   with two dimensions in place of one, the pieces and what is inside of them. Two interleaved
   cuts meet in a pattern that repeats every few pieces; then every so many make a window.
2. A route is the product of the windows, one NumPy copy each.
3. Where that makes copies of few elements, the route is copied at once, by lists of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reshard.execution.arrays import ArrayKind, Storage
from reshard.execution.copies import Copy
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.overlap import Pieces
from reshard.runs import IntArray, ragged_arange

# What a copy by windows takes to set up, in elements copied by lists of positions.
_ELEMENTS_FOR_A_WINDOW = 1024
# The longest pattern of pieces that is looked for.
_LONGEST_PATTERN = 8


class Window(NamedTuple):
    """So many pieces of `length` indices of a dimension, at equal distances in both arrays."""

    pieces: int
    length: int
    target: int
    target_step: int
    source: int
    source_step: int


def route_copies(
    plan: LayoutChange,
    kind: ArrayKind,
    source: Mapping[int, Storage],
    target: Mapping[int, Storage],
) -> Iterator[Copy]:
    """The copies of all routes of a plan, between the arrays of its cells.

    The first contribution of an element replaces what is there, the rest are combined with it.
    """
    routes, pieces = plan.routes, plan.pieces
    combine = partial(kind.combine, plan.source.reduction or "sum")
    found: dict[tuple[int, int, int], list[Window]] = {}
    for route, order in enumerate(routes.order.tolist()):
        into, out_of = target[routes.target_cell[route]], source[routes.source_cell[route]]
        dims = []
        for dimension, column in enumerate(pieces):
            # Most routes share the pieces of a dimension with others.
            key = (dimension, int(column.begin[route]), int(column.count[route]))
            if key not in found:
                found[key] = find_windows(*_columns(column, route))
            dims.append(found[key])
        reduction = combine if order else None
        count = math.prod(len(windows) for windows in dims)
        if count > 1 and count * _ELEMENTS_FOR_A_WINDOW > routes.elements[route]:
            places, positions = (_positions(pieces, route, side) for side in range(2))
            yield Copy(into, out_of, order, reduction, places, positions)
            continue
        for windows in itertools.product(*dims):
            yield Copy(
                _view(into, windows, [(w.target, w.target_step) for w in windows]),
                _view(out_of, windows, [(w.source, w.source_step) for w in windows]),
                order,
                reduction,
            )


def find_windows(length: IntArray, target: IntArray, source: IntArray) -> list[Window]:
    """The windows of pieces, given by length and by where they begin in target and source.

    >>> find_windows(np.array([2, 2, 2]), np.array([0, 2, 4]), np.array([0, 4, 8]))
    [Window(pieces=3, length=2, target=0, target_step=2, source=0, source_step=4)]
    """
    if len(length) == 1:
        return [Window(1, int(length[0]), int(target[0]), 0, int(source[0]), 0)]
    best: list[Window] = []
    for period in range(1, min(len(length) // 2, _LONGEST_PATTERN) + 1):
        windows = [
            window
            for first in range(period)
            for window in _progressions(
                length[first::period], target[first::period], source[first::period]
            )
        ]
        if not best or len(windows) < len(best):
            best = windows
        if len(best) <= period:
            break
    return best


def _progressions(length: IntArray, target: IntArray, source: IntArray) -> Iterator[Window]:
    """Windows of pieces that follow one another."""
    target_step, source_step = np.diff(target), np.diff(source)
    alike = length[1:] == length[:-1]
    # A piece that is like the one before ends its window where the distance changes.
    turns = (np.diff(target_step) != 0) | (np.diff(source_step) != 0)
    breaks = ~alike
    breaks[1:] |= turns & alike[:-1]
    begin = np.append(0, np.flatnonzero(breaks) + 1).tolist()
    for low, high in itertools.pairwise([*begin, len(length)]):
        many = high - low > 1
        yield Window(
            high - low,
            int(length[low]),
            int(target[low]),
            int(target_step[low]) if many else 0,
            int(source[low]),
            int(source_step[low]) if many else 0,
        )


def _columns(column: Pieces, route: int) -> tuple[IntArray, IntArray, IntArray]:
    rows = column.rows(route)
    return column.length[rows], column.target_local[rows], column.source_local[rows]


def _view(array: Storage, windows: Sequence[Window], places: Sequence[tuple[int, int]]) -> Storage:
    """What windows show of an array, where they begin at `(begin, step)` in each dimension."""
    if all(window.pieces == 1 for window in windows):
        dims = zip(places, windows, strict=True)
        # A scalar is shown as an array too, so that it can be written to.
        return array[tuple(slice(at, at + w.length) for (at, _), w in dims) or ...]
    shape: list[int] = []
    strides: list[int] = []
    for stride, (_, step), window in zip(array.strides, places, windows, strict=True):
        shape += [window.pieces, window.length]
        strides += [step * stride, stride]
    first = array[tuple(slice(begin, None) for begin, _ in places)]
    return np.lib.stride_tricks.as_strided(first, shape, strides)


def _positions(pieces: tuple[Pieces, ...], route: int, side: int) -> Any:
    """The positions of a route's elements in the target's cell (0), or the source's (1)."""
    found = []
    for column in pieces:
        length, *begin = _columns(column, route)
        found.append(np.repeat(begin[side], length) + ragged_arange(length))
    return np.ix_(*found)
