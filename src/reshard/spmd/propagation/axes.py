"""Axes and factors as integers: overlaps of sub-axes, and the shardings of factors.

Propagation compares axes thousands of times, so it works with integers: a `Part` is the number of a
mesh axis and a range of it, as in `mesh.Axis`::

    x of size 8 on DeviceMesh.of(y=3, x=8)    (1, 1, 8, 0)
    x:(2)4                                    (1, 2, 4, 0)

The last number identifies a level. 0 is the flat sharding in blocks of equal size, rounded up, any
prefix of which is a sharding as well. Parts of a level with another rule, or of a level below
another, have its number and stay together: such a level is propagated whole or not at all.
`AxisTable` translates the shardings of a mesh to integers and back.

`collected` distributes the axes of a dimension over its factors, from major to minor. A factor
that is not the last takes axes while they divide it, and a part of an axis if only a part does::

    [ij] of 8 = 2 x 4, sharded over a of size 4     i takes a:(1)2, j takes a:(2)2
    [ij] of 8 = 2 x 4, sharded over a of size 3     3 divides neither: it overflows i

Axes that overflow shard the dimension but no factor: they are not propagated, and are restored when
the dimension is put together. The last factor takes all remaining axes, whether or not they divide
it. `updated` joins the axes of the factors, up to the first factor that is not sharded to single
indices: beyond it a shard would have holes. A level with another rule stays with a factor that is a
whole dimension, and overflows elsewhere.

Source: the sharding projections of Shardy (OpenXLA, `docs/propagation.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.rules.sharding_rule import Mapping

# Shardings that are cached. No program has as many; without a bound, a process could leak memory.
MAX_CACHED = 1 << 16

Part = tuple[int, int, int, int]
Parts = tuple[Part, ...]


def are_apart(first: Part, second: Part) -> bool:
    """Return whether a tensor can be sharded along both: they are disjoint parts of a split.

    `x:(1)2` and `x:(3)2` of an axis of 6 do not: there is no way to split 6 that has them.

    >>> are_apart((0, 1, 2, 0), (0, 2, 2, 0)), are_apart((0, 1, 4, 0), (0, 2, 2, 0))
    (True, False)
    >>> are_apart((0, 1, 2, 0), (0, 3, 2, 0))
    False
    """
    if first[0] != second[0]:
        return True
    low, high = (first, second) if first[1] < second[1] else (second, first)
    return low[1] != high[1] and high[1] % (low[1] * low[2]) == 0


def covers(first: Part, second: Part) -> bool:
    """Return whether the first part contains the second."""
    return first == second or (
        first[0] == second[0]
        and first[3] == second[3] == 0
        and first[1] <= second[1]
        and second[1] * second[2] <= first[1] * first[2]
    )


def begins(first: Part, second: Part) -> bool:
    """Return whether the first part is a prefix of the second.

    >>> begins((0, 2, 2, 0), (0, 2, 4, 0)), begins((0, 1, 2, 0), (0, 2, 4, 0))
    (True, False)
    """
    return first == second or (
        first[0] == second[0]
        and first[1] == second[1]
        and first[3] == second[3] == 0
        and second[2] % first[2] == 0
    )


def without(part: Part, used: Parts) -> Part | None:
    """Return the longest prefix of `part` that is disjoint from `used`, or None.

    >>> without((0, 1, 8, 0), ((0, 2, 2, 0), (1, 1, 3, 0)))
    (0, 1, 2, 0)
    """
    for other in used:
        if other[0] == part[0] and not are_apart(part, other):
            # Nothing is left before `other` begins, or what is left would be part of a level that
            # must stay together.
            if part[1] >= other[1] or other[1] % part[1] or part[3]:
                return None
            size = math.gcd(part[2], other[1] // part[1])
            if size == 1:
                return None
            part = (part[0], part[1], size, 0)
    return part


def joined(parts: Parts, part: Part) -> Parts:
    """Append a part to parts, joined with the last if it follows it.

    >>> joined(((0, 1, 2, 0),), (0, 2, 4, 0))
    ((0, 1, 8, 0),)
    """
    if parts:
        last = parts[-1]
        if last[0] == part[0] and last[1] * last[2] == part[1] and last[3] == part[3] == 0:
            return (*parts[:-1], (part[0], last[1], last[2] * part[2], 0))
    return (*parts, part)


def begins_strictly(first: Parts, second: Parts) -> bool:
    """Return whether a sequence of parts begins another and is shorter.

    >>> begins_strictly((), ((0, 1, 2, 0),)), begins_strictly(((0, 1, 2, 0),), ((0, 1, 4, 0),))
    (True, True)
    """
    if first == second or len(first) > len(second):
        return False
    if not first:
        return True
    return first[:-1] == second[: len(first) - 1] and begins(first[-1], second[len(first) - 1])


def size_of(parts: Parts) -> int:
    """Return the number of shards that the parts make."""
    size = 1
    for part in parts:
        size *= part[2]
    return size


class Sharding(NamedTuple):
    """A `ShardingSpec` in integers: parts of axes for each dimension, and its other fields."""

    dims: tuple[Parts, ...]
    is_closed: tuple[bool, ...]
    replicated: Parts = ()
    partial: Parts = ()
    reduction: str | None = None
    only: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # Dimensions of a weaker user priority, which join later: meanwhile they are closed.
    waiting: tuple[int, ...] = ()

    @classmethod
    def whole(cls, ndim: int) -> Sharding:
        """Return the sharding of a tensor that every device has whole."""
        return cls(((),) * ndim, (True,) * ndim)

    @property
    def plain(self) -> Sharding:
        """The sharding as an array has it: without open dimensions and replicated axes."""
        return self._replace(is_closed=(True,) * len(self.dims), replicated=())

    @property
    def is_cut(self) -> bool:
        """Whether any dimension is."""
        return any(self.dims)


def are_alike(first: Sharding, second: Sharding) -> bool:
    """Return whether two shardings place a tensor equally, with equal contributions.

    >>> part = ((0, 1, 2, 0),)
    >>> closed = Sharding(((),), (True,), (), part, "sum")
    >>> opened, highest = closed._replace(is_closed=(False,)), closed._replace(reduction="max")
    >>> are_alike(closed, opened), are_alike(closed, highest)
    (True, False)
    """
    is_other_sum = bool(first.partial) and first.reduction != second.reduction
    return first.dims == second.dims and first.partial == second.partial and not is_other_sum


class AxisTable:
    """The shardings of a mesh in integers. `AxisTable.of(mesh)` is the table of a mesh.

    >>> from reshard import spec
    >>> mesh = DeviceMesh.of(y=3, x=8)
    >>> table = AxisTable.of(mesh)
    >>> sharding = table.encoded(spec(mesh, "x:(2)4 y, - ? | replicated(x:(1)2)"))
    >>> sharding.dims, sharding.is_closed
    ((((1, 2, 4, 0), (0, 1, 3, 0)), ()), (True, False))
    >>> print(table.decoded(sharding))
    x:(2)4 y, ? | replicated(x:(1)2)
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._number = {name: number for number, name in enumerate(mesh.axis_names)}
        self._level_numbers: dict[tuple[int, Level], int] = {}
        self.levels: list[Level | None] = [None]
        self._encoded: dict[ShardingSpec, Sharding] = {}
        self._closed: dict[Sharding, ShardingSpec] = {}
        self._decoded: dict[tuple[Sharding, tuple[int, ...]], ShardingSpec] = {}

    @staticmethod
    @lru_cache(maxsize=64)
    def of(mesh: DeviceMesh) -> AxisTable:
        """Return the table of a mesh, cached between propagations."""
        return AxisTable(mesh)

    def part(self, axis: Axis, level: int = 0) -> Part:
        """Return an axis in integers."""
        return (self._number[axis.name], axis.pre, self.mesh.axis_size(axis), level)

    def axis(self, part: Part) -> Axis:
        """Return an axis from its integers."""
        name = self.mesh.axis_names[part[0]]
        # A whole axis is written by its name alone.
        is_full = part[2] == self.mesh.shape[part[0]]
        return Axis(name) if is_full else Axis(name, part[1], part[2])

    def encoded(self, spec: ShardingSpec) -> Sharding:
        """Return a sharding of the mesh in integers, without its priorities."""
        sharding = self._encoded.get(spec)
        if sharding is None:
            if len(self._encoded) >= MAX_CACHED:
                self._encoded.clear()
            sharding = self._encoded[spec] = Sharding(
                tuple(self._encode_dim(dim) for dim in spec.dim_specs),
                tuple(not dim.is_open for dim in spec.dim_specs),
                tuple(map(self.part, spec.replicated_axes)),
                tuple(map(self.part, spec.partial_axes)),
                spec.reduction,
                spec.only,
            )
        return sharding

    def _encode_dim(self, dim: DimSpec) -> Parts:
        parts: list[Part] = []
        for depth, level in enumerate(dim.levels):
            number = 0
            # A level below another shards each of its parts, even by the default rule.
            if depth or not level.rule.is_default:
                number = self._level_numbers.setdefault((depth, level), len(self.levels))
                if number == len(self.levels):
                    self.levels.append(level)
            parts += [self.part(axis, number) for axis in level.axes]
        return tuple(parts)

    def decoded(self, sharding: Sharding, priorities: tuple[int, ...] = ()) -> ShardingSpec:
        """Return the sharding of these integers."""
        spec = self._decoded.get((sharding, priorities))
        if spec is None:
            if len(self._decoded) >= MAX_CACHED:
                self._decoded.clear()
            dims = [
                DimSpec(self._decode_levels(parts), not closed, priority)
                for parts, closed, priority in zip(
                    sharding.dims,
                    sharding.is_closed,
                    priorities or (0,) * len(sharding.dims),
                    strict=True,
                )
            ]
            spec = self._decoded[sharding, priorities] = ShardingSpec(
                self.mesh,
                dims,
                map(self.axis, sharding.replicated),
                map(self.axis, sharding.partial),
                sharding.reduction,
                sharding.only,
            )
        return spec

    def closed(self, sharding: Sharding) -> ShardingSpec:
        """Return the sharding of these integers, without open dimensions."""
        spec = self._closed.get(sharding)
        if spec is None:
            if len(self._closed) >= MAX_CACHED:
                self._closed.clear()
            closed = sharding._replace(is_closed=(True,) * len(sharding.dims))
            spec = self._closed[sharding] = self.decoded(closed)
        return spec

    def _decode_levels(self, parts: Parts) -> list[Level]:
        # Parts numbered 0 are the flat level, which comes first; the others are looked up whole.
        flat = [self.axis(part) for part in parts if not part[3]]
        numbers = dict.fromkeys(part[3] for part in parts if part[3])
        levels = [level for number in numbers if (level := self.levels[number]) is not None]
        return ([Level(flat)] if flat else []) + levels

    def whole_levels(self, parts: Parts) -> Parts:
        """Return the parts without a last level that is incomplete."""
        if not parts or not parts[-1][3]:
            return parts
        level = self.levels[parts[-1][3]]
        count = sum(part[3] == parts[-1][3] for part in parts)
        if level is not None and count < len(level.axes):
            return parts[: len(parts) - count]
        return parts


