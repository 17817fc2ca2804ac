"""Chosen programs: the collectives between two shardings of an array.

The program that moves the fewest elements is chosen, or the direct exchange if it moves even fewer.
"""

from __future__ import annotations

from functools import lru_cache

from reshard.collectives.program import Program
from reshard.collectives.search.find_program import find_program
from reshard.collectives.steps import Exchange
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType, replicated


@lru_cache(maxsize=4096)
def chosen_program(source: ArrayType, target: ShardingSpec) -> Program:
    """Return the program between two shardings of an array, or a single `Exchange` if it is better.

    Args:
        source: the type of the array; without a sharding it is replicated on every device.
        target: the requested sharding.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> mesh = DeviceMesh.of(x=4)
    >>> pending = ArrayType((8, 8), dtype("float32"), spec(mesh, "-, - | sum(x)"))
    >>> chosen_program(pending, spec(mesh, "x, -"))
    <Program of [8, 8]: reduce-scatter>
    """
    before = source.spec or replicated(target.mesh, source.ndim)
    # Collectives do not connect two meshes.
    if before.mesh is not target.mesh:
        return Program(source.shape, before, target, (Exchange(source.shape, before, target),))
    return find_program(before, target, source.shape, steps="all")
