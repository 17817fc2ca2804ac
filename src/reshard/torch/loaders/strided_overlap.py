"""Where two strided regions of one memory meet.

A memory was written through one view and is read through another. Both are regions: an offset,
sizes and strides. Which elements do they share, and which indices have these in each? ::

    written: rows 1:3 of 4 x 6           offset 6, sizes (2, 6), strides (6, 1)
    read:    columns 2:4                 offset 2, sizes (4, 2), strides (6, 1)

    strides that divide one another are digits of a position:   position = 6 * row + column

    written   row 1:3   column 0:6
    read      row 0:4   column 2:4       so they share row 1:3, column 2:4

1. The strides of both, from the smallest up, must divide one another. They are the digits' units.
2. Each region is a box of digits. Where a dimension reaches around the end of a digit it fills it
   and goes on in the next one, or the region is split in front of it.
3. Boxes of digits meet digit by digit. What they share is a box, and each digit of it is a step
   along one dimension of either side.
4. Strides that do not divide one another are rare: those regions are compared by all positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reshard.errors import RunError
from reshard.torch.loaders.element_map import find_boxes

Index = tuple[int, ...]
MOST_POSITIONS = 1 << 22


class StridedRegion(NamedTuple):
    """Elements of a memory: those at `offset` and all steps of `strides` from there."""

    offset: int
    sizes: Index
    strides: Index

    @property
    def last(self) -> int:
        """The last position; strides are not negative in PyTorch."""
        ends = ((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.offset + sum(ends)


class Meeting(NamedTuple):
    """A box `start:stop` of a reading region, and where it lies in the written one.

    Its first element has the index `written` there. A step along dimension `d` of the box is a step
    of `steps[d][k]` along dimension `k` of the written region.
    """

    start: Index
    stop: Index
    written: Index
    steps: tuple[Index, ...]


def find_meetings(read: StridedRegion, written: StridedRegion) -> Iterator[Meeting]:
    """The boxes of `read` whose elements lie in `written`.

    Raises RunError for regions of more than `MOST_POSITIONS` whose strides do not divide one
    another.

    >>> read, written = StridedRegion(2, (4, 2), (6, 1)), StridedRegion(6, (2, 6), (6, 1))
    >>> [(m.start, m.stop, m.written) for m in find_meetings(read, written)]
    [((1, 0), (3, 2), (0, 2))]
    """
    if not math.prod(read.sizes) or not math.prod(written.sizes):
        return
    if read.offset > written.last or written.offset > read.last:
        return
    # Elements that are read several times through strides of 0 are one element.
    moving = [
        d for d, (n, s) in enumerate(zip(read.sizes, read.strides, strict=True)) if n > 1 and s
    ]
    ours = [_Axis(d, read.sizes[d], read.strides[d], 1) for d in moving]
    theirs = [
        _Axis(k, n, s, 1)
        for k, (n, s) in enumerate(zip(written.sizes, written.strides, strict=True))
        if n > 1 and s
    ]
    units = _find_units([axis.stride for axis in (*ours, *theirs)])
    if units is None:
        yield from _meet_by_position(read, written)
        return
    for mine in _list_digit_boxes(read.offset, ours, units, {}):
        for other in _list_digit_boxes(written.offset, theirs, units, {}):
            yield from _meet_digits(read, written, mine, other)


def meet_aligned(read: StridedRegion, written: StridedRegion) -> list[Meeting] | None:
    """The meeting where what is written is a box of what is read; None where it may not be.

    This is the usual case, and quick.

    >>> meet_aligned(StridedRegion(0, (4, 6), (6, 1)), StridedRegion(6, (2, 6), (6, 1)))
    [Meeting(start=(1, 0), stop=(3, 6), written=(0, 0), steps=((1, 0), (0, 1)))]
    """
    dims, written_dims = len(read.sizes), len(written.sizes)
    # Which dimension was written in the steps of each that is read; -1 where a single index was.
    steps_of = {s: k for k, (n, s) in enumerate(zip(*written[1:], strict=True)) if n > 1}
    moving = sum(n > 1 for n in written.sizes)
    along, inner = [-1] * dims, 1
    for d in reversed(range(dims)):
        n, s = read.sizes[d], read.strides[d]
        # Each stride must be that of a dense tensor inside the ones before, or more.
        if s < inner:
            return None
        inner = s * n
        along[d] = steps_of.get(s, -1) if n > 1 else -1
    if sum(k >= 0 for k in along) != moving:
        return None
    distance = written.offset - read.offset
    start, stop, steps = [], [], []
    for d, k in enumerate(along):
        index, distance = divmod(distance, read.strides[d])
        size = written.sizes[k] if k >= 0 else 1
        # Reaching around the end of a dimension is for digits.
        if index < 0 or index + size > read.sizes[d]:
            return None
        start.append(index)
        stop.append(index + size)
        steps.append(tuple(int(k == other) for other in range(written_dims)))
    if distance:
        return None
    return [Meeting(tuple(start), tuple(stop), (0,) * written_dims, tuple(steps))]


class _Axis(NamedTuple):
    """A dimension, or what is left of it: its number, steps, their stride, and the indices that
    each step goes ahead.
    """

    dim: int
    size: int
    stride: int
    ahead: int


class _Digit(NamedTuple):
    """A digit of a region: values `start:start + size`, each a step along a dimension."""

    start: int
    size: int
    dim: int = -1
    ahead: int = 0


class _DigitBox(NamedTuple):
    """Digits of positions, the smallest first, and the index of the first one by dimension."""

    digits: tuple[_Digit, ...]
    first: dict[int, int]


def _find_units(strides: Sequence[int]) -> list[int] | None:
    """The strides as units of digits, rising; None where one does not divide the next."""
    units = sorted({1, *strides})
    if any(b % a for a, b in itertools.pairwise(units)):
        return None
    return units


def _list_digit_boxes(
    offset: int, axes: Sequence[_Axis], units: Sequence[int], index: dict[int, int]
) -> Iterator[_DigitBox]:
    bases = [b // a for a, b in itertools.pairwise(units)]
    digits = [_Digit(offset // u % b, 1) for u, b in zip(units, bases, strict=False)]
    digits.append(_Digit(offset // units[-1], 1))
    left = sorted(axes, key=lambda axis: -axis.stride)
    while left:
        axis = left.pop()
        at = units.index(axis.stride)
        start, taken = digits[at].start, digits[at].dim >= 0
        is_top = at == len(bases)
        if not taken and (is_top or start + axis.size <= bases[at]):
            digits[at] = _Digit(start, axis.size, axis.dim, axis.ahead)
            continue
        base = None if is_top else bases[at]
        if not taken and base is not None and start == 0 and axis.size % base == 0:
            digits[at] = _Digit(0, base, axis.dim, axis.ahead)
            rest = _Axis(axis.dim, axis.size // base, units[at + 1], axis.ahead * base)
            left.append(rest)
            left.sort(key=lambda one: -one.stride)
            continue
        # What is left of a dimension that went around is split by splitting the dimension.
        whole = next(one for one in axes if one.dim == axis.dim)
        others = [one for one in axes if one is not whole]
        # Two dimensions in the same steps: one step at a time.
        cuts: Sequence[int] = range(whole.size + 1)
        if not taken and base is not None:
            # In front of the end of the digit, or behind its last whole round.
            first = base - start if start else axis.size // base * base
            cuts = (0, first * (axis.ahead // whole.ahead), whole.size)
        for begin, end in itertools.pairwise(cuts):
            part = [*others, *([whole._replace(size=end - begin)] if end - begin > 1 else [])]
            there = index.get(whole.dim, 0) + begin * whole.ahead
            yield from _list_digit_boxes(
                offset + begin * whole.stride, part, units, {**index, whole.dim: there}
            )
        return
    yield _DigitBox(tuple(digits), index)


def _meet_digits(
    read: StridedRegion, written: StridedRegion, mine: _DigitBox, other: _DigitBox
) -> Iterator[Meeting]:
    """What two boxes of digits share, as boxes of the dimensions that are read."""
    ours = [mine.first.get(d, 0) for d in range(len(read.sizes))]
    theirs = [other.first.get(k, 0) for k in range(len(written.sizes))]
    # Of each dimension that is read: its digits that are shared, as size, step along it, and the
    # step along a dimension that was written.
    along: list[list[tuple[int, int, int, int]]] = [[] for _ in read.sizes]
    for one, two in zip(mine.digits, other.digits, strict=True):
        low = max(one.start, two.start)
        high = min(one.start + one.size, two.start + two.size)
        if low >= high:
            return
        if one.dim >= 0:
            ours[one.dim] += (low - one.start) * one.ahead
        if two.dim >= 0:
            theirs[two.dim] += (low - two.start) * two.ahead
        if high - low > 1:
            along[one.dim].append((high - low, one.ahead, two.dim, two.ahead))
    yield from _list_boxes(read, ours, theirs, along)


def _list_boxes(
    read: StridedRegion,
    ours: list[int],
    theirs: list[int],
    along: list[list[tuple[int, int, int, int]]],
) -> Iterator[Meeting]:
    sizes, steps = [], []
    for d, digits in enumerate(along):
        if not read.strides[d] and read.sizes[d] > 1:
            # The same elements at every index.
            sizes.append(read.sizes[d])
            steps.append((0,) * len(theirs))
            continue
        joined = _join_digits(digits)
        if len(joined) > 1 or (joined and joined[0][1] != 1):
            # Steps over indices are no box: one for each value of the largest digit.
            size, ahead, dim, further = digits[-1]
            rest = [*along[:d], digits[:-1], *along[d + 1 :]]
            for value in range(size):
                here, there = [*ours], [*theirs]
                here[d] += value * ahead
                there[dim] += value * further
                yield from _list_boxes(read, here, there, rest)
            return
        size, _, dim, further = joined[0] if joined else (1, 1, -1, 0)
        sizes.append(size)
        steps.append(tuple(further if k == dim else 0 for k in range(len(theirs))))
    stop = tuple(a + n for a, n in zip(ours, sizes, strict=True))
    yield Meeting(tuple(ours), stop, tuple(theirs), tuple(steps))


def _join_digits(digits: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Digits of a dimension, the smallest first, with those that continue others joined."""
    joined: list[tuple[int, int, int, int]] = []
    for size, ahead, dim, further in digits:
        if joined:
            n, step, of, there = joined[-1]
            if of == dim and ahead == n * step and further == n * there:
                joined[-1] = (n * size, step, of, there)
                continue
        joined.append((size, ahead, dim, further))
    return joined


