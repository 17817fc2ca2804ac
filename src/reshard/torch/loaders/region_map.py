"""Region maps: boxes of a tensor with the origins of their elements, through copies and views.

    a 4 x 6        b 2 x 6          cat([a, b])         [:, 2:4]

    +---------+    +---------+      +---------+         +---+
    | a       |    | b       |      | a       |         | a |   offset 2, strides (6, 1)
    |         |    +---------+      |         |         |   |
    +---------+                     +---------+         +---+
                                    | b       |         | b |   offset 2, strides (6, 1)
                                    +---------+         +---+

The origin of an element is an element of a source (`CopyOf`), a constant (`FilledWith`) or an
operation on sources (`ComputedFrom`). A map has few boxes for a tensor of any size. Boxes do not
overlap; an element in no box was never written.

A `StorageMap` holds the writes to a storage in order. Reading a view of it intersects the view with
each write (`strided_overlap`); the last write of an element counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.torch.loaders.element_map import Integers
from reshard.torch.loaders.strided_overlap import (
    Overlap,
    StridedRegion,
    find_aligned_overlap,
    find_overlaps,
)

# Wider types that hold all values of a type.
_WIDER = {
    "float8_e4m3fn": {"bfloat16", "float16", "float32", "float64"},
    "float8_e5m2": {"bfloat16", "float16", "float32", "float64"},
    "float8_e8m0fnu": {"bfloat16", "float32", "float64"},
    "float16": {"float32", "float64"},
    "bfloat16": {"float32", "float64"},
    "float32": {"float64"},
    "uint8": {"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"},
    "int8": {"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"},
    "int16": {"int32", "int64", "float32", "float64"},
    "int32": {"int64", "float64"},
    "bool": {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"},
}
CAST, BITS = "to ", "bits as "


class CopyOf(NamedTuple):
    """Elements of source number `source`, from `offset` with a stride for each dimension.

    `steps` are applied to each element: casts (`"to float32"`), bits reinterpreted as another type
    (`"bits as uint8"`), operations (`"exp"`).
    """

    source: int
    offset: int
    strides: tuple[int, ...]
    steps: tuple[str, ...] = ()

    @property
    def is_copied(self) -> bool:
        """Whether the elements are unchanged, apart from casts."""
        return all(step.startswith((CAST, BITS)) for step in self.steps)


class FilledWith(NamedTuple):
    """A constant."""

    value: float


class ComputedFrom(NamedTuple):
    """Elements computed by operations on sources, without a relation between elements."""

    operations: tuple[str, ...]
    sources: tuple[int, ...]


Origin = CopyOf | FilledWith | ComputedFrom


def add_cast(steps: tuple[str, ...], source_dtype: str, dtype: str) -> tuple[str, ...]:
    """Append a cast to `dtype` to the steps; drop earlier casts that it undoes.

    >>> add_cast(("to float32",), "bfloat16", "bfloat16")
    ()
    >>> add_cast(("to bfloat16",), "float32", "float32")
    ('to bfloat16', 'to float32')
    """
    while True:
        last = dtype_after(steps, source_dtype)
        if last == dtype:
            return steps
        if not steps or not steps[-1].startswith(CAST):
            return (*steps, CAST + dtype)
        before = dtype_after(steps[:-1], source_dtype)
        # The last cast kept all values, so the next cast can start from the type before it.
        if before is None or last not in _WIDER.get(before, ()):
            return (*steps, CAST + dtype)
        steps = steps[:-1]


def add_bitcast(steps: tuple[str, ...], source_dtype: str, dtype: str) -> tuple[str, ...]:
    """Append a reinterpretation as another type of the same width to the steps.

    >>> add_bitcast(("bits as float8_e8m0fnu",), "uint8", "uint8")
    ()
    """
    if dtype_after(steps, source_dtype) == dtype:
        return steps
    if steps and steps[-1].startswith(BITS):
        return add_bitcast(steps[:-1], source_dtype, dtype)
    return (*steps, BITS + dtype)


def dtype_after(steps: tuple[str, ...], source_dtype: str) -> str | None:
    """Return the dtype of elements after the steps, or None after another operation."""
    if not steps:
        return source_dtype
    for prefix in (CAST, BITS):
        if steps[-1].startswith(prefix):
            return steps[-1].removeprefix(prefix)
    return None


def combine_origins(operation: str, origins: Sequence[Origin | None]) -> ComputedFrom:
    """Return the origin of the result of an operation on elements of several origins.

    >>> combine_origins("mul", [CopyOf(0, 0, (1,), ("to float32",)), CopyOf(2, 5, (1,)), None])
    ComputedFrom(operations=('to float32', 'mul'), sources=(0, 2))
    """
    operations: list[str] = []
    sources: set[int] = set()
    for origin in origins:
        if isinstance(origin, CopyOf):
            operations += origin.steps
            sources.add(origin.source)
        elif isinstance(origin, ComputedFrom):
            operations += origin.operations
            sources.update(origin.sources)
    return ComputedFrom((*dict.fromkeys(operations), operation), tuple(sorted(sources)))


Index = tuple[int, ...]


class TensorRegion(NamedTuple):
    """A box `start:stop` of a tensor with the origin of its elements."""

    start: Index
    stop: Index
    origin: Origin

    @property
    def sizes(self) -> Index:
        """Number of indices in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def shift(self, by: Sequence[int]) -> TensorRegion:
        """Return the region with `by` added to its indices."""
        start = tuple(a + b for a, b in zip(self.start, by, strict=True))
        stop = tuple(a + b for a, b in zip(self.stop, by, strict=True))
        return TensorRegion(start, stop, self.origin)


