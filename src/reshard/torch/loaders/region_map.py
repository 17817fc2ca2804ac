"""TensorRegion maps: boxes of a tensor and what their elements are, through any copy.

    a 4 x 6        b 2 x 6          cat([a, b])         [:, 2:4]

    +---------+    +---------+      +---------+         +---+
    | a       |    | b       |      | a       |         | a |   offset 2, strides (6, 1)
    |         |    +---------+      |         |         |   |
    +---------+                     +---------+         +---+
                                    | b       |         | b |   offset 2, strides (6, 1)
                                    +---------+         +---+

A map has a few boxes however large the tensor is. Boxes do not overlap; an element in no box was
never written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.torch.loaders.origins import Filled, Origin, Taken

Index = tuple[int, ...]


class TensorRegion(NamedTuple):
    """A box `start:stop` of a tensor, and its origin."""

    start: Index
    stop: Index
    origin: Origin

    @property
    def sizes(self) -> Index:
        """Indices along each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True)
class RegionMap:
    """The regions of a tensor of `shape`, none of which overlap."""

    shape: Index
    regions: tuple[TensorRegion, ...]

    @classmethod
    def of(cls, shape: Sequence[int], origin: Origin | None) -> RegionMap:
        """A tensor that is one region, or was never written."""
        shape = tuple(shape)
        if origin is None or not math.prod(shape):
            return cls(shape, ())
        return cls(shape, (TensorRegion((0,) * len(shape), shape, origin),))

    @property
    def origins(self) -> list[Origin | None]:
        """All origins; None too where some of it was never written."""
        written = sum(math.prod(region.sizes) for region in self.regions)
        rest: list[Origin | None] = [None] if written < math.prod(self.shape) else []
        return [*(region.origin for region in self.regions), *rest]

    def changed(self, change: Callable[[Origin], Origin]) -> RegionMap:
        """The same boxes with other origins."""
        return RegionMap(
            self.shape, tuple(r._replace(origin=change(r.origin)) for r in self.regions)
        )

    def narrowed(self, dim: int, start: int, stop: int) -> RegionMap:
        """Indices `start:stop` of a dimension."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        found = []
        for region in self.regions:
            low, high = max(region.start[dim], start), min(region.stop[dim], stop)
            if low < high:
                cut = cut_region(region, dim, low, high)
                found.append(_move(cut, dim, -start))
        return RegionMap(shape, tuple(found))

    def broadcast(self, shape: Sequence[int]) -> RegionMap:
        """Expanded to `shape`: what it has once is repeated."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        ahead = len(shape) - len(self.shape)
        found = []
        for start, stop, origin in self.regions:
            begin, end = [0] * ahead, [*shape[:ahead]]
            strides = [0] * ahead
            own = origin.strides if isinstance(origin, Taken) else (0,) * len(start)
            for d, size in enumerate(self.shape):
                # A dimension of 1 that is repeated has one index, which is all of it.
                repeated = size != shape[ahead + d]
                begin.append(0 if repeated else start[d])
                end.append(shape[ahead + d] if repeated else stop[d])
                strides.append(0 if repeated else own[d])
            if isinstance(origin, Taken):
                origin = origin._replace(strides=tuple(strides))
            found.append(TensorRegion(tuple(begin), tuple(end), origin))
        return RegionMap(shape, tuple(found) if math.prod(shape) else ())

    def taken_at(self, dim: int, indices: Sequence[int]) -> RegionMap:
        """The indices of a dimension that are asked for, in that order."""
        shape = (*self.shape[:dim], len(indices), *self.shape[dim + 1 :])
        found: list[TensorRegion] = []
        for at, first, step, count in find_progressions(indices):
            for region in self.regions:
                start, stop = region.start[dim], region.stop[dim]
                # Positions k of the progression with start <= first + k * step < stop.
                if step == 0:
                    low, high = (0, count) if start <= first < stop else (0, 0)
                elif step > 0:
                    low = max(0, -((first - start) // step))
                    high = min(count, -((first - stop) // step))
                else:
                    low = max(0, (first - stop) // -step + 1)
                    high = min(count, (first - start) // -step + 1)
                if low < high:
                    origin = region.origin
                    if isinstance(origin, Taken):
                        stride = origin.strides[dim]
                        further = (first + low * step - start) * stride
                        strides = (*origin.strides[:dim], stride * step, *origin.strides[dim + 1 :])
                        origin = origin._replace(offset=origin.offset + further, strides=strides)
                    begin = (*region.start[:dim], at + low, *region.start[dim + 1 :])
                    end = (*region.stop[:dim], at + high, *region.stop[dim + 1 :])
                    found.append(TensorRegion(begin, end, origin))
        return RegionMap(shape, tuple(found))

    def unsqueezed(self, dim: int) -> RegionMap:
        """With a dimension of 1 put in."""
        found = []
        for start, stop, origin in self.regions:
            if isinstance(origin, Taken):
                origin = origin._replace(strides=(*origin.strides[:dim], 0, *origin.strides[dim:]))
            begin, end = (*start[:dim], 0, *start[dim:]), (*stop[:dim], 1, *stop[dim:])
            found.append(TensorRegion(begin, end, origin))
        return RegionMap((*self.shape[:dim], 1, *self.shape[dim:]), tuple(found))

    def repeated(self, repeats: Sequence[int]) -> RegionMap:
        """Side by side, so many times along each dimension, of which there may be more in front."""
        own: RegionMap = self
        for _ in range(len(repeats) - len(self.shape)):
            own = own.unsqueezed(0)
        for dim, many in enumerate(repeats):
            own = concatenated([own] * many, dim) if many != 1 else own
        return own

    def padded(self, before: Sequence[int], after: Sequence[int], value: float) -> RegionMap:
        """With so many indices of one value around it; fewer than none cut some off."""
        own: RegionMap = self
        for dim, (low, high) in enumerate(zip(before, after, strict=True)):
            size = own.shape[dim]
            own = own.narrowed(dim, max(0, -low), size - max(0, -high))
            sides = []
            for many in (low, high):
                shape = (*own.shape[:dim], max(many, 0), *own.shape[dim + 1 :])
                sides.append(RegionMap.of(shape, Filled(value)))
            own = concatenated([sides[0], own, sides[1]], dim)
        return own

    def overwritten(self, newer: Iterable[TensorRegion]) -> RegionMap:
        """With regions written over it, one after the other."""
        regions = list(self.regions)
        for new in newer:
            regions = [part for old in regions for part in cut_away(old, new.start, new.stop)]
            regions.append(new)
        return RegionMap(self.shape, tuple(regions))

    def coalesced(self) -> RegionMap:
        """With regions that continue one another joined, in order."""
        return RegionMap(self.shape, tuple(sorted(_coalesce(self.regions), key=_by_start)))


def _by_start(region: TensorRegion) -> tuple[Index, Index]:
    return region.start, region.stop


def _move(region: TensorRegion, dim: int, by: int) -> TensorRegion:
    start, stop, origin = region
    return TensorRegion(
        (*start[:dim], start[dim] + by, *start[dim + 1 :]),
        (*stop[:dim], stop[dim] + by, *stop[dim + 1 :]),
        origin,
    )


def cut_region(region: TensorRegion, dim: int, low: int, high: int) -> TensorRegion:
    """The part of a region at `low:high` of a dimension, which lies inside it."""
    start, stop, origin = region
    if isinstance(origin, Taken) and low != start[dim]:
        further = (low - start[dim]) * origin.strides[dim]
        origin = origin._replace(offset=origin.offset + further)
    return TensorRegion(
        (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]), origin
    )


def cut_away(region: TensorRegion, start: Index, stop: Index) -> list[TensorRegion]:
    """What is left of a region without a box."""
    if any(
        a >= d or c >= b for a, b, c, d in zip(region.start, region.stop, start, stop, strict=True)
    ):
        return [region]
    left = []
    for dim in range(len(start)):
        # What lies before and behind the box along each dimension in turn.
        if region.start[dim] < start[dim]:
            left.append(cut_region(region, dim, region.start[dim], start[dim]))
            region = cut_region(region, dim, start[dim], region.stop[dim])
        if stop[dim] < region.stop[dim]:
            left.append(cut_region(region, dim, stop[dim], region.stop[dim]))
            region = cut_region(region, dim, region.start[dim], stop[dim])
    return left


def concatenated(maps: Sequence[RegionMap], dim: int) -> RegionMap:
    """Maps one behind the other along a dimension."""
    found: list[TensorRegion] = []
    behind = 0
    for one in maps:
        found += [_move(region, dim, behind) for region in one.regions]
        behind += one.shape[dim]
    shape = maps[0].shape
    return RegionMap((*shape[:dim], behind, *shape[dim + 1 :]), tuple(found))


def find_progressions(indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Stretches of equal steps: the place of each, its first number, its step and its count.

    >>> find_progressions([4, 5, 6, 0, 2, 4])
    [(0, 4, 1, 3), (3, 0, 2, 3)]
    """
    numbers = np.asarray(indices, dtype=np.int64)
    total = len(numbers)
    steps = np.diff(numbers)
    # Where the step is another than the one before.
    changes = np.flatnonzero(np.diff(steps)) + 1
    found = []
    at, next_change = 0, 0
    while at < total:
        while next_change < len(changes) and changes[next_change] <= at:
            next_change += 1
        end = int(changes[next_change]) if next_change < len(changes) else len(steps)
        # Equal steps `at:end` join the numbers `at:end + 1`.
        if end - at == 1 and end < len(steps) - 1 and steps[end] == steps[end + 1]:
            # A single step in front of a longer stretch, which keeps its first number.
            end = at
        count = min(end - at + 1, total - at)
        step = int(steps[at]) if count > 1 else 0
        found.append((at, int(numbers[at]), step, count))
        at += count
    return found


def _coalesce(regions: Sequence[TensorRegion]) -> list[TensorRegion]:
    found = list(regions)
    if len(found) < 2 or _are_all_apart(found):
        return found
    before = -1
    while len(found) != before:
        before = len(found)
        for dim in reversed(range(len(found[0].start))):
            groups: dict[object, list[TensorRegion]] = {}
            for region in found:
                groups.setdefault(_key_across(region, dim), []).append(region)
            found = list(
                itertools.chain.from_iterable(_join_along(group, dim) for group in groups.values())
            )
    return found


def _are_all_apart(regions: Sequence[TensorRegion]) -> bool:
    """Whether no two can be joined, since each is from another source."""
    sources = {r.origin.source for r in regions if isinstance(r.origin, Taken)}
    return len(sources) == len(regions)


def _key_across(region: TensorRegion, dim: int) -> object:
    """What regions that are joined along a dimension have in common."""
    start, stop, origin = region
    box = (start[:dim], start[dim + 1 :], stop[:dim], stop[dim + 1 :])
    if isinstance(origin, Taken):
        others = [
            0 if b - a == 1 else s for a, b, s in zip(start, stop, origin.strides, strict=True)
        ]
        del others[dim]
        return (box, origin.source, origin.steps, tuple(others))
    return (box, repr(origin))


def _join_along(regions: list[TensorRegion], dim: int) -> list[TensorRegion]:
    regions.sort(key=lambda region: region.start[dim])
    joined = [regions[0]]
    for region in regions[1:]:
        last = joined[-1]
        together = _join(last, region, dim) if last.stop[dim] == region.start[dim] else None
        if together is None:
            joined.append(region)
        else:
            joined[-1] = together
    return joined


def _join(one: TensorRegion, other: TensorRegion, dim: int) -> TensorRegion | None:
    """Two regions that lie side by side as one, where their elements do as well."""
    origin = one.origin
    stop = (*one.stop[:dim], other.stop[dim], *one.stop[dim + 1 :])
    if not isinstance(origin, Taken) or not isinstance(other.origin, Taken):
        return one._replace(stop=stop)
    size, further = one.stop[dim] - one.start[dim], other.stop[dim] - other.start[dim]
    distance = other.origin.offset - origin.offset
    # Of a single index the stride is whatever fits.
    strides = {
        region.strides[dim]
        for region, many in ((origin, size), (other.origin, further))
        if many > 1
    }
    stride = strides.pop() if strides else distance
    if strides or distance != size * stride:
        return None
    whole = (*origin.strides[:dim], stride, *origin.strides[dim + 1 :])
    return TensorRegion(one.start, stop, origin._replace(strides=whole))
