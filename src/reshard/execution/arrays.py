"""Arrays of any library: their memory as NumPy arrays, and the reductions of their elements.

Moving elements needs their bytes, and combining contributions needs their arithmetic. An
`ArrayKind` provides both for the arrays of a library and a dtype: the bare bytes as a NumPy array
that shares memory with the original, and reductions on such bytes. Libraries are used if they are
loaded already, and never imported here:

==============  ==================================================================================
NumPy           arrays of its own dtypes and of those of ml_dtypes
torch           dense tensors in CPU memory
JAX             arrays in CPU memory, which are only read
==============  ==================================================================================

`combine` and `scale` are the arithmetic itself, on NumPy arrays, or on tensors on any device.
Everything that combines contributions calls them, so the bits of a result do not depend on how its
elements were moved.
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


def combine(reduction: str, left: Any, right: Any) -> Any:
    """Return the reduction of two arrays of one library, dtype and device.

    >>> combine("max", np.array([1, 4]), np.array([3, 2])).tolist()
    [3, 4]
    """
    if isinstance(left, np.ndarray | np.generic):
        # Overflow gives infinity and invalid operations NaN, as in torch, without a warning.
        with np.errstate(all="ignore"):
            return _UFUNCS[reduction](left, right)
    torch = sys.modules["torch"]
    dtype = left.dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        # torch lacks arithmetic for these; modulo 2**n it is that of signed integers or NumPy.
        numbers = _UFUNCS[reduction](left.cpu().numpy(), right.cpu().numpy())
        return torch.from_numpy(np.asarray(numbers)).to(left.device)
    left, right = _widen(left), _widen(right)
    operation = getattr(torch, _TORCH_OPERATIONS[reduction])
    if operation is torch.add and left.is_complex():
        # torch multiplies the second operand by 1, which makes NaN of complex infinities.
        result = torch.complex(left.real + right.real, left.imag + right.imag)
    else:
        result = operation(left, right)
    return result.to(dtype)


def scale(array: Any, numerator: int, denominator: int) -> Any:
    """Return every element times a fraction, rounded to the array's dtype.

    >>> scale(np.array([1, 2], np.float16), 3, 2).tolist()
    [1.5, 3.0]
    """
    if not isinstance(array, np.ndarray | np.generic):
        return (_widen(array) * numerator / denominator).to(array.dtype)
    # A narrow type may not represent the denominator: 17 is 16 in float8_e4m3fn.
    # A look at the kind is faster; it is `V` for some types of ml_dtypes.
    kind = array.dtype.kind
    is_paired = kind == "c" or (kind != "f" and is_complex(as_dtype(array.dtype)))
    wide = np.complex64 if is_paired else np.float32
    typed = array.astype(np.result_type(wide, array) if array.itemsize > 4 else wide)
    with np.errstate(all="ignore"):
        return np.asarray(typed * numerator / denominator, dtype=array.dtype)


def _widen(tensor: Any) -> Any:
    """Return a tensor in a type that torch computes with: it has few operations for narrow ones."""
    torch = sys.modules["torch"]
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    is_narrow = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.to(torch.float32) if is_narrow else tensor


def identity(reduction: str, dtype: DType) -> float:
    """Return the number that changes nothing in a reduction of elements of this type.

    >>> from reshard.dtypes import dtype
    >>> identity("product", dtype("int8")), identity("max", dtype("int8"))
    (1, -128)
    >>> identity("min", dtype("float8_e4m3fn")), identity("min", dtype("bfloat16"))
    (448.0, inf)
    """
    if reduction in ("sum", "mean"):
        return 0
    if reduction == "product":
        return 1
    if dtype.name == "bool":
        return reduction == "min"
    if is_integer(dtype):
        limits = np.iinfo(dtype.name)
        return int(limits.min if reduction == "max" else limits.max)
    if dtype.itemsize_bytes > 1:
        return -np.inf if reduction == "max" else np.inf
    # Used rarely, so it is not loaded with this module.
    from reshard.elements import float8_values

    # Most 8-bit types lack infinities: find the limits among all values.
    try:
        values = float8_values(dtype.name)
    except UsageError:
        values = np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    return float(np.nanmin(values) if reduction == "max" else np.nanmax(values))


class ArrayKind:
    """The arrays of a library and a dtype. `Storage` holds their bare elements."""

    dtype: DType

    def storage(self, array: Any, name: str = "the array") -> Storage:
        """Return the array's elements, sharing its memory; `name` is used in errors."""
        raise NotImplementedError

    def writable(self, array: Any, name: str) -> Storage:
        """Return writable elements, as `storage` does."""
        raise NotImplementedError

    def array(self, storage: Storage) -> Any:
        """Return an array of this kind over dense storage, sharing its memory if possible."""
        raise NotImplementedError

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        """Return the reduction of two contributions."""
        return self._store(combine(reduction, self._typed(left), self._typed(right)))

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        """Return every element times a fraction."""
        return self._store(scale(self._typed(storage), numerator, denominator))

    def element(self, value: float) -> Storage:
        """Return an element of that value: storage of shape `(1,)`."""
        return self._store(np.array([value]).astype(self.dtype.numpy))

    def _typed(self, storage: Storage) -> Any:
        """Return storage as an array for arithmetic. NumPy's is equal in all libraries."""
        return np.asarray(storage, order="C").view(self.dtype.numpy)

    def _store(self, typed: Any) -> Storage:
        return np.asarray(typed, order="C").view(self.dtype.storage)


