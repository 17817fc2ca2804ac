"""nabla's names for sharding, propagation and arrays, so that its programs run with this module.

    from reshard.spmd.nabla import DeviceMesh, DimSpec, Tensor

Its documents name meshes and specs, arrays (`Tensor.ones(...).trace()`), templates of rules, the
strategies of propagation, and the questions that an operation asks of its arguments: is any
sharded, over which mesh, how is the result, which part is a device's. Arrays in shards ask and
answer all of that themselves, at every operation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import index as as_index
from typing import Any

from reshard._validation import check_type
from reshard.errors import MeshError, SpecError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.arrays import creation
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.backend import library_of
from reshard.spmd.core.operator import Operator, likely_name, operator_of
from reshard.spmd.propagation.propagation import propagate
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import Template as OpShardingRuleTemplate
from reshard.spmd.rules.templates import (
    broadcast_with_shapes_template,
    elementwise_template,
    matmul_template,
    reduce_template,
    transpose_template,
)
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import common_mesh, infer_specs
from reshard.spmd.tracing.trace import trace

__all__ = [
    "AGGRESSIVE",
    "BASIC",
    "COST",
    "DeviceMesh",
    "DimSpec",
    "OpShardingRule",
    "OpShardingRuleTemplate",
    "PropagationStrategy",
    "ShardingSpec",
    "Tensor",
    "broadcast_with_shapes_template",
    "elementwise_template",
    "get_mesh_from_args",
    "has_sharded_inputs",
    "infer_output_sharding",
    "matmul_template",
    "propagate_sharding",
    "reduce_template",
    "reshard_tensor",
    "slice_for_shard",
    "transpose_template",
]


class PropagationStrategy(enum.StrEnum):
    """How a conflict between the shardings of several tensors is resolved.

    The first two are those of nabla's document. Each is the name of a strategy of
    `reshard.spmd.propagate_graph`, `trace` and `jit`.
    """

    BASIC = "prioritized"
    """The longest common prefix; a stronger user priority wins a conflict."""
    AGGRESSIVE = "widest"
    """The sharding with more shards; a stronger user priority wins a conflict."""
    SHARDY_BASIC = "basic"
    """The longest common prefix, as Shardy computes it: weaker priorities conflict, too."""
    SHARDY_AGGRESSIVE = "aggressive"
    """Each tensor takes what is compatible with it, as in Shardy."""
    COST = "cost"
    """The least estimated time, for whole graphs; nabla has no such strategy."""


# nabla's documents use these names without the class.
BASIC = PropagationStrategy.BASIC
AGGRESSIVE = PropagationStrategy.AGGRESSIVE
COST = PropagationStrategy.COST


class _ArrayClass(type):
    """Arrays in shards are instances of `Tensor`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ShardedArray)


class Tensor(ShardedArray, metaclass=_ArrayClass):
    """nabla's name for sharded arrays, with its constructors, of `float32` elements.

    >>> x = Tensor.ones((4, 8)).trace()
    >>> x, isinstance(x, Tensor), Tensor([1, 2]).type
    (<ShardedArray float32[4, 8]>, True, ArrayType(int64[2]))
    """

    __slots__ = ()

    def __new__(cls, data: Any, spec: ShardingSpec | None = None) -> Any:
        # An array in shards as any other: `Tensor` adds names, not a class of values.
        return array(data, spec)

    @staticmethod
    def zeros(shape: int | Sequence[int], dtype: object = "float32") -> ShardedArray:
        """Create an array of zeros."""
        return creation.zeros(shape, dtype=dtype)

    @staticmethod
    def ones(shape: int | Sequence[int], dtype: object = "float32") -> ShardedArray:
        """Create an array of ones."""
        return creation.ones(shape, dtype=dtype)

    @staticmethod
    def full(shape: int | Sequence[int], value: complex, dtype: object = "float32") -> ShardedArray:
        """Create an array of a single number."""
        return creation.full(shape, value, dtype=dtype)

    @staticmethod
    def arange(
        start: float, stop: float | None = None, step: float = 1, dtype: object = "float32"
    ) -> ShardedArray:
        """Create numbers from `start` up to `stop`, or from 0 up to `start`."""
        return creation.arange(start, stop, step, dtype=dtype)

    @staticmethod
    def from_dlpack(data: Any) -> ShardedArray:
        """Create an array from another library's array."""
        return creation.from_dlpack(data)


def _type_of(argument: Any) -> ArrayType | None:
    """Return the type of an array in shards, or of a library's whole array; None for a number."""
    if isinstance(argument, ArrayValue):
        return argument.type
    if isinstance(argument, ArrayType):
        return argument
    library = library_of(argument)
    if library is not None:
        return ArrayType(argument.shape, library.dtype_of(argument))
    if isinstance(argument, int | float | complex):
        return None
    raise UsageError(
        f"{argument!r}, a {type(argument).__name__}, as an operand; arrays and numbers were "
        "expected: make it one with sp.array"
    )


