"""Regions through which a container was written and is read, and regions in arrays of numbers.

Elements were copied from `source` into `target`, a region of a storage. The storage is then read
through another region, `view`. Where do the elements that it shares with `target` come from?
(`trace_copy`) ::

    target: rows 1:3 of 4 x 6            offset 6, shape (2, 6), strides (6, 1)
    view:   columns 2:4                  offset 2, shape (4, 2), strides (6, 1)

    strides that divide each other are digits of a position:   position = 6 * row + column

    target    row 1:3   column 0:6
    view      row 0:4   column 2:4       so they share row 1:3, column 2:4

1. The strides of both, in ascending order, must divide each other. They are the digits' units.
2. Each region is a box of digits. A dimension that reaches past the end of a digit either fills
   the digit and continues in the next, or the region is split there.
3. Boxes of digits are intersected digit by digit. The result is a box, and each of its digits is a
   step along a dimension of the view, and a stride of the source.
4. Strides that do not divide each other are rare; those regions are compared by all positions.

Where the source of each element is known, regions are found in which all offsets go in equal steps
along each dimension (`find_regions`)::

    0 1 2 | 7 7        0:2, 0:3  from 0, strides (5, 1)
    5 6 7 | 7 7        0:2, 3:5  from 7, strides (0, 0)

1. Slabs of the first dimension that differ from the next by the same array form a stretch.
2. A stretch is its first slab, whose regions are found in the same way, and the array of
   differences, which must be constant in each of these regions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import RunError
from reshard.geometry.regions import Index, Region
from reshard.runs import IntArray

# Regions of more elements are not listed position by position: a table of int64 takes 32 MiB.
MAX_POSITIONS = 1 << 22


def trace_copy(view: Region, target: Region, source: Region) -> Iterator[Region]:
    """Yield the parts of `view` that are in `target`, with their locations in `source`.

    Args:
        view: a region of a container, without negative strides.
        target: a region of the same container.
        source: of the same box as `target`, whose elements were copied from there.

    Raises RunError for regions of more than `MAX_POSITIONS` whose strides do not divide each
    other.

    >>> target, source = Region.dense((2, 6), "memory", 6), Region.dense((2, 6), "file", 100)
    >>> view = Region((0, 0), (4, 2), "memory", 2, (6, 1))
    >>> [str(part) for part in trace_copy(view, target, source)]
    ['[1:3, 0:2] at 102 of file']
    """
    shape, target_shape = view.shape, target.shape
    if 0 in shape or 0 in target_shape:
        return
    aligned = _trace_aligned(view, shape, target, target_shape, source)
    if aligned is not None:
        yield aligned
        return
    if view.offset > target.bounds[1] or target.offset > view.bounds[1]:
        return
    # Dimensions of stride 0 repeat the same elements.
    pairs = enumerate(zip(shape, view.strides, strict=True))
    ours = [_Axis(d, n, s, 1) for d, (n, s) in pairs if n > 1 and s]
    joined = _join_axes(target_shape, target.strides, source.strides)
    theirs = [_Axis(k, n, s, 1) for k, (n, s, _) in enumerate(joined) if s]
    units = sorted({1, *(axis.stride for axis in (*ours, *theirs))})
    if any(b % a for a, b in itertools.pairwise(units)):
        yield from _trace_by_position(view, target, source)
        return
    strides = [stride for _, _, stride in joined]
    for mine in _list_digit_boxes(view.offset, ours, units, {}):
        for other in _list_digit_boxes(target.offset, theirs, units, {}):
            yield from _intersect_digits(view, shape, source, strides, mine, other)


def _trace_aligned(
    view: Region, shape: Index, target: Region, target_shape: Index, source: Region
) -> Region | None:
    """Return the shared part if the target is a box of the view, else None.

    This is the usual case, and quick: a loader writes slices of a parameter.
    """
    # The target's dimension with the stride of each dimension of the view, or -1 for a single
    # index.
    pairs = zip(target_shape, target.strides, strict=True)
    steps_of = {s: k for k, (n, s) in enumerate(pairs) if n > 1}
    moving = sum(n > 1 for n in target_shape)
    along, inner = [-1] * len(shape), 1
    for d in reversed(range(len(shape))):
        n, s = shape[d], view.strides[d]
        # Each stride must be at least that of a dense tensor.
        if s < inner:
            return None
        inner = s * n
        along[d] = steps_of.get(s, -1) if n > 1 else -1
    if sum(k >= 0 for k in along) != moving:
        return None
    distance = target.offset - view.offset
    start, stop, strides = [], [], []
    for d, k in enumerate(along):
        index, distance = divmod(distance, view.strides[d])
        size = target_shape[k] if k >= 0 else 1
        # Indices that wrap around a dimension are handled by digits.
        if index < 0 or index + size > shape[d]:
            return None
        start.append(view.start[d] + index)
        stop.append(view.start[d] + index + size)
        strides.append(source.strides[k] if k >= 0 else 0)
    if distance:
        return None
    return Region(tuple(start), tuple(stop), source.container, source.offset, tuple(strides))


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
# A shared digit of a dimension of the view: its size, its step along it, its stride in the source.
_Step = tuple[int, int, int]


def _join_axes(shape: Index, strides: Index, source_strides: Index) -> list[tuple[int, int, int]]:
    """Return size, stride and source stride of dimensions; those that continue others are joined.

    Fewer strides mean fewer digits, so fewer regions have to be split.
    """
    axes: list[tuple[int, int, int]] = []
    for size, stride, step in zip(shape, strides, source_strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == (size * stride, size * step):
            axes[-1] = (axes[-1][0] * size, stride, step)
        else:
            axes.append((size, stride, step))
    return axes


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


def _intersect_digits(
    view: Region,
    shape: Index,
    source: Region,
    strides: Sequence[int],
    mine: _DigitBox,
    other: _DigitBox,
) -> Iterator[Region]:
    """Yield the intersection of two boxes of digits, as regions of the source.

    `strides` are the strides in the source of the target's joined dimensions.
    """
    (our_digits, our_first), (their_digits, their_first) = mine, other
    index = [start + our_first.get(d, 0) for d, start in enumerate(view.start)]
    offset = source.offset + sum(at * strides[k] for k, at in their_first.items())
    along: list[list[_Step]] = [[] for _ in shape]
    for a, b in zip(our_digits, their_digits, strict=True):
        low = max(a.start, b.start)
        high = min(a.start + a.size, b.start + b.size)
        if low >= high:
            return
        if a.dim >= 0:
            index[a.dim] += (low - a.start) * a.ahead
        stride = b.ahead * strides[b.dim] if b.dim >= 0 else 0
        offset += (low - b.start) * stride
        if high - low > 1:
            along[a.dim].append((high - low, a.ahead, stride))
    repeated = [n if not s else 1 for n, s in zip(shape, view.strides, strict=True)]
    yield from _list_boxes(index, repeated, along, source._replace(offset=offset))


def _list_boxes(
    index: list[int], repeated: Sequence[int], along: list[list[_Step]], source: Region
) -> Iterator[Region]:
    """Yield the regions with these digits along each dimension of the view, from `index` on."""
    sizes, strides = [], []
    for d, digits in enumerate(along):
        joined = _join_digits(digits)
        if len(joined) > 1 or (joined and joined[0][1] != 1):
            # Indices in steps above 1 are not a box: a box for each value of the largest digit.
            size, ahead, stride = digits[-1]
            rest = [*along[:d], digits[:-1], *along[d + 1 :]]
            for value in range(size):
                here = [*index[:d], index[d] + value * ahead, *index[d + 1 :]]
                there = source._replace(offset=source.offset + value * stride)
                yield from _list_boxes(here, repeated, rest, there)
            return
        # All indices of a dimension with stride 0 read the same elements.
        size, _, stride = joined[0] if joined else (repeated[d], 1, 0)
        sizes.append(size)
        strides.append(stride)
    stop = tuple(a + n for a, n in zip(index, sizes, strict=True))
    yield Region(tuple(index), stop, source.container, source.offset, tuple(strides))


def _join_digits(digits: list[_Step]) -> list[_Step]:
    """Merge digits of a dimension that continue each other, smallest first."""
    joined: list[_Step] = []
    for size, ahead, stride in digits:
        if joined:
            n, step, first = joined[-1]
            if ahead == n * step and stride == n * first:
                joined[-1] = (n * size, step, first)
                continue
        joined.append((size, ahead, stride))
    return joined


def _trace_by_position(view: Region, target: Region, source: Region) -> Iterator[Region]:
    if max(view.elements, target.elements) > MAX_POSITIONS:
        raise RunError(
            f"a memory written by strides {list(target.strides)} is read by strides "
            f"{list(view.strides)}, which do not divide one another, with more than "
            f"{MAX_POSITIONS:,} elements; trace a smaller model of the same kind"
        )
    positions = target.positions.reshape(-1)
    order = np.argsort(positions, kind="stable")
    needed = view.positions
    nearest = np.searchsorted(positions[order], needed).clip(max=len(order) - 1)
    candidates = order[nearest]
    is_shared = positions[candidates] == needed
    offsets = source.positions.reshape(-1)[candidates]
    for start, stop, (shared,), offset, strides in find_regions(offsets, is_shared):
        if shared:
            part = Region(start, stop, source.container, offset, strides)
            yield part.translate(view.start)


def find_regions(offsets: IntArray, *labels: NDArray[Any]) -> Iterator[Region]:
    """Yield regions in which offsets go in equal steps, and each array of labels is constant.

    The arrays have one shape; each element is in one region, whose container is the tuple of its
    labels.

    >>> grid = np.array([[0, 1, 2, 7, 7], [5, 6, 7, 7, 7]])
    >>> for region in find_regions(grid, grid == 7):
    ...     print(region)
    [0:1, 0:3] at 0 of (0,)
    [0:1, 3:5] at 7 of (1,)
    [1:2, 0:2] at 5 of (0,)
    [1:2, 2:5] at 7 of (1,)
    """
    if offsets.size:
        yield from _find_regions(
            offsets.astype(np.int64), [label.astype(np.int64) for label in labels]
        )


def _find_regions(offsets: IntArray, labels: list[IntArray]) -> Iterator[Region]:
    if offsets.ndim == 0:
        yield Region((), (), tuple(int(label) for label in labels), int(offsets), ())
        return
    for begin, end in _find_stretches(offsets, labels):
        # The differences in a stretch are constant in each of its regions, as the labels are.
        step = offsets[begin + 1] - offsets[begin] if end - begin > 1 else offsets[begin] * 0
        together = [*(label[begin] for label in labels), step]
        for start, stop, (*own, ahead), offset, strides in _find_regions(offsets[begin], together):
            yield Region((begin, *start), (end, *stop), tuple(own), offset, (ahead, *strides))


def _find_stretches(offsets: IntArray, labels: list[IntArray]) -> list[tuple[int, int]]:
    """Return ranges of slabs that follow each other in equal steps, with equal labels."""
    length = len(offsets)
    rest = tuple(range(1, offsets.ndim))
    # Whether slab i + 1 has the labels of slab i, and whether the next step is equal.
    alike = np.ones(length - 1, dtype=bool)
    for label in labels:
        alike &= (label[1:] == label[:-1]).all(axis=rest)
    changes = np.diff(offsets, axis=0)
    same = (changes[1:] == changes[:-1]).all(axis=rest)
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
