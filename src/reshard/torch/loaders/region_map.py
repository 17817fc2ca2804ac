"""Region maps: boxes of a tensor with the origins of their elements, through copies and views.

    a 4 x 6        b 2 x 6          cat([a, b])         [:, 2:4]

    +---------+    +---------+      +---------+         +---+
    | a       |    | b       |      | a       |         | a |   offset 2, strides (6, 1)
    |         |    +---------+      |         |         |   |
    +---------+                     +---------+         +---+
                                    | b       |         | b |   offset 2, strides (6, 1)
                                    +---------+         +---+

The container of a region is the origin of its elements: a source (`CopyOf`), a constant
(`FilledWith`) or an operation on sources (`ComputedFrom`). A map has few boxes for a tensor of any
size. Boxes do not overlap; an element in no box was never written.

A `StorageMap` holds the writes to a storage in order: regions of the storage, with the regions of
origins that were copied there. Reading a view of it traces each write (`trace_copy`); the last
write of an element counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.geometry.boxes import are_disjoint
from reshard.geometry.regions import Index, Region, coalesce
from reshard.geometry.strided_overlap import trace_copy

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
    "bool": {
        *("uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    },
}
CAST, BITS = "to ", "bits as "


class CopyOf(NamedTuple):
    """Elements of source number `source`.

    `steps` are applied to each element: casts (`"to float32"`), bits reinterpreted as another type
    (`"bits as uint8"`), operations (`"exp"`).
    """

    source: int
    steps: tuple[str, ...] = ()

    @property
    def is_copied(self) -> bool:
        """Whether the elements are unchanged, apart from casts."""
        return all(step.startswith((CAST, BITS)) for step in self.steps)


class FilledWith(NamedTuple):
    """A constant. Constants are equal if their texts are: NaN equals NaN, and 0.0 is not -0.0."""

    value: float

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


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

    >>> combine_origins("mul", [CopyOf(0, ("to float32",)), CopyOf(2), None])
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


@dataclass(frozen=True, slots=True)
class RegionMap:
    """The regions of a tensor of `shape`, which do not overlap."""

    shape: Index
    regions: tuple[Region, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], origin: Origin | None, offset: int = 0, strides: Index = ()
    ) -> RegionMap:
        """Return a map of a single region, or an empty map if `origin` is None."""
        shape = tuple(shape)
        if origin is None or not math.prod(shape):
            return cls(shape, ())
        zeros = (0,) * len(shape)
        return cls(shape, (Region(zeros, shape, origin, offset, strides or zeros),))

    @property
    def origins(self) -> list[Origin | None]:
        """All origins, with None if a part was never written."""
        written = sum(region.elements for region in self.regions)
        rest: list[Origin | None] = [None] if written < math.prod(self.shape) else []
        return [*(region.container for region in self.regions), *rest]

    def map_origins(self, change: Callable[[Origin], Origin]) -> RegionMap:
        """Return the same boxes with other origins; those that lose their source lose strides."""
        regions = []
        for region in self.regions:
            origin = change(region.container)
            is_copy = isinstance(origin, CopyOf)
            offset, strides = region[3:] if is_copy else (0, (0,) * len(region.strides))
            regions.append(Region(region.start, region.stop, origin, offset, strides))
        return RegionMap(self.shape, tuple(regions))

    def crop(self, start: Sequence[int], stop: Sequence[int]) -> RegionMap:
        """Return the box `start:stop`."""
        parts = (region.intersect(tuple(start), tuple(stop)) for region in self.regions)
        back = [-low for low in start]
        shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        return RegionMap(shape, tuple(part.translate(back) for part in parts if part is not None))

    def narrow(self, dim: int, start: int, stop: int) -> RegionMap:
        """Return indices `start:stop` of a dimension."""
        low, high = [0] * len(self.shape), list(self.shape)
        low[dim], high[dim] = start, stop
        return self.crop(low, high)

    def broadcast(self, shape: Sequence[int]) -> RegionMap:
        """Return the map expanded to `shape`."""
        shape = tuple(shape)
        if shape == self.shape or not math.prod(shape):
            return RegionMap(shape, self.regions if shape == self.shape else ())
        ahead = len(shape) - len(self.shape)
        regions: list[Region] = []
        for region in self.regions:
            for _ in range(ahead):
                region = region.insert(0)
            for d, size in enumerate(shape):
                # The only index of a repeated dimension is all of it.
                if d < ahead or self.shape[d - ahead] != size:
                    region = Region(
                        (*region.start[:d], 0, *region.start[d + 1 :]),
                        (*region.stop[:d], size, *region.stop[d + 1 :]),
                        region.container,
                        region.offset,
                        (*region.strides[:d], 0, *region.strides[d + 1 :]),
                    )
            regions.append(region)
        return RegionMap(shape, tuple(regions))

    def take(self, dim: int, indices: Sequence[int]) -> RegionMap:
        """Return the given indices of a dimension, in that order."""
        shape = (*self.shape[:dim], len(indices), *self.shape[dim + 1 :])
        parts = (
            region.step(dim, first, step, count, at)
            for at, first, step, count in find_progressions(indices)
            for region in self.regions
        )
        return RegionMap(shape, tuple(part for part in parts if part is not None))

    def unsqueeze(self, dim: int) -> RegionMap:
        """Return the map with a new dimension of size 1."""
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return RegionMap(shape, tuple(region.insert(dim) for region in self.regions))

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

    def overwrite(self, newer: Iterable[Region]) -> RegionMap:
        """Return the map with regions written over it in order."""
        regions = list(self.regions)
        # What is overwritten is subtracted at once, so that regions never overlap.
        for new in newer:
            regions = [part for old in regions for part in old.subtract(new.start, new.stop)]
            regions.append(new)
        return RegionMap(self.shape, tuple(regions))

    def coalesce(self) -> RegionMap:
        """Return the map with adjacent regions merged, in order."""
        return RegionMap(self.shape, tuple(sorted(coalesce(self.regions), key=lambda r: r.box)))


def concatenate(maps: Sequence[RegionMap], dim: int) -> RegionMap:
    """Return maps concatenated along a dimension."""
    shape = maps[0].shape
    regions: list[Region] = []
    size = 0
    for part in maps:
        regions += [region.shift(dim, size) for region in part.regions]
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


@dataclass(slots=True)
class StorageMap:
    """The contents of a tensor's storage.

    Attributes:
        dtype: of the elements that offsets count.
        size: in elements.
        source: the number of the source whose storage it is, or None. Its elements are the source's
            until they are overwritten.
        writes: regions of the storage, and the regions of origins that were written there, in
            order.
    """

    dtype: str
    size: int
    source: int | None = None
    writes: list[tuple[Region, Region]] = field(default_factory=list)

    def write(self, view: Region, written: RegionMap) -> None:
        """Write a tensor to a view of the storage of the same shape."""
        for region in written.regions:
            target = view.intersect(region.start, region.stop)
            if target is not None:
                self.writes.append((target, region))

    def write_all(self, origin: ComputedFrom) -> None:
        """Overwrite the whole storage."""
        whole = Region((0,), (self.size,), origin, 0, (0,))
        self.writes = [(Region.dense((self.size,), None), whole)]

    def read(self, view: Region) -> RegionMap:
        """Return the contents of a view of the storage."""
        base = RegionMap(view.shape, ())
        if self.source is not None:
            base = RegionMap.of(view.shape, CopyOf(self.source), view.offset, view.strides)
        parts = [
            part for target, region in self.writes for part in trace_copy(view, target, region)
        ]
        # Usually each element was written once. Then writes need not be subtracted from each other.
        if not base.regions and are_disjoint(
            np.array([part.start for part in parts]), np.array([part.stop for part in parts])
        ):
            return RegionMap(view.shape, tuple(parts))
        return base.overwrite(parts)
