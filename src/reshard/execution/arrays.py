"""Arrays of any library as NumPy memory, and reductions of their elements.

Moving elements needs their bytes, and combining contributions needs their arithmetic. An
`ArrayKind` provides both for a kind of array and a dtype: the bare bytes as a NumPy array that
shares memory with the original, and reductions on such bytes. torch is used if it is loaded
already, and never imported here.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError, UsageError

Storage = NDArray[Any]

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}
_TORCH_OPERATIONS = {
    "sum": "add",
    "mean": "add",
    "max": "maximum",
    "min": "minimum",
    "product": "mul",
}


class NumpyArrays:
    """NumPy arrays of a dtype, including the dtypes of ml_dtypes.

    The executor needs exactly these methods; `TorchTensors` has them as well.
    """

    def __init__(self, numpy_dtype: np.dtype[Any]) -> None:
        self._numpy_dtype = numpy_dtype
        self.dtype = as_dtype(numpy_dtype)

    def storage(self, array: Any, name: str = "the array") -> Storage:
        """Return the array's elements, sharing its memory; `name` is used in errors."""
        return np.asarray(array).view(self.dtype.storage)

    def writable(self, array: Any, name: str) -> Storage:
        """Return writable elements, as `storage` does."""
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise ShardError(f"{name} is read-only; give one that can be written")
        return self.storage(array, name)

    def array(self, storage: Storage) -> Any:
        """Return an array of this kind over dense storage, sharing its memory."""
        return storage.view(self._numpy_dtype)

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        """Return the reduction of two contributions."""
        # Overflow gives infinity and invalid operations NaN, as in torch, without a warning.
        with np.errstate(all="ignore"):
            return self._store(
                _UFUNCS[reduction](self._view_as_type(left), self._view_as_type(right))
            )

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        """Return every element times a fraction."""
        # A narrow type may not represent the denominator: 17 is 16 in float8_e4m3fn.
        wide = np.complex64 if is_complex(self.dtype) else np.float32
        typed = self._view_as_type(storage)
        typed = typed.astype(np.result_type(wide, typed) if typed.itemsize > 4 else wide)
        with np.errstate(all="ignore"):
            return self._store(typed * numerator / denominator)

    def element(self, value: float) -> Storage:
        """Return an element of that value: storage of shape `(1,)`."""
        return np.array([value]).astype(self._numpy_dtype).view(self.dtype.storage)

    def float_limits(self) -> tuple[float, float]:
        """Return the smallest and largest number of the type, infinities if it has them."""
        least, greatest = np.array([-np.inf, np.inf]).astype(self._numpy_dtype).astype(np.float64)
        if not np.isinf(greatest):
            # An 8-bit type without infinities: find its limits among all its values.
            every = np.arange(256, dtype=np.uint8).view(self._numpy_dtype).astype(np.float64)
            finite = every[np.isfinite(every)]
            return float(finite.min()), float(finite.max())
        return float(least), float(greatest)

    def _view_as_type(self, storage: Storage) -> Storage:
        return np.asarray(storage, order="C").view(self._numpy_dtype)

    def _store(self, typed: Storage) -> Storage:
        return np.asarray(typed, dtype=self._numpy_dtype, order="C").view(self.dtype.storage)


class TorchTensors:
    """torch tensors on the CPU."""

    def __init__(self, example: Any) -> None:
        self._torch = sys.modules["torch"]
        self._torch_dtype = example.dtype
        self.dtype = as_dtype(example.dtype)
        # torch lacks a 16-byte integer; complex128 copies bits too.
        carriers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
        self._carrier = getattr(self._torch, carriers.get(self.dtype.itemsize_bytes, "complex128"))

    def storage(self, array: Any, name: str = "the array") -> Storage:
        if array.device.type != "cpu":
            raise ShardError(
                f"{name} is a tensor on device {array.device}; this works on CPU memory, move it "
                "with tensor.cpu() first"
            )
        if array.layout != self._torch.strided:
            raise ShardError(
                f"{name} is a tensor of layout {array.layout}; dense tensors are expected"
            )
        try:
            freed_bytes = missing_bytes(array)
            plain = array.detach().resolve_conj().resolve_neg()
            viewed: Storage = plain.view(self._carrier).numpy()
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ShardError(
                f"{name} is a {type(array).__name__} whose memory cannot be shared ({reason}); "
                "give a plain tensor, for a DTensor its to_local()"
            ) from error
        if freed_bytes > 0:
            # NumPy would allocate undefined memory in its place.
            raise ShardError(
                f"{name} is a tensor whose memory was freed: {freed_bytes} bytes are missing, "
                "as in parameters that FSDP keeps sharded; gather it first, or give the shards"
            )
        return viewed.view(self.dtype.storage)

    def writable(self, array: Any, name: str) -> Storage:
        if array.is_conj() or array.is_neg():
            raise ShardError(
                f"{name} is a conjugate or negative that torch computes when it is read; give "
                "the tensor itself"
            )
        return self.storage(array, name)

    def array(self, storage: Storage) -> Any:
        # The NumPy type of the carrier, which torch accepts without a copy.
        carrier = self._torch.empty((), dtype=self._carrier).numpy().dtype
        return self._torch.from_numpy(storage.view(carrier)).view(self._torch_dtype)

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        if is_integer(self.dtype):
            # Equal in both libraries, and torch lacks it for most unsigned types.
            numbers = np.dtype(self.dtype.name)
            combined = _UFUNCS[reduction](left.view(numbers), right.view(numbers))
            return np.asarray(combined).view(self.dtype.storage)
        operation = getattr(self._torch, _TORCH_OPERATIONS[reduction])
        a, b = self._computable(left), self._computable(right)
        return self._store(operation(a, b))

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        return self._store(self._computable(storage) * numerator / denominator)

    def element(self, value: float) -> Storage:
        if is_integer(self.dtype):
            return np.array([value], dtype=self.dtype.name).view(self.dtype.storage)
        return self._store(self._torch.tensor([value], dtype=self._torch.float64))

    def float_limits(self) -> tuple[float, float]:
        limits = self._torch.finfo(self._torch_dtype)
        infinity = self._torch.tensor([float("inf")]).to(self._torch_dtype).to(self._torch.float32)
        if infinity.isinf().item():
            return float("-inf"), float("inf")
        return limits.min, limits.max

    def _computable(self, storage: Storage) -> Any:
        tensor = self.array(np.array(storage, order="C"))
        # torch has few operations for these types: compute in a wider type and round back.
        if self.dtype.name == "complex32":
            return tensor.to(self._torch.complex64)
        narrow = self.dtype.name.startswith("float8")
        return tensor.to(self._torch.float32) if narrow else tensor

    def _store(self, tensor: Any) -> Storage:
        return self.storage(tensor.to(self._torch_dtype).contiguous())


