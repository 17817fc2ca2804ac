"""Regions: boxes of a tensor, and the locations of their elements.

A `Region` is a box `start:stop` of a tensor and a strided view of a *container*: a file, a rank's
buffer, another tensor. Element `i` of the tensor is stored at `offset + sum((i - start) *
strides)`. Offset and strides share a unit, which the caller chooses: elements of the container, or
bytes for containers that hold several types::

    rows 2:4 of a 4 x 3 tensor, at 10 in a file       Region((2, 0), (4, 3), "file", 10, (3, 1))
    its transpose                                     Region((0, 2), (3, 4), "file", 10, (1, 3))
    its column 1                                      Region((2, 1), (4, 2), "file", 11, (3, 1))
    a value for all elements, a constant              Region((2, 0), (4, 3), 0.5, 0, (0, 0))

Shards, chunks, fragments of flat buffers, members of fused parameters and reads through views are
lists of regions. This module has their operations: parts are taken and moved (`narrow`,
`intersect`, `subtract`, `step`, `translate`), dimensions are permuted, inserted and dropped, large
regions are split, adjacent regions are merged (`coalesce`). Elements are not copied.

==========================  ======================================================================
`Region.dense`              a whole row-major tensor
`flat_regions`              a range of a flattened tensor, dense in its container
`multiply_runs`             a shard: the product of the runs of each dimension
`bind_regions`              regions of files as the `Binding` of a tensor
==========================  ======================================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard.binding import Binding, FileRange, View, are_dense
from reshard.binding import dense_strides as dense_strides
from reshard.layout import Box, Layout, flat_range_boxes
from reshard.runs import IntArray

Index = tuple[int, ...]


class Region(NamedTuple):
    """A box `start:stop` of a tensor, stored at `offset` of `container` with `strides`.

    `container` is any hashable object. `offset` is the offset of the first element of the box.

    >>> weight = Region.dense((4, 6), "weight.bin")
    >>> weight.narrow(1, 2, 4)
    Region(start=(0, 2), stop=(4, 4), container='weight.bin', offset=2, strides=(6, 1))
    """

    start: Index
    stop: Index
    container: Any
    offset: int
    strides: Index

    @classmethod
    def dense(
        cls, shape: Sequence[int], container: Any, offset: int = 0, itemsize: int = 1
    ) -> Region:
        """Return a whole tensor of `shape`, row-major, with elements `itemsize` units apart."""
        return cls(
            (0,) * len(shape), tuple(shape), container, offset, dense_strides(shape, itemsize)
        )

    @property
    def shape(self) -> Index:
        """Number of indices in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def box(self) -> Box:
        """The box of the tensor."""
        return Box(self.start, self.stop)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bounds(self) -> tuple[int, int]:
        """The offsets of the first and the last element in the order of the container.

        >>> Region((0, 0), (2, 3), "file", 10, (1, 2)).bounds
        (10, 15)
        """
        low = high = self.offset
        for size, stride in zip(self.shape, self.strides, strict=True):
            if stride > 0:
                high += (size - 1) * stride
            else:
                low += (size - 1) * stride
        return low, high

    @property
    def positions(self) -> IntArray:
        """The offset of each element in the container, as an array of the box's shape.

        >>> Region((0, 0), (2, 3), "file", 10, (1, 2)).positions.tolist()
        [[10, 12, 14], [11, 13, 15]]
        """
        return View(self.offset, self.strides).positions(self.shape)

    def is_dense(self, itemsize: int = 1) -> bool:
        """Return whether the elements are stored row-major without gaps.

        >>> Region((0, 0), (1, 3), "file", 0, (9, 1)).is_dense()
        True
        """
        return are_dense(self.shape, self.strides, itemsize)

    def narrow(self, dimension: int, low: int, high: int) -> Region:
        """Return the part at `low:high` of a dimension, which must be inside the region."""
        start, stop, container, offset, strides = self
        if low != start[dimension]:
            offset += (low - start[dimension]) * strides[dimension]
            start = (*start[:dimension], low, *start[dimension + 1 :])
        if high != stop[dimension]:
            stop = (*stop[:dimension], high, *stop[dimension + 1 :])
        return Region(start, stop, container, offset, strides)

    def intersect(self, start: Index, stop: Index) -> Region | None:
        """Return the part inside a box, or None if it is empty.

        >>> Region.dense((4, 6), "w").intersect((1, 0), (2, 3))
        Region(start=(1, 0), stop=(2, 3), container='w', offset=6, strides=(6, 1))
        """
        low, high = tuple(map(max, self.start, start)), tuple(map(min, self.stop, stop))
        offset = self.offset
        for a, b, begin, stride in zip(low, high, self.start, self.strides, strict=True):
            if a >= b:
                return None
            offset += (a - begin) * stride
        return Region(low, high, self.container, offset, self.strides)

    def subtract(self, start: Index, stop: Index) -> list[Region]:
        """Return the parts outside a box, which are disjoint.

        >>> [str(part) for part in Region.dense((4, 4), "w").subtract((1, 0), (2, 3))]
        ['[0:1, 0:4] at 0 of w', '[2:4, 0:4] at 8 of w', '[1:2, 3:4] at 7 of w']
        """
        if any(max(a, c) >= min(b, d) for a, b, c, d in zip(*self[:2], start, stop, strict=True)):
            return [self]
        parts, rest = [], self
        # Dimension by dimension, split off the parts before and after the box, and narrow the rest.
        for d, (low, high) in enumerate(zip(start, stop, strict=True)):
            if rest.start[d] < low:
                parts.append(rest.narrow(d, rest.start[d], low))
                rest = rest.narrow(d, low, rest.stop[d])
            if high < rest.stop[d]:
                parts.append(rest.narrow(d, high, rest.stop[d]))
                rest = rest.narrow(d, rest.start[d], high)
        return parts

    def translate(self, by: Sequence[int]) -> Region:
        """Return the same elements as the box `by` indices further on in each dimension."""
        start = tuple(a + n for a, n in zip(self.start, by, strict=True))
        stop = tuple(b + n for b, n in zip(self.stop, by, strict=True))
        return Region(start, stop, *self[2:])

    def shift(self, dimension: int, by: int) -> Region:
        """Return the same elements as the box `by` indices further on in a dimension."""
        start, stop, d = self.start, self.stop, dimension
        return Region(
            (*start[:d], start[d] + by, *start[d + 1 :]),
            (*stop[:d], stop[d] + by, *stop[d + 1 :]),
            *self[2:],
        )

    def step(self, dimension: int, first: int, step: int, count: int, at: int = 0) -> Region | None:
        """Return the part that is in a progression of indices of a dimension, or None if empty.

        Index `first + k * step` of the tensor is index `at + k` of the result, for `k` below
        `count`. A step of 0 repeats an index; a negative step reverses.

        >>> Region.dense((8,), "w").narrow(0, 2, 8).step(0, 1, 3, 3)
        Region(start=(1,), stop=(3,), container='w', offset=4, strides=(3,))
        """
        d, begin, end = dimension, self.start[dimension], self.stop[dimension]
        # The `k` with `begin <= first + k * step < end`.
        if step == 0:
            low, high = (0, count) if begin <= first < end else (0, 0)
        elif step > 0:
            low, high = max(0, -((first - begin) // step)), min(count, -((first - end) // step))
        else:
            low = max(0, (first - end) // -step + 1)
            high = min(count, (first - begin) // -step + 1)
        if low >= high:
            return None
        return Region(
            (*self.start[:d], at + low, *self.start[d + 1 :]),
            (*self.stop[:d], at + high, *self.stop[d + 1 :]),
            self.container,
            self.offset + (first + low * step - begin) * self.strides[d],
            (*self.strides[:d], self.strides[d] * step, *self.strides[d + 1 :]),
        )

    def permute(self, order: Sequence[int]) -> Region:
        """Return the region of the tensor with its dimensions in another order.

        >>> Region.dense((4, 6), "w").permute((1, 0))
        Region(start=(0, 0), stop=(6, 4), container='w', offset=0, strides=(1, 6))
        """
        start, stop, container, offset, strides = self
        permuted = [tuple(column[d] for d in order) for column in (start, stop, strides)]
        return Region(permuted[0], permuted[1], container, offset, permuted[2])

    def insert(self, dimension: int, index: int = 0) -> Region:
        """Return the region at `index` of an additional dimension."""
        start, stop, container, offset, strides = self
        return Region(
            (*start[:dimension], index, *start[dimension:]),
            (*stop[:dimension], index + 1, *stop[dimension:]),
            container,
            offset,
            (*strides[:dimension], 0, *strides[dimension:]),
        )

    def drop(self, dimension: int, index: int) -> Region:
        """Return the part at `index` of a dimension, without that dimension.

        >>> Region.dense((4, 6), "w").drop(0, 2)
        Region(start=(0,), stop=(6,), container='w', offset=12, strides=(1,))
        """
        d = dimension
        start, stop, container, offset, strides = self
        return Region(
            (*start[:d], *start[d + 1 :]),
            (*stop[:d], *stop[d + 1 :]),
            container,
            offset + (index - start[d]) * strides[d],
            (*strides[:d], *strides[d + 1 :]),
        )

    def split(
        self, max_extent: int, itemsize: int = 1, max_gap: int | None = None
    ) -> Iterator[Region]:
        """Yield parts that extend over at most `max_extent` of the container, or an element.

        The dimension of the largest stride is split first, so a dense row-major region is split
        into whole rows. If `max_gap` is given, no part has a larger gap between two indices of that
        dimension.

        >>> [str(part) for part in Region.dense((4, 3), "w").split(7)]
        ['[0:2, 0:3] at 0 of w', '[2:4, 0:3] at 6 of w']
        """
        shape = self.shape
        several = [d for d, size in enumerate(shape) if size > 1]
        if not several:
            yield self
            return
        widest = max(several, key=lambda d: (abs(self.strides[d]), -d))
        stride, count = abs(self.strides[widest]), shape[widest]
        low, high = self.bounds
        extent = high - low + itemsize
        # The extent of a single index; the rest of the stride is a gap.
        inner = extent - (count - 1) * stride
        is_wide = max_gap is not None and stride - inner > max_gap
        if extent <= max_extent and not is_wide:
            yield self
            return
        # As many indices as fit: `rows - 1` strides and the extent of the last.
        fits = inner <= max_extent and not is_wide and stride > 0
        rows = (max_extent - inner) // stride + 1 if fits else 1
        for begin in range(self.start[widest], self.stop[widest], rows):
            part = self.narrow(widest, begin, min(begin + rows, self.stop[widest]))
            yield from part.split(max_extent, itemsize, max_gap)

    def __str__(self) -> str:
        return f"{self.box} at {self.offset} of {self.container}"


def flat_regions(
    shape: Sequence[int],
    start: int,
    stop: int,
    container: Any,
    offset: int = 0,
    itemsize: int = 1,
) -> list[Region]:
    """Return elements `start:stop` of a flattened tensor, which are stored contiguously.

    >>> [str(part) for part in flat_regions((4, 3), 1, 9, "buffer", 100)]
    ['[0:1, 1:3] at 100 of buffer', '[1:3, 0:3] at 102 of buffer']
    """
    regions = []
    for box in flat_range_boxes(shape, start, stop):
        regions.append(Region(*box, container, offset, dense_strides(box.shape, itemsize)))
        offset += box.elements * itemsize
    return regions


def multiply_runs(
    runs: Sequence[Iterable[tuple[int, int, int]]], container: Any, offset: int, strides: Index
) -> Iterator[Region]:
    """Yield the regions of a shard, given by the runs `(start, stop, local)` of each dimension.

    `local` is the index of a run in the shard, whose element 0 is at `offset`.

    >>> [str(part) for part in multiply_runs([[(0, 2, 0), (6, 8, 2)]], "shard", 0, (1,))]
    ['[0:2] at 0 of shard', '[6:8] at 2 of shard']
    """
    for product in itertools.product(*runs):
        at = offset
        for (_, _, local), stride in zip(product, strides, strict=True):
            at += local * stride
        start, stop = tuple(run[0] for run in product), tuple(run[1] for run in product)
        yield Region(start, stop, container, at, strides)


def coalesce(regions: Iterable[Region]) -> list[Region]:
    """Merge regions that are adjacent in the tensor and in their container.

    >>> rows = [Region.dense((2, 3), "w"), Region.dense((2, 3), "w", 6).translate((2, 0))]
    >>> coalesce(rows) == [Region.dense((4, 3), "w")]
    True
    """
    merged = list(regions)
    # Regions merged along a dimension may then match along another: repeat until nothing merges.
    previous = -1
    while len(merged) != previous and len(merged) > 1:
        previous = len(merged)
        for d in reversed(range(len(merged[0].start))):
            groups: dict[object, list[Region]] = {}
            for region in merged:
                groups.setdefault(_key_across(region, d), []).append(region)
            merged = [part for group in groups.values() for part in _merge_along(group, d)]
    return merged


def _key_across(region: Region, dimension: int) -> object:
    """Return a key that is equal for regions that can be merged along a dimension."""
    start, stop, container, _, strides = region
    d = dimension
    # The stride of a single index does not matter, so it may differ.
    others = tuple(
        (a, b, 0 if b - a == 1 else stride)
        for i, (a, b, stride) in enumerate(zip(start, stop, strides, strict=True))
        if i != d
    )
    return container, others


def _merge_along(regions: list[Region], dimension: int) -> list[Region]:
    d = dimension
    regions.sort(key=lambda region: region.start[d])
    merged = regions[:1]
    for region in regions[1:]:
        last = merged[-1]
        size = last.stop[d] - last.start[d]
        distance = region.offset - last.offset
        # A side of several indices determines the stride; two single indices may have any stride.
        strides = {
            part.strides[d] for part in (last, region) if part.stop[d] - part.start[d] > 1
        } or {distance}
        stride = strides.pop()
        if region.start[d] == last.stop[d] and not strides and distance == size * stride:
            stop = (*last.stop[:d], region.stop[d], *last.stop[d + 1 :])
            steps = (*last.strides[:d], stride, *last.strides[d + 1 :])
            merged[-1] = last._replace(stop=stop, strides=steps)
        else:
            merged.append(region)
    return merged


def bind_regions(
    shape: Sequence[int], regions: Iterable[tuple[int, Region]], slots: int, itemsize: int
) -> Binding:
    """Return the binding of `(rank, region)` pairs: layout, addresses, and views if strided.

    The container of a region is the path of its file; offsets and strides are in bytes.

    >>> halves = [(rank, Region((rank,), (rank + 1,), "a.bin", 8 * rank, (8,))) for rank in (0, 1)]
    >>> bind_regions((2,), halves, 2, 8).addresses[1]
    (FileRange(path='a.bin', start_bytes=8),)
    """
    pairs: list[tuple[int, Box]] = []
    addresses: dict[int, list[FileRange]] = {}
    views: dict[int, list[View]] = {}
    strided: set[int] = set()
    for slot, region in regions:
        pairs.append((slot, region.box))
        addresses.setdefault(slot, []).append(FileRange(region.container, region.offset))
        if region.is_dense(itemsize):
            # Strides of single indices are replaced, so that such shards have equal views.
            view = View.row_major(region.shape)
        else:
            view = View(0, tuple(stride // itemsize for stride in region.strides))
            strided.add(slot)
        views.setdefault(slot, []).append(view)
    return Binding(
        Layout.from_boxes(shape, pairs, slots),
        {slot: tuple(ranges) for slot, ranges in addresses.items()},
        {slot: tuple(views[slot]) for slot in strided},
    )
