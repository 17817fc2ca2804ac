"""Columns of whole numbers in a short form, for JSON.

The columns of layouts are regular: ranks count up, parts come round again. A column is a list of
entries, each a number or a grid of numbers, innermost steps first::

    7                    7
    [0, 1, 4]            0 1 2 3                      from 0, step 1, 4 times
    [0, 0, 2, 1, 3]      0 0 1 1 2 2                  from 0, step 0, 2 times; all step 1, 3 times
    [5, 1, 2, 0, 3]      5 6 5 6 5 6

1. Stretches of equal steps are gathered.
2. Stretches alike that follow at equal distances are gathered in the same way, as often as that
   makes any fewer.
3. A column that does not get shorter is written number by number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from reshard.errors import NotationError
from reshard.runs import IntArray

# More than any layout has, and small enough that three of them can be added in 64 bits.
LARGEST_NUMBER = 1 << 61
MOST_ENTRIES = 1 << 22
# A grid of so many numbers is quicker to write out one by one.
_FEW = 64

_Grid = tuple[int, tuple[int, ...]]


def packed(column: Iterable[int]) -> list[int | list[int]]:
    """A column as entries. `unpacked` gives it back.

    >>> packed([0, 1, 2, 3, 0, 1, 2, 3, 9]), packed([4, 8, 1])
    ([[0, 1, 4, 0, 2], 9], [4, 8, 1])
    """
    numbers = [int(number) for number in column]
    grids: list[_Grid] = [(number, ()) for number in numbers]
    # Each pass gathers one level of steps: numbers to stretches, then alike stretches to grids.
    while True:
        gathered = _gather(grids)
        if len(gathered) == len(grids):
            break
        grids = gathered
    entries: list[int | list[int]] = []
    for start, steps in grids:
        if len(steps) == 2 and steps[1] == 2:
            # A pair is shorter as it is.
            entries += [start, start + steps[0]]
        else:
            entries.append([start, *steps] if steps else start)
    if sum(1 if isinstance(entry, int) else len(entry) for entry in entries) < len(numbers):
        return entries
    return list(numbers)


def _gather(grids: list[_Grid]) -> list[_Grid]:
    """The grids, with stretches of alike ones at equal distances as one grid each."""
    found: list[_Grid] = []
    first = 0
    while first < len(grids):
        start, steps = grids[first]
        last = first
        if last + 1 < len(grids) and grids[last + 1][1] == steps:
            step = grids[last + 1][0] - start
            while (
                last + 1 < len(grids)
                and grids[last + 1][1] == steps
                and grids[last + 1][0] - grids[last][0] == step
            ):
                last += 1
        if last == first:
            found.append((start, steps))
        else:
            found.append((start, (*steps, step, last - first + 1)))
        first = last + 1
    return found


def unpacked(entries: object, where: str) -> IntArray:
    """The column that entries stand for.

    Raises NotationError for anything else than numbers and grids of numbers, or too many.

    >>> unpacked([7, [0, 0, 2, 1, 3]], "cells").tolist()
    [7, 0, 0, 1, 1, 2, 2]
    """
    if not isinstance(entries, list):
        raise NotationError(f"{where}: {entries!r} is not a list of whole numbers and grids")
    if set(map(type, entries)) == {int} and -LARGEST_NUMBER <= min(entries) <= max(entries) <= (
        LARGEST_NUMBER
    ):
        # Numbers alone, as of a column that does not get shorter.
        return np.array(entries, dtype=np.int64)
    total = 0
    pieces: list[IntArray] = []
    plain: list[int] = []
    for entry in entries:
        if not isinstance(entry, list):
            plain.append(whole_number(entry, where))
            total += 1
            continue
        grid = [whole_number(number, where) for number in entry]
        steps, counts = grid[1::2], grid[2::2]
        if len(grid) < 3 or len(steps) != len(counts) or min(counts) < 1:
            raise NotationError(
                f"{where}: {entry!r} is not a start and pairs of a step and a count of 1 or more"
            )
        size = math.prod(counts)
        total += size
        # Checked before the numbers are made: a short entry may stand for more than memory holds.
        reach = sum(abs(step) * count for step, count in zip(steps, counts, strict=True))
        if total > MOST_ENTRIES or reach >= LARGEST_NUMBER:
            raise NotationError(
                f"{where}: {entry!r} stands for too many or too large numbers; at most "
                f"{MOST_ENTRIES} numbers below {LARGEST_NUMBER}"
            )
        if size <= _FEW:
            few = [grid[0]]
            for step, count in zip(steps, counts, strict=True):
                few = [ahead * step + number for ahead in range(count) for number in few]
            plain += few
            continue
        pieces.append(np.array(plain, dtype=np.int64))
        plain = []
        numbers = np.array([grid[0]], dtype=np.int64)
        for step, count in zip(steps, counts, strict=True):
            # Innermost steps first: each further pair repeats all numbers so far.
            numbers = (np.arange(count)[:, None] * step + numbers).reshape(-1)
        pieces.append(numbers)
    pieces.append(np.array(plain, dtype=np.int64))
    return np.concatenate(pieces)


def whole_number(value: object, where: str, least: int = -LARGEST_NUMBER) -> int:
    """`value`, checked. Raises NotationError unless it is a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise NotationError(f"{where}: {value!r} is not a whole number")
    if not least <= value <= LARGEST_NUMBER:
        raise NotationError(f"{where}: {value} is not between {least} and {LARGEST_NUMBER}")
    return value
