"""The names of `reshard.spmd`: which module has each, loaded when the name is first used.

A registry: modules below find functions of the namespace here by name, and never import it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_FAMILIES = (
    "ops.elementwise",
    "ops.products",
    "ops.reductions",
    "ops.movement",
    "ops.indexing",
    "ops.ordering",
    "ops.windows",
    "ops.networks",
    "ops.attention",
    "ops.ring_attention",
    "ops.linalg",
    "arrays.fft",
    "arrays.random",
    "ops.foreign",
)
"""The modules of families of operators."""

_NAMES_OF = {
    "core.array_type": "ArrayType",
    "propagation.by_cost.cost_model": "Machine",
    "propagation.by_cost.cost_propagation": "propagate_by_cost",
    "arrays.creation": ("arange asarray empty eye from_dlpack full linspace ones zeros"),
    "ops.filling": "empty_like full_like ones_like tril triu zeros_like",
    "ops.data_types": (
        "astype bool can_cast complex128 complex64 finfo float32 float64 iinfo int16 int32 int64 "
        "int8 isdtype result_type uint16 uint32 uint64 uint8"
    ),
    "ops.elementwise": "clip where",
    "graph": "Graph Operation Value",
    "tracing.graph_recording": "abstract",
    "ops.indexing": (
        "dynamic_slice dynamic_update_slice embedding one_hot scatter take take_along_axis"
    ),
    "ops.products": "einsum matmul tensordot vecdot",
    "ops.attention": "attention",
    "ops.movement": (
        "broadcast_arrays broadcast_shapes broadcast_to concat expand_dims flip matrix_transpose "
        "meshgrid moveaxis pad permute_dims repeat reshape roll split squeeze stack tile unstack"
    ),
    "ops.networks": ("cross_entropy gelu layer_norm log_softmax logsumexp rms_norm softmax"),
    "shards.operation_call": "Recorder recording",
    "propagation.reshards": "PlacedGraph explicit_reshards",
    "shards.checking": "checking",
    "shards.process_runner": "over_processes",
    "propagation.propagation": "PropagatedGraph propagate",
    "propagation.strategies": "propagate_graph",
    "shards.runner": "in_process running",
    "ops.ordering": (
        "argsort diff isin nonzero searchsorted sort top_k unique_all unique_counts "
        "unique_inverse unique_values"
    ),
    "arrays.random": "dropout",
    "arrays.saved_arrays": "load save save_async",
    "arrays.sharded_array": "ShardedArray array from_shards",
    "nabla": (
        "PropagationStrategy Tensor get_mesh_from_args has_sharded_inputs infer_output_sharding "
        "propagate_sharding reshard_tensor slice_for_shard"
    ),
    "ops.reductions": (
        "all any argmax argmin count_nonzero cumulative_prod cumulative_sum max mean min prod std "
        "sum var"
    ),
    "tracing.trace": "Trace trace",
    "gradients.expert_routing": "ExpertRouting expert_routing",
    "gradients.tape": "gradient",
    "gradients.optimizers": "AdamW SGD specs_over",
    "gradients.rematerialization": "rematerialized",
    "gradients.transforms": "grad value_and_grad vjp",
    "programs.auto": "AutoPlacement auto",
    "programs.control_flow": "cond scan while_loop",
    "programs.eager_operations": "eagerly",
    "programs.jit": "jit",
    "programs.custom_ops": "operator",
    "programs.pipelines.pipeline": "Pipeline",
    "programs.pipelines.schedule": (
        "PipelineSchedule PipelineTask StageCosts Timetable Work pipeline_schedule"
    ),
    "ops.windows": "avg_pool convolution max_pool",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_EXTENSIONS = {
    "fft": "arrays.fft",
    "linalg": "ops.linalg",
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
# Names that differ in their modules.
_OTHERS = {
    "eager_operation": ("programs.eager_operations", "eager_operation"),
    "ring_attention": ("gradients.ring_attention", "ring_attention"),
    "__array_namespace_info__": ("ops.data_types", "namespace_info"),
}


def list_names() -> list[str]:
    """Return all names of the namespace that have a module."""
    return [*_CONSTANTS, *_EXTENSIONS, *_MODULE_OF, *load_functions()]


@cache
def load_functions() -> dict[str, Any]:
    """Return the elementwise operators that are functions by their records alone, by name."""
    elementwise = import_module("reshard.spmd.ops.elementwise")
    registry = import_module("reshard.spmd.core.operator")
    return {name: getattr(elementwise, name) for name in registry.documented_operators()}


@cache
def load_families() -> None:
    """Import all families of operators, which add their records."""
    # By name: a function of the namespace may have the name of its module.
    for family in _FAMILIES:
        import_module(f"reshard.spmd.{family}")


def find(name: str) -> Any:
    """Return the object of a name of the namespace. Raises AttributeError for an unknown name.

    >>> find("exp").__name__, find("pi")
    ('exp', 3.141592653589793)
    """
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _EXTENSIONS:
        return import_module(f"reshard.spmd.{_EXTENSIONS[name]}")
    place, own = _OTHERS.get(name) or (_MODULE_OF.get(name, ""), name)
    if place:
        return getattr(import_module(f"reshard.spmd.{place}"), own)
    if name in load_functions():
        return load_functions()[name]
    # A user's operator whose record has a `doc` is a function.
    registry = import_module("reshard.spmd.core.operator")
    # Python looks up names such as __path__, for which no family is imported.
    operator = None if name.startswith("_") else registry.operators.get(name)
    if operator is None or not operator.doc:
        end = "" if name.startswith("_") else registry.likely_name(name)
        raise AttributeError(f"module 'reshard.spmd' has no attribute {name!r}{end}")
    return import_module("reshard.spmd.ops.elementwise").make_function(operator)


def module() -> Any:
    """Return the namespace itself: `reshard.spmd`."""
    return import_module("reshard.spmd")
