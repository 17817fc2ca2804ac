"""Array libraries that compute with shards: NumPy and PyTorch, by names of the array API standard.

Each library is used through a namespace with the standard's names: NumPy's own, and for PyTorch
the namespace of the package `array_api_compat`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import MissingExtraError, ShardError, UsageError
from reshard.execution.arrays import missing_bytes


class Library:
    """A library that computes with dense arrays. `library_of` and `library` return libraries.

    `namespace` has the functions of the array API standard.
    """

    def __init__(self, name: str, namespace: Any) -> None:
        self.name = name
        self.namespace = namespace
        self.add = namespace.add
        self._dtypes: dict[Any, DType] = {}

    def dtype_of(self, array: Any) -> DType:
        """Return the element type of an array of this library."""
        # A look into a dictionary, since this is asked at each operation.
        native = array.dtype
        dtype = self._dtypes.get(native)
        if dtype is None:
            dtype = self._dtypes[native] = as_dtype(native)
        return dtype

    def own_dtype(self, dtype: DType) -> Any:
        """Return the library's own element type. Raises UsageError if the library lacks it."""
        if self.name == "numpy":
            return dtype.numpy
        native = getattr(import_module("torch"), dtype.name, None)
        if native is None:
            raise UsageError(f"dtype {dtype.name}: PyTorch has none such; choose another")
        return native

    def is_array(self, value: object) -> bool:
        """Return whether a value is an array of this library."""
        if self.name == "numpy":
            return isinstance(value, np.ndarray | np.generic)
        return isinstance(value, sys.modules["torch"].Tensor)

    def array(self, data: Any, dtype: DType | None = None, like: Any = None) -> Any:
        """Convert data to an array on the device of `like`; its own arrays are not copied.

        Raises ShardError for tensors that are sparse or nested or whose memory was freed, and for
        arrays with a mask.
        """
        native = None if dtype is None else self.own_dtype(dtype)
        if is_distributed(data):
            raise UsageError(
                f"a {type(data).__name__} is one shard of a tensor here, not the tensor; give "
                "sp.array(tensor), which takes its sharding, or tensor.to_local() for the shard"
            )
        # Without its module, which NumPy loads when it is first used, no array has a mask.
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(data, masked.MaskedArray):
            raise ShardError(
                f"a masked array of shape {data.shape}, whose mask would be lost; give "
                "data.filled(...), and its mask as an array of its own"
            )
        if self.name == "numpy":
            # PyTorch is not imported for this: if it is not loaded, no value is a tensor.
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(data, torch.Tensor):
                data = _as_numpy(data)
            return np.asarray(data, dtype=native)
        torch = import_module("torch")
        device = getattr(like, "device", None)
        if isinstance(data, torch.Tensor):
            _check_memory(data)
            return data.to(dtype=native, device=device)
        # Numbers go through NumPy, so that they get the same types in both libraries.
        # A copy in C order: `from_numpy` refuses negative strides, and warns of read-only memory.
        elements = np.array(data, order="C")
        # Raises for element types that sharded arrays do not support: strings, objects.
        kind = as_dtype(elements.dtype)
        if elements.dtype.isbuiltin == 2:
            # A type of ml_dtypes: PyTorch takes the bits, and views them as its own type.
            tensor = torch.from_numpy(elements.view(kind.storage)).view(self.own_dtype(kind))
        else:
            tensor = torch.from_numpy(elements)
        return tensor.to(dtype=native, device=device)

    def filled(self, shape: tuple[int, ...], value: Any, like: Any) -> Any:
        """Return a new array filled with a number, with the element type and device of `like`."""
        if self.name == "numpy":
            return np.full(shape, value, dtype=like.dtype)
        return like.new_full(shape, value)

    def state_of(self, arrays: tuple[Any, ...]) -> Any:
        """Return a state that differs once an array may have been written to.

        For PyTorch: how often each tensor was written to, and whether gradients are recorded. NumPy
        does not count writes: the state is None if a program has access to the memory, see `lend`.
        """
        if self.name == "numpy":
            is_lent = bool(_lent) and any(id(_find_root(array)) in _lent for array in arrays)
            return None if is_lent else ()
        return (any(map(records_gradient, arrays)), *map(_count_writes, arrays))

    def has_copied(self, data: Any, array: Any) -> bool:
        """Return whether an array created from `data` does not share memory with it.

        The answer depends on the types of both alone, so all processes get the same.
        """
        if isinstance(data, list | tuple | int | float | complex | np.generic):
            return True
        source = library_of(data)
        if self.name == "torch" and (source is None or source.name != "torch"):
            return True
        return source is not None and source.dtype_of(data) is not self.dtype_of(array)

    def find_views(self, arrays: Iterable[Any], others: Iterable[Any]) -> tuple[bool, ...]:
        """Return for each NumPy array whether it shares memory with any of the others."""
        roots = {id(_find_root(array)) for array in others}
        return tuple([id(_find_root(array)) in roots for array in arrays])

    def lend(self, arrays: Iterable[Any]) -> None:
        """Note that a program has access to these arrays, and might write to them."""
        if self.name == "numpy":
            for array in arrays:
                root = _find_root(array)
                if isinstance(root, np.ndarray):
                    _lent[id(root)] = root

    def copied(self, array: Any) -> Any:
        """Return a copy of an array that may be written to; gradients flow through the copy."""
        return array.copy() if self.name == "numpy" else array.clone()

    def linked(self, constant: Any, to: Any) -> Any:
        """Make constants depend on `to` for autograd, with a gradient of 0.

        All ranks must record the same operations, including ranks whose part is empty.
        """
        if self.name == "numpy" or not records_gradient(to):
            return constant
        # The sum of no elements is 0; 0 times an element is NaN if the element is infinite.
        return constant + to.reshape(-1)[:0].sum().to(constant.dtype)

    def is_finite(self, array: Any) -> bool:
        """Return whether all elements of a floating-point array are finite."""
        space = self.namespace
        return bool(space.all(space.isfinite(array)))

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Convert an array to a NumPy array."""
        if self.name == "numpy":
            return np.asarray(array)
        return _as_numpy(array)

    def __repr__(self) -> str:
        return f"<Library {self.name}>"


_lent: WeakValueDictionary[int, np.ndarray[Any, Any]] = WeakValueDictionary()
"""NumPy arrays, by identity, to which programs have access and might write."""


def _find_root(array: Any) -> Any:
    """Return the array that owns the memory of a view."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def _count_writes(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0  # A tensor of inference mode: its writes are not counted.


