"""NumPy's functions on sharded arrays: `np.exp(x)` is `sp.exp(x)`.

A function of NumPy whose name the namespace has is taken from there, arguments and all; NumPy's
older names are known too. Others are refused rather than run on the dense array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, isfunction, signature
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.spmd import namespace
from reshard.spmd.ops import elementwise
from reshard.spmd.ops import movement as manipulation
from reshard.spmd.ops import reductions as statistics
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.products import matmul
from reshard.spmd.rules.rule_builder import axis_of
from reshard.spmd.shards.array_value import ArrayValue

_OTHER_NAMES = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "around": "round",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "concatenate": "concat",
    "conjugate": "conj",
    "cumprod": "cumulative_prod",
    "cumsum": "cumulative_sum",
    "fabs": "abs",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
    "rint": "round",
    "transpose": "permute_dims",
    "true_divide": "divide",
}
# What the array API has among its functions of matrices. (`sp.trace` traces a function.)
_OF_MATRICES = ("cross", "diagonal", "outer", "trace")
# What answers yes or no about values is asked of the whole arrays.
_QUESTIONS = ("allclose", "array_equal", "array_equiv")
# What is asked of a shape is asked of any array that has it.
_ABOUT_SHAPES = ("ndim", "shape", "size")
_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
# Arguments that NumPy takes by place and the array API by name.
_BY_NAME = {"axis", "keepdims", "axes", "dtype"}


def _raise_rank(x: Any, least: int) -> Any:
    """With dimensions of size 1 ahead, up to the least number of dimensions."""
    return manipulation.reshape(x, (1,) * (least - x.ndim) + x.shape) if x.ndim < least else x


@of_arrays
def _hstack(tup: Sequence[Any]) -> Any:
    arrays = [_raise_rank(one, 1) for one in elementwise.operands(*tup)]
    return manipulation.concat(arrays, axis=0 if arrays[0].ndim == 1 else 1)


@of_arrays
def _vstack(tup: Sequence[Any]) -> Any:
    return manipulation.concat([_raise_rank(one, 2) for one in elementwise.operands(*tup)])


def _ravel(a: Any) -> Any:
    return manipulation.reshape(a, (-1,))


def _dot(a: Any, b: Any) -> Any:
    a, b = elementwise.operands(a, b)
    ranks = [getattr(one, "ndim", 0) for one in (a, b)]
    if max(ranks) > 2:
        raise UsageError(
            f"numpy.dot of arrays of {ranks[0]} and {ranks[1]} dimensions; use sp.matmul or "
            "sp.tensordot"
        )
    return matmul(a, b) if min(ranks) else elementwise.multiply(a, b)


def _squeeze(a: Any, axis: int | Sequence[int] | None = None) -> Any:
    ones = tuple(dim for dim, size in enumerate(a.shape) if size == 1)
    return manipulation.squeeze(a, ones if axis is None else axis)


def _copy(a: Any) -> Any:
    """The array itself, for it never changes."""
    return a


def _swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    order = list(range(a.ndim))
    first, second = axis_of(a.ndim, axis1), axis_of(a.ndim, axis2)
    order[first], order[second] = second, first
    return manipulation.permute_dims(a, order)


# What the array API has no one function for.
_MADE_OF_OTHERS: dict[str, Callable[..., Any]] = {
    "copy": _copy,
    "dot": _dot,
    "hstack": _hstack,
    "ravel": _ravel,
    "squeeze": _squeeze,
    "swapaxes": _swapaxes,
    "vstack": _vstack,
}


def instead_of(name: str) -> str:
    """The replacement of an attribute that NumPy's arrays have and arrays in shards lack."""
    sp = namespace.module()
    known = _OTHER_NAMES.get(name, name)
    if known in _OF_MATRICES:
        return f"use sp.linalg.{known}(x{', ...' if known in ('cross', 'outer') else ''})"
    if known in sp.__all__ and isfunction(getattr(sp, known)):
        asked = signature(getattr(sp, known)).parameters.values()
        needed = [one for one in asked if one.default is one.empty]
        return f"use sp.{known}(x{', ...' if len(needed) > 1 else ''})"
    if name in _MADE_OF_OTHERS:
        return f"use numpy.{name}(x)"
    return "use a function of reshard.spmd, or x.to_dense()"


