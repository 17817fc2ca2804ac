"""Axes as integers: overlaps of sub-axes, and prefixes of sequences of sub-axes.

Propagation asks this thousands of times, so it counts with integers: a `Part` is an axis of the
mesh by its number, and the range of it that is meant, as in `mesh.Axis`::

    x of size 8 on DeviceMesh.of(y=3, x=8)    (1, 1, 8, 0)
    x:(2)4                                    (1, 2, 4, 0)

The last number tells levels apart. 0 is the flat cut by ceil, of which any beginning is a cut as
well; parts of a level with a rule of its own, or of a level below another, have its number, and
stay together: such a level is carried unchanged or not at all.

`AxisTable` translates the shardings of one mesh there and back.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

# Beyond any program's number of different shardings; a bound all the same.
MOST_KEPT = 1 << 16

Part = tuple[int, int, int, int]
Parts = tuple[Part, ...]


def are_apart(one: Part, other: Part) -> bool:
    """Whether one tensor can be cut along both: they share no coordinates, and one axis has both.

    `x:(1)2` and `x:(3)2` of an axis of 6 do not: there is no way to split 6 that has them.

    >>> are_apart((0, 1, 2, 0), (0, 2, 2, 0)), are_apart((0, 1, 4, 0), (0, 2, 2, 0))
    (True, False)
    >>> are_apart((0, 1, 2, 0), (0, 3, 2, 0))
    False
    """
    if one[0] != other[0]:
        return True
    low, high = (one, other) if one[1] < other[1] else (other, one)
    return low[1] != high[1] and high[1] % (low[1] * low[2]) == 0


def covers(one: Part, other: Part) -> bool:
    """Whether `other` is a part of `one`, or all of it."""
    return one == other or (
        one[0] == other[0]
        and one[3] == other[3] == 0
        and one[1] <= other[1]
        and other[1] * other[2] <= one[1] * one[2]
    )


def begins(one: Part, other: Part) -> bool:
    """Whether `one` is the major part of `other`, or all of it.

    >>> begins((0, 2, 2, 0), (0, 2, 4, 0)), begins((0, 1, 2, 0), (0, 2, 4, 0))
    (True, False)
    """
    return one == other or (
        one[0] == other[0]
        and one[1] == other[1]
        and one[3] == other[3] == 0
        and other[2] % one[2] == 0
    )


def without(part: Part, used: Parts) -> Part | None:
    """The longest beginning of `part` that is apart from all of `used`; None where there is none.

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
    """`parts` and then `part`, as one where it follows the last.

    >>> joined(((0, 1, 2, 0),), (0, 2, 4, 0))
    ((0, 1, 8, 0),)
    """
    if parts:
        last = parts[-1]
        if last[0] == part[0] and last[1] * last[2] == part[1] and last[3] == part[3] == 0:
            return (*parts[:-1], (part[0], last[1], last[2] * part[2], 0))
    return (*parts, part)


def begins_strictly(first: Parts, second: Parts) -> bool:
    """Whether a sequence of parts begins another and is shorter.

    >>> begins_strictly((), ((0, 1, 2, 0),)), begins_strictly(((0, 1, 2, 0),), ((0, 1, 4, 0),))
    (True, True)
    """
    if first == second or len(first) > len(second):
        return False
    if not first:
        return True
    return first[:-1] == second[: len(first) - 1] and begins(first[-1], second[len(first) - 1])


def size_of(parts: Parts) -> int:
    """Into how many pieces the parts cut."""
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

    @property
    def is_cut(self) -> bool:
        """Whether any dimension is."""
        return any(self.dims)


def are_alike(one: Sharding, other: Sharding) -> bool:
    """Whether a tensor lies the same in both: cut alike, and with contributions of one kind.

    >>> part = ((0, 1, 2, 0),)
    >>> one = Sharding(((),), (True,), (), part, "sum")
    >>> opened, highest = one._replace(is_closed=(False,)), one._replace(reduction="max")
    >>> are_alike(one, opened), are_alike(one, highest)
    (True, False)
    """
    is_other_sum = bool(one.partial) and one.reduction != other.reduction
    return one.dims == other.dims and one.partial == other.partial and not is_other_sum


class AxisTable:
    """The shardings of one mesh in integers. `AxisTable.of(mesh)` is the table of a mesh.

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
        self._decoded: dict[tuple[Sharding, tuple[int, ...]], ShardingSpec] = {}

    @staticmethod
    @lru_cache(maxsize=64)
    def of(mesh: DeviceMesh) -> AxisTable:
        """The table of a mesh, kept from one propagation to the next."""
        return AxisTable(mesh)

    def part(self, axis: Axis, level: int = 0) -> Part:
        """An axis in integers."""
        return (self._number[axis.name], axis.pre, self.mesh.axis_size(axis), level)

    def axis(self, part: Part) -> Axis:
        """An axis from its integers."""
        name = self.mesh.axis_names[part[0]]
        # A whole axis is written by its name alone.
        is_full = part[2] == self.mesh.shape[part[0]]
        return Axis(name) if is_full else Axis(name, part[1], part[2])

    def encoded(self, spec: ShardingSpec) -> Sharding:
        """A sharding of the mesh in integers, without its priorities."""
        found = self._encoded.get(spec)
        if found is None:
            if len(self._encoded) >= MOST_KEPT:
                self._encoded.clear()
            found = self._encoded[spec] = Sharding(
                tuple(self._encode_dim(dim) for dim in spec.dim_specs),
                tuple(not dim.is_open for dim in spec.dim_specs),
                tuple(map(self.part, spec.replicated_axes)),
                tuple(map(self.part, spec.partial_axes)),
                spec.reduction,
                spec.only,
            )
        return found

    def _encode_dim(self, dim: DimSpec) -> Parts:
        found: list[Part] = []
        for depth, level in enumerate(dim.levels):
            number = 0
            # A level below another is a cut of each part of that one, even by the default rule.
            if depth or not level.rule.is_default:
                number = self._level_numbers.setdefault((depth, level), len(self.levels))
                if number == len(self.levels):
                    self.levels.append(level)
            found += [self.part(axis, number) for axis in level.axes]
        return tuple(found)

    def decoded(self, sharding: Sharding, priorities: tuple[int, ...] = ()) -> ShardingSpec:
        """The sharding of these integers."""
        found = self._decoded.get((sharding, priorities))
        if found is None:
            if len(self._decoded) >= MOST_KEPT:
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
            found = self._decoded[sharding, priorities] = ShardingSpec(
                self.mesh,
                dims,
                map(self.axis, sharding.replicated),
                map(self.axis, sharding.partial),
                sharding.reduction or "sum",
                sharding.only,
            )
        return found

    def _decode_levels(self, parts: Parts) -> list[Level]:
        # Parts numbered 0 are the flat level, which comes first; the others are looked up whole.
        flat = [self.axis(part) for part in parts if not part[3]]
        numbers = dict.fromkeys(part[3] for part in parts if part[3])
        own = [level for number in numbers if (level := self.levels[number]) is not None]
        return ([Level(flat)] if flat else []) + own

    def whole_levels(self, parts: Parts) -> Parts:
        """`parts` without a level at the end of which axes are missing."""
        if not parts or not parts[-1][3]:
            return parts
        level = self.levels[parts[-1][3]]
        count = sum(part[3] == parts[-1][3] for part in parts)
        if level is not None and count < len(level.axes):
            return parts[: len(parts) - count]
        return parts