def records_gradient(tensor: Any) -> bool:
    """Return whether PyTorch records operations on a tensor for its gradient."""
    return bool(tensor.requires_grad) and sys.modules["torch"].is_grad_enabled()


def _check_memory(tensor: Any) -> None:
    """Raise ShardError for a sparse or nested tensor, or a tensor whose memory was freed."""
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
    """Return a tensor's elements as a NumPy array.

    Raises MissingExtraError for a type that NumPy needs `ml_dtypes` for, if that is not installed,
    and ShardError if the tensor's memory was freed.
    """
    torch = import_module("torch")
    _check_memory(tensor)
    if records_gradient(tensor):
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} that requires a gradient, as elements of "
            "NumPy: the gradient would end there; give tensor.detach(), or keep shards of "
            "PyTorch: sp.running(sp.in_process('torch'))"
        )
    # NumPy lacks gradients, devices or lazy conjugates.
    plain = tensor.detach().cpu().resolve_conj()
    kind = as_dtype(tensor.dtype)
    array: np.ndarray[Any, Any]
    try:
        array = plain.numpy()
    except TypeError:
        # A type that NumPy lacks is converted as integers of its width, viewed as ml_dtypes' type.
        bits = getattr(torch, f"int{8 * kind.itemsize_bytes}")
        array = plain.contiguous().view(bits).numpy().view(kind.numpy)
    return array


@lru_cache(maxsize=2)
def library(name: str) -> Library:
    """Return the library `numpy` or `torch`.

    Raises:
        UsageError: another name.
        MissingExtraError: a library that is not installed, or `array_api_compat` where it is
            needed.
    """
    if name == "numpy":
        return Library(name, np)
    if name == "torch":
        try:
            return Library(name, import_module("array_api_compat.torch"))
        except ImportError as error:
            raise MissingExtraError(
                "computing on shards of torch needs torch and array_api_compat; install them with: "
                "pip install torch array-api-compat"
            ) from error
    raise UsageError(f"unknown library {name!r}; shards are arrays of 'numpy' or 'torch'")


def is_distributed(value: object) -> bool:
    """Return whether a value is a part of a tensor over ranks, such as a DTensor."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def library_of(value: object) -> Library | None:
    """Return the library that a value is an array of, or None if it is not an array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return library("torch")
    return library("numpy") if isinstance(value, np.ndarray | np.generic) else None
