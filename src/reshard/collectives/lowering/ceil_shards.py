"""Shards by ceil, padded to the size of the largest, and the effect of a step on them.

JAX and MLIR give every device of a program an array of one shape. A dimension of length `K` in
`P` parts has parts of `K ceildiv P`; the last ones have padding after the end of the tensor::

    10 over x=4     0 1 2 | 3 4 5 | 6 7 8 | 9 . .

Gathered parts may then be longer than the new part, and are truncated. A part may have to be
padded before it is sliced::

    10 over x=4 to 10           0 1 2 3 4 5 6 7 8 9 . .     truncated to 10
    10 to 10 over x=4           0 1 2 3 4 5 6 7 8 9         padded to 12

1. If `n` new parts together are as long as the old one, each begins at the right index.
2. If they are longer, they begin at wrong indices in every old part but the first. Then all of
   the tensor must be in the first one.
"""

from __future__ import annotations

import math

from reshard.errors import NotationError
from reshard.sharding import ShardingSpec


def parts_of(spec: ShardingSpec, dim: int) -> int:
    """Into how many parts a dimension is cut."""
    return math.prod(spec.mesh.axis_size(axis) for axis in spec.dim_specs[dim].axes)


def part_length(spec: ShardingSpec, shape: tuple[int, ...], dim: int) -> int:
    """Elements along a dimension of the largest shard."""
    return -(-shape[dim] // parts_of(spec, dim))


def ceil_shape(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the largest shard, which every device has.

    >>> from reshard import DeviceMesh
    >>> from reshard.sharding import spec
    >>> ceil_shape(spec(DeviceMesh.of(x=4, y=2), "x, y"), (10, 4))
    (3, 2)
    """
    return tuple(part_length(spec, shape, dim) for dim in range(len(shape)))


def check_ceil(where: str, system: str, spec: ShardingSpec, shape: tuple[int, ...]) -> None:
    """Raise NotationError for a sharding that has other shards than one cut by ceil gives.

    Levels are one cut where the sizes divide.
    """
    for dim, cut in enumerate(spec.dim_specs):
        # Levels that divide evenly cut as one level of all their axes does.
        is_flat = len(cut.levels) < 2 or shape[dim] % parts_of(spec, dim) == 0
        if not is_flat or spec.only or any(not level.rule.is_default for level in cut.levels):
            raise NotationError(
                f"{where} cannot be expressed in {system}: `{spec}` has other shards of shape "
                f"{list(shape)} than blocks in order, each as long as the first; {system} has "
                "those alone"
            )
    if not math.prod(shape):
        raise NotationError(
            f"{where} cannot be expressed in {system}: a tensor of shape {list(shape)} has no "
            "elements to move; leave it out"
        )


def lines_up(short: ShardingSpec, long: ShardingSpec, shape: tuple[int, ...], dim: int) -> bool:
    """Whether the parts of `long` begin in those of `short` where padded shards have them.

    `long` cuts the dimension by more axes.

    >>> from reshard import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> one, both = spec(mesh, "x"), spec(mesh, "x y")
    >>> lines_up(one, both, (12,), 0), lines_up(one, both, (10,), 0)
    (True, False)
    """
    length = part_length(short, shape, dim)
    count = parts_of(long, dim) // parts_of(short, dim)
    return count * part_length(long, shape, dim) == length or shape[dim] <= length
