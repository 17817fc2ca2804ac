"""Array libraries that compute with shards: NumPy and PyTorch, by names of the array API standard.

Both libraries are used through one namespace each, with the standard's names. NumPy has them
itself; for PyTorch the package `array_api_compat` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import MissingExtraError, ShardError, UsageError
from reshard.execution.arrays import missing_bytes

Combine = Callable[[Any, Any], Any]


class Library:
    """A library that computes with dense arrays. Get one with `library_of` or `library`.

    `namespace` has the functions of the array API standard.
    """

    def __init__(self, name: str, namespace: Any) -> None:
        self.name = name
        self.namespace = namespace
        self.add = namespace.add
        self.reductions = {
            "sum": namespace.add,
            "mean": namespace.add,
            "max": namespace.maximum,
            "min": namespace.minimum,
            "product": namespace.multiply,
        }
        if name == "torch":
            self.reductions = {
                reduction: _of_tensors(combine, _UFUNCS[reduction])
                for reduction, combine in self.reductions.items()
            }
        self._dtypes: dict[Any, DType] = {}

    def dtype_of(self, array: Any) -> DType:
        """The element type of one of its arrays."""
        # A look into a dictionary, since this is asked at each operation.
        own = array.dtype
        found = self._dtypes.get(own)
        if found is None:
            found = self._dtypes[own] = as_dtype(own)
        return found

    def own_dtype(self, dtype: DType) -> Any:
        """The library's own name of an element type. Raises UsageError where it has none."""
        if self.name == "numpy":
            return dtype.numpy
        found = getattr(import_module("torch"), dtype.name, None)
        if found is None:
            raise UsageError(f"dtype {dtype.name}: PyTorch has none such; choose another")
        return found

    def is_array(self, value: object) -> bool:
        """Whether a value is one of its arrays."""
        if self.name == "numpy":
            return isinstance(value, np.ndarray | np.generic)
        return isinstance(value, sys.modules["torch"].Tensor)

    def array(self, data: Any, dtype: DType | None = None, beside: Any = None) -> Any:
        """Data as one of its arrays, on the device of `beside`; its own arrays are not copied.

        Raises ShardError for tensors whose memory was freed, that are sparse or nested, and for
        arrays with a mask.
        """
        own = None if dtype is None else self.own_dtype(dtype)
        if is_distributed(data):
            raise UsageError(
                f"a {type(data).__name__} is one shard of a tensor here, not the tensor; give "
                "sp.array(tensor), which takes its sharding, or tensor.to_local() for the shard"
            )
        if isinstance(data, np.ma.MaskedArray):
            raise ShardError(
                f"a masked array of shape {data.shape}, whose mask would be lost; give "
                "data.filled(...), and its mask as an array of its own"
            )
        if self.name == "numpy":
            # Without importing it: where it is not loaded, nothing is a tensor.
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(data, torch.Tensor):
                data = _as_numpy(data)
            return np.asarray(data, dtype=own)
        torch = import_module("torch")
        device = getattr(beside, "device", None)
        if isinstance(data, torch.Tensor):
            _check_memory(data)
            return data.to(dtype=own, device=device)
        # By way of NumPy, so that numbers get the same types in both libraries.
        found = np.array(data, order="C")
        # Raises for what no array in shards has: texts, objects.
        kind = as_dtype(found.dtype)
        if found.dtype.isbuiltin == 2:
            # A type of ml_dtypes: PyTorch takes the bits, and its own name for them.
            made = torch.from_numpy(found.view(kind.storage)).view(self.own_dtype(kind))
        else:
            made = torch.from_numpy(found)
        return made.to(dtype=own, device=device)

    def filled(self, shape: tuple[int, ...], value: Any, beside: Any) -> Any:
        """A new array of one number, of the element type and on the device of `beside`."""
        if self.name == "numpy":
            return np.full(shape, value, dtype=beside.dtype)
        return beside.new_full(shape, value)

    def state_of(self, arrays: tuple[Any, ...]) -> Any:
        """Return a state that differs once an array may have been written to.

        Of PyTorch's, how often each was written to, and whether gradients are recorded. NumPy
        counts no writes: None where a program has got hold of the memory, see `lend`.
        """
        if self.name == "numpy":
            is_lent = any(id(_find_root(one)) in _lent for one in arrays)
            return None if is_lent else ()
        return (any(map(records_gradient, arrays)), *map(_count_writes, arrays))

    def has_copied(self, data: Any, made: Any) -> bool:
        """Whether `made`, its array of some data, has memory that nobody else knows of.

        By the kinds of both alone, so that all processes say the same.
        """
        if isinstance(data, list | tuple | int | float | complex | np.generic):
            return True
        source = library_of(data)
        if self.name == "torch" and (source is None or source.name != "torch"):
            return True
        return source is not None and source.dtype_of(data) is not self.dtype_of(made)

    def find_views(self, arrays: Iterable[Any], others: Iterable[Any]) -> tuple[bool, ...]:
        """Of arrays of NumPy, whether each has the memory of one of the others."""
        roots = {id(_find_root(one)) for one in others}
        return tuple([id(_find_root(one)) in roots for one in arrays])

    def lend(self, arrays: Iterable[Any]) -> None:
        """A program gets its arrays, and might write to them."""
        if self.name == "numpy":
            for one in arrays:
                root = _find_root(one)
                if isinstance(root, np.ndarray):
                    _lent[id(root)] = root

    def copied(self, array: Any) -> Any:
        """A copy of one of its arrays, to be written to; gradients go through it."""
        return array.copy() if self.name == "numpy" else array.clone()

    def has_gradient_or_device(self, array: Any) -> bool:
        """Whether one of its arrays records gradients, or is elsewhere than in CPU memory."""
        if self.name == "numpy":
            return False
        return array.device.type != "cpu" or records_gradient(array)

    def identity(self, reduction: str, beside: Any) -> Any:
        """The number that changes nothing when it is combined, for elements like those of an array.

        Of truth values, whole numbers and floats alike: the least of a type for "max".
        """
        if reduction in ("sum", "mean"):
            return 0
        if reduction == "product":
            return 1
        name = self.dtype_of(beside).name
        if name == "bool":
            return reduction == "min"
        if "int" in name:
            limits = np.iinfo(name)
            return limits.min if reduction == "max" else limits.max
        return -np.inf if reduction == "max" else np.inf

    def scaled(self, array: Any, numerator: int, denominator: int) -> Any:
        """One of its arrays times a fraction, in its own type."""
        return (
            (array * numerator / denominator).astype(array.dtype)
            if self.name == "numpy"
            else ((array * numerator / denominator).to(array.dtype))
        )

    def linked(self, made: Any, to: Any) -> Any:
        """An array of constants that, as one made from `to`, takes part in its gradient: by 0.

        All ranks must record alike, also those whose part has no elements.
        """
        if self.name == "numpy" or not records_gradient(to):
            return made
        return made + to.reshape(-1)[:0].sum().to(made.dtype)

    def is_finite(self, array: Any) -> bool:
        """Whether all elements of one of its floating arrays are finite."""
        space = self.namespace
        return bool(space.all(space.isfinite(array)))

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """One of its arrays as a NumPy array."""
        if self.name == "numpy":
            return np.asarray(array)
        return _as_numpy(array)

    def __repr__(self) -> str:
        return f"<Library {self.name}>"


