"""Element types by the names of the array API: constants, functions of types, and wider types.

Types are reshard's own `DType`s, the same for arrays of NumPy and of PyTorch.

>>> result_type(int16, float32), isdtype(uint8, "integral")
(DType('float32'), True)

Floats narrower than 4 bytes are accumulated in `float32` (`in_wide_types`). A float16 overflows at
the square of 256, or in a sum of 70,000 elements of 1, and each rounding to bfloat16 has a relative
error of up to 1/256. Functions that consist of several operations widen their arguments and round
their result once.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.spmd.core.result_types import (
    BY_KIND,
    as_python_number,
    kind_of,
    meant,
    promoted,
    stand_in,
)
from reshard.spmd.ops.elementwise import operands
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

bool = as_dtype("bool")
int8, int16, int32, int64 = (as_dtype(f"int{bits}") for bits in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (as_dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
float32, float64 = as_dtype("float32"), as_dtype("float64")
complex64, complex128 = as_dtype("complex64"), as_dtype("complex128")

_JOINED = {
    "integral": ("signed integer", "unsigned integer"),
    "numeric": ("signed integer", "unsigned integer", "real floating", "complex floating"),
}


def _read_type(value: Any) -> DType:
    return value.dtype if isinstance(value, ArrayValue) else as_dtype(value)  # type: ignore[attr-defined]


def astype(x: Any, dtype: object, /, *, copy: object = True, device: object = None) -> Any:
    """Cast to another element type.

    Partial sums stay partial if the new type is exact: a float that is cast to a wider float.
    """
    check_device(device, x)
    target = as_dtype(dtype)
    # Equal element types are the same object.
    if target is x.dtype:
        return x
    kinds = (kind_of(x.dtype), kind_of(target))
    floats = ("real floating", "complex floating")
    is_wider = kinds[0] in floats and kinds[1] in floats and _is_exact(x.dtype, target)
    attributes: dict[str, Any] = {"dtype": target, "widening": is_wider}
    return call("astype", (x,), attributes)


def _is_exact(dtype: DType, target: DType) -> object:
    # NumPy's can_cast does not know the narrow types that NumPy lacks. float32 represents all of
    # their numbers, so it stands in for them.
    if dtype.itemsize_bytes < 4 <= target.itemsize_bytes:
        return True
    if target.itemsize_bytes <= dtype.itemsize_bytes:
        return False
    return np.can_cast(dtype.numpy, target.numpy)


def check_device(device: object, like: Any = None) -> None:
    """Raise UsageError for a device other than the default device, or the device of `like`."""
    if device is None:
        return
    own = getattr(like, "device", "cpu")
    if str(device) != own:
        raise UsageError(
            f"device {device!r}; {own!r} was expected, for shards stay where they are made: give a "
            "tensor of that device to sp.array or sp.from_shards"
        )


def can_cast(from_: Any, to: object, /) -> object:
    """Return whether a type (or array) can be cast to another type by NumPy's safe casting."""
    return np.can_cast(_read_type(from_).numpy, as_dtype(to).numpy)


class FloatInfo(NamedTuple):
    """The limits of a floating-point type, or of the parts of a complex type."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


class IntegerInfo(NamedTuple):
    """The limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FloatInfo:
    """Return the limits of a floating-point type or array. Raises UsageError for another type.

    >>> finfo(float32).bits, finfo(complex128).dtype
    (32, DType('float64'))
    """
    dtype = _read_type(type)
    if kind_of(dtype) not in ("real floating", "complex floating"):
        raise UsageError(f"finfo of {dtype}; a floating type was expected: iinfo is for {dtype}")
    limits = _read_limits(dtype)
    return FloatInfo(
        int(limits.bits),
        float(limits.eps),
        float(limits.max),
        float(limits.min),
        float(limits.smallest_normal),
        as_dtype(limits.dtype),
    )


def _read_limits(dtype: DType) -> Any:
    # numpy.finfo does not support types of ml_dtypes, such as bfloat16.
    if any(dtype in types for types in BY_KIND.values()):
        return np.finfo(dtype.numpy)
    return import_module("ml_dtypes").finfo(dtype.numpy)