@dataclass(slots=True)
class FactorSharding:
    """The sharding of a factor of a tensor.

    Args:
        axes: that cut it, major to minor.
        overflow: axes of its dimension that follow and cut no factor.
        is_closed: whether it may not be cut further.
        is_last: whether it is the minor-most factor of its dimension.
        is_waiting: whether its dimension joins later, by a weaker user priority.
    """

    axes: Parts = ()
    overflow: Parts = ()
    is_closed: bool = False
    is_last: bool = True
    is_waiting: bool = False


FactorShardings = dict[int, FactorSharding]
"""The factors of one tensor."""


def collected(
    mapping: Mapping,
    sizes: Sequence[int],
    sharding: Sharding | None,
    carriers: frozenset[int],
    *,
    closed_if_missing: bool = False,
) -> FactorShardings:
    """Return the cuts of a tensor's factors under its sharding.

    Args:
        mapping: the tensor's dimensions in factors.
        sizes: of the factors.
        sharding: of the tensor; None if unknown.
        carriers: factors that carry levels with a rule of their own.
        closed_if_missing: whether a tensor without a sharding may not be cut.

    >>> dims = (((0, 1, 4, 0),),)
    >>> cuts = collected(((0, 1),), (2, 4), Sharding(dims, (True,)), frozenset())
    >>> cuts[0].axes, cuts[1].axes
    (((0, 1, 2, 0),), ((0, 2, 2, 0),))
    """
    cuts: FactorShardings = {}
    for dim, factors in enumerate(mapping):
        axes: Parts = () if sharding is None else sharding.dims[dim]
        is_closed = closed_if_missing if sharding is None else sharding.is_closed[dim]
        if len(factors) == 1:
            factor = factors[0]
            if factor not in carriers and any(part[3] for part in axes):
                cuts[factor] = FactorSharding((), axes, is_closed)
            else:
                cuts[factor] = FactorSharding(axes, (), is_closed)
        elif factors:
            _collect_compound(cuts, factors, sizes, axes, is_closed)
        if sharding is not None and dim in sharding.waiting:
            for factor in factors:
                if factor in cuts:
                    cuts[factor].is_waiting = True
    return cuts


