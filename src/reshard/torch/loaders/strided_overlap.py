"""The intersection of two strided regions of a storage, and boxes in arrays of numbers.

A storage was written through a view and is read through another view. Both are regions: an offset,
sizes and strides. Which elements do they share, and at which indices of each? ::

    written: rows 1:3 of 4 x 6           offset 6, sizes (2, 6), strides (6, 1)
    read:    columns 2:4                 offset 2, sizes (4, 2), strides (6, 1)

    strides that divide each other are digits of a position:   position = 6 * row + column

    written   row 1:3   column 0:6
    read      row 0:4   column 2:4       so they share row 1:3, column 2:4

1. The strides of both, in ascending order, must divide each other. They are the digits' units.
2. Each region is a box of digits. A dimension that reaches past the end of a digit either fills
   the digit and continues in the next, or the region is split there.
3. Boxes of digits are intersected digit by digit. The result is a box, and each of its digits is a
   step along a dimension of each region.
4. Strides that do not divide each other are rare; those regions are compared by all positions.

Where each element is known, boxes are found in which all numbers go in equal steps along each
dimension (`find_boxes`)::

    0 1 2 | 7 7        0:2, 0:3  from 0, steps (5, 1)
    5 6 7 | 7 7        0:2, 3:5  from 7, steps (0, 0)

1. Slabs of the first dimension that differ from the next by the same array form a stretch.
2. A stretch is its first slab, whose boxes are found in the same way, and the array of differences,
   which must be constant in each of these boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import RunError

Integers = NDArray[np.int64]
Index = tuple[int, ...]
NumberBox = tuple[Index, Index, Index, Index, tuple[Index, ...]]
MAX_POSITIONS = 1 << 22


class StridedRegion(NamedTuple):
    """Elements of a storage: an offset, and sizes with strides."""

    offset: int
    sizes: Index
    strides: Index

    @property
    def last(self) -> int:
        """The last position, for strides that are not negative, as in PyTorch."""
        ends = ((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.offset + sum(ends)


class Overlap(NamedTuple):
    """A box `start:stop` of a region that is read, and its location in the written region.

    Its first element has the index `written` there. A step along dimension `d` of the box is a step
    of `steps[d][k]` along dimension `k` of the written region.
    """

    start: Index
    stop: Index
    written: Index
    steps: tuple[Index, ...]


def find_overlaps(read: StridedRegion, written: StridedRegion) -> Iterator[Overlap]:
    """Yield the boxes of `read` whose elements are in `written`.

    Raises RunError for regions of more than `MAX_POSITIONS` whose strides do not divide each
    other.

    >>> read, written = StridedRegion(2, (4, 2), (6, 1)), StridedRegion(6, (2, 6), (6, 1))
    >>> [(m.start, m.stop, m.written) for m in find_overlaps(read, written)]
    [((1, 0), (3, 2), (0, 2))]
    """
    if not math.prod(read.sizes) or not math.prod(written.sizes):
        return
    if read.offset > written.last or written.offset > read.last:
        return
    # Dimensions of stride 0 repeat the same elements.
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


def find_aligned_overlap(read: StridedRegion, written: StridedRegion) -> list[Overlap] | None:
    """Return the overlap if the written region is a box of the read region, else None.

    This is the usual case, and quick.

    >>> find_aligned_overlap(StridedRegion(0, (4, 6), (6, 1)), StridedRegion(6, (2, 6), (6, 1)))
    [Overlap(start=(1, 0), stop=(3, 6), written=(0, 0), steps=((1, 0), (0, 1)))]
    """
    dims, written_dims = len(read.sizes), len(written.sizes)
    # The written dimension with the stride of each read dimension, or -1 for a single index.
    steps_of = {s: k for k, (n, s) in enumerate(zip(*written[1:], strict=True)) if n > 1}
    moving = sum(n > 1 for n in written.sizes)
    along, inner = [-1] * dims, 1
    for d in reversed(range(dims)):
        n, s = read.sizes[d], read.strides[d]
        # Each stride must be at least that of a dense tensor.
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
        # Indices that wrap around a dimension are handled by digits.
        if index < 0 or index + size > read.sizes[d]:
            return None
        start.append(index)
        stop.append(index + size)
        steps.append(tuple(int(k == other) for other in range(written_dims)))
    if distance:
        return None
    return [Overlap(tuple(start), tuple(stop), (0,) * written_dims, tuple(steps))]


class _Axis(NamedTuple):
    """A dimension, or the rest of it: number, size, stride, and index increment of a step."""

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


# The digits of the positions in a region, smallest unit first, and the first index by dimension.
_DigitBox = tuple[tuple[_Digit, ...], dict[int, int]]


def _find_units(strides: Sequence[int]) -> list[int] | None:
    """Return the strides as units of digits, ascending, or None if any is not divisible."""
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
    pending = sorted(axes, key=lambda current: -current.stride)
    while pending:
        current = pending.pop()
        digit = units.index(current.stride)
        start, is_used = digits[digit].start, digits[digit].dim >= 0
        is_top = digit == len(bases)
        if not is_used and (is_top or start + current.size <= bases[digit]):
            digits[digit] = _Digit(start, current.size, current.dim, current.ahead)
            continue
        base = None if is_top else bases[digit]
        if not is_used and base is not None and start == 0 and current.size % base == 0:
            digits[digit] = _Digit(0, base, current.dim, current.ahead)
            rest = _Axis(current.dim, current.size // base, units[digit + 1], current.ahead * base)
            pending.append(rest)
            pending.sort(key=lambda other: -other.stride)
            continue
        # The rest of a dimension that wrapped around: split the dimension itself.
        axis = next(other for other in axes if other.dim == current.dim)
        others = [other for other in axes if other is not axis]
        # Two dimensions with the same stride: take single steps.
        cuts: Sequence[int] = range(axis.size + 1)
        if not is_used and base is not None:
            # Before the end of the digit, or after its last complete round.
            first = base - start if start else current.size // base * base
            cuts = (0, first * (current.ahead // axis.ahead), axis.size)
        for begin, end in itertools.pairwise(cuts):
            part = [*others, *([axis._replace(size=end - begin)] if end - begin > 1 else [])]
            there = index.get(axis.dim, 0) + begin * axis.ahead
            yield from _list_digit_boxes(
                offset + begin * axis.stride, part, units, {**index, axis.dim: there}
            )
        return
    yield tuple(digits), index


def _meet_digits(
    read: StridedRegion, written: StridedRegion, mine: _DigitBox, other: _DigitBox
) -> Iterator[Overlap]:
    """Yield the intersection of two boxes of digits, as boxes of the read dimensions."""
    (our_digits, our_first), (their_digits, their_first) = mine, other
    ours = [our_first.get(d, 0) for d in range(len(read.sizes))]
    theirs = [their_first.get(k, 0) for k in range(len(written.sizes))]
    # For each read dimension its shared digits: size, step along it, and the dimension and step in
    # the written region.
    along: list[list[tuple[int, int, int, int]]] = [[] for _ in read.sizes]
    for a, b in zip(our_digits, their_digits, strict=True):
        low = max(a.start, b.start)
        high = min(a.start + a.size, b.start + b.size)
        if low >= high:
            return
        if a.dim >= 0:
            ours[a.dim] += (low - a.start) * a.ahead
        if b.dim >= 0:
            theirs[b.dim] += (low - b.start) * b.ahead
        if high - low > 1:
            along[a.dim].append((high - low, a.ahead, b.dim, b.ahead))
    yield from _list_boxes(read, ours, theirs, along)


def _list_boxes(
    read: StridedRegion,
    ours: list[int],
    theirs: list[int],
    along: list[list[tuple[int, int, int, int]]],
) -> Iterator[Overlap]:
    sizes, steps = [], []
    for d, digits in enumerate(along):
        if not read.strides[d] and read.sizes[d] > 1:
            # All indices read the same elements.
            sizes.append(read.sizes[d])
            steps.append((0,) * len(theirs))
            continue
        joined = _join_digits(digits)
        if len(joined) > 1 or (joined and joined[0][1] != 1):
            # Indices in steps above 1 are not a box: one box for each value of the largest digit.
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
    yield Overlap(tuple(ours), stop, tuple(theirs), tuple(steps))


def _join_digits(digits: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Merge digits of a dimension that continue each other, smallest first."""
    joined: list[tuple[int, int, int, int]] = []
    for size, ahead, dim, further in digits:
        if joined:
            n, step, of, there = joined[-1]
            if of == dim and ahead == n * step and further == n * there:
                joined[-1] = (n * size, step, of, there)
                continue
        joined.append((size, ahead, dim, further))
    return joined


