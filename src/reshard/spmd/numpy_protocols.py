"""NumPy's functions on arrays in shards: `np.exp(x)` is `sp.exp(x)`.

A function of NumPy whose name the namespace has is taken from there, arguments and all; NumPy's
older names are known too. Others are refused rather than run on the dense array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.spmd import elementwise, statistics
from reshard.spmd.array_value import ArrayValue

_OTHER_NAMES = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
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
# What answers yes or no about values is asked of the whole arrays.
_QUESTIONS = ("allclose", "array_equal", "array_equiv")
_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
# Arguments that NumPy takes by place and the array API by name.
_BY_NAME = {"axis", "keepdims", "axes", "dtype"}


def dense_array(x: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """The whole array as NumPy's."""
    found: np.ndarray[Any, Any] = x.runner.library.numpy(x.to_dense())
    return found if dtype is None else found.astype(dtype)


def by_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """What a ufunc, or its `reduce`, makes of arrays in shards.

    Raises UsageError for what arrays in shards do not do, such as `out=`.
    """
    name = _OTHER_NAMES.get(ufunc.__name__, ufunc.__name__)
    if method == "__call__" and not options:
        function = getattr(elementwise, name, None)
        if function is not None:
            return function(*inputs)
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
    """What a function of NumPy makes of arrays in shards. Raises UsageError for an unknown one."""
    import reshard.spmd

    if function.__name__ in _QUESTIONS:
        whole = [np.asarray(one) if isinstance(one, ArrayValue) else one for one in inputs]
        return function(*whole, **options)
    module = str(getattr(function, "__module__", ""))
    name = _OTHER_NAMES.get(function.__name__, function.__name__)
    place: Any = reshard.spmd
    if module.startswith(("numpy.linalg", "numpy.fft")):
        place = getattr(reshard.spmd, module.split(".")[1])
    found = getattr(place, name, None) if name in place.__all__ else None
    if found is None:
        raise UsageError(
            f"numpy.{function.__name__} on an array in shards; use a function of reshard.spmd, or "
            "x.to_dense()"
        )
    if name == "permute_dims" and len(inputs) == 1 and not options:
        return found(inputs[0], tuple(reversed(range(inputs[0].ndim))))
    try:
        return found(*inputs, **options)
    except TypeError:
        import inspect

        # The same arguments, those that the array API takes by name only by their names.
        bound = inspect.signature(function).bind(*inputs, **options).arguments
        named = {key: value for key, value in bound.items() if key in _BY_NAME}
        placed = [value for key, value in bound.items() if key not in _BY_NAME]
        try:
            return found(*placed, **named)
        except TypeError as error:
            raise UsageError(
                f"numpy.{function.__name__} with {sorted(bound)} on an array in shards: {error}; "
                f"use reshard.spmd.{name}{inspect.signature(found)}"
            ) from error
