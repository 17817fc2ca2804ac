"""The array API's functions for searching, sorting and sets.

The number of nonzero or unique elements depends on the elements: such results are computed from the
whole array, and are not sharded.

A sort along a sharded axis does not gather it. A 1-D array is sorted by exact splitters:

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
from typing import Any, NamedTuple

import numpy as np

from reshard._validation import check_int
from reshard.cut_rules import Joined, Sizes
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import records_gradient
from reshard.spmd.core.local_work import Function, LocalWork, has_plain_parts
from reshard.spmd.core.operator import Example, TapeStep, ship
from reshard.spmd.core.result_types import index, of_first, value_and_index
from reshard.spmd.namespace import find
from reshard.spmd.ops import elementwise, reductions
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.elementwise import operands, whole
from reshard.spmd.ops.indexing import add_along, take
from reshard.spmd.ops.movement import broadcast_to, concat, reshape, take_ranges
from reshard.spmd.ops.reductions import any as any_of
from reshard.spmd.rules.rule_builder import Inferred, Shape, axis_of, from_dims, one_operand
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.partial_sums import settles

_PLACES = as_dtype("int64")


# Types that can be sampled: samples are exchanged by a sum with zeros, and compared by NumPy.
_SAMPLED = {"int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"}


# Samples of each part for each boundary, divided by the number of parts. Each round leaves
# about a seventh of an interval.
_SAMPLES = 16
_LEFT = 7


def sorted_along(space: Any, x: Any, axis: int, descending: bool) -> Any:
    """Return elements sorted along an axis."""
    result = space.sort(x, axis=axis)
    return space.flip(result, axis=axis) if descending else result


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
    is_seen = any(not recorder.takes_bodies for recorder in recorders.active)
    if is_seen or moved is None or sum(moved) >= gathered_bytes:
        return None
    if not x.runner.is_abstract:
        return _SampleSort(x, lengths, descending).run(wants_places=name == "argsort")
    if not settles():
        return None
    result_type = ArrayType(x.shape, _PLACES if name == "argsort" else x.dtype, spec)
    # In a random order, (parts - 1) / parts of the elements move to another part.
    sampled_bytes, exchanged_bytes = moved
    of_copy = sampled_bytes + exchanged_bytes * (parts - 1) // parts
    # Each replica of the array is sorted by ranks of its own.
    moved_bytes = of_copy * (spec.mesh.size // parts)
    function = partial(find(name), descending=descending)
    # Memory: the sorted parts, the exchanged pieces, and the result; argsort also has positions.
    held = [x.type, x.type, *[result_type] * (4 if name == "argsort" else 1)]
    # Found by name, because it depends on this module.
    return find("eager_operation")(name, function, x, result_type, moved_bytes, held)


def _sort_turned(name: str, x: Any, axis: int, descending: bool, parts: int) -> Any:
    """Sort with another dimension sharded instead of the axis."""
    dims = list(x.type.spec.dim_specs)
    free = [n for n, dim in enumerate(dims) if not dim.levels and x.shape[n] >= parts]
    # Two all-to-alls move each element at most twice; a gather moves parts - 1 times the array.
    if parts < 3 or not free:
        return None
    # The longest dimension is divided most evenly.
    other = max(free, key=lambda n: x.shape[n])
    dims[axis], dims[other] = dims[other], dims[axis]
    turned = x.shard(ShardingSpec(x.type.spec.mesh, dims))
    result = call(name, (turned,), {"axis": axis}, {"descending": descending})
    return result.shard(x.type.spec)


def _count_moved_bytes(x: Any, parts: int, wants_places: bool) -> tuple[int, int] | None:
    """Return the maximum bytes that samples and elements move, or None if it cannot be sampled."""
    if x.dtype.name not in _SAMPLED:
        return None
    # PyTorch's gradients do not follow exchanges of samples; they follow a gather.
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
            shards = tuple(sorted_along(space, shard, 0, self.descending) for shard in moved)
            return self._array(self.x.type, shards)
        before = self._exchange(places, pieces)
        orders = [order_of(space, shard, 0, self.descending) for shard in moved]
        shards = tuple(space.take(b, o, axis=0) for b, o in zip(before, orders, strict=True))
        return self._array(places.type, shards)

    def _array(self, kind: ArrayType, shards: tuple[Any, ...]) -> Any:
        return type(self.x).of_shards(kind, shards, self.x.runner)

    def _sort_parts(self, wants_places: bool) -> tuple[Any, Any]:
        """Sort each part, and return the positions of its elements (step 1)."""
        x = self.x
        space = x.runner.library.namespace
        if not wants_places:
            shards = tuple(sorted_along(space, shard, 0, self.descending) for shard in x._shards)
            return self._array(x.type, shards), None
        orders = [order_of(space, shard, 0, self.descending) for shard in x._shards]
        pairs = zip(x._shards, orders, strict=True)
        own = self._array(x.type, tuple(space.take(shard, order, axis=0) for shard, order in pairs))
        starts = [
            box[0].start[0] if box else 0
            for box in (x.type.layout.boxes(rank) for rank in x.runner.ranks(x.type.spec.mesh))
        ]
        places = tuple(order + start for order, start in zip(orders, starts, strict=True))
        return own, self._array(ArrayType(x.shape, _PLACES, x.type.spec), places)

    def _find_pieces(self, own: Any) -> list[tuple[int, ...]]:
        """Find how many elements of each sorted part go to each part of the result (step 2)."""
        parts = len(self.lengths)
        starts = np.cumsum([0, *self.lengths])
        totals = starts[1:-1]
        low = np.zeros((parts - 1, parts), np.int64)
        high = np.tile(np.asarray(self.lengths, np.int64), (parts - 1, 1))
        count = _SAMPLES * parts
        steps = np.arange(count)
        while True:
            is_found = low.sum(1) == totals
            is_full = high.sum(1) == totals
            if np.all(is_found | is_full):
                break
            # An interval shorter than this is sampled at every position, at some repeatedly.
            at = low[..., None] + (high - low)[..., None] * steps // count
            asked = np.minimum(starts[:-1, None] + at, self.x.shape[0] - 1)
            taken = call("take", (own, whole(own, asked.ravel())), {"axis": 0}).reduced()
            values = self.x.runner.library.numpy(taken.to_dense()).reshape(at.shape)
            for boundary in np.flatnonzero(~(is_found | is_full)):
                some = low[boundary], high[boundary]
                _narrow(*some, at[boundary], values[boundary], totals[boundary], self.descending)
        cuts = np.where(is_found[:, None], low, high)
        ends = np.vstack([np.zeros((1, parts), np.int64), cuts, [self.lengths]])
        return [tuple(sizes) for sizes in np.diff(ends, axis=0).T.tolist()]

    def _exchange(self, own: Any, pieces: list[tuple[int, ...]]) -> tuple[Any, ...]:
        """Reshard to the sharding that stores the pieces of each part together (step 3)."""
        spec, runner = self.x.type.spec, self.x.runner
        axes = list(itertools.chain.from_iterable(level.axes for level in spec.dim_specs[0].levels))
        blocks = [(n, Sizes(sizes)) for n, sizes in zip(self.lengths, pieces, strict=True) if n]
        rule = Joined(tuple(n for n, _ in blocks), tuple(sizes for _, sizes in blocks))
        target = ShardingSpec(spec.mesh, [DimSpec([Level(axes, rule)])])
        moved: tuple[Any, ...] = runner.moved_once(own.type, target, own._shards)
        return moved


def _narrow(
    low: np.ndarray[Any, Any],
    high: np.ndarray[Any, Any],
    at: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    total: int,
    descending: bool,
) -> None:
    """Tighten the bounds of a boundary in place, by samples.

    Args:
        low, high: for each part, the minimum and maximum number of elements before the boundary.
        at, values: `[parts, samples]`, the positions of samples between these, and their elements.
        total: the number of elements before the boundary.
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
        inside, outside = is_own & (most <= total), is_own & (least > total)
        low[part] = max(low[part], np.max(place[inside] + 1, initial=0))
        high[part] = min(high[part], np.min(place[outside], initial=high[part]))