_UFUNCS = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def _of_tensors(combine: Combine, by_numpy: np.ufunc) -> Combine:
    """PyTorch's function of two tensors, by NumPy for unsigned types that PyTorch cannot add.

    PyTorch's sum multiplies its second operand by 1, which is no number where that is complex and
    infinite. So parts are added by themselves.
    """
    torch = import_module("torch")
    lacking = (torch.uint16, torch.uint32, torch.uint64)

    def combined(x: Any, y: Any) -> Any:
        if by_numpy is np.add and x.is_complex() and y.is_complex():
            return torch.complex(x.real + y.real, x.imag + y.imag)
        if x.dtype not in lacking:
            return combine(x, y)
        made = np.asarray(by_numpy(_as_numpy(x), _as_numpy(y)))
        return torch.from_numpy(made).to(x.device)

    return combined


_lent: WeakValueDictionary[int, np.ndarray[Any, Any]] = WeakValueDictionary()
"""Arrays of NumPy, by identity, that programs have got and might write to."""


def _find_root(array: Any) -> Any:
    """The array that has the memory which another one is a view of."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def _count_writes(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0  # Of inference mode, in which nothing is counted.


def records_gradient(tensor: Any) -> bool:
    """Whether PyTorch records what is computed with a tensor, for its gradient."""
    return bool(tensor.requires_grad) and sys.modules["torch"].is_grad_enabled()


def _check_memory(tensor: Any) -> None:
    """Raises ShardError for a tensor whose memory was freed, and for a sparse or nested one."""
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of {tensor.layout}"
        raise ShardError(
            f"{kind}; arrays in shards are dense, of one shape: give tensor.to_dense(), or "
            "to_padded_tensor(0) of a nested one"
        )
    try:
        freed_bytes = missing_bytes(tensor)
    except RuntimeError:
        return  # One without memory of its own, fake or batched: PyTorch's to judge.
    if freed_bytes > 0:
        raise ShardError(
            f"a tensor of shape {tuple(tensor.shape)} whose memory was freed: {freed_bytes} bytes "
            "are not there, as in parameters that FSDP keeps sharded; gather it first"
        )


def _as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor's elements in an array of NumPy.

    Raises MissingExtraError for a type that NumPy has by `ml_dtypes` only, where that is absent,
    and ShardError where the tensor's memory was freed.
    """
    torch = import_module("torch")
    _check_memory(tensor)
    if records_gradient(tensor):
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} that requires a gradient, as elements of "
            "NumPy: the gradient would end there; give tensor.detach(), or keep shards of "
            "PyTorch: sp.running(sp.in_process('torch'))"
        )
    # NumPy has no gradients, devices or lazy conjugates.
    plain = tensor.detach().cpu().resolve_conj()
    kind = as_dtype(tensor.dtype)
    found: np.ndarray[Any, Any]
    try:
        found = plain.numpy()
    except TypeError:
        # A type that NumPy lacks goes over as integers of its width, then by its name in ml_dtypes.
        bits = getattr(torch, f"int{8 * kind.itemsize_bytes}")
        found = plain.contiguous().view(bits).numpy().view(kind.numpy)
    return found


@lru_cache(maxsize=2)
def library(name: str) -> Library:
    """The library `numpy` or `torch`.

    Raises:
        UsageError: another name.
        MissingExtraError: a library that is not installed, or `array_api_compat` where it is
            needed.
    """
    if name == "numpy":
        return Library(name, np)
    if name == "torch":
        return Library(name, _load_compatible("array_api_compat.torch", name))
    raise UsageError(f"unknown library {name!r}; shards are arrays of 'numpy' or 'torch'")


def _load_compatible(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"computing on shards of {name} needs {name} and array_api_compat; install them with: "
            f"pip install {name} array-api-compat"
        ) from error


def is_distributed(value: object) -> bool:
    """Return whether a value is a part of a tensor over ranks, such as a DTensor."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def library_of(value: object) -> Library | None:
    """The library that a value is an array of; None if it is not an array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return library("torch")
    return library("numpy") if isinstance(value, np.ndarray | np.generic) else None
