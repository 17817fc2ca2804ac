"""Values of a file of `torch.save`: its tensors where they lie, and what is plain as it is.

A `ValueBuilder` makes them while the pickle is read:

1. A reference to a storage becomes a `Storage`, where the records of the file have it.
2. The call that makes a tensor of a storage becomes an `ArchivedTensor`; so does a parameter.
3. Ordered dicts and those with a default become dicts, `torch.Size` a tuple, bytes and numbers of
   NumPy themselves, a device its text.
4. Any other call stays a `Call`, which nobody makes: an object of a class, a sparse or quantized
   tensor, one that has no elements. `explain` says why it is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.archived_tensors import (
    TYPED_STORAGES,
    ArchivedTensor,
    Records,
    as_sizes,
    describe_object,
    is_size,
    placed_tensor,
)
from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global, Reference
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError

_UNTYPED = ("UntypedStorage", "_UntypedStorage")
_NUMPY_CORE = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMPY_CODE = re.compile(r"[biufc](1|2|4|8|16)")


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage in a file; `dtype` is None where it is one of bytes."""

    dtype: DType | None
    start_bytes: int
    size_bytes: int
    crc32: int


class ValueBuilder:
    """Makes the values of one file, whose storages are in `records`."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._storages: dict[tuple[Any, ...], Storage] = {}
        # One object for each of the few shapes and views that a model has.
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._views: dict[tuple[Any, ...], View] = {}

    def refer(self, key: Any) -> Any:
        """A storage, or a `Reference` to something else."""
        match key:
            case ("storage", Global(_, kind), str(record), str(), int(count), *view):
                pass
            case _:
                return Reference(key)
        element = TYPED_STORAGES.get(kind)
        if (element is None and kind not in _UNTYPED) or not is_size(count):
            return Reference(key)
        found = self._storages.get((kind, record, count))
        if found is None:
            dtype = None if element is None else as_dtype(element)
            size_bytes = count * (1 if dtype is None else dtype.itemsize_bytes)
            start_bytes, stored_bytes, crc32 = self._records.storage(record, size_bytes)
            if stored_bytes != size_bytes:
                raise self._records.wrong(
                    f"storage {record!r} has {stored_bytes} bytes, expected {size_bytes}"
                )
            found = Storage(dtype, start_bytes, size_bytes, crc32)
            self._storages[kind, record, count] = found
        return found if not view or view == [None] else self._part(found, view[0])

    def _part(self, storage: Storage, view: Any) -> Storage:
        """A part of a storage, which old files have: its name, offset and size in elements."""
        itemsize_bytes = 1 if storage.dtype is None else storage.dtype.itemsize_bytes
        match view:
            case (str(), int(offset), int(size)) if is_size(offset) and is_size(size):
                if (offset + size) * itemsize_bytes <= storage.size_bytes:
                    start_bytes = storage.start_bytes + offset * itemsize_bytes
                    return Storage(storage.dtype, start_bytes, size * itemsize_bytes, 0)
        raise self._records.wrong(f"a part of a storage of {storage.size_bytes} bytes is outside")

    def make(self, function: Global, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """The value of a call that is known."""
        maker = _MAKERS.get(function.name)
        if maker is None or function.module not in maker[0]:
            return None
        return maker[1](self, arguments)

    def tensor(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A tensor: storage, offset, sizes, strides, if it needs a gradient, hooks, and perhaps a
        dict of bits such as conjugation. The oldest have the first four."""
        if len(arguments) not in (4, 6, 7) or (len(arguments) == 7 and arguments[6]):
            return None
        return self._place(arguments, arguments[0])

    def typed_tensor(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A tensor in a storage of bytes: its element type stands before the bits."""
        if len(arguments) not in (7, 8) or (len(arguments) == 8 and arguments[7]):
            return None
        named, storage = arguments[6], arguments[0]
        if not isinstance(named, Global) or type(storage) is not Storage:
            return None
        try:
            dtype = as_dtype(named.name)
        except UsageError:
            return None
        typed = Storage(dtype, storage.start_bytes, storage.size_bytes, storage.crc32)
        return self._place(arguments, typed)

    def _place(self, arguments: tuple[Any, ...], storage: Any) -> tuple[Any, bool] | None:
        if type(storage) is not Storage or storage.dtype is None:
            return None
        offset = arguments[1]
        shape, strides = as_sizes(arguments[2]), as_sizes(arguments[3])
        if shape is None or strides is None or len(shape) != len(strides) or not is_size(offset):
            raise self._records.wrong("the offset, shape or strides of a tensor are no sizes")
        view = self._views.get((offset, strides))
        if view is None:
            view = self._views[offset, strides] = View(offset, strides)
        shape = self._shapes.setdefault(shape, shape)
        # Elements under several indices are made when they are read: it stays a call.
        is_repeated = any(s == 0 and n > 1 for n, s in zip(shape, strides, strict=True))
        if is_repeated and 0 not in shape:
            return None
        place = storage.start_bytes, storage.size_bytes, storage.crc32
        return placed_tensor(self._records, storage.dtype, place, shape, view), True

    def parameter(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A parameter is a tensor, whether it needs a gradient, hooks, and perhaps attributes."""
        if arguments and type(arguments[0]) is ArchivedTensor:
            return arguments[0], True
        return None

    def attributed(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A plain tensor with attributes: its own call, its class, that call's arguments, them."""
        match arguments:
            case (Global() as function, Global("torch", "Tensor"), tuple(own), _):
                maker = _MAKERS.get(function.name)
                is_tensor = function.name.startswith("_rebuild_tensor")
                if is_tensor and maker is not None and function.module in maker[0]:
                    return maker[1](self, own)
        return None

    def ordered(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """An ordered dict, of pairs or of nothing."""
        pairs = arguments[0] if len(arguments) == 1 else []
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | int)
            for pair in pairs
        ):
            return None
        return {pair[0]: pair[1] for pair in pairs}, False

    def defaulting(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A dict with a default, without it."""
        return ({}, False) if len(arguments) <= 1 else None

    def sizes(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """The sizes of a `torch.Size`."""
        found = as_sizes(arguments[0]) if len(arguments) == 1 else None
        return None if found is None else (found, False)

    def encoded(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """Bytes, which early protocols write as text of the same codes."""
        match arguments:
            case (str(text), "latin1" | "latin-1"):
                try:
                    return text.encode("latin-1"), False
                except UnicodeEncodeError:
                    return None
        return None

    def no_bytes(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """Bytes of length 0, which early protocols make without an argument."""
        return (b"", False) if not arguments else None

    def device(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """The text of a device, such as `cuda:0`."""
        match arguments:
            case (str(kind),):
                return kind, False
            case (str(kind), int(number)):
                return f"{kind}:{number}", False
        return None

    def number(self, arguments: tuple[Any, ...]) -> tuple[Any, bool] | None:
        """A number of NumPy as Python's own."""
        if len(arguments) != 2:
            return None
        dtype = _numpy_dtype(arguments[0])
        content = arguments[1]
        if dtype is None or type(content) is not bytes or len(content) != dtype.itemsize:
            return None
        return np.frombuffer(content, dtype)[0].item(), False


_Maker = Callable[[ValueBuilder, tuple[Any, ...]], tuple[Any, bool] | None]
# What makes the value of a call, by the name that is called, with the modules that have it.
_MAKERS: dict[str, tuple[tuple[str, ...], _Maker]] = {
    "_rebuild_tensor": (("torch._utils",), ValueBuilder.tensor),
    "_rebuild_tensor_v2": (("torch._utils",), ValueBuilder.tensor),
    "_rebuild_tensor_v3": (("torch._utils",), ValueBuilder.typed_tensor),
    "_rebuild_parameter": (("torch._utils",), ValueBuilder.parameter),
    "_rebuild_parameter_with_state": (("torch._utils",), ValueBuilder.parameter),
    "_rebuild_from_type_v2": (("torch._tensor",), ValueBuilder.attributed),
    "OrderedDict": (("collections",), ValueBuilder.ordered),
    "defaultdict": (("collections",), ValueBuilder.defaulting),
    "Size": (("torch",), ValueBuilder.sizes),
    "encode": (("_codecs",), ValueBuilder.encoded),
    "bytes": (("__builtin__", "builtins"), ValueBuilder.no_bytes),
    "device": (("torch",), ValueBuilder.device),
    "scalar": (_NUMPY_CORE, ValueBuilder.number),
}


def numpy_array(value: object) -> np.ndarray[Any, Any] | None:
    """The array that a call would make of its bytes; None for anything else.

    The array shares the bytes and cannot be written.
    """
    if not isinstance(value, Call) or value.function.name != "_reconstruct":
        return None
    if value.function.module not in _NUMPY_CORE:
        return None
    # A version, the shape, the type, whether it lies column by column, the bytes.
    match value.state:
        case (int(), tuple() as shape, Call() as named, bool(by_column), bytes(content)):
            dtype = _numpy_dtype(named)
            sizes = as_sizes(shape)
            if dtype is None or sizes is None:
                return None
            if int(np.prod(sizes, dtype=object)) * dtype.itemsize != len(content):
                return None
            found = np.frombuffer(content, dtype)
            return found.reshape(sizes, order="F" if by_column else "C")
    return None


def _numpy_dtype(value: object) -> np.dtype[Any] | None:
    """The type that a call of `numpy.dtype` names, in this machine's byte order."""
    if not isinstance(value, Call) or value.function != Global("numpy", "dtype"):
        return None
    code = value.arguments[0] if value.arguments else None
    if not isinstance(code, str) or not _NUMPY_CODE.fullmatch(code):
        return None
    # Version and byte order come first.
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "<"
    if order not in ("<", "|", "="):
        return None
    try:
        return np.dtype(code)
    except TypeError:
        return None


def is_tensor_call(value: object) -> bool:
    """Whether a call that is not made would make a tensor of PyTorch, of any class."""
    return (
        isinstance(value, Call)
        and value.function.module in ("torch._utils", "torch._tensor")
        and value.function.name.startswith("_rebuild_")
    )


def explain(value: object) -> str:
    """Why a value is not read, for the user.

    >>> explain(Call(Global("torch._utils", "_rebuild_sparse_tensor"), ()))
    'a sparse tensor; save tensor.to_dense()'
    >>> explain(Call(Global("datetime", "date"), ()))
    'an object of datetime.date'
    """
    if isinstance(value, Call):
        if value.function.name in ("_reconstruct", "scalar") and (
            value.function.module in _NUMPY_CORE
        ):
            return "an array of NumPy"
        return describe_object(value)
    if isinstance(value, Global):
        return f"the name {value}"
    if isinstance(value, Reference | Storage):
        return "a storage"
    return f"a {type(value).__name__}"