class NumpyArrays(ArrayKind):
    """NumPy arrays of a dtype, including the dtypes of ml_dtypes."""

    def __init__(self, numpy_dtype: np.dtype[Any]) -> None:
        self.dtype = as_dtype(numpy_dtype)

    def storage(self, array: Any, name: str = "the array") -> Storage:
        return np.asarray(array).view(self.dtype.storage)

    def writable(self, array: Any, name: str) -> Storage:
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise ShardError(f"{name} is read-only; give one that can be written")
        return self.storage(array, name)

    def array(self, storage: Storage) -> Any:
        return storage.view(self.dtype.numpy)


class JaxArrays(ArrayKind):
    """JAX arrays in CPU memory. They are never written to: results are new arrays."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def storage(self, array: Any, name: str = "the array") -> Storage:
        devices = array.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu":
            raise ShardError(
                f"{name} is on {', '.join(sorted(map(str, devices)))}; this works on CPU memory, "
                "one array for each rank: give array.addressable_shards[i].data, moved with "
                "jax.device_put(shard, jax.devices('cpu')[0])"
            )
        return np.asarray(array).view(self.dtype.storage)

    def writable(self, array: Any, name: str) -> Storage:
        raise ShardError(f"{name} is a JAX array, which cannot be written; leave out `out`")

    def array(self, storage: Storage) -> Any:
        return sys.modules["jax"].numpy.asarray(storage.view(self.dtype.numpy))


class TorchTensors(ArrayKind):
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
            # torch stores a conjugate or a negative as a flag, which the memory does not show.
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
        # NumPy's sums have the same bits, and need neither copies nor threads of their own.
        if _UFUNCS[reduction] is np.add and self.dtype.name in ("float32", "float64"):
            sums = combine(reduction, left.view(self.dtype.numpy), right.view(self.dtype.numpy))
            return np.asarray(sums).view(self.dtype.storage)
        return super().combine(reduction, left, right)

    def element(self, value: float) -> Storage:
        if is_integer(self.dtype):
            return np.array([value], dtype=self.dtype.name).view(self.dtype.storage)
        return self._store(self._torch.tensor([value], dtype=self._torch.float64))

    def _typed(self, storage: Storage) -> Any:
        if is_integer(self.dtype):
            # Equal in both libraries, and NumPy needs no copy.
            return storage.view(self.dtype.name)
        # A tensor cannot share memory that is read-only.
        return self.array(np.array(storage, order="C"))

    def _store(self, typed: Any) -> Storage:
        if isinstance(typed, np.ndarray | np.generic):
            return super()._store(typed)
        return self.storage(typed.to(self._torch_dtype).contiguous())


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
        ShardError: anything but an array of NumPy, torch or JAX, or a dtype that cannot be moved.

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
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(array, jax.Array):
            if isinstance(array, jax.core.Tracer):
                raise ShardError(f"{name} is traced by JAX; call this outside of jax.jit")
            return JaxArrays(as_dtype(array.dtype))
    except UsageError as error:
        raise ShardError(f"{name}: {error}") from error
    raise ShardError(
        f"{name} is a {type(array).__name__}; arrays of NumPy, torch or JAX in CPU memory are "
        "expected"
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
