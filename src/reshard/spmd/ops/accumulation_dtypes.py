"""Accumulation types: floats narrower than 4 bytes are accumulated in `float32`.

A float16 overflows at the square of 256, or in a sum of 70,000 elements of 1, and each rounding to
bfloat16 has a relative error of up to 1/256. Functions that consist of several operations widen
their arguments and round their result once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from reshard.dtypes import DType
from reshard.spmd.core.result_types import kind_of, promoted
from reshard.spmd.ops import data_types
from reshard.spmd.ops.elementwise import operands
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Function = TypeVar("Function", bound=Callable[..., Any])


def is_narrow(dtype: DType) -> bool:
    """Whether a type is floating and narrower than `float32`.

    >>> from reshard.dtypes import dtype
    >>> [is_narrow(dtype(name)) for name in ("bfloat16", "float16", "float32", "int8")]
    [True, True, False, False]
    """
    return dtype.itemsize_bytes < 4 and kind_of(dtype) == "real floating"


def widen(x: Any) -> Any:
    """Cast to `float32` if the type is narrow."""
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    return data_types.astype(x, data_types.float32) if is_one else x


def _widen_sum(x: Any) -> Any:
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    # With widening=False the operation does not count as linear, so contributions are combined.
    attributes = {"dtype": data_types.float32, "widening": False}
    return call("astype", (x,), attributes) if is_one else x


def in_wide_types(function: Function) -> Function:
    """Let a function of arrays compute narrower types as `float32`, and round its result.

    The result is rounded to the type that the arrays promote to, if that is narrow. Contributions
    are combined before they are widened, so that they move in the narrow type.

    >>> import reshard.spmd as sp
    >>> norm = in_wide_types(lambda x: sp.sqrt(sp.sum(x * x)))
    >>> norm(sp.array([300.0, 400.0], dtype="float16"))
    <ShardedArray float16[]>
    """

    @wraps(function)
    def computed(*arrays: Any, **options: Any) -> Any:
        given = operands(*arrays)
        types = [one.type.dtype for one in given if isinstance(one, ArrayValue)]
        floats = [one for one in types if kind_of(one) == "real floating"]
        if not any(map(is_narrow, floats)):
            return function(*arrays, **options)
        found = function(*map(_widen_sum, given), **options)
        (kind,) = promoted(floats, {}, "")
        return data_types.astype(found, kind) if is_narrow(kind) else found

    return cast(Function, computed)