@dataclass(frozen=True, slots=True)
class RegionMap:
    """The regions of a tensor of `shape`, which do not overlap."""

    shape: Index
    regions: tuple[TensorRegion, ...]

    @classmethod
    def of(cls, shape: Sequence[int], origin: Origin | None) -> RegionMap:
        """Return a map of a single region, or an empty map if `origin` is None."""
        shape = tuple(shape)
        if origin is None or not math.prod(shape):
            return cls(shape, ())
        return cls(shape, (TensorRegion((0,) * len(shape), shape, origin),))

    @property
    def origins(self) -> list[Origin | None]:
        """All origins, with None if a part was never written."""
        written = sum(math.prod(region.sizes) for region in self.regions)
        rest: list[Origin | None] = [None] if written < math.prod(self.shape) else []
        return [*(region.origin for region in self.regions), *rest]

    def map_origins(self, change: Callable[[Origin], Origin]) -> RegionMap:
        """Return the same boxes with other origins."""
        return RegionMap(
            self.shape, tuple(r._replace(origin=change(r.origin)) for r in self.regions)
        )

    def narrow(self, dim: int, start: int, stop: int) -> RegionMap:
        """Return indices `start:stop` of a dimension."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        regions = []
        for region in self.regions:
            low, high = max(region.start[dim], start), min(region.stop[dim], stop)
            if low < high:
                cut = narrow_region(region, dim, low, high)
                regions.append(cut.shift([-start if d == dim else 0 for d in range(len(shape))]))
        return RegionMap(shape, tuple(regions))

    def crop(self, start: Sequence[int], stop: Sequence[int]) -> RegionMap:
        """Return the box `start:stop`."""
        part = self
        for dim, (low, high) in enumerate(zip(start, stop, strict=True)):
            part = part.narrow(dim, low, high)
        return part

    def broadcast(self, shape: Sequence[int]) -> RegionMap:
        """Return the map expanded to `shape`."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        ahead = len(shape) - len(self.shape)
        regions = []
        for start, stop, origin in self.regions:
            begin, end = [0] * ahead, [*shape[:ahead]]
            strides = [0] * ahead
            own = origin.strides if isinstance(origin, CopyOf) else (0,) * len(start)
            for d, size in enumerate(self.shape):
                # The only index of a repeated dimension is all of it.
                is_repeated = size != shape[ahead + d]
                begin.append(0 if is_repeated else start[d])
                end.append(shape[ahead + d] if is_repeated else stop[d])
                strides.append(0 if is_repeated else own[d])
            if isinstance(origin, CopyOf):
                origin = origin._replace(strides=tuple(strides))
            regions.append(TensorRegion(tuple(begin), tuple(end), origin))
        return RegionMap(shape, tuple(regions) if math.prod(shape) else ())

    def take(self, dim: int, indices: Sequence[int]) -> RegionMap:
        """Return the given indices of a dimension, in that order."""
        shape = (*self.shape[:dim], len(indices), *self.shape[dim + 1 :])
        regions: list[TensorRegion] = []
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
                    if isinstance(origin, CopyOf):
                        stride = origin.strides[dim]
                        further = (first + low * step - start) * stride
                        strides = (*origin.strides[:dim], stride * step, *origin.strides[dim + 1 :])
                        origin = origin._replace(offset=origin.offset + further, strides=strides)
                    begin = (*region.start[:dim], at + low, *region.start[dim + 1 :])
                    end = (*region.stop[:dim], at + high, *region.stop[dim + 1 :])
                    regions.append(TensorRegion(begin, end, origin))
        return RegionMap(shape, tuple(regions))

    def unsqueeze(self, dim: int) -> RegionMap:
        """Return the map with a new dimension of size 1."""
        regions = []
        for start, stop, origin in self.regions:
            if isinstance(origin, CopyOf):
                origin = origin._replace(strides=(*origin.strides[:dim], 0, *origin.strides[dim:]))
            begin, end = (*start[:dim], 0, *start[dim:]), (*stop[:dim], 1, *stop[dim:])
            regions.append(TensorRegion(begin, end, origin))
        return RegionMap((*self.shape[:dim], 1, *self.shape[dim:]), tuple(regions))

    def tile(self, repeats: Sequence[int]) -> RegionMap:
        """Return the map repeated along each dimension, with leading dimensions added."""
        result: RegionMap = self
        for _ in range(len(repeats) - len(self.shape)):
            result = result.unsqueeze(0)
        for dim, count in enumerate(repeats):
            result = concatenate([result] * count, dim) if count != 1 else result
        return result

    def pad(self, before: Sequence[int], after: Sequence[int], value: float) -> RegionMap:
        """Return the map padded with a constant; negative widths crop it."""
        result: RegionMap = self
        for dim, (low, high) in enumerate(zip(before, after, strict=True)):
            size = result.shape[dim]
            result = result.narrow(dim, max(0, -low), size - max(0, -high))
            sides = []
            for count in (low, high):
                shape = (*result.shape[:dim], max(count, 0), *result.shape[dim + 1 :])
                sides.append(RegionMap.of(shape, FilledWith(value)))
            result = concatenate([sides[0], result, sides[1]], dim)
        return result

    def overwrite(self, newer: Iterable[TensorRegion]) -> RegionMap:
        """Return the map with regions written over it in order."""
        regions = list(self.regions)
        for new in newer:
            regions = [part for old in regions for part in subtract_box(old, new.start, new.stop)]
            regions.append(new)
        return RegionMap(self.shape, tuple(regions))

    def coalesce(self) -> RegionMap:
        """Return the map with adjacent regions merged, in order."""
        return RegionMap(self.shape, tuple(sorted(_coalesce(self.regions), key=_by_start)))


