"""Creation: the array API's functions that create arrays, with or without input data.

Each function accepts `spec=`: if possible, the array is then created in shards, without creating
the whole array first. Numbers have NumPy's types in both libraries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, plain_spec
from reshard.spmd.ops.arguments import explain_errors
from reshard.spmd.ops.data_types import check_device
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import runner_for


def read_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a new array. Raises UsageError if it is not a shape."""
    with explain_errors(f"shape {shape!r}", "give one whole number, or a tuple of them"):
        numbers = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        sizes = tuple(map(index, numbers))
    if min(sizes, default=0) < 0:
        raise UsageError(f"shape {shape!r} with a size below 0; give sizes of 0 or more")
    # NumPy's own error for it is a ValueError or a MemoryError, depending on the size.
    if math.prod(sizes) > sys.maxsize:
        raise UsageError(f"shape {shape!r} of more than {sys.maxsize} elements; give smaller sizes")
    return sizes


def _numpy_type(dtype: object) -> Any:
    return None if dtype is None else as_dtype(dtype).numpy


def asarray(
    obj: Any,
    /,
    *,
    dtype: object = None,
    device: object = None,
    copy: bool | None = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Return data as a sharded array, see `array`. Raises UsageError if it cannot share memory."""
    check_device(device, obj if isinstance(obj, ArrayValue) else None)
    # Lists and numbers do not have memory that can be shared.
    if copy is False and not isinstance(obj, ArrayValue) and not hasattr(obj, "shape"):
        raise UsageError(f"{type(obj).__name__} without a copy; leave out copy=False")
    if copy and hasattr(obj, "__array__") and not isinstance(obj, ArrayValue):
        obj = np.array(obj)
    if isinstance(obj, list | tuple):
        obj = _unwrap_lists(obj)
    return array(obj, spec, dtype=dtype)


def _unwrap_lists(data: Any) -> Any:
    """Return lists of numbers, with arrays of no dimensions as numbers."""
    if isinstance(data, list | tuple):
        return [_unwrap_lists(item) for item in data]
    if isinstance(data, ArrayValue):
        return data.to_dense()
    return data


def from_dlpack(x: Any, /, *, device: object = None, copy: bool | None = None) -> ShardedArray:
    """Convert another library's array by the DLPack protocol. Raises UsageError without it."""
    check_device(device)
    try:
        data = np.from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"from_dlpack of a {type(x).__name__}: {error}; give another library's array, on the "
            "CPU"
        ) from error
    return array(np.array(data) if copy else data)


def full(
    shape: int | Sequence[int],
    fill_value: Any,
    *,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create an array filled with a number."""
    check_device(device)
    sizes = read_shape(shape)
    with explain_errors(f"full of {fill_value!r}", "give one number"):
        # One element first: its type is that of the array, and a wrong value is refused before
        # shards.
        value = np.full((), fill_value, dtype=_numpy_type(dtype))
        element = as_dtype(value.dtype)
    runner = runner_for()
    if spec is None:
        return array(np.full(sizes, value), runner=runner)
    plain = plain_spec(spec)
    kind = ArrayType(sizes, element, plain)
    # Each rank creates its own shard: the whole array is never created.
    shards = tuple(
        runner.library.array(np.full(kind.layout.local_shape(rank) or (), value))
        for rank in runner.ranks(plain.mesh)
    )
    result: ShardedArray = ShardedArray.of_shards(kind, shards, runner)
    return result


def zeros(
    shape: int | Sequence[int],
    *,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create an array of zeros, of type `float64` by default.

    >>> from reshard import DeviceMesh, spec
    >>> zeros((3, 2), spec=spec(DeviceMesh.of(x=2), "x, -")).shards[1].tolist()
    [[0.0, 0.0]]
    """
    element_type = "float64" if dtype is None else dtype
    return full(shape, 0, dtype=element_type, device=device, spec=spec)


def ones(
    shape: int | Sequence[int],
    *,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create an array of ones, of type `float64` by default."""
    element_type = "float64" if dtype is None else dtype
    return full(shape, 1, dtype=element_type, device=device, spec=spec)


def empty(
    shape: int | Sequence[int],
    *,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create an array with unspecified elements: zeros, because arrays are immutable."""
    return zeros(shape, dtype=dtype, device=device, spec=spec)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create evenly spaced numbers from `start` (default 0) up to, but not including, `stop`."""
    check_device(device)
    low, high = (0, start) if stop is None else (start, stop)
    with explain_errors(
        f"arange from {low!r} to {high!r} by {step!r}", "give numbers, and a step that is not 0"
    ):
        numbers = np.arange(low, high, step, dtype=_numpy_type(dtype))
    return array(numbers, spec, runner=runner_for())


def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: object = None,
    device: object = None,
    endpoint: bool = True,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create `num` evenly spaced numbers."""
    check_device(device)
    ends: list[Any] = [start, stop]
    for end in ends:
        if isinstance(end, ArrayValue):
            raise UsageError(f"linspace from or to {end!r}; numbers were expected: float(x) is one")
    with explain_errors(
        f"linspace from {start!r} to {stop!r} of {num!r}", "give numbers, and how many: 0 or more"
    ):
        numbers = np.linspace(start, stop, num, endpoint=endpoint, dtype=_numpy_type(dtype))
    return array(numbers, spec, runner=runner_for())


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: object = None,
    device: object = None,
    spec: ShardingSpec | None = None,
) -> ShardedArray:
    """Create a matrix of ones on a diagonal, and zeros elsewhere."""
    check_device(device)
    numpy_type = np.float64 if dtype is None else _numpy_type(dtype)
    rows, columns = read_shape((n_rows, n_rows if n_cols is None else n_cols))
    with explain_errors(f"eye with its diagonal at {k!r}", "give a whole number"):
        matrix = np.eye(rows, columns, k=k, dtype=numpy_type)
    return array(matrix, spec, runner=runner_for())
