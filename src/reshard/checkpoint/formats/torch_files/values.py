"""Values in the pickles of `torch.save`: tensors of the file, and plain values.

A `ValueBuilder` builds them while the pickle is read:

1. A reference to a storage becomes a `Storage`, located by the records of the file.
2. The call that makes a tensor of a storage becomes an `ArchivedTensor`; so does a parameter. The
   tensor must be inside its storage.
3. Ordered dicts and dicts with a default become dicts, `torch.Size` a tuple, bytes and numbers of
   NumPy themselves, a device its text.
4. Any other call stays a `Call`, which is never made: an object of a class, a sparse or quantized
   tensor, a tensor without elements. `explain` returns why it is not read.

*Plain* values mean the same to every program: numbers, text, None, and lists, tuples, dicts and
sizes of such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.pickles import Call, Global, Reference, shortened
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import FormatError, UsageError

# The classes of storages that are named for an element type.
TYPED_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED_STORAGES = ("UntypedStorage", "_UntypedStorage")
# NumPy 2 renamed `core` to `_core`.
_NUMPY_CORE = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMPY_CODE = r"[biufc](1|2|4|8|16)"
_EXPLANATIONS = {
    "_rebuild_sparse_tensor": "a sparse tensor; save tensor.to_dense()",
    "_rebuild_sparse_csr_tensor": "a sparse tensor; save tensor.to_dense()",
    "_rebuild_qtensor": "a quantized tensor; save tensor.dequantize()",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no elements",
    "_rebuild_tensor": "a tensor whose elements are repeated or computed when they are read; "
    "save tensor.contiguous().resolve_conj().resolve_neg()",
}


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor of a file: `view` of the `storage_bytes` of the file at `start_bytes`.

    `crc32` is the checksum of the storage, or None if it was saved without.
    """

    dtype: DType
    shape: tuple[int, ...]
    view: View
    start_bytes: int
    storage_bytes: int
    crc32: int | None


class Storage(NamedTuple):
    """A storage in a file; `dtype` is None for a storage of bytes."""

    dtype: DType | None
    start_bytes: int
    size_bytes: int
    crc32: int


# Returns a storage's start, its size, and its checksum or 0; of its key and the expected size.
LocateStorage = Callable[[str, int], tuple[int, int, int]]
# Returns the error for a malformed file, with a reason.
MakeError = Callable[[str], FormatError]
# The value of a call, and whether the call is the only user of its arguments; None if unknown.
_Built = tuple[Any, bool] | None


