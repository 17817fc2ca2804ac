"""Sharding propagation, and arrays that live in shards and compute at once.

The namespace has the functions of the array API standard for arrays in shards::

    import reshard.spmd as sp

    A = sp.array(data).shard(mesh, [DimSpec(["x"]), DimSpec([])])
    B = sp.exp(A @ W)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.operators.operator import Operator
from reshard.spmd.operators.table import operator_of, rule, rule_of
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

# The names of each module, loaded when they are first used.
_NAMES_OF = {
    "shards.array_type": "ArrayType",
    "propagation.cost_model": "Machine",
    "propagation.cost_propagation": "propagate_by_cost",
    "functions.creation": (
        "arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones "
        "ones_like tril triu zeros zeros_like"
    ),
    "functions.data_types": (
        "astype bool can_cast complex128 complex64 finfo float32 float64 iinfo int16 int32 int64 "
        "int8 isdtype result_type uint16 uint32 uint64 uint8"
    ),
    "functions.elementwise": (
        "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert "
        "bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos "
        "cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot imag isfinite "
        "isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not "
        "logical_or logical_xor matmul maximum minimum multiply negative nextafter not_equal "
        "positive pow real reciprocal remainder round sign signbit sin sinh sqrt square subtract "
        "tan tanh trunc where"
    ),
    "propagation.graph": "Graph Operation Value",
    "tracing.graph_recording": "abstract",
    "functions.indexing": "take take_along_axis",
    "functions.linalg": "tensordot vecdot",
    "functions.manipulation": (
        "broadcast_arrays broadcast_shapes broadcast_to concat expand_dims flip matrix_transpose "
        "moveaxis permute_dims repeat reshape roll squeeze stack tile unstack"
    ),
    "functions.networks": (
        "attention cross_entropy einsum embedding gelu layer_norm log_softmax logsumexp one_hot "
        "relu rms_norm sigmoid silu softmax top_k"
    ),
    "shards.operation_call": "Recorder recording",
    "propagation.placement": "PlacedGraph explicit_reshards",
    "shards.process_runner": "over_processes",
    "propagation.propagation": "PropagatedGraph propagate propagate_graph",
    "shards.runner": "in_process running",
    "functions.searching": (
        "argmax argmin argsort diff isin nonzero searchsorted sort unique_all unique_counts "
        "unique_inverse unique_values"
    ),
    "arrays.sharded_array": "ShardedArray array from_shards",
    "nabla": (
        "get_mesh_from_args has_sharded_inputs infer_output_sharding reshard_tensor slice_for_shard"
    ),
    "functions.statistics": (
        "all any count_nonzero cumulative_prod cumulative_sum max mean min prod std sum var"
    ),
    "tracing.trace": "Trace trace",
    "functions.windows": (
        "avg_pool convolution dynamic_slice dynamic_update_slice max_pool pad scatter split"
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_CONSTANTS = {
    "e": 2.718281828459045,
    "inf": float("inf"),
    "nan": float("nan"),
    "newaxis": None,
    "pi": 3.141592653589793,
}

__all__ = [
    "DeviceMesh",
    "DimSpec",
    "OpShardingRule",
    "Operator",
    "ShardingSpec",
    "Template",
    "Tensor",
    "broadcast_with_shapes_template",
    "einsum_template",
    "elementwise_template",
    "fft",
    "linalg",
    "matmul_template",
    "operator_of",
    "reduce_template",
    "reshape_template",
    "rule",
    "rule_of",
    "transpose_template",
    *_CONSTANTS,
    *_MODULE_OF,
]


def __getattr__(name: str) -> Any:
    """Load a part of the namespace when it is first used."""
    if name in _MODULE_OF:
        found = getattr(import_module(f"reshard.spmd.{_MODULE_OF[name]}"), name)
    elif name in _CONSTANTS:
        found = _CONSTANTS[name]
    elif name in ("fft", "linalg"):
        return import_module(f"reshard.spmd.functions.{name}")
    elif name == "Tensor":
        # The name that arrays have in nabla, whose programs run as they are.
        found = import_module("reshard.spmd.arrays.sharded_array").ShardedArray
    elif name == "__array_namespace_info__":
        found = import_module("reshard.spmd.functions.inspection").namespace_info
    else:
        raise AttributeError(f"module 'reshard.spmd' has no attribute {name!r}")
    globals()[name] = found
    return found
