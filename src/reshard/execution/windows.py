"""Windows: pieces of a dimension at equal distances, as one strided view.

Interleaved cuts have many pieces in a dimension, and mostly at equal distances.

1. Pieces of one length and at equal distances, in source and target, become one *window*: a view
   with two dimensions in place of one, the pieces and what is inside of them.
2. Two interleaved cuts meet in a pattern that repeats every few pieces; then every so many make
   a window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reshard.execution.arrays import Storage
from reshard.runs import IntArray

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


def find_windows(length: IntArray, target: IntArray, source: IntArray) -> list[Window]:
    """The windows of pieces, given by length and by where they begin in target and source.

    >>> find_windows(np.array([2, 2, 2]), np.array([0, 2, 4]), np.array([0, 4, 8]))
    [Window(pieces=3, length=2, target=0, target_step=2, source=0, source_step=4)]
    """
    if len(length) == 1:
        return [Window(1, int(length[0]), int(target[0]), 0, int(source[0]), 0)]
    best: list[Window] = []
    # In an interleaved pattern, every `period`-th piece belongs to one progression.
    for period in range(1, min(len(length) // 2, _LONGEST_PATTERN) + 1):
        windows = [
            window
            for first in range(period)
            for window in _split_progressions(
                length[first::period], target[first::period], source[first::period]
            )
        ]
        if not best or len(windows) < len(best):
            best = windows
        # A longer period gives more windows than that: one at least for each place in it.
        if len(best) <= period:
            break
    return best


def _split_progressions(length: IntArray, target: IntArray, source: IntArray) -> Iterator[Window]:
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


def view_windows(
    array: Storage, windows: Sequence[Window], places: Sequence[tuple[int, int]]
) -> Storage:
    """What windows show of an array, where they begin at `(begin, step)` in each dimension."""
    if all(window.pieces == 1 for window in windows):
        dims = zip(places, windows, strict=True)
        # A scalar is shown as an array too, so that it can be written to.
        return array[tuple(slice(at, at + w.length) for (at, _), w in dims) or ...]
    shape: list[int] = []
    strides: list[int] = []
    for stride, (_, step), window in zip(array.strides, places, windows, strict=True):
        # Each dimension becomes two: the number of the piece, and the index in it.
        shape += [window.pieces, window.length]
        strides += [step * stride, stride]
    first = array[tuple(slice(begin, None) for begin, _ in places)]
    return np.lib.stride_tricks.as_strided(first, shape, strides)
