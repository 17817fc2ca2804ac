"""New files of `torch.save`, written without PyTorch: values whose elements follow.

The offset of each storage is known before any element is, so that elements are written by any
thread or process, in any order. `torch.load` reads the file::

    [data.pkl][byteorder][version] [header + padding][storage 0] [header + padding][storage 1] ...
    \\-- known before ----------/ ... [directory]

1. The tensors of a value (`NewTensor`) are collected; each has its own storage, or shares the
   storage of another.
2. A storage begins at a page of the file, or at a multiple of 64 bytes if it is small.
3. Headers of storages and the directory have the checksums of the elements; they are written last.
   PyTorch does not look at checksums; `zipfile`, `unzip` and `reshard` do.

`TorchFilesBuilder` binds the shards of a new checkpoint to the tensors of such files. `NewArchive`
is an archive of a tensor inside another file, as distributed checkpoints have them; its storage
is its last record, so that only its end is written last::

    [data.pkl][byteorder][version][header of data/0 + padding][ storage ][directory]
     \\------------------ head: known before ------------------/           \\- tail -/
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import StoredFile, StoredTensor
from reshard.checkpoint.formats.torch_files.pickles import (
    Alike,
    Call,
    Global,
    Reference,
    write_pickle,
)
from reshard.checkpoint.formats.torch_files.values import TYPED_STORAGES
from reshard.checkpoint.formats.torch_files.zip_archives import (
    SIZES_FOLLOW,
    UTF8,
    descriptor,
    directory_end,
    directory_entry,
    local_header,
    padded_extra,
)
from reshard.checkpoint.formats.write_plan import NewFile, PlannedTensor
from reshard.dtypes import DType
from reshard.errors import UsageError

_STORAGE_OF = {element: storage for storage, element in TYPED_STORAGES.items()}
_UNTYPED = frozenset(
    [
        *("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
)


def is_writable(dtype: DType) -> bool:
    """Return whether PyTorch has a type of that name.

    >>> from reshard.dtypes import dtype
    >>> is_writable(dtype("bfloat16")), is_writable(dtype("float8_e3m4"))
    (True, False)
    """
    return dtype.name in _STORAGE_OF or dtype.name in _UNTYPED


def _expect_writable(dtype: DType) -> None:
    """Raise UsageError for a type that PyTorch does not have."""
    if not is_writable(dtype):
        raise UsageError(
            f"PyTorch has no type {dtype}, so none of its checkpoints can hold it; choose another "
            "format"
        )


# A checkpoint has many tensors of equal shapes.
@lru_cache(maxsize=1024)
def _dense_view(shape: tuple[int, ...]) -> View:
    return View.row_major(shape)


def size_of(shape: tuple[int, ...]) -> Call:
    """Return a `torch.Size`."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def ordered(items: Mapping[str, Any]) -> Call:
    """Return an ordered dict."""
    return Call(Global("collections", "OrderedDict"), (), items=dict(items))


def new_object(module: str, name: str, state: Any) -> Call:
    """Return an object of a class that is given its attributes."""
    return Call(Global(module, name), (), state, is_new=True)