def _meet_by_position(read: StridedRegion, written: StridedRegion) -> Iterator[Meeting]:
    if max(math.prod(read.sizes), math.prod(written.sizes)) > MOST_POSITIONS:
        raise RunError(
            f"a memory written by strides {list(written.strides)} is read by strides "
            f"{list(read.strides)}, which do not divide one another, with more than "
            f"{MOST_POSITIONS:,} elements; trace a smaller model of the same kind"
        )
    positions = _list_positions(written).reshape(-1)
    order = np.argsort(positions, kind="stable")
    wanted = _list_positions(read)
    place = np.searchsorted(positions[order], wanted).clip(max=len(order) - 1)
    found = order[place]
    is_there = positions[found] == wanted
    dims = len(written.sizes)
    index = (
        np.stack(np.unravel_index(found, written.sizes)) if dims else np.zeros((0, *found.shape))
    )
    # Boxes in which every index of the written region goes in equal steps.
    for start, stop, _, first, steps in find_boxes(
        [*index.astype(np.int64)], [is_there.astype(np.int64)]
    ):
        if is_there[start]:
            yield Meeting(start, stop, first, steps)


def _list_positions(region: StridedRegion) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    index = np.full(region.sizes, region.offset, dtype=np.int64)
    for d, stride in enumerate(region.strides):
        steps = np.arange(region.sizes[d], dtype=np.int64) * stride
        index += steps.reshape((-1,) + (1,) * (len(region.sizes) - d - 1))
    return index