def _by_start(region: TensorRegion) -> tuple[Index, Index]:
    return region.start, region.stop


def narrow_region(region: TensorRegion, dim: int, low: int, high: int) -> TensorRegion:
    """Return the part of a region at `low:high` of a dimension."""
    start, stop, origin = region
    if isinstance(origin, CopyOf) and low != start[dim]:
        further = (low - start[dim]) * origin.strides[dim]
        origin = origin._replace(offset=origin.offset + further)
    return TensorRegion(
        (*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]), origin
    )


def subtract_box(region: TensorRegion, start: Index, stop: Index) -> list[TensorRegion]:
    """Return the rest of a region without a box."""
    if any(
        a >= d or c >= b for a, b, c, d in zip(region.start, region.stop, start, stop, strict=True)
    ):
        return [region]
    left = []
    for dim in range(len(start)):
        # The parts before and after the box along each dimension in turn.
        if region.start[dim] < start[dim]:
            left.append(narrow_region(region, dim, region.start[dim], start[dim]))
            region = narrow_region(region, dim, start[dim], region.stop[dim])
        if stop[dim] < region.stop[dim]:
            left.append(narrow_region(region, dim, stop[dim], region.stop[dim]))
            region = narrow_region(region, dim, region.start[dim], stop[dim])
    return left