def has_sharded_inputs(args: Any) -> bool:
    """Return whether any argument is an array with a sharding.

    Args:
        args: the arguments, and lists, tuples and dictionaries of them.

    >>> import reshard.spmd as sp
    >>> x = sp.ones((4, 2))
    >>> sharded = x.shard(DeviceMesh.of(x=2), [["x"], []])
    >>> has_sharded_inputs([x, 3]), has_sharded_inputs(([x, sharded], 0))
    (False, True)
    """
    return any(kind.spec is not None for kind in _array_types(args))


def get_mesh_from_args(args: Any) -> DeviceMesh | None:
    """Return the mesh of the sharded arguments, or None if there is none.

    Args:
        args: the arguments, and lists, tuples and dictionaries of them.

    Raises MeshError if there are several meshes; it names two of them.
    """
    return common_mesh("an operation", _array_types(args))


def _array_types(args: Any) -> list[ArrayType]:
    tree = args if isinstance(args, dict | list | tuple) else [*args]
    return [value.type for _, value in leaves(tree) if isinstance(value, ArrayValue)]


def propagate_sharding(
    rule: OpShardingRule,
    input_specs: Sequence[ShardingSpec | None],
    output_specs: Sequence[ShardingSpec | None],
    strategy: PropagationStrategy | str = PropagationStrategy.BASIC,
    max_priority: int | None = None,
) -> tuple[tuple[ShardingSpec | None, ...], tuple[ShardingSpec | None, ...]]:
    """Propagate shardings between the inputs and outputs of an operation.

    nabla's function changes its specs in place and returns whether any changed. Specs are immutable
    here, so it returns the new ones.

    Args:
        rule: of the operation.
        input_specs, output_specs: the known shardings, None for unknown ones.
        strategy: any but `COST`, which needs a graph.
        max_priority: dimensions of a higher priority number keep their sharding and propagate
            nothing; None for all dimensions.

    Raises:
        SpecError: shardings of several meshes, or with another number of dimensions; an unknown
            strategy.

    >>> from reshard import spec
    >>> mesh = DeviceMesh.of(a=2, b=4)
    >>> rule = elementwise_template(1).rule((8,), (8,))
    >>> str(propagate_sharding(rule, [spec(mesh, "a ?"), spec(mesh, "b ?!1")], [None])[1][0])
    'a ?'
    """
    return propagate(
        rule, input_specs, output_specs, strategy=str(strategy), max_priority=max_priority
    )


def infer_output_sharding(
    op: str | Operator | Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh | None = None,
    **attributes: Any,
) -> ShardingSpec | tuple[ShardingSpec, ...]:
    """Infer the sharding of an operation's result, without executing it.

    Args:
        op: the name of an operator in the table of rules, its row, or a function on arrays in
            shards, such as `reshard.spmd.matmul`.
        args: arrays in shards, arrays of NumPy or PyTorch, and numbers.
        mesh: of the arguments when None.
        attributes: of the operator, such as `axis`.

    Returns:
        One sharding; a tuple for an operator with several results.

    Raises:
        MeshError: arguments over different meshes.
        UsageError: no mesh, given or of the arguments; other values than operations and arguments.
        SpecError: shapes or attributes that the operator cannot have.

    >>> import reshard.spmd as sp
    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> a, w = sp.ones((4, 8), spec=spec(mesh, "x, y")), sp.ones((8, 6))
    >>> str(infer_output_sharding("matmul", [a, w], mesh))
    'x, - | sum(y)'
    >>> str(infer_output_sharding(sp.softmax, [a], axis=0))
    'x, y'
    """
    if isinstance(op, str):
        operator = operator_of(op)
    elif isinstance(op, Operator):
        operator = op
    elif callable(op):
        return _trace_sharding(op, args, mesh, attributes)
    else:
        raise UsageError(
            f"{op!r} is no operation; give the name of one, such as 'matmul', or a function of "
            "arrays in shards, such as reshard.spmd.matmul"
        )
    types = [_type_of(arg) for arg in args]
    mesh = _find_mesh(operator.name, types, mesh)
    if not operator.has_rule:
        shapes = [() if array_type is None else array_type.shape for array_type in types]
        raise SpecError(
            f"{operator.name} of shapes {shapes} has no rule: its operands are replicated, and its "
            f"result is; give it one with @reshard.spmd.rule({operator.name!r})"
            f"{likely_name(operator.name)}"
        )
    specs = infer_specs(operator, types, attributes, mesh).result_specs
    return specs[0] if len(specs) == 1 else specs


def _find_mesh(name: str, types: Sequence[ArrayType | None], mesh: DeviceMesh | None) -> DeviceMesh:
    # The arguments' mesh, which must be `mesh` if both exist.
    # Compared by identity below: meshes are interned.
    common = common_mesh(name, types) or mesh
    if common is None:
        raise UsageError(f"{name} of arrays that are not sharded, without a mesh; give mesh=")
    if mesh is not None and common is not mesh:
        raise MeshError(
            f"{name} of arrays over {common!r}, but mesh= is {mesh!r}; give the same one"
        )
    return common


