"""What nabla's sharding module asks, under its names: which mesh, which sharding, which slice.

The functions are for programs written for it; arrays in shards ask and answer all of it
themselves, at every operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from reshard.errors import MeshError, SpecError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.array_type import ArrayType
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.operators.table import operator_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import common_mesh, laid_out
from reshard.spmd.shards.runner import replicated


def _types(args: Iterable[Any]) -> list[ArrayType | None]:
    return [one.type if isinstance(one, ArrayValue) else None for one in args]


def has_sharded_inputs(args: Iterable[Any]) -> bool:
    """Whether one of the arguments is an array with a sharding.

    >>> import reshard.spmd as sp
    >>> x = sp.ones((4, 2))
    >>> has_sharded_inputs([x, 3]), has_sharded_inputs([x.shard(DeviceMesh.of(x=2), [["x"], []])])
    (False, True)
    """
    return any(one is not None and one.spec is not None for one in _types(args))


def get_mesh_from_args(args: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of the arguments that are sharded; None where none is.

    Raises MeshError where there are two, and names both.
    """
    return common_mesh("an operation", _types(args))


def infer_output_sharding(
    op: str, args: Sequence[Any], mesh: DeviceMesh | None = None, **attributes: Any
) -> ShardingSpec | tuple[ShardingSpec, ...]:
    """The sharding that the result of an operation will have, without carrying it out.

    Args:
        op: the name of the operator, as in the table of rules.
        args: arrays in shards, and numbers.
        mesh: of the arguments when None.
        attributes: of the operator, such as `axis`.

    Returns:
        One sharding; a tuple for an operator with several results.

    Raises:
        MeshError: arguments over different meshes.
        UsageError: no mesh, given or of the arguments.
        SpecError: shapes or attributes that the operator cannot have.

    >>> import reshard.spmd as sp
    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> a, w = sp.ones((4, 8), spec=spec(mesh, "x, y")), sp.ones((8, 6))
    >>> str(infer_output_sharding("matmul", [a, w], mesh))
    'x, - | sum(y)'
    """
    types = _types(args)
    found = common_mesh(op, types) or mesh
    if found is None:
        raise UsageError(f"{op} of arrays that are not sharded, without a mesh; give mesh=")
    if mesh is not None and found is not mesh:
        raise UsageError(f"{op} of arrays over {found!r}, but mesh= is {mesh!r}; give the same one")
    operator = operator_of(op)
    if not operator.has_rule:
        shapes = [() if one is None else one.shape for one in types]
        raise SpecError(
            f"{op} of shapes {shapes} has no rule: its operands are replicated, and its result is"
        )
    specs = laid_out(operator, types, attributes, found).result_specs
    return specs[0] if len(specs) == 1 else specs


def slice_for_shard(
    tensor: Any, shape: Sequence[int], sharding: ShardingSpec | None, index: int
) -> Any:
    """The part of a whole array that one device has.

    Args:
        tensor: an array of NumPy or PyTorch, or one in shards.
        shape: of the whole array.
        sharding: of it; all of it where None.
        index: the device's place in the mesh's list of devices.

    Raises:
        SpecError: a shape that is not the array's, or a sharding for another one.
        UsageError: a place that the mesh has not, a part that is not one rectangle.

    >>> import numpy as np
    >>> from reshard import spec
    >>> slice_for_shard(np.arange(5), (5,), spec(DeviceMesh.of(x=2), "x"), 1).tolist()
    [3, 4]
    """
    whole = tensor.to_dense() if isinstance(tensor, ArrayValue) else tensor
    if tuple(whole.shape) != tuple(shape):
        raise SpecError(f"an array of shape {list(whole.shape)} is not of {list(shape)}")
    if sharding is None:
        return whole
    if not 0 <= index < sharding.mesh.size:
        raise UsageError(f"device {index} of a mesh of {sharding.mesh.size}; count from 0")
    layout = sharding.layout(shape)
    boxes = layout.boxes(sharding.mesh.devices[index])
    if len(boxes) > 1:
        raise UsageError(
            f"`{sharding}` gives device {index} {len(boxes)} pieces; x.shard(...) deals them out"
        )
    start, stop = (boxes[0].start, boxes[0].stop) if boxes else ((0,) * len(shape),) * 2
    return whole[tuple(map(slice, start, stop))]


def reshard_tensor(
    tensor: Any,
    from_spec: ShardingSpec | None,
    to_spec: ShardingSpec | None,
    mesh: DeviceMesh,
) -> ShardedArray:
    """The same array in another sharding; None means a copy on every device of the mesh.

    Raises SpecError for an array that is not sharded as `from_spec` says, MeshError for a
    sharding over another mesh.
    """
    x: ShardedArray = tensor
    for name, given in (("from_spec", from_spec), ("to_spec", to_spec)):
        if given is not None and given.mesh is not mesh:
            raise MeshError(
                f"mesh {mesh!r}, but {name} `{given}` is over {given.mesh!r}; give the mesh of the "
                "shardings"
            )
    if (
        from_spec is not None
        and x.spec is not None
        and x.type.layout is not from_spec.layout(x.shape)
    ):
        raise SpecError(f"the array is sharded by `{x.spec}`, not by `{from_spec}`")
    return x.shard(replicated(mesh, x.ndim) if to_spec is None else to_spec)
