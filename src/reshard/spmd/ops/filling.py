"""Arrays with the shape and sharding of another array, and triangles of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.spmd.core.array_type import without_partial
from reshard.spmd.core.result_types import BY_KIND
from reshard.spmd.ops import elementwise
from reshard.spmd.ops.arguments import as_whole, explain_errors, of_arrays
from reshard.spmd.ops.data_types import astype, check_device
from reshard.spmd.ops.movement import broadcast_to


@of_arrays
def full_like(x: Any, /, fill_value: Any, *, dtype: object = None, device: object = None) -> Any:
    """Create an array filled with a number, with the shape and sharding of another."""
    check_device(device, x)
    target = x.dtype if dtype is None else as_dtype(dtype)
    value = _make_scalar(x, fill_value, target)
    spec = x.type.spec
    filled = broadcast_to(value, x.shape)
    return filled if spec is None else filled.shard(without_partial(spec))


def _make_scalar(x: Any, value: Any, dtype: DType) -> Any:
    """Return a number as a zero-dimensional array for an operation with `x`."""
    # NumPy creates its own types directly; for other types an array is cast.
    is_numpys = any(dtype in types for types in BY_KIND.values())
    with explain_errors(f"{value!r} as {dtype}", "give a number of that type"):
        if is_numpys:
            return elementwise.whole(x, np.full((), value, dtype=dtype.numpy))
        return astype(elementwise.whole(x, np.full((), value)), dtype)


@of_arrays
def zeros_like(x: Any, /, *, dtype: object = None, device: object = None) -> Any:
    """Create zeros with the shape and the sharding of another array."""
    return full_like(x, 0, dtype=dtype, device=device)


@of_arrays
def ones_like(x: Any, /, *, dtype: object = None, device: object = None) -> Any:
    """Create ones with the shape and the sharding of another array."""
    return full_like(x, 1, dtype=dtype, device=device)


@of_arrays
def empty_like(x: Any, /, *, dtype: object = None, device: object = None) -> Any:
    """Create unspecified elements, with the shape and sharding of another array."""
    return full_like(x, 0, dtype=dtype, device=device)


def _take_triangle(x: Any, lower: bool, k: int) -> Any:
    if x.ndim < 2:
        raise SpecError(f"a triangle of shape {list(x.shape)}; matrices were expected")
    if as_whole(k) is None:
        raise UsageError(f"a triangle from the diagonal {k!r}; a whole number was expected")
    # A column and a row of indices, which broadcast to the mask: [rows, columns] of truth values.
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    inside = columns - rows <= k if lower else columns - rows >= k
    return elementwise.where(elementwise.whole(x, inside), x, _make_scalar(x, 0, x.dtype))


@of_arrays
def tril(x: Any, /, *, k: int = 0) -> Any:
    """Return the lower triangle of matrices, with zeros above the diagonal `k`."""
    return _take_triangle(x, True, k)


@of_arrays
def triu(x: Any, /, *, k: int = 0) -> Any:
    """Return the upper triangle of matrices, with zeros below the diagonal `k`."""
    return _take_triangle(x, False, k)
