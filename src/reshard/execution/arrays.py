"""Arrays of any kind, as NumPy memory.

Moving elements needs their bytes, and combining contributions needs their arithmetic. An
`ArrayKind` gives both for one kind of array and one dtype: the bare bytes as a NumPy array
that shares memory with the original, and reductions on such bytes. torch is used where it is
loaded already, and never imported here.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

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


class ArrayKind(Protocol):
    """What the executor needs of one kind of array. `Storage` holds bare elements."""

    dtype: DType

    def storage(self, array: Any) -> Storage:
        """The array's elements, sharing its memory."""

    def array(self, storage: Storage) -> Any:
        """An array of this kind over dense storage, sharing its memory."""

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        """Two contributions as one."""

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        """Every element times a fraction."""


class NumpyArrays:
    """NumPy arrays, ml_dtypes' included."""

    def __init__(self, example: Any) -> None:
        self._numpy_dtype: np.dtype[Any] = example.dtype
        self.dtype = as_dtype(example.dtype)

    def storage(self, array: Any) -> Storage:
        return np.asarray(array).view(self.dtype.storage)

    def array(self, storage: Storage) -> Any:
        return storage.view(self._numpy_dtype)

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        typed = _UFUNCS[reduction](self._typed(left), self._typed(right))
        return self._stored(typed)

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        typed = self._typed(storage)
        scalar = self._numpy_dtype.type
        return self._stored(typed * scalar(numerator) / scalar(denominator))

    def _typed(self, storage: Storage) -> Storage:
        return np.asarray(storage, order="C").view(self._numpy_dtype)

    def _stored(self, typed: Storage) -> Storage:
        return np.asarray(typed, dtype=self._numpy_dtype, order="C").view(self.dtype.storage)


class TorchTensors:
    """torch tensors on the CPU."""

    def __init__(self, example: Any) -> None:
        self._torch = sys.modules["torch"]
        self._torch_dtype = example.dtype
        self.dtype = as_dtype(example.dtype)
        # torch has no element of 16 bytes without arithmetic, and NumPy knows those types.
        carriers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
        self._carrier = getattr(self._torch, carriers.get(self.dtype.itemsize_bytes, "complex128"))

    def storage(self, array: Any) -> Storage:
        if array.device.type != "cpu":
            raise ShardError(
                f"a tensor on device {array.device}; plan.run works on CPU memory, move it with "
                "tensor.cpu() first"
            )
        if array.layout != self._torch.strided:
            raise ShardError(f"a tensor of layout {array.layout}; dense tensors are expected")
        plain = array.detach().resolve_conj().resolve_neg()
        viewed: Storage = plain.view(self._carrier).numpy()
        return viewed.view(self.dtype.storage)

    def array(self, storage: Storage) -> Any:
        carrier = self._torch.empty((), dtype=self._carrier).numpy().dtype
        return self._torch.from_numpy(storage.view(carrier)).view(self._torch_dtype)

    def combine(self, reduction: str, left: Storage, right: Storage) -> Storage:
        operation = getattr(self._torch, _TORCH_OPERATIONS[reduction])
        a, b = self._computable(left), self._computable(right)
        return self._stored(operation(a, b))

    def scale(self, storage: Storage, numerator: int, denominator: int) -> Storage:
        return self._stored(self._computable(storage) * numerator / denominator)

    def _computable(self, storage: Storage) -> Any:
        tensor = self.array(np.array(storage, order="C"))
        # torch computes nothing in one-byte floats; each step is rounded back to them.
        narrow = self.dtype.name.startswith("float8")
        return tensor.to(self._torch.float32) if narrow else tensor

    def _stored(self, tensor: Any) -> Storage:
        return self.storage(tensor.to(self._torch_dtype).contiguous())


def kind_of(array: Any, name: str) -> ArrayKind:
    """The kind of an array; `name` says whose it is.

    Raises:
        ShardError: something that is no NumPy array or torch tensor, or of a dtype that
            cannot be moved.

    >>> kind_of(np.zeros(2, np.float32), "x").dtype
    DType('float32')
    """
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(array, torch.Tensor):
            return TorchTensors(array)
        if isinstance(array, np.ndarray | np.generic):
            return NumpyArrays(array)
    except UsageError as error:
        raise ShardError(f"{name}: {error}") from error
    raise ShardError(
        f"{name} is a {type(array).__name__}; NumPy arrays and torch CPU tensors are expected"
    )


def identity(reduction: str, kind: ArrayKind) -> Storage:
    """The one element that changes nothing when combined: storage of shape `(1,)`."""
    numpy_dtype = kind.dtype.numpy
    if reduction in ("sum", "mean"):
        value: Any = 0
    elif reduction == "product":
        value = 1
    elif numpy_dtype.kind == "b":
        value = reduction == "min"
    elif numpy_dtype.kind in "iu":
        limits = np.iinfo(numpy_dtype)
        value = limits.min if reduction == "max" else limits.max
    elif numpy_dtype.kind == "c":
        raise ShardError(
            f"{reduction} of {kind.dtype.name}: complex numbers have no order; reduce by sum, "
            "mean or product"
        )
    else:
        value = -np.inf if reduction == "max" else np.inf
        stored = np.array([value]).astype(numpy_dtype)
        if not np.isinf(stored.astype(np.float64)[0]):
            # A type without infinities (float8_e4m3fn): its largest finite number will do.
            bits = np.arange(256, dtype=np.uint8).view(numpy_dtype).astype(np.float64)
            finite = bits[np.isfinite(bits)]
            value = finite.min() if reduction == "max" else finite.max()
    return np.array([value]).astype(numpy_dtype).view(kind.dtype.storage)
