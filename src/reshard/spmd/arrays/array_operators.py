"""Python's operators and NumPy's protocols for sharded arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Signature, isfunction, signature
from typing import Any

import numpy as np

from reshard.errors import ShardError, UsageError
from reshard.spmd import namespace
from reshard.spmd.ops import elementwise, movement, reductions
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.indexing import getitem
from reshard.spmd.ops.movement import matrix_transpose, permute_dims
from reshard.spmd.ops.products import matmul
from reshard.spmd.ops.reductions import any as any_of
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


# Functions that the array API has in `linalg`. (`sp.trace` traces a function.)
_OF_MATRICES = ("cross", "diagonal", "outer", "trace")


# Functions that return a bool about values are applied to the whole arrays.
_QUESTIONS = ("allclose", "array_equal", "array_equiv")


# Functions of a shape are applied to any array of that shape.
_ABOUT_SHAPES = ("ndim", "shape", "size")


_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}


# Arguments that NumPy takes by position and the array API by name.
_BY_NAME = {"axis", "keepdims", "axes", "dtype"}


def _raise_rank(x: Any, least: int) -> Any:
    """Prepend dimensions of size 1, up to the minimum number of dimensions."""
    return movement.reshape(x, (1,) * (least - x.ndim) + x.shape) if x.ndim < least else x


@of_arrays
def _hstack(tup: Sequence[Any]) -> Any:
    arrays = [_raise_rank(one, 1) for one in elementwise.operands(*tup)]
    return movement.concat(arrays, axis=0 if arrays[0].ndim == 1 else 1)


@of_arrays
def _vstack(tup: Sequence[Any]) -> Any:
    return movement.concat([_raise_rank(one, 2) for one in elementwise.operands(*tup)])


def _ravel(a: Any) -> Any:
    return movement.reshape(a, (-1,))


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
    return movement.squeeze(a, ones if axis is None else axis)


def _copy(a: Any) -> Any:
    """Return the array itself, because arrays are immutable."""
    return a


def _swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    order = list(range(a.ndim))
    first, second = axis_of(a.ndim, axis1), axis_of(a.ndim, axis2)
    order[first], order[second] = second, first
    return movement.permute_dims(a, order)


# Functions without a direct equivalent in the array API.
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
    """Return the replacement of an attribute of NumPy arrays that sharded arrays lack."""
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
    """Return the whole array as a NumPy array."""
    found: np.ndarray[Any, Any] = x.runner.library.numpy(x.to_dense())
    return found if dtype is None else found.astype(dtype)


def by_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Apply a ufunc, or its `reduce`, to sharded arrays.

    Raises UsageError for features that sharded arrays do not support, such as `out=`.
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
        return getattr(reductions, _REDUCED[name])(*inputs, **given)
    raise UsageError(
        f"numpy.{ufunc.__name__}.{method} with {sorted(options)} on an array in shards; use a "
        "function of reshard.spmd, or x.to_dense()"
    )


def by_function(function: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Apply a NumPy function to sharded arrays. Raises UsageError for an unknown function."""
    sp = namespace.module()
    # 1. Questions about values and about shapes need no function.
    if function.__name__ in _QUESTIONS:
        whole = [np.asarray(one) if isinstance(one, ArrayValue) else one for one in inputs]
        return function(*whole, **options)
    # A broadcast view of a single number with that shape: nothing is gathered.
    if function.__name__ in _ABOUT_SHAPES and inputs and isinstance(inputs[0], ArrayValue):
        return function(np.broadcast_to(0, inputs[0].type.shape), *inputs[1:], **options)
    # 2. The corresponding function of the namespace, its extensions or this module.
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
        # The same arguments; arguments that the array API takes by name only are passed by name.
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


class _Absent:
    """A method of NumPy arrays that sharded arrays lack; its error names a replacement.

    There is an instance per name, because a `__getattr__` would slow down every attribute access.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, array: Any, kind: Any = None) -> Any:
        raise AttributeError(
            f"an array in shards has no attribute {self.name!r}; {instead_of(self.name)}",
            name=self.name,
            obj=array,
        )


def _swap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of two operands in the other order."""

    def swapped(x2: Any, x1: Any, /) -> Any:
        return function(x1, x2)

    return swapped