# ---- sort


@of_arrays
def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Sort along an axis in ascending order. A sharded axis may stay so."""
    return _put_in_order("sort", x, axis_of(x.ndim, axis), bool(descending))


def _put_in_order(name: str, x: Any, axis: int, descending: bool) -> Any:
    result = sorted_where_cut(name, x, axis, descending)
    return (
        call(name, (x,), {"axis": axis}, {"descending": descending}) if result is None else result
    )


register = partial(ship, family="ordering")


def ordered(
    shapes: Sequence[Shape], axis: int = -1, descending: bool = False, stable: bool = True
) -> Inferred:
    """Infer operands of equal shape, sorted in the order of the first along an axis.

    >>> print(ordered([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not shapes or len(set(shapes)) > 1:
        raise SpecError(f"a sort of {', '.join(map(str, shapes))}; one shape was expected")
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    # A 1-D array lacks another dimension that could be sharded instead.
    alone = all(size == 1 for dim, size in enumerate(shape) if dim != place)
    dims = [range(len(shape))] * len(shapes)
    return from_dims(dims, dims, shapes, whole=[place], blocked=[place] if alone else ())


def _sort_kernel(work: LocalWork) -> Function:
    """Return a kernel that sorts along an axis."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: sorted_along(space, x, axis, descending)


_EXAMPLE: Example = ([(4, 8)], {"axis": 1})


def _pull_sort(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes["axis"]
    order = argsort(step.operands[0], axis=axis, descending=step.attributes["descending"])
    # The position to which each element was moved is the argsort of the order.
    return call("take_along_axis", (g, argsort(order, axis=axis)), {"axis": axis})


register(
    "sort",
    ordered,
    local=_sort_kernel,
    result_types=of_first,
    example=_EXAMPLE,
    note="further operands are put in the first's order",
    pullback=_pull_sort,
)


# ---- argsort


@of_arrays
def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Return the indices that sort along an axis; the sort is stable."""
    return _put_in_order("argsort", x, axis_of(x.ndim, axis), bool(descending))


def _argsort_kernel(work: LocalWork) -> Function:
    """Return a kernel for the indices that sort an axis; equal elements keep their order."""
    space, axis = work.library.namespace, work.attributes["axis"]
    descending = work.attributes["descending"]
    return lambda x: order_of(space, x, axis, descending)


register(
    "argsort",
    ordered,
    local=_argsort_kernel,
    result_types=index,
    example=_EXAMPLE,
    is_constant=True,
)


@of_arrays
def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Any:
    """Return the insertion indices of `x2` in the sorted `x1`, or in `x1` sorted by `sorter`."""
    x1, x2 = operands(x1, x2)
    if sorter is not None:
        x1 = take(x1, sorter, axis=0)
    return call("searchsorted", (x1, x2), None, {"side": side})


@of_arrays
def nonzero(x: Any, /) -> tuple[Any, ...]:
    """Return the indices of nonzero elements, by dimension; not sharded."""
    if not x.ndim:
        raise UsageError("nonzero of an array of no dimensions; it has no indices: reshape it")
    return tuple(whole(x, indices) for indices in x.runner.library.namespace.nonzero(x.to_dense()))


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Any
    inverse_indices: Any


@of_arrays
def unique_all(x: Any, /) -> UniqueAll:
    """Return the unique elements, their first and inverse indices, and counts; not sharded."""
    unique = _find_unique(x)
    return unique._replace(inverse_indices=reshape(unique.inverse_indices, x.shape))


def _find_unique(x: Any) -> UniqueAll:
    """Compute `unique_all` by NumPy in both libraries, since PyTorch lacks first indices."""
    library = x.runner.library
    values, indices, inverse, counts = np.unique(
        library.numpy(x.to_dense()),
        return_index=True,
        return_inverse=True,
        return_counts=True,
        # The standard counts each NaN as another value.
        equal_nan=False,
    )
    return UniqueAll(*(whole(x, array) for array in (values, indices, inverse, counts)))


@of_arrays
def unique_counts(x: Any, /) -> UniqueCounts:
    """Return the unique elements and their counts; not sharded."""
    unique = _find_unique(x)
    return UniqueCounts(unique.values, unique.counts)


@of_arrays
def unique_inverse(x: Any, /) -> UniqueInverse:
    """Return the unique elements and the inverse indices; not sharded."""
    unique = unique_all(x)
    return UniqueInverse(unique.values, unique.inverse_indices)


@of_arrays
def unique_values(x: Any, /) -> Any:
    """Return the unique elements; not sharded."""
    return _find_unique(x).values


@of_arrays
def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
    """Return whether each element of `x1` is in `x2`."""
    x1, x2 = operands(x1, x2)
    # Each element of `x1` is compared with all of `x2`, along a new last axis.
    flat = reshape(x2, (1,) * x1.ndim + (x2.size,))
    is_member = any_of(elementwise.equal(reshape(x1, (*x1.shape, 1)), flat), axis=-1)
    return elementwise.logical_not(is_member) if invert else is_member


@of_arrays
def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Any:
    """Compute the differences of neighbours along an axis, `n` times."""
    place = axis_of(x.ndim, axis)
    if not hasattr(n, "__index__") or n < 0:
        raise UsageError(f"differences taken {n!r} times; give a whole number of 0 or more")
    parts = []
    for part in (prepend, x, append):
        if part is None:
            continue
        (part,) = operands(x, part)[1:]
        # Prepended and appended values may be numbers and NumPy arrays.
        if not isinstance(part, ArrayValue):
            part = whole(x, np.asarray(part))
        if part.ndim == 0:
            part = broadcast_to(part, (*x.shape[:place], 1, *x.shape[place + 1 :]))
        parts.append(part)
    result = concat(parts, axis=place) if len(parts) > 1 else x
    for _ in range(n):
        size = result.shape[place]
        later = take_ranges(result, {place: (min(1, size), size, 1)})
        earlier = take_ranges(result, {place: (0, max(size - 1, 0), 1)})
        # Booleans cannot be subtracted; their difference is whether they differ.
        if result.dtype.name == "bool":
            result = elementwise.not_equal(later, earlier)
        else:
            result = elementwise.subtract(later, earlier)
    return result


# ---- top_k


@of_arrays
def top_k(x: Any, k: int, /, *, axis: int = -1) -> tuple[Any, Any]:
    """Return the `k` largest elements along an axis, in descending order, and their indices."""
    reductions.check_ordered(x, "top_k")
    attributes = {"k": check_int(k, "k of top_k"), "axis": axis_of(x.ndim, axis)}
    result: tuple[Any, Any] = call("top_k", (x,), attributes)
    return result


def top_k_rule(shapes: Sequence[Shape], k: int, axis: int = -1) -> Inferred:
    """Infer the `k` largest elements along an axis, and their indices.

    >>> print(top_k_rule([(4, 8)], k=3).rule)
    ([i, j]) -> ([i, j], [i, j]) {i=4, j=8} need_replication={j} blocked={j}
    """
    shape = one_operand("top_k", shapes)
    place = axis_of(len(shape), axis)
    if not 0 <= k <= shape[place]:
        raise SpecError(f"top {k} of {shape[place]}; 0 to {shape[place]} were expected")
    dims, result = range(len(shape)), (*shape[:place], k, *shape[place + 1 :])
    return from_dims([dims], [dims] * 2, [shape], [result] * 2, whole=[place], blocked=[place])


def _top_k_kernel(work: LocalWork) -> Function:
    """Return a kernel for the largest elements along an axis and their indices; ties by index."""
    space, k, axis = work.library.namespace, work.attributes["k"], work.attributes["axis"]

    def function(x: Any) -> tuple[Any, Any]:
        # Flipped before and after, so that the first of equal elements comes first.
        flipped = space.flip(x, axis=axis)
        places = space.flip(space.argsort(flipped, axis=axis, stable=True), axis=axis)
        places = x.shape[axis] - 1 - places[(slice(None),) * axis + (slice(0, k),)]
        return space.take_along_axis(x, places, axis=axis), places

    return function


register(
    "top_k",
    top_k_rule,
    local=_top_k_kernel,
    result_types=value_and_index,
    example=([(4, 8)], {"k": 3}),
    note="results are the values and their indices",
    pullback=lambda step, g, number: add_along(
        step.operands[0], step.results[1], g[0], step.attributes["axis"]
    ),
)


# ---- unique


for _name in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
    register(
        _name,
        None,
        note="how many there are depends on the values",
        no_pullback="how many results there are depends on the elements, which are read",
    )
