"""Chosen programs: the collectives between two shardings of an array.

By the program that moves the fewest elements, or by the direct exchange where that moves fewer
still.
"""

from __future__ import annotations

from functools import lru_cache

from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.shards.runner import replicated


@lru_cache(maxsize=4096)
def chosen_program(source: ArrayType, target: ShardingSpec) -> Program:
    """The program from the sharding of an array to another; one `Exchange` where that is better.

    Args:
        source: the array; one that is not sharded is whole on every device.
        target: the sharding wanted.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> mesh = DeviceMesh.of(x=4)
    >>> pending = ArrayType((8, 8), dtype("float32"), spec(mesh, "-, - | sum(x)"))
    >>> chosen_program(pending, spec(mesh, "x, -"))
    <Program of [8, 8]: reduce-scatter>
    """
    before = source.spec or replicated(target.mesh, source.ndim)
    # No collective is between two meshes.
    if before.mesh is not target.mesh:
        return Program(source.shape, before, target, (Exchange(source.shape, before, target),))
    return find_program(before, target, source.shape, steps="all")