class ArrayOperators:
    """Python's operators and NumPy's protocols, as methods of an array."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        raise NotImplementedError

    def to_dense(self) -> Any:
        """The whole array."""
        raise NotImplementedError

    # Functions of the namespace are the methods themselves, which saves a call per operation.
    __add__ = e.add
    __radd__ = _swap(e.add)
    __sub__ = e.subtract
    __rsub__ = _swap(e.subtract)
    __mul__ = e.multiply
    __rmul__ = _swap(e.multiply)
    __truediv__ = e.divide
    __rtruediv__ = _swap(e.divide)
    __floordiv__ = e.floor_divide
    __rfloordiv__ = _swap(e.floor_divide)

    def __divmod__(self, other: Any) -> Any:
        return e.floor_divide(self, other), e.remainder(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return e.floor_divide(other, self), e.remainder(other, self)

    __mod__ = e.remainder
    __rmod__ = _swap(e.remainder)
    __pow__ = e.pow
    __rpow__ = _swap(e.pow)
    __matmul__ = matmul
    __rmatmul__ = _swap(matmul)
    __and__ = e.bitwise_and
    __rand__ = _swap(e.bitwise_and)
    __or__ = e.bitwise_or
    __ror__ = _swap(e.bitwise_or)
    __xor__ = e.bitwise_xor
    __rxor__ = _swap(e.bitwise_xor)
    __lshift__ = e.bitwise_left_shift
    __rlshift__ = _swap(e.bitwise_left_shift)
    __rshift__ = e.bitwise_right_shift
    __rrshift__ = _swap(e.bitwise_right_shift)
    __eq__ = e.equal
    __ne__ = e.not_equal
    __lt__ = e.less
    __le__ = e.less_equal
    __gt__ = e.greater
    __ge__ = e.greater_equal
    __neg__ = e.negative
    __pos__ = e.positive
    __abs__ = e.abs

    def __round__(self, digits: int | None = None) -> Any:
        if digits:
            raise UsageError(
                f"round to {digits!r} digits; arrays in shards are rounded to whole numbers: "
                f"scale x by 10 ** {digits!r} before, and back after it"
            )
        return e.round(self)

    __invert__ = e.bitwise_invert
    # Equality is elementwise, so arrays cannot be dictionary keys.
    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        return getitem(self, key)

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("an array of no dimensions has no parts to go through")
        # A generator expression, not `yield`, so that the check above runs when `iter` is called.
        return (self[index] for index in range(self.shape[0]))

    def __contains__(self, value: Any) -> bool:
        return bool(any_of(e.equal(self, value)))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise ShardError(
            f"assignment to index {key!r}: arrays in shards never change; make a new one with "
            "sp.where, sp.concat or sp.dynamic_update_slice"
        )

    @property
    def T(self) -> Any:  # noqa: N802
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise UsageError(f"T of {self.ndim} dimensions; it is for 2, mT for stacks")
        return permute_dims(self, (1, 0))

    @property
    def mT(self) -> Any:  # noqa: N802
        """The transposes of a stack of matrices."""
        return matrix_transpose(self)

    def _read_number(self) -> Any:
        dense = self.to_dense()
        if self.ndim:
            raise TypeError(f"an array of {self.ndim} dimensions is no number; index it first")
        return dense.item()

    def __bool__(self) -> bool:
        return bool(self._read_number())

    def __int__(self) -> int:
        return int(self._read_number())

    def __float__(self) -> float:
        return float(self._read_number())

    def __complex__(self) -> complex:
        return complex(self._read_number())

    def __index__(self) -> int:
        number = self._read_number()
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is no whole number, so it is no index")
        return number

    def __format__(self, layout: str) -> str:
        return format(self._read_number(), layout) if layout else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return dense_array(self, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return by_ufunc(ufunc, method, inputs, options)

    def __array_function__(
        self, function: Any, types: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return by_function(function, inputs, options)


_METHODS_OF_NUMPY = """
    all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal dot fill
    flatten item max mean min nonzero prod ravel repeat reshape round searchsorted sort squeeze std
    sum swapaxes take tolist trace transpose var
"""


# Set on the class once, so that the access to existing attributes does not become slower.
for _name in _METHODS_OF_NUMPY.split():
    setattr(ArrayOperators, _name, _Absent(_name))