def _collect_compound(
    cuts: FactorShardings,
    factors: Sequence[int],
    sizes: Sequence[int],
    axes: Parts,
    is_closed: bool,
) -> None:
    waiting = list(axes)
    has_levels = any(part[3] for part in axes)
    has_overflow = False
    for index, factor in enumerate(factors):
        is_last = index == len(factors) - 1
        cut = cuts[factor] = FactorSharding((), (), is_closed or has_overflow, is_last)
        if has_overflow:
            # This factor may not be sharded, and the following ones are ignored.
            return
        if has_levels:
            cut.overflow = axes
            has_overflow = True
            continue
        if is_last:
            for part in waiting:
                cut.axes = joined(cut.axes, part)
            continue
        # Take axes while they divide the rest of the factor; of an axis that is too large, the part
        # that divides it, and leave the rest to the next factor.
        left, taken = sizes[factor], []
        while waiting:
            part = waiting[0]
            common = math.gcd(left, part[2])
            # The axis and what is left have no divisor in common: it overflows here.
            if part[2] != 1 and common == 1:
                break
            if part[2] > common:
                taken.append((part[0], part[1], common, 0))
                waiting[0] = (part[0], part[1] * common, part[2] // common, 0)
            else:
                taken.append(waiting.pop(0))
            left //= common
        cut.axes = tuple(taken)
        if left > 1 and waiting:
            has_overflow = True
            for part in waiting:
                cut.overflow = joined(cut.overflow, part)


def updated(
    mapping: Mapping,
    sizes: Sequence[int],
    factors: FactorShardings,
    sharding: Sharding | None,
) -> Sharding:
    """Return a tensor's sharding from the cuts of its factors.

    Args:
        mapping: the tensor's dimensions in factors.
        sizes: of the factors.
        factors: their cuts.
        sharding: of the tensor before, whose replicated and partial axes stay.

    >>> cuts = {0: FactorSharding(((0, 1, 2, 0),)), 1: FactorSharding(((0, 2, 4, 0),))}
    >>> updated(((0, 1),), (2, 4), cuts, None).dims
    (((0, 1, 8, 0),),)
    """
    dims: list[Parts] = []
    closed: list[bool] = []
    for dim, indices in enumerate(mapping):
        if not indices:
            dims.append(sharding.dims[dim] if sharding else ())
            closed.append(sharding.is_closed[dim] if sharding else False)
            continue
        if len(indices) == 1:
            cut = factors[indices[0]]
            dims.append(cut.axes + cut.overflow if cut.overflow else cut.axes)
            closed.append(cut.is_closed)
            continue
        axes: Parts = ()
        is_closed = False
        for factor in indices:
            cut = factors[factor]
            is_closed |= cut.is_closed
            size = 1
            for place, part in enumerate(cut.axes):
                size *= part[2]
                # Join an axis that was split between two factors.
                axes = (*axes, part) if place else joined(axes, part)
            if cut.overflow:
                for place, part in enumerate(cut.overflow):
                    axes = (*axes, part) if place else joined(axes, part)
                break
            # Not cut to single indices: a cut of the next factor would leave holes in the shards.
            if size < sizes[factor]:
                break
        dims.append(axes)
        closed.append(is_closed)
    if sharding is None:
        return Sharding(tuple(dims), tuple(closed))
    return sharding._replace(dims=tuple(dims), is_closed=tuple(closed))