def dense_array(x: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """The whole array as NumPy's."""
    found: np.ndarray[Any, Any] = x.runner.library.numpy(x.to_dense())
    return found if dtype is None else found.astype(dtype)


def by_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """A ufunc, or its `reduce`, applied to arrays in shards.

    Raises UsageError for what arrays in shards do not do, such as `out=`.
    """
    name = _OTHER_NAMES.get(ufunc.__name__, ufunc.__name__)
    # 1. A plain call of an elementwise function.
    if method == "__call__" and not options:
        function = matmul if name == "matmul" else getattr(elementwise, name, None)
        if function is not None:
            return function(*inputs)
    # 2. A reduction, whose axis is 0 by default as in NumPy; dtype=None is the same as none given.
    known = set(options) <= {"axis", "keepdims", "dtype"}
    if method == "reduce" and name in _REDUCED and known:
        given = {"axis": 0, **options}
        if given.get("dtype") is None:
            given.pop("dtype", None)
        return getattr(statistics, _REDUCED[name])(*inputs, **given)
    raise UsageError(
        f"numpy.{ufunc.__name__}.{method} with {sorted(options)} on an array in shards; use a "
        "function of reshard.spmd, or x.to_dense()"
    )


def by_function(function: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """A function of NumPy applied to arrays in shards. Raises UsageError for an unknown one."""
    sp = namespace.module()
    # 1. Questions about values and about shapes need no function.
    if function.__name__ in _QUESTIONS:
        whole = [np.asarray(one) if isinstance(one, ArrayValue) else one for one in inputs]
        return function(*whole, **options)
    # A view of one number of that shape: nothing is gathered.
    if function.__name__ in _ABOUT_SHAPES and inputs and isinstance(inputs[0], ArrayValue):
        return function(np.broadcast_to(0, inputs[0].type.shape), *inputs[1:], **options)
    # 2. The function of the same meaning, in the namespace, its extensions or the ones made here.
    module = str(getattr(function, "__module__", ""))
    name = _OTHER_NAMES.get(function.__name__, function.__name__)
    place: Any = sp
    if module.startswith(("numpy.linalg", "numpy.fft")):
        place = getattr(sp, module.split(".")[1])
    elif name in _OF_MATRICES:
        place = sp.linalg
    found = getattr(place, name, None) if name in place.__all__ else None
    said = f"{place.__name__}.{name}"
    if function is getattr(np, name, None) and name in _MADE_OF_OTHERS:
        found, said = _MADE_OF_OTHERS[name], f"numpy.{name}"
    if found is None:
        raise UsageError(
            f"numpy.{function.__name__} on an array in shards; use a function of reshard.spmd, or "
            "x.to_dense()"
        )
    # 3. numpy.transpose without axes reverses all; the array API asks for the axes.
    if name == "permute_dims" and len(inputs) == 1 and not options:
        return found(inputs[0], tuple(reversed(range(inputs[0].ndim))))
    try:
        return found(*inputs, **options)
    except TypeError as error:
        # The same arguments, those that the array API takes by name only by their names.
        parameters = _find_signature(function)
        if parameters is None:
            raise UsageError(
                f"numpy.{function.__name__} on an array in shards: {error}; use "
                f"{said}{signature(found)}"
            ) from error
        bound = parameters.bind(*inputs, **options).arguments
        named = {key: value for key, value in bound.items() if key in _BY_NAME}
        placed = [value for key, value in bound.items() if key not in _BY_NAME]
        try:
            return found(*placed, **named)
        except TypeError as error:
            raise UsageError(
                f"numpy.{function.__name__} with {sorted(bound)} on an array in shards: {error}; "
                f"use {said}{signature(found)}"
            ) from error


def _find_signature(function: Any) -> Signature | None:
    """Return the signature of a function of NumPy, or None if NumPy does not have it.

    Before NumPy 2.4, functions written in C have none.
    """

    def concatenate(arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None) -> None: ...
    def empty_like(prototype: Any, dtype: Any = None) -> None: ...

    try:
        return signature(function)
    except ValueError:
        if function is np.concatenate:
            return signature(concatenate)
        return signature(empty_like) if function is np.empty_like else None
