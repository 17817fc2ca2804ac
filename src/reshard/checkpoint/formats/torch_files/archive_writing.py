"""New archives of tensors, as `torch.save` writes them, for many threads and without PyTorch.

A tensor is an archive whose storage is its last record::

    [data.pkl][byteorder][version][header of data/0 + padding][ storage ][directory]
     \\------------------ head: known before ------------------/           \\- tail -/

1. The head is padded so that the storage begins at a page of the file (or at 64 bytes, if it
   is small): blocks are written into it directly, by anyone, in any order.
2. The tail has the checksum of the storage and is written last. PyTorch does not look at
   checksums; `zipfile`, `unzip` and `reshard` do.

Records of 4 GiB and more are described by the format's 64-bit fields.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.archived_tensors import TYPED_STORAGES
from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global, Reference
from reshard.checkpoint.formats.torch_files.pickle_writing import write_pickle
from reshard.checkpoint.formats.torch_files.zip_writing import (
    CHECKSUM_FOLLOWS,
    UTF8,
    directory_end,
    directory_entry,
    is_wide,
    local_header,
    padded_extra,
)
from reshard.dtypes import DType
from reshard.errors import UsageError

STORAGE_OF = {element: storage for storage, element in TYPED_STORAGES.items()}
_UNTYPED = frozenset(
    [
        *("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
)
_STORAGE_NAME = b"archive/data/0"


def is_writable(dtype: DType) -> bool:
    """Whether PyTorch has a type of that name.

    >>> from reshard.dtypes import dtype
    >>> is_writable(dtype("bfloat16")), is_writable(dtype("float8_e3m4"))
    (True, False)
    """
    return dtype.name in STORAGE_OF or dtype.name in _UNTYPED


def expect_writable(dtype: DType) -> None:
    """Raise UsageError for a type that PyTorch does not have."""
    if not is_writable(dtype):
        raise UsageError(
            f"PyTorch has no type {dtype}, so no checkpoint of it can hold one; choose another "
            "format"
        )


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
        """The archive that begins at byte `start_bytes` of a file.

        Raises UsageError for a type that PyTorch does not have.
        """
        expect_writable(dtype)
        # The head's length gives the storage's place, and both give the tail's length.
        begun = cls(dtype, shape, start_bytes)
        storage = start_bytes + len(begun.head())
        placed = cls(dtype, shape, start_bytes, storage)
        stop = storage + placed.storage_bytes + len(placed.tail(0))
        return cls(dtype, shape, start_bytes, storage, stop)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the storage."""
        return math.prod(self.shape) * self.dtype.itemsize_bytes

    def head(self) -> bytes:
        """The bytes before the storage."""
        records, _ = self._records()
        return records + self._storage_header(records)

    def tail(self, checksum: int) -> bytes:
        """The bytes behind the storage, whose CRC-32 is `checksum`."""
        size = self.storage_bytes
        records, entries = self._records()
        if is_wide(size):
            follows = struct.pack("<4sI2Q", b"PK\x07\x08", checksum, size, size)
        else:
            follows = struct.pack("<4s3I", b"PK\x07\x08", checksum, size, size)
        flags = UTF8 | CHECKSUM_FOLLOWS
        entry = directory_entry(_STORAGE_NAME, flags, checksum, size, len(records))
        directory = entries + entry
        begin = self.storage_start_bytes - self.start_bytes + size + len(follows)
        return follows + directory + directory_end(4, len(directory), begin)

    def _records(self) -> tuple[bytes, bytes]:
        """The small records with their headers, and their entries in the directory."""
        records, entries = b"", b""
        contents = {"data.pkl": self._pickle(), "byteorder": b"little", "version": b"3\n"}
        for name, content in contents.items():
            full = f"archive/{name}".encode()
            checksum = zlib.crc32(content)
            entries += directory_entry(full, UTF8, checksum, len(content), len(records))
            records += local_header(full, UTF8, checksum, len(content)) + content
        return records, entries

    def _storage_header(self, records: bytes) -> bytes:
        """The header of the storage's record, padded."""
        size = self.storage_bytes
        extra = padded_extra(self.start_bytes + len(records), _STORAGE_NAME, size)
        return local_header(_STORAGE_NAME, UTF8 | CHECKSUM_FOLLOWS, 0, size, extra)

    def _pickle(self) -> bytes:
        view = View.row_major(self.shape)
        return write_pickle(tensor_call(self.dtype, self.shape, view, "0", self.storage_bytes))


def tensor_call(
    dtype: DType, shape: tuple[int, ...], view: View, record: str, storage_bytes: int
) -> Call:
    """The call that makes a tensor of the storage in `data/RECORD`."""
    typed = STORAGE_OF.get(dtype.name)
    if typed is not None:
        count = storage_bytes // dtype.itemsize_bytes
        storage = ("storage", Global("torch", typed), record, "cpu", count)
    else:
        untyped = Global("torch.storage", "UntypedStorage")
        storage = ("storage", untyped, record, "cpu", storage_bytes)
    hooks = Call(Global("collections", "OrderedDict"), ())
    # The arguments of `_rebuild_tensor_v2`. Types without a class of storages need version 3,
    # which has the type as one more argument.
    fields = (Reference(storage), view.offset, shape, view.strides, False, hooks)
    if typed is not None:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), fields)
    fields_and_type = (*fields, Global("torch", dtype.name))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), fields_and_type)
