"""Sorts along a sharded axis, without gathering it.

A 1-D array is sorted by exact splitters:

1. Each rank sorts its own part.
2. For each boundary between parts of the result, ranks find how many elements of each sorted part
   come before it. Regular samples of all parts bound these numbers; samples between the bounds
   tighten them, until they are known. Equal elements are ordered by part, then by position.
3. Each rank gets exactly the elements of its part of the result. The exchange is a reshard to a
   sharding by blocks, in which each block is a sorted part.
4. Each rank sorts its elements. Pieces are in the order of the parts, so equal elements keep their
   order.

        part 0     part 1     part 2        three parts of an axis, sorted
        1  5  9    2  3  8    4  6  7
        1 | 5 | 9  2 3 | | 8  | 4 6 | 7     before places 3 and 6 of the result: 1 2 0 and 2 2 2
        1  2  3    5  4  6    9  8  7       exchanged

Other arrays are sharded along another dimension while they are sorted, by two all-to-alls.
Sources: Shi and Schaeffer, Parallel Sorting by Regular Sampling, 1992; Varman and others, Merging
Multiple Lists on Hierarchical-Memory Multiprocessors, 1991 (exact splitters).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reshard.cut_rules import Joined, Sizes
from reshard.dtypes import dtype as as_dtype
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import records_gradient
from reshard.spmd.core.local_work import has_plain_parts
from reshard.spmd.namespace import find
from reshard.spmd.ops.elementwise import whole
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.partial_policy import settles

_PLACES = as_dtype("int64")


# Types that can be sampled: samples are exchanged by a sum with zeros, and compared by NumPy.
_SAMPLED = {"int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"}


# Samples of each part for each boundary, divided by the number of parts. Each round leaves
# about a seventh of an interval.
_SAMPLES = 16
_LEFT = 7


def sorted_along(space: Any, x: Any, axis: int, descending: bool) -> Any:
    """Return elements sorted along an axis."""
    made = space.sort(x, axis=axis)
    return space.flip(made, axis=axis) if descending else made


def order_of(space: Any, x: Any, axis: int, descending: bool) -> Any:
    """Return the indices that sort an axis; equal elements keep their order."""
    if not descending:
        return space.argsort(x, axis=axis, stable=True)
    # Flip, sort, and flip back, so that equal elements keep their order.
    places = space.argsort(space.flip(x, axis=axis), axis=axis, stable=True)
    return x.shape[axis] - 1 - space.flip(places, axis=axis)


def sorted_where_cut(name: str, x: Any, axis: int, descending: bool) -> Any:
    """Return `sort` or `argsort` of `x`, sharded as `x` is, or None if the axis is to be gathered.

    The axis is gathered if that does not move more bytes. A 1-D array is also gathered
    if a recorder observes its operations, or if a strategy is to choose its sharding. In a traced
    function, which has no elements, the sort of a 1-D array is a single operation.
    """
    spec = x.type.spec if isinstance(x, ArrayValue) else None
    if spec is None or spec.partial_axes:
        return None
    cut = spec.dim_specs[axis]
    if not cut.levels or not has_plain_parts(spec):
        return None
    lengths = [int(length) for length in cut.table(spec.mesh, x.shape[axis]).local_lengths]
    if x.ndim > 1:
        return _sort_turned(name, x, axis, descending, len(lengths))
    parts = len(lengths)
    moved = _count_moved_bytes(x, parts, wants_places=name == "argsort")
    gathered_bytes = (parts - 1) * int(x.shape[0] * x.dtype.itemsize_bytes)
    # Recorders of a traced function's graph accept the sort as a single operation.
    is_seen = any(not hasattr(one, "add_body") for one in recorders)
    if is_seen or moved is None or sum(moved) >= gathered_bytes:
        return None
    if not x.runner.is_abstract:
        return _SampleSort(x, lengths, descending).run(wants_places=name == "argsort")
    if not settles():
        return None
    kind = ArrayType(x.shape, _PLACES if name == "argsort" else x.dtype, spec)
    # In a random order, (parts - 1) / parts of the elements move to another part.
    sampled_bytes, exchanged_bytes = moved
    of_copy = sampled_bytes + exchanged_bytes * (parts - 1) // parts
    moved_bytes = of_copy * (spec.mesh.size // parts)
    function = partial(find(name), descending=descending)
    # Memory: the sorted parts, the exchanged pieces, and the result; argsort also has positions.
    held = [x.type, x.type, *[kind] * (4 if name == "argsort" else 1)]
    # Found by name, because it depends on this module.
    return find("eager_operation")(name, function, x, kind, moved_bytes, held)


def _sort_turned(name: str, x: Any, axis: int, descending: bool, parts: int) -> Any:
    """Sort with another dimension sharded instead of the axis."""
    dims = list(x.type.spec.dim_specs)
    free = [n for n, dim in enumerate(dims) if not dim.levels and x.shape[n] >= parts]
    # Two all-to-alls move each element at most twice; a gather moves parts - 1 times the array.
    if parts < 3 or not free:
        return None
    other = max(free, key=lambda n: x.shape[n])
    dims[axis], dims[other] = dims[other], dims[axis]
    turned = x.shard(ShardingSpec(x.type.spec.mesh, dims))
    found = call(name, (turned,), {"axis": axis}, {"descending": descending})
    return found.shard(x.type.spec)


def _count_moved_bytes(x: Any, parts: int, wants_places: bool) -> tuple[int, int] | None:
    """Return the maximum bytes that samples and elements move, or None if it cannot be sampled."""
    if x.dtype.name not in _SAMPLED:
        return None
    if x.runner.library.name == "torch" and any(map(records_gradient, x._shards)):
        return None
    size_bytes, count = int(x.dtype.itemsize_bytes), int(x.shape[0])
    exchanged_bytes = count * (size_bytes + (_PLACES.itemsize_bytes if wants_places else 0))
    of_part = _SAMPLES * parts
    rounds = 1 + math.ceil(math.log(max(count / parts / of_part, 1), _LEFT))
    # Each round is an all-reduce.
    sampled_bytes = 2 * (parts - 1) * rounds * parts * (parts - 1) * of_part * size_bytes
    return sampled_bytes, exchanged_bytes


@dataclass(frozen=True)
class _SampleSort:
    """A sort of a 1-D array.

    Args:
        x: the array.
        lengths: of its parts, including empty parts.
        descending: whether the largest element comes first.
    """

    x: Any
    lengths: Sequence[int]
    descending: bool

    def run(self, wants_places: bool) -> Any:
        """Return the sorted array, or the positions that its elements had."""
        own, places = self._sort_parts(wants_places)
        pieces = self._find_pieces(own)
        moved = self._exchange(own, pieces)
        space = self.x.runner.library.namespace
        if places is None:
            shards = tuple(sorted_along(space, one, 0, self.descending) for one in moved)
            return self._array(self.x.type, shards)
        before = self._exchange(places, pieces)
        orders = [order_of(space, one, 0, self.descending) for one in moved]
        shards = tuple(space.take(b, o, axis=0) for b, o in zip(before, orders, strict=True))
        return self._array(places.type, shards)

    def _array(self, kind: ArrayType, shards: tuple[Any, ...]) -> Any:
        return type(self.x).of_shards(kind, shards, self.x.runner)

    def _sort_parts(self, wants_places: bool) -> tuple[Any, Any]:
        """Step 1: sort each part, and return the positions of its elements."""
        x = self.x
        space = x.runner.library.namespace
        if not wants_places:
            shards = tuple(sorted_along(space, one, 0, self.descending) for one in x._shards)
            return self._array(x.type, shards), None
        orders = [order_of(space, one, 0, self.descending) for one in x._shards]
        pairs = zip(x._shards, orders, strict=True)
        own = self._array(x.type, tuple(space.take(one, order, axis=0) for one, order in pairs))
        starts = [
            box[0].start[0] if box else 0
            for box in (x.type.layout.boxes(rank) for rank in x.runner.ranks(x.type.spec.mesh))
        ]
        places = tuple(order + start for order, start in zip(orders, starts, strict=True))
        return own, self._array(ArrayType(x.shape, _PLACES, x.type.spec), places)

    def _find_pieces(self, own: Any) -> list[tuple[int, ...]]:
        """Step 2: find how many elements of each sorted part go to each part of the result."""
        parts = len(self.lengths)
        starts = np.cumsum([0, *self.lengths])
        wanted = starts[1:-1]
        low = np.zeros((parts - 1, parts), np.int64)
        high = np.tile(np.asarray(self.lengths, np.int64), (parts - 1, 1))
        count = _SAMPLES * parts
        steps = np.arange(count)
        while True:
            is_found = low.sum(1) == wanted
            is_full = high.sum(1) == wanted
            if np.all(is_found | is_full):
                break
            # An interval shorter than this is sampled at every position, at some repeatedly.
            at = low[..., None] + (high - low)[..., None] * steps // count
            asked = np.minimum(starts[:-1, None] + at, self.x.shape[0] - 1)
            taken = call("take", (own, whole(own, asked.ravel())), {"axis": 0}).reduced()
            values = self.x.runner.library.numpy(taken.to_dense()).reshape(at.shape)
            for boundary in np.flatnonzero(~(is_found | is_full)):
                some = low[boundary], high[boundary]
                _narrow(*some, at[boundary], values[boundary], wanted[boundary], self.descending)
        cuts = np.where(is_found[:, None], low, high)
        ends = np.vstack([np.zeros((1, parts), np.int64), cuts, [self.lengths]])
        return [tuple(one) for one in np.diff(ends, axis=0).T.tolist()]

    def _exchange(self, own: Any, pieces: list[tuple[int, ...]]) -> tuple[Any, ...]:
        """Step 3: reshard to the sharding that stores the pieces of each part together."""
        spec, runner = self.x.type.spec, self.x.runner
        axes = list(itertools.chain.from_iterable(one.axes for one in spec.dim_specs[0].levels))
        blocks = [(n, Sizes(one)) for n, one in zip(self.lengths, pieces, strict=True) if n]
        rule = Joined(tuple(n for n, _ in blocks), tuple(one for _, one in blocks))
        target = ShardingSpec(spec.mesh, [DimSpec([Level(axes, rule)])])
        moved: tuple[Any, ...] = runner.moved_once(own.type, target, own._shards)
        return moved


def _narrow(
    low: np.ndarray[Any, Any],
    high: np.ndarray[Any, Any],
    at: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    wanted: int,
    descending: bool,
) -> None:
    """Tighten the bounds of a boundary in place, by samples.

    Args:
        low, high: for each part, the minimum and maximum number of elements before the boundary.
        at, values: `[parts, samples]`, the positions of samples between these, and their elements.
        wanted: the total number of elements before the boundary.
        descending: whether the largest element comes first.
    """
    source = np.repeat(np.arange(len(low)), at.shape[1])
    is_there = np.repeat(high > low, at.shape[1])
    source, place = source[is_there], at.ravel()[is_there]
    # Replace values by ranks, in which NaN is the largest, as in a sort.
    _, key = np.unique(values.ravel()[is_there], return_inverse=True)
    order = np.lexsort((place, source, -key if descending else key))
    source, place = source[order], place[order]
    least, most = np.zeros(len(place), np.int64), place + 1
    for part in range(len(low)):
        is_own = source == part
        # The elements of this part before the sample: at least up to this part's previous sample,
        # at most up to its next sample.
        before = np.maximum.accumulate(np.where(is_own, place + 1, low[part]))
        after = np.minimum.accumulate(np.where(is_own, place, high[part])[::-1])[::-1]
        after = np.append(after[1:], high[part])
        least += before
        most += np.where(is_own, 0, after)
    for part in range(len(low)):
        is_own = source == part
        inside, outside = is_own & (most <= wanted), is_own & (least > wanted)
        low[part] = max(low[part], np.max(place[inside] + 1, initial=0))
        high[part] = min(high[part], np.min(place[outside], initial=high[part]))