def _trace_sharding(
    function: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh | None,
    attributes: dict[str, Any],
) -> ShardingSpec | tuple[ShardingSpec, ...]:
    """Return the shardings of a function's results, which are inferred by tracing it."""
    types = [_type_of(arg) for arg in args]
    used_mesh = _find_mesh(getattr(function, "__name__", repr(function)), types, mesh)
    # Arrays as their types: nothing is computed.
    inputs = [
        arg if array_type is None else array_type
        for arg, array_type in zip(args, types, strict=True)
    ]
    outputs = trace(lambda *operands: function(*operands, **attributes), *inputs).outputs
    specs = tuple(output.spec or replicated(used_mesh, output.ndim) for output in outputs)
    return specs[0] if len(specs) == 1 else specs


def slice_for_shard(
    tensor: Any, shape: Sequence[int], sharding: ShardingSpec | None, index: int
) -> Any:
    """Return the shard of a full array on a device.

    Args:
        tensor: an array of NumPy or PyTorch, or an array in shards.
        shape: of the whole array.
        sharding: of it; all of it where None.
        index: the device's place in the mesh's list of devices.

    Raises:
        SpecError: a shape that is not the array's, or a sharding for another number of dimensions.
        UsageError: a value that is not an array; a place outside the mesh; a part in pieces.

    >>> import numpy as np
    >>> from reshard import spec
    >>> slice_for_shard(np.arange(5), (5,), spec(DeviceMesh.of(x=2), "x"), 1).tolist()
    [3, 4]
    """
    whole = _array_of("slice_for_shard", tensor)
    whole = whole.to_dense() if isinstance(whole, ArrayValue) else whole
    if tuple(whole.shape) != tuple(shape):
        raise SpecError(
            f"an array of shape {list(whole.shape)} is not of {list(shape)}; give its own shape"
        )
    if sharding is None:
        return whole
    if not hasattr(index, "__index__") or not 0 <= as_index(index) < sharding.mesh.size:
        raise UsageError(
            f"device {index!r} of a mesh of {sharding.mesh.size}; give a whole number, from 0 on"
        )
    layout = sharding.layout(shape)
    device = sharding.mesh.devices[index]
    boxes = layout.boxes(device)
    if len(boxes) > 1:
        raise UsageError(
            f"`{sharding}` gives device {index} {len(boxes)} pieces; x.shard(...) distributes them"
        )
    if boxes:
        return whole[tuple(map(slice, boxes[0].start, boxes[0].stop))]
    # An empty part keeps the lengths of the dimensions that are not empty.
    # A layout of several dimensions lacks a box for an empty part, so each dimension is laid out
    # alone.
    alone = [ShardingSpec(sharding.mesh, (dim,)) for dim in sharding.dim_specs]
    parts = [
        spec.layout((size,)).local_shape(device) for spec, size in zip(alone, shape, strict=True)
    ]
    return whole[tuple(slice(0, part[0] if part else 0) for part in parts)]


def reshard_tensor(
    tensor: Any,
    from_spec: ShardingSpec | None,
    to_spec: ShardingSpec | None,
    mesh: DeviceMesh,
) -> ShardedArray:
    """Reshard an array; None means replicated on every device of the mesh.

    Args:
        tensor: an array in shards, or a whole array of NumPy or PyTorch.
        from_spec: its sharding, which is checked; None if it is not known.
        to_spec: the sharding wanted.
        mesh: of both shardings.

    Raises:
        UsageError: a value that is not an array, a sharding or a mesh.
        SpecError: an array that is not sharded by `from_spec`.
        MeshError: a sharding over another mesh.

    >>> import numpy as np
    >>> from reshard import spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> reshard_tensor(np.arange(4), None, spec(mesh, "x"), mesh).shards[1].tolist()
    [2, 3]
    """
    value = _array_of("reshard_tensor", tensor)
    x: ShardedArray = value if isinstance(value, ShardedArray) else array(value)
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"reshard_tensor over {mesh!r}; give the DeviceMesh of the shardings")
    for name, spec in (("from_spec", from_spec), ("to_spec", to_spec)):
        if spec is None:
            continue
        check_type(spec, ShardingSpec, name, "give reshard.spec(mesh, 'x, -')")
        if spec.mesh is not mesh:
            raise MeshError(
                f"mesh {mesh!r}, but {name} `{spec}` is over {spec.mesh!r}; give the mesh of the "
                "shardings"
            )
    expected = None if from_spec is None or x.spec is None else from_spec.layout(x.shape)
    # Layouts, since shardings of other texts may put the elements in the same places.
    if expected is not None and x.type.layout is not expected:
        raise SpecError(
            f"the array is sharded by `{x.spec}`, not by `{from_spec}`; give x.spec as from_spec"
        )
    return x.shard(replicated(mesh, x.ndim) if to_spec is None else to_spec)


def _array_of(name: str, tensor: Any) -> Any:
    """Return an array in shards or of a library. Raises UsageError for anything else."""
    if isinstance(tensor, ArrayValue) or library_of(tensor) is not None:
        return tensor
    raise UsageError(
        f"{name} of {tensor!r}, a {type(tensor).__name__}; an array in shards, or of NumPy or "
        "PyTorch, was expected: make it one with sp.array"
    )
