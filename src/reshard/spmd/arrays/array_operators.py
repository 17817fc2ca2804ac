"""Python's operators and NumPy's protocols for sharded arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reshard.errors import ShardError, UsageError
from reshard.spmd.arrays.numpy_protocols import by_function, by_ufunc, dense_array, instead_of
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.indexing import getitem
from reshard.spmd.ops.movement import matrix_transpose, permute_dims
from reshard.spmd.ops.products import matmul
from reshard.spmd.ops.reductions import any as any_of


class _Absent:
    """A method of NumPy's arrays that sharded arrays lack; its error names a replacement.

    One for each name, since a `__getattr__` makes every look at an array slower.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, array: Any, kind: Any = None) -> Any:
        raise AttributeError(
            f"an array in shards has no attribute {self.name!r}; {instead_of(self.name)}",
            name=self.name,
            obj=array,
        )


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

    def __add__(self, other: Any) -> Any:
        return e.add(self, other)

    def __radd__(self, other: Any) -> Any:
        return e.add(other, self)

    def __sub__(self, other: Any) -> Any:
        return e.subtract(self, other)

    def __rsub__(self, other: Any) -> Any:
        return e.subtract(other, self)

    def __mul__(self, other: Any) -> Any:
        return e.multiply(self, other)

    def __rmul__(self, other: Any) -> Any:
        return e.multiply(other, self)

    def __truediv__(self, other: Any) -> Any:
        return e.divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return e.divide(other, self)

    def __floordiv__(self, other: Any) -> Any:
        return e.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return e.floor_divide(other, self)

    def __divmod__(self, other: Any) -> Any:
        return e.floor_divide(self, other), e.remainder(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return e.floor_divide(other, self), e.remainder(other, self)

    def __mod__(self, other: Any) -> Any:
        return e.remainder(self, other)

    def __rmod__(self, other: Any) -> Any:
        return e.remainder(other, self)

    def __pow__(self, other: Any) -> Any:
        return e.pow(self, other)

    def __rpow__(self, other: Any) -> Any:
        return e.pow(other, self)

    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return matmul(other, self)

    def __and__(self, other: Any) -> Any:
        return e.bitwise_and(self, other)

    def __rand__(self, other: Any) -> Any:
        return e.bitwise_and(other, self)

    def __or__(self, other: Any) -> Any:
        return e.bitwise_or(self, other)

    def __ror__(self, other: Any) -> Any:
        return e.bitwise_or(other, self)

    def __xor__(self, other: Any) -> Any:
        return e.bitwise_xor(self, other)

    def __rxor__(self, other: Any) -> Any:
        return e.bitwise_xor(other, self)

    def __lshift__(self, other: Any) -> Any:
        return e.bitwise_left_shift(self, other)

    def __rlshift__(self, other: Any) -> Any:
        return e.bitwise_left_shift(other, self)

    def __rshift__(self, other: Any) -> Any:
        return e.bitwise_right_shift(self, other)

    def __rrshift__(self, other: Any) -> Any:
        return e.bitwise_right_shift(other, self)

    def __eq__(self, other: Any) -> Any:
        return e.equal(self, other)

    def __ne__(self, other: Any) -> Any:
        return e.not_equal(self, other)

    def __lt__(self, other: Any) -> Any:
        return e.less(self, other)

    def __le__(self, other: Any) -> Any:
        return e.less_equal(self, other)

    def __gt__(self, other: Any) -> Any:
        return e.greater(self, other)

    def __ge__(self, other: Any) -> Any:
        return e.greater_equal(self, other)

    def __neg__(self) -> Any:
        return e.negative(self)

    def __pos__(self) -> Any:
        return e.positive(self)

    def __abs__(self) -> Any:
        return e.abs(self)

    def __round__(self, digits: int | None = None) -> Any:
        if digits:
            raise UsageError(
                f"round to {digits!r} digits; arrays in shards are rounded to whole numbers: "
                f"scale x by 10 ** {digits!r} before, and back after it"
            )
        return e.round(self)

    def __invert__(self) -> Any:
        return e.bitwise_invert(self)

    # Equality is element by element, so arrays are no keys.
    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        return getitem(self, key)

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("an array of no dimensions has no parts to go through")
        # A generator expression, not `yield`: the check above is made when `iter` is called.
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
# Set on the class once, so that an attribute that is there is found as quickly as ever.
for _name in _METHODS_OF_NUMPY.split():
    setattr(ArrayOperators, _name, _Absent(_name))
