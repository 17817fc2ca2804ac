"""The names of `reshard.spmd`: which module has each, loaded when the name is first used.

A registry: modules below find functions of the namespace here by name, and never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES_OF = {
    "core.array_type": "ArrayType",
    "propagation.by_cost.cost_model": "Machine",
    "propagation.by_cost.cost_propagation": "propagate_by_cost",
    "arrays.creation": ("arange asarray empty eye from_dlpack full linspace ones zeros"),
    "functions.filling": "empty_like full_like ones_like tril triu zeros_like",
    "functions.data_types": (
        "astype bool can_cast complex128 complex64 finfo float32 float64 iinfo int16 int32 int64 "
        "int8 isdtype result_type uint16 uint32 uint64 uint8"
    ),
    "functions.elementwise": "clip where",
    "graph": "Graph Operation Value",
    "tracing.graph_recording": "abstract",
    "functions.indexing": "take take_along_axis",
    "functions.linalg": "tensordot vecdot",
    "functions.manipulation": (
        "broadcast_arrays broadcast_shapes broadcast_to concat expand_dims flip matrix_transpose "
        "meshgrid moveaxis permute_dims repeat reshape roll squeeze stack tile unstack"
    ),
    "functions.networks": (
        "attention cross_entropy einsum embedding gelu layer_norm log_softmax logsumexp one_hot "
        "relu rms_norm sigmoid silu softmax top_k"
    ),
    "shards.operation_call": "Recorder recording",
    "placement.placement": "PlacedGraph explicit_reshards",
    "shards.checking": "checking",
    "shards.process_runner": "over_processes",
    "propagation.propagation": "PropagatedGraph propagate",
    "propagation.strategies": "propagate_graph",
    "shards.runner": "in_process running",
    "functions.searching": (
        "argmax argmin argsort diff isin nonzero searchsorted sort unique_all unique_counts "
        "unique_inverse unique_values"
    ),
    "arrays.random": "dropout",
    "arrays.saved_arrays": "load save save_async",
    "arrays.sharded_array": "ShardedArray array from_shards",
    "nabla": (
        "PropagationStrategy Tensor get_mesh_from_args has_sharded_inputs infer_output_sharding "
        "propagate_sharding reshard_tensor slice_for_shard"
    ),
    "functions.statistics": (
        "all any count_nonzero cumulative_prod cumulative_sum max mean min prod std sum var"
    ),
    "tracing.trace": "Trace trace",
    "gradients.expert_routing": "ExpertRouting expert_routing",
    "gradients.table": "gradient",
    "gradients.optimizers": "AdamW SGD specs_over",
    "gradients.rematerialization": "rematerialized",
    "gradients.transforms": "grad value_and_grad vjp",
    "programs.automatic.auto": "AutoPlacement auto",
    "programs.control_flow": "cond scan while_loop",
    "programs.eager_operations": "eagerly",
    "programs.jit": "jit",
    "programs.own_operators": "operator",
    "programs.pipelines.orders": "pipeline_schedule",
    "programs.pipelines.pipeline": "Pipeline",
    "programs.pipelines.schedule": "PipelineSchedule PipelineTask Work",
    "programs.pipelines.timetable": "StageCosts Timetable",
    "functions.windows": "dynamic_slice dynamic_update_slice pad scatter split",
    "ops.windows": "avg_pool convolution max_pool",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_EXTENSIONS = {
    "fft": "arrays.fft",
    "linalg": "functions.linalg",
    "nabla": "nabla",
    "random": "arrays.random",
}
_CONSTANTS = {
    "e": 2.718281828459045,
    "inf": float("inf"),
    "nan": float("nan"),
    "newaxis": None,
    "pi": 3.141592653589793,
}
# Names that their modules have by another one.
_OTHERS = {
    "eager_operation": ("programs.eager_operations", "eager_operation"),
    "ring_attention": ("gradients.ring_attention", "ring_attention"),
    "__array_namespace_info__": ("functions.inspection", "namespace_info"),
}

NAMES = (*_CONSTANTS, *_EXTENSIONS, *_MODULE_OF)
"""All names that are loaded when they are first used."""


def find(name: str) -> Any:
    """The object of a name of the namespace. Raises AttributeError for an unknown name.

    >>> find("exp").__name__, find("pi")
    ('exp', 3.141592653589793)
    """
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _EXTENSIONS:
        return import_module(f"reshard.spmd.{_EXTENSIONS[name]}")
    place, own = _OTHERS.get(name) or (_MODULE_OF.get(name, ""), name)
    if not place:
        # What no module has by itself, a row of the table of operators may make.
        table = import_module("reshard.spmd.core.operator")
        row = table.operators.get(name)
        if row is None or not row.doc:
            end = "" if name.startswith("_") else table.likely_name(name)
            raise AttributeError(f"module 'reshard.spmd' has no attribute {name!r}{end}")
        place = "functions.elementwise"
    return getattr(import_module(f"reshard.spmd.{place}"), own)


def module() -> Any:
    """The namespace itself: `reshard.spmd`."""
    return import_module("reshard.spmd")
