"""The archives of `torch.save`: where in a file the elements of a tensor lie.

It writes a zip archive whose records are stored as they are, so that a tensor's
storage is a range of the file::

    archive/data.pkl     which part of which storage the tensor is: offset, size, strides
    archive/byteorder    little
    archive/version
    archive/data/0       the storage
    (directory)          where each record is

1. The end of the archive says where its directory is, the directory where the records are.
2. `data.pkl` is read without doing what it says (`restricted_pickle`).
3. What they say must fit: stored records, one tensor, a storage as long as its record, a view
   inside it.

Of an archive that is compressed, the beginning can be had without the rest (`read_archive_front`).
It has the description in front of the storage, and each record behind a header of its own::

    [header data.pkl][what the tensor is][its size]...[header data/0][the storage ...
    |<----------------------- front ------------------------------->|

1. Records follow each other. A size that its header leaves open stands behind the record,
   after a mark; the mark counts only where size and checksum fit.
2. The first record of data is the storage. How long it must be, the description says.

A front is provisional: when the whole archive is there, it is read by its directory, and both
must agree.

Source: the zip format (APPNOTE 6.3.3), and what PyTorch 1.6 and later write.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.binding import View
from reshard.checkpoint.blocks.strided_spans import extent
from reshard.checkpoint.formats.torch_files.restricted_pickle import (
    Call,
    Global,
    Reference,
    read_pickle,
    shortened,
)
from reshard.dtypes import ALL_DTYPES, DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import FormatError, UsageError

ReadRange = Callable[[int, int], bytes]

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
TORCH_DTYPES = frozenset([d.name for d in ALL_DTYPES] + _NUMBERS + _QUANTIZED + _BITS)

_REBUILT = frozenset(["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"])
# The names that the pickle of a tensor may have.
ALLOWED = {
    "torch._utils": _REBUILT,
    "torch": TORCH_DTYPES | {"Size"} | frozenset(TYPED_STORAGES),
    "torch.storage": frozenset(["UntypedStorage", "TypedStorage"]),
    "collections": frozenset(["OrderedDict"]),
}
# What is read into memory at once: the archive of one tensor has a few hundred bytes of each.
_LARGEST_DIRECTORY_BYTES = 1 << 20
_LARGEST_PICKLE_BYTES = 1 << 20
# Read first: the end record, and usually the whole directory with it.
_TAIL_BYTES = 4096
# The structures of APPNOTE: end of directory, its 64-bit form and the locator of that, an entry of
# the directory, and the header in front of a record.
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
LOCAL_SIGNATURE = b"PK\x03\x04"
# Room for the description, and for the padding in front of the storage.
FRONT_BYTES = 64 << 10
# The mark between a record and its size, and two bits of a header's flags.
_MARK = b"PK\x07\x08"
_SIZE_FOLLOWS = 8
_ENCRYPTED = 1


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


@dataclass(frozen=True, slots=True)
class _Record:
    """An entry of the directory."""

    header_bytes: int
    size_bytes: int
    crc32: int


def read_archive(read: ReadRange, start_bytes: int, size_bytes: int, label: str) -> ArchivedTensor:
    """The tensor in the archive of `size_bytes` at `start_bytes` of a file.

    `read(offset, size)` returns bytes of the file; `label` names the archive in errors.

    Raises:
        FormatError: no such archive, one that is damaged, or one of something else.
    """
    archive = _Archive(read, start_bytes, size_bytes, label)
    order = archive.content("byteorder", 16) if archive.has("byteorder") else b"little"
    if order != b"little":
        raise archive.wrong(f"its byte order is {order!r}, expected b'little'; save it again")
    pickle = archive.content("data.pkl", _LARGEST_PICKLE_BYTES)
    return archived_tensor(archive, read_pickle(pickle, ALLOWED, label))


class _Archive:
    """The directory of one archive."""

    def __init__(self, read: ReadRange, start_bytes: int, size_bytes: int, label: str) -> None:
        self._read = read
        self._start = start_bytes
        self._size = size_bytes
        self._label = label
        tail = min(size_bytes, _TAIL_BYTES)
        self._tail = read(start_bytes + size_bytes - tail, tail)
        try:
            self._records = self._directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self.wrong(f"its directory is damaged ({error})") from error

    def wrong(self, reason: str) -> FormatError:
        """The error for an archive that is not what it should be."""
        return FormatError(f"{self._label} is no tensor as torch.save writes it: {reason}")

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self._size:
            raise self.wrong(f"it refers to bytes {offset}:{offset + size} of its {self._size}")
        in_tail = offset - (self._size - len(self._tail))
        if in_tail >= 0:
            return self._tail[in_tail : in_tail + size]
        return self._read(self._start + offset, size)

    def _directory(self) -> dict[str, _Record]:
        end = self._bytes(self._size - _END.size, _END.size)
        signature, _, _, _, count, size, offset, comment = _END.unpack(end)
        if signature != b"PK\x05\x06" or comment:
            raise self.wrong("it does not end as an archive ends; is it cut off?")
        # A large archive has a 64-bit end of directory, which a locator before the end points to.
        place = self._size - _END.size - _LOCATOR.size
        if place >= 0 and self._bytes(place, 4) == b"PK\x06\x07":
            _, _, end64, _ = _LOCATOR.unpack(self._bytes(place, _LOCATOR.size))
            fields = _END64.unpack(self._bytes(end64, _END64.size))
            if fields[0] != b"PK\x06\x06":
                raise self.wrong("the end of its directory is not where it should be")
            count, size, offset = fields[7:]
        if size > _LARGEST_DIRECTORY_BYTES:
            raise self.wrong(f"its directory has {size} bytes, a tensor's has a few hundred")
        return self._entries(self._bytes(offset, size), count)

    def _entries(self, directory: bytes, count: int) -> dict[str, _Record]:
        records: dict[str, _Record] = {}
        prefix, at = None, 0
        # A count that is not true must cost no more than the directory's own bytes.
        for _ in range(min(count, len(directory))):
            fields = _ENTRY.unpack_from(directory, at)
            signature, flags, method = fields[0], fields[3], fields[4]
            name_size, extra_size, comment_size = fields[10:13]
            if signature != b"PK\x01\x02":
                raise self.wrong("an entry of its directory is damaged")
            at += _ENTRY.size
            name = directory[at : at + name_size].decode("utf-8")
            extra = directory[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + comment_size
            crc32, packed, size, header = self._sizes(fields, extra)
            if method != 0 or flags & 1 or packed != size:
                raise self.wrong(f"its record {shortened(name)!r} is compressed or encrypted")
            # All records lie in one folder, which is named after the file that was saved.
            if prefix is None:
                prefix = name[: name.find("/") + 1]
            if name in records:
                raise self.wrong(f"it has two records {shortened(name)!r}")
            records[name] = _Record(header, size, crc32)
        if at != len(directory):
            raise self.wrong("its directory has another length than it says")
        prefix = prefix or ""
        return {n[len(prefix) :]: r for n, r in records.items() if n.startswith(prefix)}

    def _sizes(self, fields: tuple[Any, ...], extra: bytes) -> tuple[int, int, int, int]:
        """Checksum, packed size, size and place of a record; large ones stand in `extra`."""
        # Field 1 of `extra` has the 64-bit values of those that are 0xFFFFFFFF, in this order.
        values = [fields[9], fields[8], fields[16]]
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            at += 4
            if kind == 1:
                wide = extra[at : at + size]
                for number, value in enumerate(values):
                    if value == 0xFFFFFFFF:
                        (values[number],) = struct.unpack_from("<Q", wide)
                        wide = wide[8:]
            at += size
        return fields[7], values[1], values[0], values[2]

    def has(self, name: str) -> bool:
        """Whether there is a record of that name."""
        return name in self._records

    def place(self, name: str) -> tuple[int, _Record]:
        """Where in the archive the content of a record begins, and its entry."""
        record = self._records.get(name)
        if record is None:
            raise self.wrong(f"it has no record {shortened(name)!r}")
        local = LOCAL_HEADER.unpack(self._bytes(record.header_bytes, LOCAL_HEADER.size))
        if local[0] != LOCAL_SIGNATURE:
            raise self.wrong(f"its record {shortened(name)!r} is not where its directory says")
        # The lengths of this header, not the directory's: only here `extra` has PyTorch's padding,
        # which lets storages begin at multiples of 64 bytes.
        begin = record.header_bytes + LOCAL_HEADER.size + local[9] + local[10]
        if begin + record.size_bytes > self._size:
            raise self.wrong(f"its record {shortened(name)!r} is longer than the archive")
        return begin, record

    def content(self, name: str, most_bytes: int) -> bytes:
        """The content of a small record."""
        begin, record = self.place(name)
        if record.size_bytes > most_bytes:
            raise self.wrong(f"its record {name!r} has {record.size_bytes} bytes, too many")
        content = self._bytes(begin, record.size_bytes)
        # PyTorch can be set not to compute checksums; they are 0 then.
        if record.crc32 and zlib.crc32(content) != record.crc32:
            raise self.wrong(f"its record {name!r} is damaged, by its own checksum")
        return content

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Where in the file a storage begins, its bytes as they are, and its checksum."""
        begin, record = self.place(f"data/{key}")
        return self._start + begin, record.size_bytes, record.crc32


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
        raise archive.wrong(
            "its values are conjugated or negated only when they are read; save "
            "`tensor.resolve_conj().resolve_neg()`"
        )
    storage, key, count = _storage(archive, fields[0].key)
    element = _element(archive, named[0] if named else storage)
    shape, strides = _sizes(fields[2]), _sizes(fields[3])
    offset = fields[1]
    if shape is None or strides is None or len(shape) != len(strides) or not _is_size(offset):
        raise archive.wrong("its offset, shape or strides are no sizes")
    # An untyped storage is counted in bytes, a typed one in elements.
    size_bytes = count * (1 if storage is None else element.itemsize_bytes)
    start_bytes, storage_bytes, crc32 = archive.storage(key, size_bytes)
    if size_bytes != storage_bytes:
        raise archive.wrong(
            f"its storage has {storage_bytes} bytes, expected {count} elements of {element}"
        )
    view = View(offset, strides)
    # Fewer elements in the storage than in the tensor would be one under several indices.
    needed = max(offset + extent(view, shape), math.prod(shape))
    if needed * element.itemsize_bytes > storage_bytes:
        raise archive.wrong(
            f"shape {list(shape)} at offset {offset} with strides {list(strides)} is more than "
            f"its storage of {storage_bytes} bytes"
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
        raise archive.wrong(str(error)) from error


def _is_call(value: object, name: str) -> bool:
    return isinstance(value, Call) and value.function.name == name


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(value: object) -> tuple[int, ...] | None:
    """A tuple of sizes, or a `torch.Size`; None for anything else."""
    if isinstance(value, Call) and value.function == Global("torch", "Size"):
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if isinstance(value, tuple | list) and all(map(_is_size, value)):
        return tuple(value)
    return None


def read_archive_front(front: bytes, label: str) -> ArchivedTensor:
    """The tensor in the archive that begins with `front`; without a checksum.

    Raises:
        FormatError: no such archive, one that is damaged, or one of something else.
    """
    return _Front(front, label).tensor()


class _Front:
    """The records at the beginning of an archive."""

    def __init__(self, front: bytes, label: str) -> None:
        self._front = front
        self._label = label
        self._storage: tuple[str, int] | None = None

    def wrong(self, reason: str) -> FormatError:
        """The error for an archive that is not what it should be."""
        return FormatError(f"{self._label} is no tensor as torch.save writes it: {reason}")

    def tensor(self) -> ArchivedTensor:
        """The described tensor, and where its storage begins."""
        pickle = None
        for name, begin, stop in self._records():
            if name == "data.pkl":
                pickle = self._front[begin:stop]
            elif name.startswith("data/"):
                self._storage = name.removeprefix("data/"), begin
        if pickle is None:
            raise self.wrong("it does not begin with its record 'data.pkl'")
        return archived_tensor(self, read_pickle(pickle, ALLOWED, self._label))

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Where the storage begins, and the bytes that it must have."""
        if self._storage is None or self._storage[0] != key:
            raise self.wrong(
                f"its record {shortened(f'data/{key}')!r} does not begin in its first "
                f"{len(self._front)} bytes"
            )
        return self._storage[1], size_bytes, 0

    def _records(self) -> Iterator[tuple[str, int, int]]:
        """Name, begin and end of each record up to the first of data, of which the end is open."""
        at, prefix = 0, None
        while at + LOCAL_HEADER.size <= len(self._front):
            fields = LOCAL_HEADER.unpack_from(self._front, at)
            signature, _, flags, method = fields[:4]
            size, name_size, extra_size = fields[8:11]
            if signature != LOCAL_SIGNATURE:
                return
            if method != 0 or flags & _ENCRYPTED:
                raise self.wrong("one of its records is compressed or encrypted")
            at += LOCAL_HEADER.size
            try:
                name = self._front[at : at + name_size].decode("utf-8")
            except UnicodeDecodeError as error:
                raise self.wrong(f"the name of a record is damaged ({error})") from error
            begin = at + name_size + extra_size
            prefix = name[: name.find("/") + 1] if prefix is None else prefix
            name = name.removeprefix(prefix)
            if name.startswith("data/"):
                yield name, begin, begin
                return
            is_open = flags & _SIZE_FOLLOWS
            stop = self._end_of(name, begin) if is_open else begin + size
            yield name, begin, stop
            # Behind an open record stand the mark, the checksum and two sizes, of four bytes each.
            at = stop + 16 if is_open else stop

    def _end_of(self, name: str, begin: int) -> int:
        """Where a record ends whose size stands behind it."""
        stop = begin
        while (stop := self._front.find(_MARK, stop)) >= 0:
            behind = self._front[stop + 4 : stop + 16]
            if len(behind) == 12:
                crc32, packed, size = struct.unpack("<3I", behind)
                # The mark's bytes may also be part of the record.
                is_long = packed == size == stop - begin
                # PyTorch can be set not to compute checksums; they are 0 then.
                if is_long and crc32 in (0, zlib.crc32(self._front[begin:stop])):
                    return stop
            stop += 1
        raise self.wrong(
            f"its record {shortened(name)!r} does not end in its first {len(self._front)} bytes"
        )