def concatenate(maps: Sequence[RegionMap], dim: int) -> RegionMap:
    """Return maps concatenated along a dimension."""
    shape = maps[0].shape
    regions: list[TensorRegion] = []
    size = 0
    for part in maps:
        offset = [size if d == dim else 0 for d in range(len(shape))]
        regions += [region.shift(offset) for region in part.regions]
        size += part.shape[dim]
    return RegionMap((*shape[:dim], size, *shape[dim + 1 :]), tuple(regions))


def find_progressions(indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return runs of equal steps: position, first number, step and count of each.

    >>> find_progressions([4, 5, 6, 0, 2, 4])
    [(0, 4, 1, 3), (3, 0, 2, 3)]
    """
    numbers = np.asarray(indices, dtype=np.int64)
    total = len(numbers)
    steps = np.diff(numbers)
    # Positions at which the step changes.
    changes = np.flatnonzero(np.diff(steps)) + 1
    runs = []
    at, next_change = 0, 0
    while at < total:
        while next_change < len(changes) and changes[next_change] <= at:
            next_change += 1
        end = int(changes[next_change]) if next_change < len(changes) else len(steps)
        # Equal steps `at:end` connect the numbers `at:end + 1`.
        if end - at == 1 and end < len(steps) - 1 and steps[end] == steps[end + 1]:
            # A single step before a longer run, which keeps its first number.
            end = at
        count = min(end - at + 1, total - at)
        step = int(steps[at]) if count > 1 else 0
        runs.append((at, int(numbers[at]), step, count))
        at += count
    return runs


def _coalesce(regions: Sequence[TensorRegion]) -> list[TensorRegion]:
    result = list(regions)
    if len(result) < 2 or _are_all_apart(result):
        return result
    count = -1
    while len(result) != count:
        count = len(result)
        for dim in reversed(range(len(result[0].start))):
            groups: dict[object, list[TensorRegion]] = {}
            for region in result:
                groups.setdefault(_key_across(region, dim), []).append(region)
            result = list(
                itertools.chain.from_iterable(_join_along(group, dim) for group in groups.values())
            )
    return result


def _are_all_apart(regions: Sequence[TensorRegion]) -> bool:
    """Return whether no two regions can be merged, since each has another source."""
    sources = {r.origin.source for r in regions if isinstance(r.origin, CopyOf)}
    return len(sources) == len(regions)


def _key_across(region: TensorRegion, dim: int) -> object:
    """Return what two regions must share to be merged along a dimension."""
    start, stop, origin = region
    box = (start[:dim], start[dim + 1 :], stop[:dim], stop[dim + 1 :])
    if isinstance(origin, CopyOf):
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


def _join(first: TensorRegion, second: TensorRegion, dim: int) -> TensorRegion | None:
    """Merge two adjacent regions, or return None if their elements are not adjacent."""
    origin = first.origin
    stop = (*first.stop[:dim], second.stop[dim], *first.stop[dim + 1 :])
    if not isinstance(origin, CopyOf) or not isinstance(second.origin, CopyOf):
        return first._replace(stop=stop)
    size, next_size = first.stop[dim] - first.start[dim], second.stop[dim] - second.start[dim]
    distance = second.origin.offset - origin.offset
    # The stride of a single index is arbitrary.
    strides = {
        region.strides[dim]
        for region, count in ((origin, size), (second.origin, next_size))
        if count > 1
    }
    stride = strides.pop() if strides else distance
    if strides or distance != size * stride:
        return None
    merged = (*origin.strides[:dim], stride, *origin.strides[dim + 1 :])
    return TensorRegion(first.start, stop, origin._replace(strides=merged))


@dataclass(slots=True)
class StorageMap:
    """The contents of a tensor's storage.

    Attributes:
        dtype: of the elements that offsets count.
        size: in elements.
        source: the number of the source whose storage it is, or None. Its elements are the source's
            until they are overwritten.
        writes: regions and origins, in order.
    """

    dtype: str
    size: int
    source: int | None = None
    writes: list[tuple[StridedRegion, Origin]] = field(default_factory=list)

    def write(self, where: StridedRegion, written: RegionMap) -> None:
        """Write a tensor to a view of the storage of the same shape."""
        for start, stop, origin in written.regions:
            offset = where.offset + sum(a * s for a, s in zip(start, where.strides, strict=True))
            sizes = tuple(b - a for a, b in zip(start, stop, strict=True))
            self.writes.append((StridedRegion(offset, sizes, where.strides), origin))

    def write_all(self, origin: ComputedFrom) -> None:
        """Overwrite the whole storage."""
        self.writes = [(StridedRegion(0, (self.size,), (1,)), origin)]

    def read(self, where: StridedRegion) -> RegionMap:
        """Return the contents of a view of the storage."""
        shape = where.sizes
        base = RegionMap(shape, ())
        if self.source is not None:
            base = RegionMap.of(shape, CopyOf(self.source, where.offset, where.strides))
        written_parts: list[TensorRegion] = []
        for written, origin in self.writes:
            written_parts += _find_parts(where, written, origin)
        if not written_parts:
            return base
        if base.regions or _may_overlap(written_parts):
            return base.overwrite(written_parts)
        return RegionMap(shape, tuple(written_parts))


def _find_parts(where: StridedRegion, written: StridedRegion, origin: Origin) -> list[TensorRegion]:
    """Return the parts of a view that a write covers."""
    parts = []
    overlaps: Iterable[Overlap] | None = find_aligned_overlap(where, written)
    if overlaps is None:
        written, origin = _join_dims(written, origin)
        overlaps = find_overlaps(where, written)
    for start, stop, at, steps in overlaps:
        if isinstance(origin, CopyOf):
            own = origin.strides
            offset = origin.offset + sum(i * s for i, s in zip(at, own, strict=True))
            strides = tuple(
                sum(step * s for step, s in zip(along, own, strict=True)) for along in steps
            )
            parts.append(TensorRegion(start, stop, origin._replace(offset=offset, strides=strides)))
        else:
            parts.append(TensorRegion(start, stop, origin))
    return parts


def _join_dims(written: StridedRegion, origin: Origin) -> tuple[StridedRegion, Origin]:
    """Return the same elements with contiguous dimensions merged."""
    own = origin.strides if isinstance(origin, CopyOf) else written.strides
    dims: list[tuple[int, int, int]] = []
    for size, stride, taken in zip(written.sizes, written.strides, own, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride and dims[-1][2] == size * taken:
            dims[-1] = (dims[-1][0] * size, stride, taken)
        else:
            dims.append((size, stride, taken))
    sizes, strides, own = zip(*dims, strict=True) if dims else ((), (), ())
    joined = StridedRegion(written.offset, sizes, strides)
    return joined, origin._replace(strides=own) if isinstance(origin, CopyOf) else origin


def _may_overlap(regions: Sequence[TensorRegion]) -> bool:
    """Return whether two regions may share an element; False is certain."""
    if len(regions) < 2 or not regions[0].start:
        return len(regions) > 1
    start = np.array([region.start for region in regions])
    stop = np.array([region.stop for region in regions])
    return _boxes_may_overlap(start, stop)


def _boxes_may_overlap(start: Integers, stop: Integers) -> bool:
    """Return whether two of the boxes, a row each, may share an element."""
    if len(start) < 2 or any(_are_disjoint(start, stop, d) for d in range(start.shape[1])):
        return False
    if start.shape[1] < 2:
        return True
    # Loaders write tensors as grids of boxes. Boxes that span the same indices of the first
    # dimension form a group; disjoint groups are compared by the remaining dimensions.
    bounds = np.stack([start[:, 0], stop[:, 0]], axis=1)
    _, firsts, group = np.unique(bounds, axis=0, return_index=True, return_inverse=True)
    if len(firsts) > 1 and not _are_disjoint(start[firsts], stop[firsts], 0):
        return True
    members = (np.flatnonzero(group.reshape(-1) == g) for g in range(len(firsts)))
    return any(_boxes_may_overlap(start[rows, 1:], stop[rows, 1:]) for rows in members)


def _are_disjoint(start: Integers, stop: Integers, dim: int) -> bool:
    order = np.argsort(start[:, dim], kind="stable")
    return bool((start[order[1:], dim] >= stop[order[:-1], dim]).all())
