"""New files of `torch.save`: a nested value with tensors whose elements follow.

`torch.load` reads such a file; nothing of PyTorch is needed to write it. Where each storage
begins is known before any element is, so that anyone can write elements in any order::

    [data.pkl][byteorder][version] [header + padding][storage 0] [header + padding][storage 1] ...
    \\-- known before ----------/ ... [directory]

1. Tensors of a value (`NewTensor`) are collected; each has a storage of its own, or shares one.
2. A storage begins at a page of the file, or at 64 bytes if it is small.
3. Headers of storages and the directory have the checksums of the elements; they are written last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.binding import View
from reshard.checkpoint.blocks.spans import extent
from reshard.checkpoint.contents import StoredFile
from reshard.checkpoint.formats.torch_files.archive_writing import expect_writable, tensor_call
from reshard.checkpoint.formats.torch_files.pickle_terms import Global
from reshard.checkpoint.formats.torch_files.pickle_writing import write_pickle
from reshard.checkpoint.formats.torch_files.zip_writing import (
    UTF8,
    directory_end,
    directory_entry,
    local_header,
    padded_extra,
)
from reshard.checkpoint.formats.write_plan import NewFile
from reshard.dtypes import DType
from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class NewStorage:
    """A storage of `elements` elements, which several tensors may view.

    `content` has its bytes where they are known beforehand, as those of a mesh's ranks are.
    """

    dtype: DType
    elements: int
    content: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
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
        """A tensor in a storage of its own, or in one that it shares; dense without `view`.

        Raises:
            UsageError: a type that PyTorch does not have; a storage that does not hold the view.
        """
        expect_writable(dtype)
        view = View.row_major(shape) if view is None else view
        size = extent(view, shape)
        if storage is None:
            storage = NewStorage(dtype, view.offset + size)
        if storage.dtype is not dtype or (size and view.offset + size > storage.elements):
            raise UsageError(
                f"a tensor {dtype} {list(shape)} at {view} in a storage of {storage.elements} "
                f"{storage.dtype}; give it a storage of its type that holds it"
            )
        return cls(shape, storage, view)


@dataclass(frozen=True)
class NewTorchFile(NewFile):
    """A new file of `torch.save`. Made by `new_torch_file`.

    `starts` has, for each storage in the file, the place of its header and of its first byte.
    """

    starts: dict[NewStorage, tuple[int, int]] = field(default_factory=dict)
    # The entries of the records in front of the storages.
    entries: bytes = b""

    def start_bytes(self, tensor: NewTensor) -> int:
        """Where in the file the first element of a tensor lies."""
        offset_bytes = tensor.view.offset * tensor.storage.dtype.itemsize_bytes
        return self.starts[tensor.storage][1] + offset_bytes

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """The records in front, and storages whose content is known."""
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
        """The headers of the storages, and the directory."""
        entries, end = [self.entries], len(self.content)
        for number, (storage, (header_bytes, start)) in enumerate(self.starts.items()):
            name = _record_name(number)
            size = storage.size_bytes
            if storage.content is not None:
                crc32 = zlib.crc32(storage.content)
            else:
                crc32 = checksum(start, size) if size else 0
            extra = padded_extra(header_bytes, name, size)
            yield header_bytes, local_header(name, UTF8, crc32, size, extra)
            entries.append(directory_entry(name, UTF8, crc32, size, header_bytes))
            end = start + size
        directory = b"".join(entries)
        count = len(self.starts) + len(_SMALL_RECORDS) + 1
        yield end, directory + directory_end(count, len(directory), end)


_SMALL_RECORDS = {"byteorder": b"little", "version": b"3\n"}


def _record_name(number: int) -> bytes:
    return b"archive/data/%d" % number


def new_torch_file(name: str, value: Any, rank: int = 0) -> NewTorchFile:
    """The file that `torch.load` reads `value` from, once its tensors are written.

    `value` is nested of dicts, lists, tuples, plain values, `NewTensor`s, and `Call`s for objects
    of classes. A `DType` is written as PyTorch's type. A tensor that is met again shares its
    storage.

    >>> from reshard.dtypes import dtype
    >>> w = NewTensor.of(dtype("float32"), (2, 3))
    >>> file = new_torch_file("w.pt", {"model": {"w": w}, "step": 3})
    >>> file.start_bytes(w), file.stored.size_bytes
    (384, 676)

    Raises:
        UsageError: a value that cannot be written.
    """
    storages: dict[NewStorage, str] = {}

    def describe(value: Any) -> Any:
        if type(value) is NewTensor:
            storage = value.storage
            record = storages.setdefault(storage, str(len(storages)))
            return tensor_call(storage.dtype, value.shape, value.view, record, storage.size_bytes)
        if type(value) is DType:
            return Global("torch", value.name)
        return None

    records = {"data.pkl": write_pickle(value, describe), **_SMALL_RECORDS}
    content, entries = b"", b""
    for record, data in records.items():
        full = f"archive/{record}".encode()
        crc32 = zlib.crc32(data)
        entries += directory_entry(full, UTF8, crc32, len(data), len(content))
        content += local_header(full, UTF8, crc32, len(data)) + data
    starts: dict[NewStorage, tuple[int, int]] = {}
    end = len(content)
    # The directory has the length of an entry for each record, whatever its checksum.
    directory_bytes = len(entries)
    for number, storage in enumerate(storages):
        record_name, size = _record_name(number), storage.size_bytes
        extra = padded_extra(end, record_name, size)
        start = end + len(local_header(record_name, UTF8, 0, size, extra))
        starts[storage] = end, start
        directory_bytes += len(directory_entry(record_name, UTF8, 0, size, end))
        end = start + size
    last = directory_end(len(records) + len(storages), directory_bytes, end)
    size_bytes = end + directory_bytes + len(last)
    return NewTorchFile(StoredFile(name, size_bytes, rank), content, starts, entries)


def saved_bytes(value: Any) -> bytes:
    """The file that `torch.load` reads a value from, whose tensors have known elements.

    >>> saved_bytes({"step": 3})[:4]
    b'PK\\x03\\x04'

    Raises:
        UsageError: a value that cannot be written, or with tensors whose elements follow.
    """
    file = new_torch_file("", value)
    if file.checked_ranges:
        raise UsageError("a value with tensors, whose elements follow; use `new_torch_file`")
    found = bytearray(file.stored.size_bytes)
    for start, content in (*file.known_bytes(), *file.closing_bytes(lambda start, size: 0)):
        found[start : start + len(content)] = content
    return bytes(found)