class ValueBuilder:
    """Builds the values of a file, whose storages `locate` finds."""

    def __init__(self, locate: LocateStorage, wrong: MakeError) -> None:
        self._locate, self._wrong = locate, wrong
        self._storages: dict[tuple[Any, ...], Storage] = {}
        # A single object for each of the few shapes and views of a model.
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._views: dict[tuple[Any, ...], View] = {}

    def refer(self, key: Any) -> Any:
        """Return a storage, or a `Reference` to another object."""
        match key:
            case ("storage", Global(_, kind), str(record), str(), int(count), *view):
                pass
            case _:
                return Reference(key)
        element = TYPED_STORAGES.get(kind)
        # The pattern `int()` matches bool and negative numbers too.
        if (element is None and kind not in _UNTYPED_STORAGES) or not is_size(count):
            return Reference(key)
        storage = self._storages.get((kind, record, count))
        if storage is None:
            dtype = None if element is None else as_dtype(element)
            size_bytes = count * (1 if dtype is None else dtype.itemsize_bytes)
            start_bytes, stored_bytes, crc32 = self._locate(record, size_bytes)
            if stored_bytes != size_bytes:
                raise self._wrong(
                    f"storage {record!r} has {stored_bytes} bytes, expected {size_bytes}"
                )
            storage = Storage(dtype, start_bytes, size_bytes, crc32)
            self._storages[kind, record, count] = storage
        return storage if not view or view == [None] else self._part(storage, view[0])

    def _part(self, storage: Storage, view: Any) -> Storage:
        """Return a part of a storage of an old file: its name, offset and size in elements."""
        itemsize_bytes = 1 if storage.dtype is None else storage.dtype.itemsize_bytes
        match view:
            case (str(), int(offset), int(size)) if is_size(offset) and is_size(size):
                if (offset + size) * itemsize_bytes <= storage.size_bytes:
                    start_bytes = storage.start_bytes + offset * itemsize_bytes
                    return Storage(storage.dtype, start_bytes, size * itemsize_bytes, 0)
        raise self._wrong(f"a part of a storage of {storage.size_bytes} bytes is outside")

    def make(self, function: Global, arguments: tuple[Any, ...]) -> _Built:
        """Return the value of a call that is known."""
        maker = _MAKERS.get(function.name)
        if maker is None or function.module not in maker[0]:
            return None
        return maker[1](self, arguments)

    def tensor(self, arguments: tuple[Any, ...]) -> _Built:
        """Build a tensor of a typed storage.

        Its arguments are storage, offset, sizes, strides, whether it needs a gradient, hooks, and
        an optional dict of bits such as conjugation. The oldest have only the first four.
        """
        if len(arguments) not in (4, 6, 7) or (len(arguments) == 7 and arguments[6]):
            return None
        return self._tensor_in(arguments[0], arguments)

    def typed_tensor(self, arguments: tuple[Any, ...]) -> _Built:
        """Build a tensor in a storage of bytes: its element type precedes the bits."""
        if len(arguments) not in (7, 8) or (len(arguments) == 8 and arguments[7]):
            return None
        storage, dtype = arguments[0], _torch_dtype(arguments[6])
        if dtype is None or type(storage) is not Storage:
            return None
        typed = Storage(dtype, storage.start_bytes, storage.size_bytes, storage.crc32)
        return self._tensor_in(typed, arguments)

    def _tensor_in(self, storage: Any, arguments: tuple[Any, ...]) -> _Built:
        if type(storage) is not Storage or storage.dtype is None:
            return None
        offset = arguments[1]
        shape, strides = as_sizes(arguments[2]), as_sizes(arguments[3])
        if shape is None or strides is None or len(shape) != len(strides) or not is_size(offset):
            raise self._wrong("the offset, shape or strides of a tensor are not sizes")
        view = self._views.get((offset, strides))
        if view is None:
            view = self._views[offset, strides] = View(offset, strides)
        shape = self._shapes.setdefault(shape, shape)
        # Elements under several indices are computed when they are read: it stays a call.
        is_repeated = 0 in strides and any(
            s == 0 and n > 1 for n, s in zip(shape, strides, strict=True)
        )
        if is_repeated and 0 not in shape:
            return None
        # With fewer elements in the storage than in the tensor, indices would share elements.
        count = math.prod(shape)
        needed = max(offset + view.extent(shape), count) if count else 0
        if needed * storage.dtype.itemsize_bytes > storage.size_bytes:
            raise self._wrong(
                f"shape {list(shape)} at offset {offset} with strides {list(strides)} is more "
                f"than its storage of {storage.size_bytes} bytes"
            )
        start_bytes, size_bytes, crc32 = storage.start_bytes, storage.size_bytes, storage.crc32
        tensor = ArchivedTensor(storage.dtype, shape, view, start_bytes, size_bytes, crc32 or None)
        return tensor, True

    def parameter(self, arguments: tuple[Any, ...]) -> _Built:
        """Return the tensor of a parameter."""
        is_read = bool(arguments) and type(arguments[0]) is ArchivedTensor
        return (arguments[0], True) if is_read else None

    def attributed(self, arguments: tuple[Any, ...]) -> _Built:
        """Return a plain tensor of a call with its function, class, arguments and attributes."""
        match arguments:
            case (Global() as function, Global("torch", "Tensor"), tuple(own), _):
                maker = _MAKERS.get(function.name)
                is_tensor = function.name.startswith("_rebuild_tensor")
                if is_tensor and maker is not None and function.module in maker[0]:
                    return maker[1](self, own)
        return None

    def ordered(self, arguments: tuple[Any, ...]) -> _Built:
        """Build the dict of an ordered dict, of pairs or empty."""
        pairs = arguments[0] if len(arguments) == 1 else []
        if not isinstance(pairs, list) or not all(
            # Other keys may not be hashable.
            isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | int)
            for pair in pairs
        ):
            return None
        return {pair[0]: pair[1] for pair in pairs}, False

    def sizes(self, arguments: tuple[Any, ...]) -> _Built:
        """Build the tuple of a `torch.Size`."""
        sizes = as_sizes(arguments[0]) if len(arguments) == 1 else None
        return None if sizes is None else (sizes, False)

    def encoded(self, arguments: tuple[Any, ...]) -> _Built:
        """Build bytes, which early protocols write as text of the same codes."""
        match arguments:
            case (str(text), "latin1" | "latin-1"):
                try:
                    return text.encode("latin-1"), False
                except UnicodeEncodeError:
                    return None
        return None

    def device(self, arguments: tuple[Any, ...]) -> _Built:
        """Build the text of a device, such as `cuda:0`."""
        match arguments:
            case (str(kind),):
                return kind, False
            case (str(kind), int(number)):
                return f"{kind}:{number}", False
        return None

    def number(self, arguments: tuple[Any, ...]) -> _Built:
        """Build Python's number of a number of NumPy."""
        if len(arguments) != 2:
            return None
        dtype, content = _numpy_dtype(arguments[0]), arguments[1]
        if dtype is None or type(content) is not bytes or len(content) != dtype.itemsize:
            return None
        return np.frombuffer(content, dtype)[0].item(), False