# Storages of equal sizes are different: they are keys by identity.
@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """A storage of `elements` elements, which several tensors may view.

    `content` has its bytes if they are known beforehand, as for the ranks of a mesh.
    """

    dtype: DType
    elements: int
    content: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all elements."""
        return self.elements * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True, eq=False)
class NewTensor:
    """A tensor whose elements follow: a view of a storage. Made by `NewTensor.of`."""

    shape: tuple[int, ...]
    storage: NewStorage
    view: View

    @classmethod
    def of(
        cls,
        dtype: DType,
        shape: tuple[int, ...],
        storage: NewStorage | None = None,
        view: View | None = None,
    ) -> NewTensor:
        """Return a tensor in its own storage, or in a shared storage; dense without `view`.

        Raises:
            UsageError: a type that PyTorch does not have; a storage that does not hold the view.
        """
        _expect_writable(dtype)
        view = _dense_view(shape) if view is None else view
        size = view.extent(shape)
        if storage is None:
            storage = NewStorage(dtype, view.offset + size)
        if storage.dtype is not dtype or (size and view.offset + size > storage.elements):
            raise UsageError(
                f"a tensor {dtype} {list(shape)} at {view} in a storage of {storage.elements} "
                f"{storage.dtype}; give it a storage of its type that holds it"
            )
        return cls(shape, storage, view)


@dataclass(frozen=True, slots=True, eq=False)
class NewWrapper:
    """An object with a new tensor inside, such as a DTensor, which `make()` returns.

    Objects of the same `kind` in a file differ only in the storage of the tensor.
    """

    kind: Hashable
    tensor: NewTensor
    make: Callable[[], Any]


def _describe_tensor(
    dtype: DType, shape: tuple[int, ...], view: View, record: str, storage_bytes: int
) -> Call:
    """Return the call that makes a tensor of the storage in `data/RECORD`."""
    typed = _STORAGE_OF.get(dtype.name)
    if typed is not None:
        count = storage_bytes // dtype.itemsize_bytes
        storage = ("storage", Global("torch", typed), record, "cpu", count)
    else:
        untyped = Global("torch.storage", "UntypedStorage")
        storage = ("storage", untyped, record, "cpu", storage_bytes)
    hooks = Call(Global("collections", "OrderedDict"), ())
    # The arguments of `_rebuild_tensor_v2`. Types without a class of storages need version 3,
    # which has the type as a further argument.
    fields = (Reference(storage), view.offset, shape, view.strides, False, hooks)
    if typed is not None:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), fields)
    fields_and_type = (*fields, Global("torch", dtype.name))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), fields_and_type)


def _first_records(pickle: bytes) -> tuple[bytes, bytes, int]:
    """Return the records before the storages, their directory entries, and their number."""
    records, entries = b"", b""
    contents = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    for name, content in contents.items():
        full, crc32 = f"archive/{name}".encode(), zlib.crc32(content)
        entries += directory_entry(full, UTF8, crc32, len(content), len(records))
        records += local_header(full, UTF8, crc32, len(content)) + content
    return records, entries, len(contents)


def _record_name(number: int) -> bytes:
    return b"archive/data/%d" % number


class NewTorchFile(NewFile):
    """A new file of `torch.save`. Made by `new_torch_file`.

    `starts` has the offsets of the header and of the first byte of each storage, `entries` the
    directory entries of the first `count` records.
    """

    starts: dict[NewStorage, tuple[int, int]] = field(default_factory=dict)
    entries: bytes = b""
    count: int = 0

    def start_bytes(self, tensor: NewTensor) -> int:
        """Return the offset in the file of a tensor's first element."""
        offset_bytes = tensor.view.offset * tensor.storage.dtype.itemsize_bytes
        return self.starts[tensor.storage][1] + offset_bytes

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the first records, and storages whose content is known."""
        yield 0, self.content
        for storage, (_, start) in self.starts.items():
            if storage.content:
                yield start, storage.content

    @property
    def checked_ranges(self) -> tuple[tuple[int, int], ...]:
        """The storages whose elements follow."""
        return tuple(
            (start, storage.size_bytes)
            for storage, (_, start) in self.starts.items()
            if storage.elements and storage.content is None
        )

    def closing_bytes(self, checksum: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """Yield the headers of the storages, and the directory."""
        entries, end = [self.entries], len(self.content)
        for number, (storage, (header_bytes, start)) in enumerate(self.starts.items()):
            name, size = _record_name(number), storage.size_bytes
            if storage.content is not None:
                crc32 = zlib.crc32(storage.content)
            else:
                # The CRC-32 of no bytes is 0.
                crc32 = checksum(start, size) if size else 0
            extra = padded_extra(header_bytes, name, size)
            yield header_bytes, local_header(name, UTF8, crc32, size, extra)
            entries.append(directory_entry(name, UTF8, crc32, size, header_bytes))
            end = start + size
        directory = b"".join(entries)
        count = self.count + len(self.starts)
        yield end, directory + directory_end(count, len(directory), end)


def new_torch_file(name: str, value: Any, rank: int = 0) -> NewTorchFile:
    """Return the file from which `torch.load` reads `value`, once its tensors are written.

    `value` is nested of dicts, lists, tuples, plain values, `NewTensor`s, and `Call`s or
    `NewWrapper`s for objects of classes. A `DType` is written as PyTorch's type. A tensor that
    occurs again shares its storage.

    >>> from reshard.dtypes import dtype
    >>> w = NewTensor.of(dtype("float32"), (2, 3))
    >>> file = new_torch_file("w.pt", {"model": {"w": w}, "step": 3})
    >>> file.start_bytes(w), file.stored.size_bytes
    (384, 676)

    Raises:
        UsageError: a value that cannot be written.
    """
    storages: dict[NewStorage, str] = {}

    def place(tensor: NewTensor) -> tuple[str, Hashable]:
        """Return the record of a tensor's storage, and what else its description depends on."""
        storage = tensor.storage
        record = storages.setdefault(storage, str(len(storages)))
        return record, (storage.dtype, tensor.shape, tensor.view, storage.elements)

    def describe(value: Any) -> Any:
        if type(value) is NewWrapper:
            record, kind = place(value.tensor)
            return Alike((value.kind, kind), record, value.make)
        if type(value) is NewTensor:
            record, kind = place(value)
            dtype, size_bytes = value.storage.dtype, value.storage.size_bytes
            fields = (dtype, value.shape, value.view, record, size_bytes)
            return Alike(kind, record, lambda: _describe_tensor(*fields))
        if type(value) is DType:
            return Global("torch", value.name)
        return None

    content, entries, count = _first_records(write_pickle(value, describe))
    starts: dict[NewStorage, tuple[int, int]] = {}
    end = len(content)
    # The length of a directory entry does not depend on the checksum.
    directory_bytes = len(entries)
    for number, storage in enumerate(storages):
        record_name, size = _record_name(number), storage.size_bytes
        extra = padded_extra(end, record_name, size)
        start = end + len(local_header(record_name, UTF8, 0, size, extra))
        starts[storage] = end, start
        directory_bytes += len(directory_entry(record_name, UTF8, 0, size, end))
        end = start + size
    last = directory_end(count + len(storages), directory_bytes, end)
    size_bytes = end + directory_bytes + len(last)
    return NewTorchFile(StoredFile(name, size_bytes, rank), content, starts, entries, count)


