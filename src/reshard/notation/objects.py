"""The sharding of a live object, whichever system it is of.

=====================================  ==========================================================
object                                 its sharding
=====================================  ==========================================================
`ShardingSpec`, or an object with it   itself: an array in shards, for example
DTensor, `DTensorSpec`, and other      its placements over its mesh
objects with placements
array or sharding of jax               its `PartitionSpec` over its mesh
parameter of Megatron                  its attributes (`tensor_model_parallel`,
                                       `partition_dim`, `partition_stride`, `partition_sizes`),
                                       over the ranks that are given with it
=====================================  ==========================================================

Objects are known by their attributes and by the module of their type: no framework is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reshard.errors import NotationError
from reshard.layout import Layout
from reshard.megatron.parameters import LocalParameter, MegatronParameter
from reshard.megatron.ranks import MegatronGrids, MegatronRanks
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor, jax
from reshard.notation.dtensor import sharding_of_placements
from reshard.notation.partitioned import PartitionedShard
from reshard.sharding import ShardingSpec


def sharding_of(value: Any, mesh: Any = None, shape: Sequence[int] | None = None) -> ShardingSpec:
    """Return the sharding of a live object.

    Args:
        value: a DTensor or another object with placements; an array or a sharding of jax; a
            parameter of Megatron; a `ShardingSpec`.
        mesh: the devices, for what has none of its own: a `PartitionSpec` of jax, or a parameter
            of Megatron, which knows its partitions, but not its ranks. A mesh of reshard, torch or
            jax; for a parameter also `MegatronRanks` or `MegatronGrids`. A parameter is sharded
            over the axis `tp`, and of an expert over `etp`.
        shape: of the whole tensor, for a sharding of jax that leaves out dimensions.

    Raises:
        NotationError: an object without a sharding, or that needs a mesh.
        SpecError, RuleError: attributes of a parameter that do not fit each other.

    >>> from reshard.megatron import LocalParameter, MegatronRanks
    >>> print(sharding_of(LocalParameter((4, 8), tensor_model_parallel=True), MegatronRanks(tp=2)))
    tp, -
    """
    # From the most specific to the least: a DTensor has attributes of later cases, too.
    if isinstance(value, ShardingSpec):
        return value
    if isinstance(value, MegatronParameter):
        return value.spec()
    if jax.is_jax(value):
        return jax.sharding_of_jax(value, _as_mesh(mesh), shape)
    if hasattr(value, "placements"):
        return dtensor.sharding_of_dtensor(value)
    if isinstance(getattr(value, "placement", None), PartitionedShard):
        # A `PartitionedTensor` of reshard.torch, whose splits all its ranks know.
        own_mesh = dtensor.mesh_of(value.mesh)
        return sharding_of_placements(own_mesh, [value.placement], value.local.ndim)
    if isinstance(getattr(value, "spec", None), ShardingSpec):
        spec: ShardingSpec = value.spec
        return spec
    has_ranks = isinstance(mesh, MegatronRanks | MegatronGrids) and hasattr(value, "shape")
    if hasattr(value, "tensor_model_parallel") or has_ranks:
        return _sharding_of_parameter(value, mesh)
    raise NotationError(
        f"{_describe(value)}; give a DTensor, an array or sharding of jax, a "
        "parameter of Megatron with mesh=MegatronRanks(...), or a ShardingSpec"
    )


def _describe(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, str):
        return f"{value!r} is a text, which `reshard.notation.read_sharding` reads"
    if isinstance(value, Layout):
        return "a Layout has the parts of each rank, and no mesh axes"
    return f"a value of type {kind} has no attributes of a sharding over ranks"


def _as_mesh(mesh: Any) -> DeviceMesh | None:
    """Convert a mesh of reshard, torch or jax to a `DeviceMesh`."""
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    if jax.is_jax(mesh):
        return jax.mesh_of(mesh)
    if hasattr(mesh, "mesh_dim_names"):
        return dtensor.mesh_of(mesh)
    raise NotationError(
        f"mesh={mesh!r} of type {type(mesh).__name__}; give a mesh of reshard, torch or jax, or "
        "MegatronRanks for a parameter of Megatron"
    )


def _sharding_of_parameter(value: Any, mesh: Any) -> ShardingSpec:
    local = value if isinstance(value, LocalParameter) else LocalParameter.of(value)
    if mesh is None:
        raise NotationError(
            "a parameter of Megatron has its partitions, but not its ranks; give them, such "
            "as mesh=MegatronRanks(tp=2, dp=4), or a mesh with an axis tp"
        )
    if isinstance(mesh, MegatronRanks | MegatronGrids):
        return MegatronParameter(mesh, **asdict(local)).spec()
    grid = _as_mesh(mesh)
    axis = "etp" if local.is_expert else "tp"
    if grid is None or (local.tensor_model_parallel and axis not in grid.axis_names):
        raise NotationError(
            f"the parameter is sharded over {axis}, but the mesh {mesh!r} has no such axis; name "
            f"its tensor-parallel axis {axis}, or give MegatronRanks"
        )
    return MegatronParameter(MegatronGrids(grid, grid), **asdict(local)).spec()
