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
from reshard.dtypes import DType
from reshard.errors import UsageError

PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64
# Storages smaller than this are not worth a page's padding.
_SMALL_BYTES = 4 * PAGE_BYTES
_LARGEST_NARROW = 0xFFFFFFFE
_STORAGE_OF = {element: storage for storage, element in TYPED_STORAGES.items()}
_UNTYPED = frozenset(
    [
        *("uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ]
)
# Two bits of a header's flags: the name is UTF-8, checksum and sizes follow the record.
_UTF8 = 0x0800
_CHECKSUM_FOLLOWS = 0x0008
# The extra field with which PyTorch pads; readers skip fields that they do not know.
_PADDING_ID = b"FB"
_STORAGE_NAME = b"archive/data/0"


def is_writable(dtype: DType) -> bool:
    """Whether PyTorch has a type of that name.

    >>> from reshard.dtypes import dtype
    >>> is_writable(dtype("bfloat16")), is_writable(dtype("float8_e3m4"))
    (True, False)
    """
    return dtype.name in _STORAGE_OF or dtype.name in _UNTYPED


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
        if not is_writable(dtype):
            raise UsageError(
                f"PyTorch has no type {dtype}, so no checkpoint of it can hold one; choose "
                "another format"
            )
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
        if self._is_wide:
            follows = struct.pack("<4sI2Q", b"PK\x07\x08", checksum, size, size)
        else:
            follows = struct.pack("<4s3I", b"PK\x07\x08", checksum, size, size)
        flags = _UTF8 | _CHECKSUM_FOLLOWS
        entry = _entry(_STORAGE_NAME, flags, checksum, size, len(records), wide=self._is_wide)
        directory = entries + entry
        begin = self.storage_start_bytes - self.start_bytes + size + len(follows)
        return follows + directory + _end(4, len(directory), begin, wide=self._is_wide)

    @property
    def _is_wide(self) -> bool:
        # The directory lies behind the storage, and its place must be said in the same bits.
        return self.storage_bytes > _LARGEST_NARROW - (1 << 20)

    def _records(self) -> tuple[bytes, bytes]:
        """The small records with their headers, and their entries in the directory."""
        records, entries = b"", b""
        contents = {"data.pkl": self._pickle(), "byteorder": b"little", "version": b"3\n"}
        for name, content in contents.items():
            full = f"archive/{name}".encode()
            checksum = zlib.crc32(content)
            entries += _entry(full, _UTF8, checksum, len(content), len(records), wide=False)
            records += _local(full, _UTF8, checksum, len(content), b"") + content
        return records, entries

    def _storage_header(self, records: bytes) -> bytes:
        """The header of the storage's record, padded."""
        size = self.storage_bytes
        extra = struct.pack("<2H2Q", 1, 16, size, size) if self._is_wide else b""
        said = 0xFFFFFFFF if self._is_wide else size
        alignment = PAGE_BYTES if size >= _SMALL_BYTES else SMALL_ALIGNMENT_BYTES
        # Four bytes for the padding's own name and length.
        bare = len(_local(_STORAGE_NAME, 0, 0, 0, extra)) + 4
        padding = -(self.start_bytes + len(records) + bare) % alignment
        extra += struct.pack("<2sH", _PADDING_ID, padding) + b"Z" * padding
        return _local(_STORAGE_NAME, _UTF8 | _CHECKSUM_FOLLOWS, 0, said, extra)

    def _pickle(self) -> bytes:
        count = self.storage_bytes // self.dtype.itemsize_bytes
        typed = _STORAGE_OF.get(self.dtype.name)
        if typed is not None:
            storage = ("storage", Global("torch", typed), "0", "cpu", count)
        else:
            untyped = Global("torch.storage", "UntypedStorage")
            storage = ("storage", untyped, "0", "cpu", self.storage_bytes)
        hooks = Call(Global("collections", "OrderedDict"), ())
        strides = View.row_major(self.shape).strides
        # The arguments of `_rebuild_tensor_v2`. Types without a class of storages need version 3,
        # which has the type as one more argument.
        fields = (Reference(storage), 0, self.shape, strides, False, hooks)
        if typed is not None:
            return write_pickle(Call(Global("torch._utils", "_rebuild_tensor_v2"), fields))
        fields_and_type = (*fields, Global("torch", self.dtype.name))
        return write_pickle(Call(Global("torch._utils", "_rebuild_tensor_v3"), fields_and_type))


def _local(name: bytes, flags: int, checksum: int, size: int, extra: bytes) -> bytes:
    """The header in front of a record. The time is the format's first, as PyTorch has it."""
    fields = (b"PK\x03\x04", 0, flags, 0, 0, 0, checksum, size, size, len(name), len(extra))
    return struct.pack("<4s5H3I2H", *fields) + name + extra


def _entry(name: bytes, flags: int, checksum: int, size: int, header: int, *, wide: bool) -> bytes:
    """A record's entry in the directory."""
    extra = struct.pack("<2H2Q", 1, 16, size, size) if wide else b""
    said = 0xFFFFFFFF if wide else size
    numbers = (checksum, said, said, len(name), len(extra), 0, 0, 0, 0, header)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, flags, 0, 0, 0, *numbers) + name + extra


def _end(count: int, size: int, begin: int, *, wide: bool) -> bytes:
    """What stands behind the directory."""
    if not wide:
        return struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, begin, 0)
    # 44 bytes follow; made by version 3.0 on Unix, readable from version 4.5 on, which has 64 bits.
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, size, begin
    ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + size, 1)
    # The narrow end sends readers to the wide one by a place of all ones.
    said = (0, 0, count, count, size, 0xFFFFFFFF, 0)
    return end + struct.pack("<4s4H2IH", b"PK\x05\x06", *said)
