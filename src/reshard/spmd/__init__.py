"""Sharding propagation, and arrays that live in shards and compute at once."""

from __future__ import annotations

from reshard.spmd.operators.operator import Operator
from reshard.spmd.operators.table import operator_of, operators, rule, rule_of
from reshard.spmd.rule import OpShardingRule
from reshard.spmd.templates import (
    Template,
    broadcast_with_shapes_template,
    einsum_template,
    elementwise_template,
    matmul_template,
    reduce_template,
    reshape_template,
    transpose_template,
)

__all__ = [
    "OpShardingRule",
    "Operator",
    "Template",
    "broadcast_with_shapes_template",
    "einsum_template",
    "elementwise_template",
    "matmul_template",
    "operator_of",
    "operators",
    "reduce_template",
    "reshape_template",
    "rule",
    "rule_of",
    "transpose_template",
]