ArrayKind = NumpyArrays | TorchTensors
"""A kind of array. Its `Storage` holds bare elements."""


def missing_bytes(tensor: Any) -> int:
    """Return how many bytes a tensor extends beyond the end of its memory; 0 or less if it does
    not.

    FSDP frees the memory of parameters that it keeps sharded, while the tensors remain.
    """
    if tensor.numel() == 0:
        return 0
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in dims)
    there_bytes: int = tensor.untyped_storage().nbytes()
    return int((last + 1) * tensor.element_size() - there_bytes)


def is_integer(dtype: DType) -> bool:
    """Return whether elements are integers or booleans."""
    return dtype.name.startswith(("int", "uint", "bool"))


def is_complex(dtype: DType) -> bool:
    """Return whether elements are complex numbers."""
    return dtype.name.startswith("complex")


def kind_of(array: Any, name: str) -> ArrayKind:
    """Return the kind of an array; `name` is used in errors.

    Raises:
        ShardError: anything but a NumPy array or torch tensor, or a dtype that cannot be moved.

    >>> kind_of(np.zeros(2, np.float32), "x").dtype
    DType('float32')
    """
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(array, torch.Tensor):
            if not _has_shape(array):
                raise ShardError(
                    f"{name} is a {type(array).__name__} without a shape, nested or not yet "
                    "initialized; dense tensors are expected"
                )
            return TorchTensors(array)
        # Importing numpy.ma is slow; it is loaded if there are masked arrays.
        if "numpy.ma" in sys.modules and isinstance(array, np.ma.MaskedArray):
            # The mask would be lost, and the masked elements would appear.
            raise ShardError(f"{name} is masked; give its values, array.filled()")
        if isinstance(array, np.ndarray | np.generic):
            return _numpy_arrays(array.dtype)
    except UsageError as error:
        raise ShardError(f"{name}: {error}") from error
    raise ShardError(
        f"{name} is a {type(array).__name__}; NumPy arrays and torch CPU tensors are expected"
    )


# NumPy composes the name of a dtype on every access.
_numpy_arrays = lru_cache(maxsize=64)(NumpyArrays)


def _has_shape(tensor: Any) -> bool:
    try:
        return tensor.shape is not None
    except RuntimeError:
        return False


def check_reduction(reduction: str, dtype: DType) -> None:
    """Raise ShardError for a reduction that is undefined for elements of this type.

    >>> from reshard.dtypes import dtype
    >>> check_reduction("mean", dtype("int8"))
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: a mean of int8 is not exact; reduce by sum, or cast to a floating
    type
    """
    if reduction == "mean" and is_integer(dtype):
        raise ShardError(
            f"a mean of {dtype.name} is not exact; reduce by sum, or cast to a floating type"
        )
    if reduction in ("max", "min") and is_complex(dtype):
        raise ShardError(
            f"{reduction} of {dtype.name}: complex numbers have no order; reduce by sum, mean or "
            "product"
        )


def identity(reduction: str, kind: ArrayKind) -> Storage:
    """Return the identity element of a reduction: storage of shape `(1,)`."""
    if reduction in ("sum", "mean"):
        return kind.element(0)
    if reduction == "product":
        return kind.element(1)
    # NumPy does not define limits for booleans.
    if kind.dtype.name == "bool":
        least, greatest = 0.0, 1.0
    elif is_integer(kind.dtype):
        limits = np.iinfo(kind.dtype.name)
        least, greatest = limits.min, limits.max
    else:
        least, greatest = kind.float_limits()
    return kind.element(least if reduction == "max" else greatest)
