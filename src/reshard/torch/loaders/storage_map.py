"""What is in a memory, by what was written to it through views.

Writes are kept in order. To read a view of the memory is to find where it meets each write; of two
that wrote an element the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.torch.loaders.origins import Made, Origin, Taken
from reshard.torch.loaders.region_map import RegionMap, TensorRegion
from reshard.torch.loaders.strided_overlap import (
    Meeting,
    StridedRegion,
    find_meetings,
    meet_aligned,
)


class _Write(NamedTuple):
    """Elements of the memory that were written at once, and what they are."""

    where: StridedRegion
    origin: Origin


@dataclass(slots=True)
class StorageMap:
    """The memory of a tensor.

    Attributes:
        dtype: of the elements that positions count.
        source: the number of the source that it is, if any: then an element was what it is there,
            until something was written over it.
        size: how many elements it has.
        writes: in order.
    """

    dtype: str
    size: int
    source: int | None = None
    writes: list[_Write] = field(default_factory=list)

    def write(self, where: StridedRegion, written: RegionMap) -> None:
        """Write a tensor to a view of the memory, of the same shape."""
        for start, stop, origin in written.regions:
            offset = where.offset + sum(a * s for a, s in zip(start, where.strides, strict=True))
            sizes = tuple(b - a for a, b in zip(start, stop, strict=True))
            self.writes.append(_Write(StridedRegion(offset, sizes, where.strides), origin))

    def write_all(self, origin: Made) -> None:
        """Everything in it is made anew."""
        self.writes = [_Write(StridedRegion(0, (self.size,), (1,)), origin)]

    def read(self, where: StridedRegion) -> RegionMap:
        """What a view of the memory has."""
        shape = where.sizes
        base = RegionMap(shape, ())
        if self.source is not None:
            base = RegionMap.of(shape, Taken(self.source, where.offset, where.strides))
        found: list[TensorRegion] = []
        for write in self.writes:
            found += _find_parts(where, write)
        if not found:
            return base
        if base.regions or _share_elements(found):
            return base.overwritten(found)
        return RegionMap(shape, tuple(found))


def _find_parts(where: StridedRegion, write: _Write) -> list[TensorRegion]:
    """The parts of a view that a write has written."""
    parts = []
    written, origin = write
    meetings: Iterable[Meeting] | None = meet_aligned(where, written)
    if meetings is None:
        written, origin = _join_dims(written, origin)
        meetings = find_meetings(where, written)
    for start, stop, at, steps in meetings:
        if isinstance(origin, Taken):
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
    """The same elements with fewer dimensions: those that continue others are joined."""
    own = origin.strides if isinstance(origin, Taken) else written.strides
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
    return joined, origin._replace(strides=own) if isinstance(origin, Taken) else origin


def _share_elements(regions: Sequence[TensorRegion]) -> bool:
    """Whether some two may share an element: False is certain."""
    if len(regions) < 2 or not regions[0].start:
        return len(regions) > 1
    start = np.array([region.start for region in regions])
    stop = np.array([region.stop for region in regions])
    # Boxes that lie apart along one dimension, or along one after the other of a grid.
    for d in range(start.shape[1]):
        order = np.argsort(start[:, d], kind="stable")
        if (start[order[1:], d] >= stop[order[:-1], d]).all():
            return False
    return _cross_in_groups(start, stop)


def _cross_in_groups(
    start: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    stop: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> bool:
    """The same for the boxes with one stretch of the first dimension, each group by itself."""
    if start.shape[1] < 2:
        return True
    _, group = np.unique(np.stack([start[:, 0], stop[:, 0]], axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1)
    groups = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)]
    if len(groups) == 1:
        return _cross_in_groups(start[:, 1:], stop[:, 1:]) if start.shape[1] > 1 else True
    firsts = np.array([g[0] for g in groups])
    order = np.argsort(start[firsts, 0])
    if (start[firsts, 0][order[1:]] < stop[firsts, 0][order[:-1]]).any():
        return True
    for members in groups:
        if len(members) < 2:
            continue
        inner_start, inner_stop = start[members, 1:], stop[members, 1:]
        apart = False
        for d in range(inner_start.shape[1]):
            order = np.argsort(inner_start[:, d], kind="stable")
            if (inner_start[order[1:], d] >= inner_stop[order[:-1], d]).all():
                apart = True
                break
        if not apart and _cross_in_groups(inner_start, inner_stop):
            return True
    return False