def saved_bytes(value: Any) -> bytes:
    """Return the file from which `torch.load` reads a value whose tensors have known elements.

    >>> saved_bytes({"step": 3})[:4]
    b'PK\\x03\\x04'

    Raises:
        UsageError: a value that cannot be written, or with tensors whose elements follow.
    """
    file = new_torch_file("", value)
    if file.checked_ranges:
        raise UsageError("a value with tensors, whose elements follow; use `new_torch_file`")
    content = bytearray(file.stored.size_bytes)
    for start, part in (*file.known_bytes(), *file.closing_bytes(lambda start, size: 0)):
        content[start : start + len(part)] = part
    return bytes(content)


class TorchFilesBuilder:
    """The files of a new checkpoint, and the shards of its tensors in them.

    `tensors` are the tensors of the checkpoint, `files` the files so far.
    """

    def __init__(self, tensors: Mapping[str, PlannedTensor]) -> None:
        self._tensors = tensors
        self._shards: dict[str, dict[int, tuple[NewTensor, int]]] = {}
        self._file_of: dict[NewStorage, NewTorchFile] = {}
        self.files: list[NewTorchFile] = []

    def new_tensor(self, name: str) -> NewTensor:
        """Return a tensor of the type and the whole shape of `name`."""
        tensor = self._tensors[name]
        return NewTensor.of(tensor.dtype, tensor.layout.shape)

    def put(self, name: str, rank: int, tensor: NewTensor, offset: int = 0) -> None:
        """Store the shard of `name` on a rank in a new tensor, from element `offset` on.

        The boxes of a shard follow each other; only the first call for a shard counts.
        """
        self._shards.setdefault(name, {}).setdefault(rank, (tensor, offset))

    def put_new(self, name: str, rank: int, shape: tuple[int, ...]) -> NewTensor:
        """Store the shard of `name` on a rank in a new tensor of `shape`; return that."""
        tensor = NewTensor.of(self._tensors[name].dtype, shape)
        self.put(name, rank, tensor)
        return tensor

    def put_whole(self, name: str, rank: int) -> NewTensor:
        """Store `name`, which a rank holds whole, in a new tensor; return that."""
        return self.put_new(name, rank, self._tensors[name].layout.shape)

    def write(self, file: str, value: Any, rank: int = 0) -> None:
        """Add a file of a value, written by a rank.

        Raises:
            UsageError: a value that cannot be written.
        """
        new = new_torch_file(file, value, rank)
        self.files.append(new)
        self._file_of.update(dict.fromkeys(new.starts, new))

    def bind(self, *, has_specs: bool = False) -> dict[str, StoredTensor]:
        """Return the tensors of the checkpoint, bound to the files that were written.

        `has_specs` keeps the text of their shardings.
        """
        stored = {}
        for name, shards in self._shards.items():
            planned, addresses = self._tensors[name], {}
            spec = planned.spec if has_specs else None
            for rank, (tensor, offset) in shards.items():
                file = self._file_of[tensor.storage]
                start = file.start_bytes(tensor) + offset * planned.dtype.itemsize_bytes
                addresses[rank] = FileRange(file.stored.name, start)
            binding = Binding(planned.layout, addresses, {})
            stored[name] = StoredTensor(name, planned.dtype, binding, spec)
        return stored