def _meet_by_position(read: StridedRegion, written: StridedRegion) -> Iterator[Overlap]:
    if max(math.prod(read.sizes), math.prod(written.sizes)) > MAX_POSITIONS:
        raise RunError(
            f"a memory written by strides {list(written.strides)} is read by strides "
            f"{list(read.strides)}, which do not divide one another, with more than "
            f"{MAX_POSITIONS:,} elements; trace a smaller model of the same kind"
        )
    positions = _list_positions(written).reshape(-1)
    order = np.argsort(positions, kind="stable")
    read_positions = _list_positions(read)
    nearest = np.searchsorted(positions[order], read_positions).clip(max=len(order) - 1)
    candidates = order[nearest]
    is_shared = positions[candidates] == read_positions
    dims = len(written.sizes)
    index = (
        np.stack(np.unravel_index(candidates, written.sizes))
        if dims
        else np.zeros((0, *candidates.shape))
    )
    # Boxes in which each index of the written region advances in equal steps.
    for start, stop, _, first, steps in find_boxes(
        [*index.astype(np.int64)], [is_shared.astype(np.int64)]
    ):
        if is_shared[start]:
            yield Overlap(start, stop, first, steps)


def _list_positions(region: StridedRegion) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    index = np.full(region.sizes, region.offset, dtype=np.int64)
    for d, stride in enumerate(region.strides):
        steps = np.arange(region.sizes[d], dtype=np.int64) * stride
        index += steps.reshape((-1,) + (1,) * (len(region.sizes) - d - 1))
    return index


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