def iinfo(type: Any, /) -> IntegerInfo:
    """Return the limits of an integer type or array.

    Raises UsageError for another type.

    >>> iinfo(int8)
    IntegerInfo(bits=8, max=127, min=-128, dtype=DType('int8'))
    """
    dtype = _read_type(type)
    if kind_of(dtype) not in ("signed integer", "unsigned integer"):
        raise UsageError(f"iinfo of {dtype}; a type of whole numbers was expected")
    limits = np.iinfo(dtype.numpy)
    return IntegerInfo(limits.bits, int(limits.max), int(limits.min), dtype)


def isdtype(dtype: object, kind: Any) -> object:
    """Return whether a type equals another type, is of a kind, or is among several.

    Raises UsageError for an unknown kind.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, option) for option in kind)
    resolved = as_dtype(dtype)
    if isinstance(kind, str):
        if kind not in BY_KIND and kind not in _JOINED:
            raise UsageError(
                f"unknown kind {kind!r}; it is one of {', '.join([*BY_KIND, *_JOINED])}"
            )
        return kind_of(resolved) in _JOINED.get(kind, (kind,))
    return resolved is as_dtype(kind)


def _is_number(value: Any) -> object:
    return isinstance(value, int | float | complex)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """Return the type that operands of these types (arrays, types, numbers) promote to."""
    if not arrays_and_dtypes:
        raise UsageError("the type of nothing; give at least one array or type")
    types = {_read_type(operand) for operand in arrays_and_dtypes if not _is_number(operand)}
    # A single type needs no promotion, which NumPy has for its own types only.
    if len(types) == 1 and not any(map(_is_number, arrays_and_dtypes)):
        return types.pop()
    # In NumPy's promotion, Python numbers take the arrays' type if it has their kind.
    stand_ins = [
        as_python_number(operand) if _is_number(operand) else stand_in(_read_type(operand))
        for operand in arrays_and_dtypes
    ]
    return meant(as_dtype(np.result_type(*stand_ins)), list(types))


class NamespaceInfo:
    """Information about the namespace `reshard.spmd`, returned by `__array_namespace_info__()`.

    >>> NamespaceInfo().default_dtypes()["real floating"]
    DType('float64')
    """

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities that the standard leaves open."""
        # 64 dimensions are NumPy's limit since version 2.
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Return the device of new arrays by default."""
        return "cpu"

    def devices(self) -> list[str]:
        """Return the devices that arrays can be made on. Meshes specify where shards are."""
        return ["cpu"]

    def default_dtypes(self, *, device: object = None) -> dict[str, DType]:
        """Return the types that numbers get, by kind."""
        check_device(device)
        return {
            "real floating": float64,
            "complex floating": complex128,
            "integral": int64,
            "indexing": int64,
        }

    def dtypes(self, *, device: object = None, kind: Any = None) -> dict[str, DType]:
        """Return the types of a kind, or of several; all when None."""
        check_device(device)
        return {
            dtype.name: dtype
            for types in BY_KIND.values()
            for dtype in types
            if kind is None or isdtype(dtype, kind)
        }


def namespace_info() -> NamespaceInfo:
    """Return the object with which the namespace describes itself."""
    return NamespaceInfo()


Function = TypeVar("Function", bound=Callable[..., Any])


def is_narrow(dtype: DType) -> builtins.bool:
    """Return whether a type is floating and narrower than `float32`.

    >>> from reshard.dtypes import dtype
    >>> [is_narrow(dtype(name)) for name in ("bfloat16", "float16", "float32", "int8")]
    [True, True, False, False]
    """
    return dtype.itemsize_bytes < 4 and kind_of(dtype) == "real floating"


def widen(x: Any) -> Any:
    """Cast to `float32` if the type is narrow."""
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    return astype(x, float32) if is_one else x


def _widen_sum(x: Any) -> Any:
    is_one = isinstance(x, ArrayValue) and is_narrow(x.type.dtype)
    # With widening=False the operation does not count as linear, so contributions are combined.
    attributes = {"dtype": float32, "widening": False}
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
        inputs = operands(*arrays)
        types = [array.type.dtype for array in inputs if isinstance(array, ArrayValue)]
        floats = [dtype for dtype in types if kind_of(dtype) == "real floating"]
        if not any(map(is_narrow, floats)):
            return function(*arrays, **options)
        result = function(*map(_widen_sum, inputs), **options)
        (kind,) = promoted(floats, {}, "")
        return astype(result, kind) if is_narrow(kind) else result

    return cast(Function, computed)
