"""Sharded arrays, which are immutable and compute eagerly.

    A = sp.array(data).shard(mesh, [DimSpec(["x"]), DimSpec([])])
    B = (A @ W).with_sharding(mesh, [DimSpec([]), DimSpec([])])

An operation runs on the shards; operands whose shardings conflict are resharded first, and the
result is that of the dense computation. An array without a sharding counts as a copy on every
device. Functions of NumPy on sharded arrays are those of the array API (`by_ufunc`, `by_function`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Signature, isfunction, signature
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd import namespace
from reshard.spmd.core.array_type import ArrayType, plain_spec, without_partial
from reshard.spmd.core.backend import is_distributed, library_of
from reshard.spmd.ops import data_types, elementwise, movement, reductions
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.indexing import getitem
from reshard.spmd.ops.movement import matrix_transpose, permute_dims
from reshard.spmd.ops.products import matmul
from reshard.spmd.ops.reductions import any as any_of
from reshard.spmd.rules.rule_builder import axis_of
from reshard.spmd.shards.array_value import ArrayValue, take_moved
from reshard.spmd.shards.checking import check_copies, check_data
from reshard.spmd.shards.error_translation import refuse_traced
from reshard.spmd.shards.operation_call import recorders
from reshard.spmd.shards.runner import Runner, runner_for

# NumPy's names of functions that the array API names otherwise.
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
    arrays = [_raise_rank(operand, 1) for operand in elementwise.operands(*tup)]
    return movement.concat(arrays, axis=0 if arrays[0].ndim == 1 else 1)


@of_arrays
def _vstack(tup: Sequence[Any]) -> Any:
    return movement.concat([_raise_rank(operand, 2) for operand in elementwise.operands(*tup)])


def _dot(a: Any, b: Any) -> Any:
    a, b = elementwise.operands(a, b)
    ranks = [getattr(operand, "ndim", 0) for operand in (a, b)]
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
    "ravel": lambda a: movement.reshape(a, (-1,)),
    "squeeze": _squeeze,
    "swapaxes": _swapaxes,
    "vstack": _vstack,
}


def instead_of(name: str) -> str:
    """Return the replacement of an attribute of NumPy arrays that sharded arrays lack."""
    sp = namespace.module()
    equivalent = _OTHER_NAMES.get(name, name)
    if equivalent in _OF_MATRICES:
        return f"use sp.linalg.{equivalent}(x{', ...' if equivalent in ('cross', 'outer') else ''})"
    if equivalent in sp.__all__ and isfunction(getattr(sp, equivalent)):
        asked = signature(getattr(sp, equivalent)).parameters.values()
        needed = [parameter for parameter in asked if parameter.default is parameter.empty]
        return f"use sp.{equivalent}(x{', ...' if len(needed) > 1 else ''})"
    if name in _MADE_OF_OTHERS:
        return f"use numpy.{name}(x)"
    return "use a function of reshard.spmd, or x.to_dense()"


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
    is_supported = set(options) <= {"axis", "keepdims", "dtype"}
    if method == "reduce" and name in _REDUCED and is_supported:
        arguments = {"axis": 0, **options}
        if arguments.get("dtype") is None:
            arguments.pop("dtype", None)
        return getattr(reductions, _REDUCED[name])(*inputs, **arguments)
    raise UsageError(
        f"numpy.{ufunc.__name__}.{method} with {sorted(options)} on an array in shards; use a "
        "function of reshard.spmd, or x.to_dense()"
    )


def by_function(function: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Apply a NumPy function to sharded arrays. Raises UsageError for an unknown function."""
    sp = namespace.module()
    # 1. Questions about values and about shapes need no function.
    if function.__name__ in _QUESTIONS:
        whole = [np.asarray(value) if isinstance(value, ArrayValue) else value for value in inputs]
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
    replacement = getattr(place, name, None) if name in place.__all__ else None
    said = f"{place.__name__}.{name}"
    if function is getattr(np, name, None) and name in _MADE_OF_OTHERS:
        replacement, said = _MADE_OF_OTHERS[name], f"numpy.{name}"
    if replacement is None:
        raise UsageError(
            f"numpy.{function.__name__} on an array in shards; use a function of reshard.spmd, or "
            "x.to_dense()"
        )
    # 3. numpy.transpose without axes reverses all; the array API asks for the axes.
    if name == "permute_dims" and len(inputs) == 1 and not options:
        return replacement(inputs[0], tuple(reversed(range(inputs[0].ndim))))
    try:
        return replacement(*inputs, **options)
    except TypeError as error:
        # The same arguments; arguments that the array API takes by name only are passed by name.
        parameters = _find_signature(function)
        if parameters is None:
            raise UsageError(
                f"numpy.{function.__name__} on an array in shards: {error}; use "
                f"{said}{signature(replacement)}"
            ) from error
        # Without defaults, so that only arguments that the caller gave are passed on.
        bound = parameters.bind(*inputs, **options).arguments
        named = {key: value for key, value in bound.items() if key in _BY_NAME}
        placed = [value for key, value in bound.items() if key not in _BY_NAME]
        try:
            return replacement(*placed, **named)
        except TypeError as error:
            raise UsageError(
                f"numpy.{function.__name__} with {sorted(bound)} on an array in shards: {error}; "
                f"use {said}{signature(replacement)}"
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


Dims = Iterable[DimSpec | Sequence[str]]
_API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")


def _swap(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function of two arguments in the other order."""

    def swapped(self: Any, other: Any) -> Any:
        return function(other, self)

    return swapped


class ShardedArray(ArrayValue):
    """An array that is sharded or replicated over a mesh. Create it with `sp.array`.

    It has the operators and methods of the array API standard, except assignment: arrays are
    immutable. `type` is its `ArrayType`, `runner` stores its shards.

    >>> import numpy as np
    >>> from reshard.spmd import DeviceMesh, DimSpec, array
    >>> mesh = DeviceMesh("devices", (2,), ("x",))
    >>> a = array(np.arange(8.0).reshape(2, 4)).shard(mesh, [DimSpec(["x"]), DimSpec([])])
    >>> (a @ array(np.ones((4, 3)))).type
    ArrayType(float64[2, 3], 'x, -')
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full array."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """The number of elements of the full array."""
        return int(np.prod(self.type.shape, dtype=np.int64))

    @property
    def device(self) -> str:
        """The device of this process's shards."""
        return str(getattr(next(iter(self._shards), None), "device", "cpu"))

    @property
    def spec(self) -> ShardingSpec | None:
        """The sharding; None if the array is replicated."""
        return self.type.spec

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that the array is sharded over; None if it is replicated."""
        return None if self.type.spec is None else self.type.spec.mesh

    @property
    def shards(self) -> Mapping[int, Any]:
        """The shards of this process, by rank. They are shared memory: do not write to them."""
        self._tell_readers()
        shards = self.runner.unwrap_output(self.type, self._shards)
        self.runner.library.lend(shards)
        return dict(zip(self.runner.ranks(self.mesh), shards, strict=True))

    def to_dense(self) -> Any:
        """Return the full array as an array of NumPy or PyTorch, on every process.

        It may share memory with the shards: copy it before writing to it.
        """
        self._tell_readers()
        dense = super().to_dense()
        self.runner.library.lend((dense,))
        return dense

    def _tell_readers(self) -> None:
        # Recorders that differentiate raise an error: values read from elements have no gradient.
        for recorder in recorders.active:
            recorder.record_read(self)

    def shard(self, target: DeviceMesh | ShardingSpec, dims: Dims | None = None) -> ShardedArray:
        """Return the array in another sharding.

        Args:
            target: a sharding, or a mesh.
            dims: with a mesh, the sharding of each dimension.

        Raises:
            SpecError: another number of dimensions, or a sharding without a part for some device.
            MeshError: over processes, a mesh with ranks that are not processes of the job.
        """
        spec = _read_spec(target, dims)
        # In a trace, recorders observe the requested sharding even if nothing moves.
        if spec is self.type.spec and not self.runner.is_abstract:
            return self
        kind = self.type.with_spec(spec)
        shards = take_moved(self, spec, self.runner.movement(self.type, spec))
        result: ShardedArray = type(self).of_shards(kind, shards, self.runner)
        # The moved shards may be views of the program's memory, too.
        if self.is_given:
            result.mark_given()
        for recorder in recorders.active:
            recorder.record_reshard(self, result)
        return result

    def with_sharding(
        self, target: DeviceMesh | ShardingSpec, dims: Dims | None = None
    ) -> ShardedArray:
        """Return the array in another sharding, fixed for propagation. See `shard`."""
        return self.shard(target, dims)

    def reduced(self) -> ShardedArray:
        """Reduce a pending sum; return the array itself if it is not pending."""
        spec = self.type.spec
        return self if spec is None or not spec.partial_axes else self.shard(without_partial(spec))

    def trace(self) -> ShardedArray:
        """Return the array itself, because arrays compute eagerly."""
        return self

    def __repr__(self) -> str:
        spec = "" if self.spec is None else f", {str(self.spec)!r} over {self.mesh!r}"
        return f"<ShardedArray {self.type}{spec}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    def __copy__(self) -> ShardedArray:
        return self

    def __deepcopy__(self, memo: Any) -> ShardedArray:
        # Arrays are immutable, so a copy can be the array itself.
        return self

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return the namespace of the array API for such arrays: `reshard.spmd`.

        Raises UsageError for a version of the standard that it does not have.
        """
        if api_version is not None and api_version not in _API_VERSIONS:
            raise UsageError(
                f"version {api_version!r} of the array API; this is one of "
                f"{', '.join(_API_VERSIONS)}"
            )
        return namespace.module()

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Give the whole array to another library.

        Raises:
            BufferError: a device other than its own.
            UsageError: what its library cannot give.
        """
        dense = self.to_dense()
        if dl_device is not None and tuple(dl_device) != tuple(dense.__dlpack_device__()):
            # The standard's error.
            raise BufferError(
                f"dl_device {dl_device!r}; {tuple(dense.__dlpack_device__())} was expected, where "
                "the shards are"
            )
        asked = {"stream": stream, "max_version": max_version, "copy": copy}
        try:
            return dense.__dlpack__(**{k: v for k, v in asked.items() if v is not None})
        except (TypeError, RuntimeError) as error:
            raise UsageError(f"{self.type} by DLPack: {error}; give x.to_dense() itself") from error

    def __dlpack_device__(self) -> Any:
        """Return the device of the whole array, for another library."""
        return self.to_dense().__dlpack_device__()

    def to_device(self, device: object, /, *, stream: object = None) -> ShardedArray:
        """Return the array itself. Raises UsageError for another device."""
        if str(device) != self.device:
            raise UsageError(f"device {device!r}; the shards are on {self.device!r}, kept by ranks")
        return self

    # Functions are the methods themselves: a wrapper would slow down every operator.
    __add__, __radd__ = e.add, _swap(e.add)
    __sub__, __rsub__ = e.subtract, _swap(e.subtract)
    __mul__, __rmul__ = e.multiply, _swap(e.multiply)
    __truediv__, __rtruediv__ = e.divide, _swap(e.divide)
    __floordiv__, __rfloordiv__ = e.floor_divide, _swap(e.floor_divide)
    __mod__, __rmod__ = e.remainder, _swap(e.remainder)
    __pow__, __rpow__ = e.pow, _swap(e.pow)
    __matmul__, __rmatmul__ = matmul, _swap(matmul)
    __and__, __rand__ = e.bitwise_and, _swap(e.bitwise_and)
    __or__, __ror__ = e.bitwise_or, _swap(e.bitwise_or)
    __xor__, __rxor__ = e.bitwise_xor, _swap(e.bitwise_xor)
    __lshift__, __rlshift__ = e.bitwise_left_shift, _swap(e.bitwise_left_shift)
    __rshift__, __rrshift__ = e.bitwise_right_shift, _swap(e.bitwise_right_shift)
    __eq__ = e.equal
    __ne__ = e.not_equal
    __lt__ = e.less
    __le__ = e.less_equal
    __gt__ = e.greater
    __ge__ = e.greater_equal
    __neg__, __pos__, __abs__, __invert__ = e.negative, e.positive, e.abs, e.bitwise_invert
    # Equality is elementwise, so arrays cannot be dictionary keys.
    __hash__ = None  # type: ignore[assignment]

    def __divmod__(self, other: Any) -> Any:
        return e.floor_divide(self, other), e.remainder(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return e.floor_divide(other, self), e.remainder(other, self)

    def __round__(self, digits: int | None = None) -> Any:
        if digits:
            raise UsageError(
                f"round to {digits!r} digits; arrays in shards are rounded to whole numbers: "
                f"scale x by 10 ** {digits!r} before, and back after it"
            )
        return e.round(self)

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
        dense = self.runner.library.numpy(self.to_dense())
        if copy is None:
            return dense if dtype is None else dense.astype(dtype)
        return np.array(dense, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return by_ufunc(ufunc, method, inputs, options)

    def __array_function__(
        self, function: Any, types: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return by_function(function, inputs, options)


_METHODS_OF_NUMPY = """
    all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal dot fill
    flatten item max mean min nonzero prod ravel repeat reshape round searchsorted sort squeeze std
    sum swapaxes take tolist transpose var
"""


# Set on the class once, so that the access to existing attributes does not become slower.
for _name in _METHODS_OF_NUMPY.split():
    setattr(ShardedArray, _name, _Absent(_name))


def _read_spec(target: DeviceMesh | ShardingSpec, dims: Dims | None) -> ShardingSpec:
    if isinstance(target, ShardingSpec):
        if dims is not None:
            raise UsageError(f"`{target}` is a whole sharding; leave out {dims!r}")
        return plain_spec(target)
    if not isinstance(target, DeviceMesh):
        raise UsageError(
            f"{target!r} is neither a sharding nor a mesh; give reshard.spec(mesh, 'x, -'), or a "
            "mesh and a DimSpec for each dimension"
        )
    if dims is None:
        raise UsageError(f"a mesh alone, {target!r}; give a DimSpec for each dimension as well")
    if isinstance(dims, str):
        raise UsageError(f"dimensions {dims!r} as text; give reshard.spec(mesh, {dims!r}) alone")
    return plain_spec(ShardingSpec(target, dims))


def array(
    data: Any,
    spec: ShardingSpec | None = None,
    *,
    dtype: object = None,
    runner: Runner | None = None,
) -> ShardedArray:
    """Create a sharded array from data that every process has in full.

    The array may share memory with the data: write to neither, or pass a copy. An array created
    from lists, or cast to another type, owns its memory. One of NumPy's copies its shards when it
    is first resharded, and caches resharded copies. One of PyTorch tensors, which optimizers may
    write to, caches nothing.

    Args:
        data: an array of NumPy or PyTorch, numbers in lists, or a sharded array. A DTensor is
            taken in its own sharding, over processes.
        spec: its sharding; when None, replicated, or the data's own.
        dtype: its element type; that of the data when None.
        runner: where the shards are stored; the runner set by `running`, else the one of this
            process for the library of `data`.

    Raises:
        SpecError: a sharding with another number of dimensions.
        UsageError: data that is not an array.

    >>> from reshard import DeviceMesh, spec
    >>> rows = array([[1, 2], [3, 4], [5, 6]], spec(DeviceMesh.of(x=2), "x, -"))
    >>> {rank: shard.tolist() for rank, shard in rows.shards.items()}
    {0: [[1, 2], [3, 4]], 1: [[5, 6]]}
    """
    if isinstance(data, ShardedArray):
        # Arrays are immutable, so an array of the same runner is not copied.
        if runner is None or runner is data.runner:
            resharded = data if spec is None else data.shard(spec)
            if dtype is None or as_dtype(dtype) is resharded.dtype:
                return resharded
            cast: ShardedArray = data_types.astype(resharded, dtype)
            return cast
        data = data.to_dense()
    if is_distributed(data):
        converted = _from_distributed(data, runner)
        return array(converted, spec, dtype=dtype)
    refuse_traced("sp.array", data)
    if not isinstance(runner, Runner | None):
        raise UsageError(
            f"an array of runner {runner!r}, a {type(runner).__name__}; give sp.in_process() or "
            "sp.over_processes()"
        )
    keeper = runner_for(data) if runner is None else runner
    element_type = None if dtype is None else as_dtype(dtype)
    try:
        # A ReshardError is also caught by its base class; it is raised unchanged.
        whole = keeper.library.array(data, element_type)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ReshardError):
            raise
        raise UsageError(
            f"an array of {reprlib.repr(data)}: {error}; give numbers in lists of equal lengths, "
            "or a library's array"
        ) from error
    kind = ArrayType(whole.shape, keeper.library.dtype_of(whole))
    check_data(keeper, whole, kind)
    is_own = keeper.library.has_copied(data, whole)
    make = ShardedArray.of_shards if is_own else ShardedArray.given
    result: ShardedArray = make(kind, (whole,), keeper)
    return result if spec is None else result.shard(spec)


def _from_distributed(data: Any, runner: Runner | None) -> ShardedArray:
    """Return a tensor that is sharded over ranks, a DTensor, as an array in the same sharding."""
    # Few programs have DTensors, and the module imports all notations.
    from reshard.notation.objects import sharding_of

    spec, local = sharding_of(data), data.to_local()
    keeper = runner_for(local) if runner is None else runner
    ranks = keeper.ranks(spec.mesh)
    if len(ranks) > 1:
        raise UsageError(
            f"a {type(data).__name__} over {spec.mesh!r} has one shard here, where arrays have the "
            "shards of all devices; use `with sp.running(sp.over_processes()):`, or give "
            "data.full_tensor()"
        )
    dtype = keeper.library.dtype_of(keeper.library.array(local))
    return from_shards(dict.fromkeys(ranks, local), data.shape, spec, dtype=dtype, runner=keeper)


def from_shards(
    shards: Mapping[int, Any],
    shape: Sequence[int],
    spec: ShardingSpec,
    *,
    dtype: object = None,
    runner: Runner | None = None,
) -> ShardedArray:
    """Create a sharded array from the shards of this process.

    Args:
        shards: by rank: of every rank of the mesh in one process; of this rank over processes, and
            none on a process outside the mesh.
        shape: of the full array.
        spec: its sharding.
        dtype: its element type, on a process without shards.
        runner: as for `array`.

    Raises:
        ShardError: shards that are missing, or have a wrong shape or element type.

    >>> from reshard import DeviceMesh, spec
    >>> parts = {0: np.array([1.0, 2.0]), 1: np.array([3.0])}
    >>> from_shards(parts, (3,), spec(DeviceMesh.of(x=2), "x")).to_dense().tolist()
    [1.0, 2.0, 3.0]
    """
    if not isinstance(shards, Mapping):
        raise ShardError(f"shards in a {type(shards).__name__}; give a dict of them by rank")
    plain = plain_spec(spec)
    some = next(iter(shards.values()), None)
    keeper = runner_for(some) if runner is None else runner
    ranks = keeper.ranks(plain.mesh)
    if set(shards) != set(ranks) or any(library_of(shard) is None for shard in shards.values()):
        raise ShardError(
            f"shards of ranks {sorted(shards)}; an array of each of {sorted(ranks)} was expected"
        )
    arrays = tuple(keeper.library.array(shards[rank]) for rank in ranks)
    if not arrays and dtype is None:
        raise ShardError(
            f"no shards, on a process that {plain.mesh!r} has no place for; give dtype= there"
        )
    element_type = as_dtype(dtype) if dtype is not None else keeper.library.dtype_of(arrays[0])
    kind = ArrayType(shape, element_type, plain)
    # Shards of other shapes or types would fail only in some later operation, on one rank.
    for rank, shard in zip(ranks, arrays, strict=True):
        expected = kind.layout.local_shape(rank)
        if tuple(shard.shape) != expected or keeper.library.dtype_of(shard) is not kind.dtype:
            raise ShardError(
                f"the shard of rank {rank} has shape {list(shard.shape)} of {shard.dtype}, but "
                f"`{plain}` of {list(kind.shape)} has {list(expected or ())} of "
                f"{kind.dtype.name} there"
            )
    check_copies(keeper, dict(zip(ranks, arrays, strict=True)), kind)
    result: ShardedArray = ShardedArray.given(kind, keeper.wrap_input(kind, arrays), keeper)
    return result