# The builder of each known call by the function's name, with the modules that have it.
_MAKERS: dict[str, tuple[tuple[str, ...], Callable[[ValueBuilder, tuple[Any, ...]], _Built]]] = {
    "_rebuild_tensor": (("torch._utils",), ValueBuilder.tensor),
    "_rebuild_tensor_v2": (("torch._utils",), ValueBuilder.tensor),
    "_rebuild_tensor_v3": (("torch._utils",), ValueBuilder.typed_tensor),
    "_rebuild_parameter": (("torch._utils",), ValueBuilder.parameter),
    "_rebuild_parameter_with_state": (("torch._utils",), ValueBuilder.parameter),
    "_rebuild_from_type_v2": (("torch._tensor",), ValueBuilder.attributed),
    "OrderedDict": (("collections",), ValueBuilder.ordered),
    # The default of a dict is a function, which is not called.
    "defaultdict": (("collections",), lambda _, given: ({}, False) if len(given) <= 1 else None),
    "Size": (("torch",), ValueBuilder.sizes),
    "encode": (("_codecs",), ValueBuilder.encoded),
    # Early protocols make bytes of length 0 without an argument.
    "bytes": (("__builtin__", "builtins"), lambda _, given: None if given else (b"", False)),
    "device": (("torch",), ValueBuilder.device),
    "scalar": (_NUMPY_CORE, ValueBuilder.number),
}


def is_size(value: object) -> bool:
    """Return whether a value is an integer that can be a size or an offset."""
    # The sum of two, such as an offset and a size, fits into 64 bits.
    return type(value) is int and 0 <= value < 1 << 62


def as_sizes(value: object) -> tuple[int, ...] | None:
    """Return a `torch.Size`, a tuple or a list of sizes as a tuple, or None for another value."""
    if isinstance(value, Call) and value.function == Global("torch", "Size"):
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if isinstance(value, tuple | list) and all(map(is_size, value)):
        return tuple(value)
    return None


def _torch_dtype(value: object) -> DType | None:
    if not isinstance(value, Global):
        return None
    try:
        return as_dtype(value.name)
    except UsageError:
        return None


def numpy_array(value: object) -> np.ndarray[Any, Any] | None:
    """Return the array that a call would make of its bytes, or None for another value.

    The array shares the bytes and is read-only.
    """
    if not isinstance(value, Call) or value.function.name != "_reconstruct":
        return None
    if value.function.module not in _NUMPY_CORE:
        return None
    # A version, the shape, the type, whether it is in column-major order, the bytes.
    match value.state:
        case (int(), tuple() as shape, Call() as named, bool(is_by_column), bytes(content)):
            dtype = _numpy_dtype(named)
            sizes = as_sizes(shape)
            if dtype is None or sizes is None:
                return None
            if math.prod(sizes) * dtype.itemsize != len(content):
                return None
            return np.frombuffer(content, dtype).reshape(sizes, order="F" if is_by_column else "C")
    return None


