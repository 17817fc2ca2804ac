"""Boxes in arrays that have a number for each element.

Where each element is known, boxes are found in them in which all numbers go in equal steps
along each dimension:

    0 1 2 | 7 7        0:2, 0:3  from 0, steps (5, 1)
    5 6 7 | 7 7        0:2, 3:5  from 7, steps (0, 0)

1. Slabs of the first dimension that differ from the next by the same array form a stretch.
2. A stretch is its first slab, whose boxes are found in the same way, and the array of differences,
   which must be constant in each of these boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Index = tuple[int, ...]
NumberBox = tuple[Index, Index, Index, Index, tuple[Index, ...]]


def find_boxes(
    stepping: Sequence[Integers], constant: Sequence[Integers] = ()
) -> Iterator[NumberBox]:
    """Yield boxes in which `constant` arrays are constant and `stepping` arrays are affine.

    A box is a tuple of its start and stop, the values of the constant arrays, the values of the
    stepping arrays at its first element, and their steps: `steps[d][k]` is the step of array `k`
    along dimension `d`.

    All arrays have one shape; the boxes cover it, each element in one.

    >>> grid = np.array([[0, 1, 2, 7, 7], [5, 6, 7, 7, 7]])
    >>> for start, stop, _, first, steps in find_boxes([grid]):
    ...     print(start, stop, first, steps)
    (0, 0) (2, 3) (0,) ((5,), (1,))
    (0, 3) (2, 5) (7,) ((0,), (0,))
    """
    steps_of, fixed = np.array([*stepping]), np.array([*constant])
    shape = (stepping or constant)[0].shape
    steps_of = steps_of.reshape((len(stepping), *shape)).astype(np.int64)
    fixed = fixed.reshape((len(constant), *shape)).astype(np.int64)
    if 0 in shape:
        return
    numbers = len(constant)
    for start, stop, values, first, steps in _find_boxes(steps_of, fixed):
        yield start, stop, values[:numbers], first, steps


def _find_boxes(stepped: Integers, fixed: Integers) -> Iterator[NumberBox]:
    channels = len(stepped)
    if stepped.ndim == 1:
        yield (), (), tuple(fixed.tolist()), tuple(stepped.tolist()), ()
        return
    for begin, end in _find_stretches(stepped, fixed):
        # The differences in a stretch are constant in each of its boxes, as the fixed numbers are.
        if end - begin > 1:
            change = stepped[:, begin + 1] - stepped[:, begin]
        else:
            change = np.zeros_like(stepped[:, begin])
        together = np.concatenate([fixed[:, begin], change])
        for start, stop, values, first, steps in _find_boxes(stepped[:, begin], together):
            ahead = values[len(values) - channels :]
            yield (
                (begin, *start),
                (end, *stop),
                values[: len(values) - channels],
                first,
                (ahead, *steps),
            )


def _find_stretches(stepped: Integers, fixed: Integers) -> list[tuple[int, int]]:
    """Return ranges of slabs that follow each other in equal steps, with equal fixed numbers."""
    length = stepped.shape[1]
    rest = tuple(d for d in range(stepped.ndim) if d != 1)
    changes = np.diff(stepped, axis=1)
    # Whether slab i + 1 has the fixed numbers of slab i, and whether the next step is equal.
    alike = (
        (np.diff(fixed, axis=1) == 0).all(axis=rest) if len(fixed) else np.ones(length - 1, bool)
    )
    same = (np.diff(changes, axis=1) == 0).all(axis=rest) if len(stepped) else alike[1:]
    stretches = []
    begin = 0
    while begin < length:
        end = begin + 1
        if end < length and alike[begin]:
            longer = end < length - 1 and alike[end]
            goes_on = longer and bool(same[begin])
            # Two slabs form a stretch unless the second begins a longer stretch.
            begins = (
                longer and not goes_on and end < length - 2 and alike[end + 1] and bool(same[end])
            )
            if not begins:
                end += 1
                while end < length and goes_on and alike[end - 1] and same[end - 2]:
                    end += 1
        stretches.append((begin, end))
        begin = end
    return stretches
