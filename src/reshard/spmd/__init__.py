"""Sharded arrays with the array API, and sharding propagation.

The namespace has the functions of the array API standard for sharded arrays::

    import reshard.spmd as sp

    A = sp.array(data).shard(mesh, [DimSpec(["x"]), DimSpec([])])
    B = sp.exp(A @ W)
"""

from __future__ import annotations

from typing import Any

from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd import namespace
from reshard.spmd.core.operator import Operator, operator_of, register, rule, rule_of
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import (
    Template,
    broadcast_with_shapes_template,
    einsum_template,
    elementwise_template,
    matmul_template,
    reduce_template,
    reshape_template,
    transpose_template,
)

__array_api_version__ = "2024.12"

__all__ = [
    "DeviceMesh",
    "DimSpec",
    "OpShardingRule",
    "Operator",
    "ShardingSpec",
    "Template",
    "broadcast_with_shapes_template",
    "einsum_template",
    "elementwise_template",
    "matmul_template",
    "operator_of",
    "reduce_template",
    "register",
    "reshape_template",
    "rule",
    "rule_of",
    "transpose_template",
    *namespace.list_names(),
]

globals().update(namespace.load_functions())


def __getattr__(name: str) -> Any:
    """Load a part of the namespace when it is first used."""
    value = namespace.find(name)
    if name in __all__:  # A user's row may be replaced by another.
        globals()[name] = value
    return value