def _numpy_dtype(value: object) -> np.dtype[Any] | None:
    """Return the type of a call of `numpy.dtype` in this machine's byte order, or None."""
    if not isinstance(value, Call) or value.function != Global("numpy", "dtype"):
        return None
    code = value.arguments[0] if value.arguments else None
    if not isinstance(code, str) or not re.fullmatch(_NUMPY_CODE, code):
        return None
    # The state begins with version and byte order.
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "<"
    if order not in ("<", "|", "="):
        return None
    try:
        # Some letters lack some sizes: NumPy knows neither f1 nor b2.
        return np.dtype(code)
    except TypeError:
        return None


# Values that are not read.


def is_tensor_call(value: object) -> bool:
    """Return whether a call would make a tensor of PyTorch, of any class."""
    return (
        isinstance(value, Call)
        and value.function.module in ("torch._utils", "torch._tensor")
        and value.function.name.startswith("_rebuild_")
    )


def explain(value: object) -> str:
    """Return a description of a value that is not read, for the user.

    >>> explain(Call(Global("torch._utils", "_rebuild_sparse_tensor"), ()))
    'a sparse tensor; save tensor.to_dense()'
    >>> explain(Call(Global("datetime", "date"), ()))
    'an object of datetime.date'
    """
    if isinstance(value, Call):
        return _explain_call(value)
    if isinstance(value, Global):
        return f"the name {value}"
    if isinstance(value, Reference | Storage):
        return "a storage"
    return f"a {type(value).__name__}"


def _explain_call(value: Call) -> str:
    module, name, arguments = value.function.module, value.function.name, value.arguments
    if name in ("_reconstruct", "scalar") and module in _NUMPY_CORE:
        return "an array of NumPy"
    if module == "torch._utils":
        element = arguments[6] if name == "_rebuild_tensor_v3" and len(arguments) > 6 else None
        if isinstance(element, Global) and _torch_dtype(element) is None:
            return f"a tensor of the element type {shortened(element.name)}"
        name = "_rebuild_tensor" if name.startswith("_rebuild_tensor") else name
        if name in _EXPLANATIONS:
            return _EXPLANATIONS[name]
    # Tensors of their own class: the function that makes them, the class; or the class alone.
    at = {"_rebuild_from_type_v2": 1, "_rebuild_wrapper_subclass": 0}.get(name)
    if at is not None and len(arguments) > at and isinstance(arguments[at], Global):
        return f"a tensor of {shortened(str(arguments[at]))}"
    # Objects that are copied by their class, the first argument.
    if name in ("_reconstructor", "__newobj_ex__") and arguments:
        return f"an object of {shortened(str(arguments[0]))}"
    return f"an object of {shortened(str(value.function))}"


# Plain values.

# A pickle can hold a list in itself, or a list in very many places.
_MAX_DEPTH = 16
_MAX_VALUES = 1_000_000
_PLAIN_TYPES = (str, int, float, bool, type(None))


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes whose values are plain.

    >>> plain_attributes({"shapes": {"w": (8, 4)}, "owner": Global("os", "system")})
    {'shapes': {'w': (8, 4)}}
    """
    # All attributes share a budget, since shared lists are walked once for each place they are in.
    budget = [_MAX_VALUES]
    return {
        name: value
        for name, value in attributes.items()
        if name.isidentifier() and name.isascii() and _is_plain(value, budget, _MAX_DEPTH)
    }


def is_plain(value: Any) -> bool:
    """Return whether a value is plain. NaN is, though not as an attribute: it differs from itself.

    >>> is_plain([float("nan"), {"loss": 0.5}]), is_plain(Global("os", "system"))
    (True, False)
    """
    return _is_plain(value, [_MAX_VALUES], _MAX_DEPTH, allows_nan=True)


def _is_plain(value: Any, budget: list[int], depth: int, *, allows_nan: bool = False) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        return False

    def are_plain(parts: Iterable[Any]) -> bool:
        return all(_is_plain(part, budget, depth - 1, allows_nan=allows_nan) for part in parts)

    kind = type(value)
    if kind in _PLAIN_TYPES:
        return allows_nan or kind is not float or not math.isnan(value)
    if kind is Call:
        is_size = value.function == Global("torch", "Size") and value.state is None
        return is_size and not value.is_new and are_plain([value.arguments])
    if kind is dict:
        return are_plain(value) and are_plain(value.values())
    if kind in (list, tuple):
        return are_plain(value)
    return False
