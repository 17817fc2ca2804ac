"""Accumulation types: floats narrower than 4 bytes are accumulated in `float32`.

A sum of squares of float16 is infinite from 256 on, a sum of 70,000 ones too, and each rounding of
bfloat16 takes off a 256th. Functions that are made of several operations widen what they are given
and round their result once.
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
    """The same numbers, as `float32` where their type is narrow."""
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    return data_types.astype(x, data_types.float32) if is_one else x


def _widen_sum(x: Any) -> Any:
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    # Said not to be widening, the operation is no linear one.
    attributes = {"dtype": data_types.float32, "widening": False}
    return call("astype", (x,), attributes) if is_one else x


def in_wide_types(function: Function) -> Function:
    """A function of arrays that computes as `float32` what is narrower, and rounds its result.

    The result has the type that the arrays' own promote to, where that is narrow. Contributions
    are combined before: they move in the narrow type.

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
