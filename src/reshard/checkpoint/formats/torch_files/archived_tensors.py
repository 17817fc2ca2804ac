"""Tensors as `torch.save` describes them: which part of which storage, in what strides.

A pickle has a call for each tensor, whose first argument refers to its storage. The call becomes
an `ArchivedTensor` when its storage is where the records of the file say, is as long as they say,
and the tensor lies inside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.binding import View
from reshard.checkpoint.blocks.spans import extent
from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global, Reference, shortened
from reshard.dtypes import ALL_DTYPES, DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import FormatError, UnreadableTensorError, UsageError

# The classes of storages that are named for an element type; all others are untyped.
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
# Element types of PyTorch that are known by name only, so that they can be refused by name.
_NUMBERS = [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)]
_QUANTIZED = ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]
_BITS = ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"]
_EXPLANATIONS = {
    "_rebuild_sparse_tensor": "a sparse tensor; save tensor.to_dense()",
    "_rebuild_sparse_csr_tensor": "a sparse tensor; save tensor.to_dense()",
    "_rebuild_qtensor": "a quantized tensor; save tensor.dequantize()",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no elements",
    "_rebuild_tensor": "a tensor whose elements are repeated or computed when they are read; "
    "save tensor.contiguous().resolve_conj().resolve_neg()",
}
# How `torch.save` makes plain tensors.
_PLAIN_TENSORS = ("_rebuild_tensor_v", "_rebuild_parameter")
TORCH_DTYPES = frozenset([d.name for d in ALL_DTYPES] + _NUMBERS + _QUANTIZED + _BITS)


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive: its storage is `storage_bytes` of the file at `start_bytes`.

    `crc32` is the checksum of the storage, or None where it was saved without.
    """

    dtype: DType
    shape: tuple[int, ...]
    view: View
    start_bytes: int
    storage_bytes: int
    crc32: int | None


class Records(Protocol):
    """The records of an archive."""

    def wrong(self, reason: str) -> FormatError:
        """The error for an archive that is not what it should be."""

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Where a storage begins, its bytes (expected: `size_bytes`), and its checksum or 0."""


def archived_tensor(archive: Records, value: Any) -> ArchivedTensor:
    """The tensor that the pickle of an archive describes, checked against its records.

    Raises:
        FormatError: a pickle of something else, or one that its records contradict.
    """
    # A parameter is a tensor, whether it needs a gradient, and hooks.
    if _is_call(value, "_rebuild_parameter") and value.arguments:
        value = value.arguments[0]
    if isinstance(value, Call) and not value.function.name.startswith(_PLAIN_TENSORS):
        raise UnreadableTensorError(describe_object(value))
    if not _is_call(value, "_rebuild_tensor_v2") and not _is_call(value, "_rebuild_tensor_v3"):
        raise archive.wrong(f"it holds {shortened(repr(type(value).__name__))}, expected a tensor")
    # Storage, offset, sizes, strides, whether it needs a gradient, hooks; version 3 has the element
    # type next; a dict of bits such as conjugation may come last.
    fields = list(value.arguments)
    named = [fields.pop(6)] if value.function.name == "_rebuild_tensor_v3" and fields[6:] else []
    metadata = fields[6] if len(fields) == 7 else None
    if len(fields) not in (6, 7) or not isinstance(fields[0], Reference):
        raise archive.wrong("its tensor is not described as it should be")
    if metadata:
        raise UnreadableTensorError(
            "conjugated or negated only when it is read; save `tensor.resolve_conj().resolve_neg()`"
        )
    storage, key, count = _storage(archive, fields[0].key)
    element = _element(archive, named[0] if named else storage)
    shape, strides = as_sizes(fields[2]), as_sizes(fields[3])
    offset = fields[1]
    if shape is None or strides is None or len(shape) != len(strides) or not is_size(offset):
        raise archive.wrong("its offset, shape or strides are no sizes")
    # An untyped storage is counted in bytes, a typed one in elements.
    size_bytes = count * (1 if storage is None else element.itemsize_bytes)
    start_bytes, storage_bytes, crc32 = archive.storage(key, size_bytes)
    if size_bytes != storage_bytes:
        raise archive.wrong(
            f"its storage has {storage_bytes} bytes, expected {count} elements of {element}"
        )
    return placed_tensor(
        archive, element, (start_bytes, storage_bytes, crc32), shape, View(offset, strides)
    )


def describe_object(value: Call) -> str:
    """Return what an object is that no call is made for, by its class.

    >>> describe_object(Call(Global("datetime", "date"), ()))
    'an object of datetime.date'
    """
    name, arguments = value.function.name, value.arguments
    if value.function.module == "torch._utils":
        name = "_rebuild_tensor" if name.startswith("_rebuild_tensor") else name
        if name in _EXPLANATIONS:
            return _EXPLANATIONS[name]
    # Tensors of a class of their own: how they are made, the class; or the class alone.
    at = {"_rebuild_from_type_v2": 1, "_rebuild_wrapper_subclass": 0}.get(name)
    if at is not None and len(arguments) > at and isinstance(arguments[at], Global):
        return f"a tensor of {shortened(str(arguments[at]))}"
    # Objects that are copied by their class: it is the first argument.
    if name in ("_reconstructor", "__newobj_ex__") and arguments:
        return f"an object of {shortened(str(arguments[0]))}"
    return f"an object of {shortened(str(value.function))}"


def placed_tensor(
    records: Records,
    element: DType,
    storage: tuple[int, int, int],
    shape: tuple[int, ...],
    view: View,
) -> ArchivedTensor:
    """A tensor in a storage `(start_bytes, size_bytes, crc32)`, which must hold all of it.

    Raises:
        FormatError: a view that reaches beyond the storage, or a shape of more elements.
    """
    start_bytes, storage_bytes, crc32 = storage
    # Fewer elements in the storage than in the tensor would be one under several indices.
    count = math.prod(shape)
    needed = max(view.offset + extent(view, shape), count) if count else 0
    if needed * element.itemsize_bytes > storage_bytes:
        raise records.wrong(
            f"shape {list(shape)} at offset {view.offset} with strides {list(view.strides)} is "
            f"more than its storage of {storage_bytes} bytes"
        )
    return ArchivedTensor(element, shape, view, start_bytes, storage_bytes, crc32 or None)


def _storage(archive: Records, key: Any) -> tuple[str | None, str, int]:
    """The element type of a storage (None when untyped), its record and its elements."""
    match key:
        case ("storage", Global(_, kind), str(record), str(), int(count)) if count >= 0:
            return TYPED_STORAGES.get(kind), record, count
    raise archive.wrong("its storage is not described as it should be")


def _element(archive: Records, named: object) -> DType:
    if isinstance(named, Global):
        named = named.name
    if not isinstance(named, str):
        raise archive.wrong("its storage has no element type")
    try:
        return as_dtype(named)
    except UsageError as error:
        raise UnreadableTensorError(f"of {error}") from error


def _is_call(value: object, name: str) -> bool:
    return isinstance(value, Call) and value.function.name == name


def is_size(value: object) -> bool:
    """Whether it is a whole number that can be a size or an offset."""
    return type(value) is int and 0 <= value < 1 << 63


def as_sizes(value: object) -> tuple[int, ...] | None:
    """A tuple of sizes, or a `torch.Size`; None for anything else."""
    if isinstance(value, Call) and value.function == Global("torch", "Size"):
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if isinstance(value, tuple | list) and all(map(is_size, value)):
        return tuple(value)
    return None