@dataclass(frozen=True, slots=True)
class NewArchive:
    """The archive of a dense tensor of `shape`: bytes `start_bytes:stop_bytes` of a file.

    Its storage begins at `storage_start_bytes`. Made by `NewArchive.at`.
    """

    dtype: DType
    shape: tuple[int, ...]
    start_bytes: int
    storage_start_bytes: int = 0
    stop_bytes: int = 0

    @classmethod
    def at(cls, dtype: DType, shape: tuple[int, ...], start_bytes: int) -> NewArchive:
        """Return the archive that begins at byte `start_bytes` of a file.

        Raises:
            UsageError: a type that PyTorch does not have.
        """
        _expect_writable(dtype)
        # The head's length gives the storage's offset, and both give the tail's length.
        begun = cls(dtype, shape, start_bytes)
        storage = start_bytes + len(begun.head())
        placed = cls(dtype, shape, start_bytes, storage)
        stop = storage + placed.storage_bytes + len(placed.tail(0))
        return cls(dtype, shape, start_bytes, storage, stop)

    @property
    def storage_bytes(self) -> int:
        """The bytes of the storage."""
        return math.prod(self.shape) * self.dtype.itemsize_bytes

    def head(self) -> bytes:
        """Return the bytes before the storage."""
        records, _, _ = _archive_records(self.dtype, self.shape)
        size, name = self.storage_bytes, _record_name(0)
        extra = padded_extra(self.start_bytes + len(records), name, size)
        return records + local_header(name, UTF8 | SIZES_FOLLOW, 0, size, extra)

    def tail(self, crc32: int) -> bytes:
        """Return the bytes after the storage, whose checksum is `crc32`."""
        size = self.storage_bytes
        records, entries, count = _archive_records(self.dtype, self.shape)
        follows = descriptor(crc32, size)
        flags = UTF8 | SIZES_FOLLOW
        directory = entries + directory_entry(_record_name(0), flags, crc32, size, len(records))
        begin = self.storage_start_bytes - self.start_bytes + size + len(follows)
        return follows + directory + directory_end(count + 1, len(directory), begin)


# A checkpoint has many archives of tensors of equal types and shapes.
@lru_cache(maxsize=1024)
def _archive_records(dtype: DType, shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    storage_bytes = math.prod(shape) * dtype.itemsize_bytes
    call = _describe_tensor(dtype, shape, View.row_major(shape), "0", storage_bytes)
    return _first_records(write_pickle(call))
