"""Zip archives whose records are stored as they are, as `torch.save` writes them.

    [header][content of a record] [header][content] ... [directory][end of the directory]

Reading (`ZipRecords`): the end of the archive locates the directory, the directory the headers of
records, and a record's own header its content. Only that header has the padding before the content,
by which PyTorch aligns storages. A directory may have a million records: it is read once, and a
record is a few numbers.

Writing: `local_header`, `directory_entry` and `directory_end` return the structures of a new
archive. Records of 4 GiB and more, and offsets beyond 4 GiB, use the format's 64-bit fields.

Source: the zip format (APPNOTE 6.3.3), and the archives of PyTorch 1.6 and later.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.storage.byte_streams import ReadRange
from reshard.errors import FormatError

# Read first: the end record, and usually the whole directory with it.
_TAIL_BYTES = 4096
# The structures of APPNOTE: the header before a record, an entry of the directory, the end of the
# directory, its 64-bit form, and the locator of that.
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
# The offset of the checksum in a header, and in an entry of the directory.
_HEADER_CRC32, _ENTRY_CRC32 = 14, 16
LOCAL_SIGNATURE, DESCRIPTOR_SIGNATURE = b"PK\x03\x04", b"PK\x07\x08"
_ENTRY_SIGNATURE, _END_SIGNATURE = b"PK\x01\x02", b"PK\x05\x06"
_END64_SIGNATURE, _LOCATOR_SIGNATURE = b"PK\x06\x06", b"PK\x06\x07"
# Bits of a header's flags: the record is encrypted; checksum and sizes follow the record; the name
# is UTF-8.
ENCRYPTED, SIZES_FOLLOW, UTF8 = 0x0001, 0x0008, 0x0800
# The size of a record that is compressed or encrypted.
_NOT_STORED = -1
# In 32-bit fields, this value refers to the 64-bit field.
_WIDE = 0xFFFFFFFF

_PAGE_BYTES = 4096
# The alignment of PyTorch's own archives.
_SMALL_ALIGNMENT_BYTES = 64
# Storages smaller than this are not worth a page's padding.
_SMALL_BYTES = 4 * _PAGE_BYTES
# Sizes and offsets above this are written in 64 bits. The directory, which follows the records, may
# begin a little later in 32 bits.
_MAX_NARROW = _WIDE - 1 - (1 << 20)
# 0xFFFF refers to the 64-bit field.
_MAX_NARROW_ENTRIES = 0xFFFE
# The extra field of PyTorch's padding; readers skip fields that they do not know.
_PADDING_ID = b"FB"


class _Record(NamedTuple):
    """An entry of the directory: the offset of the record's header; the CRC-32 is 0 if absent.

    `crc32_bytes` is the offset of the CRC-32 in the archive.
    """

    header_bytes: int
    size_bytes: int
    crc32: int
    crc32_bytes: int


class ZipRecords:
    """The records of the archive of `size_bytes` at `start_bytes` of a file.

    `read(offset, size)` returns bytes of the file. Errors begin with `label`, which states what the
    archive should be and is not. A directory of more than `max_directory_bytes` is an error.
    """

    def __init__(
        self,
        read: ReadRange,
        start_bytes: int,
        size_bytes: int,
        label: str,
        max_directory_bytes: int,
        *,
        is_recorded: bool = False,
    ) -> None:
        self._read = read
        self._start = start_bytes
        self._size = size_bytes
        self._label = label
        self._max_directory_bytes = max_directory_bytes
        # The bytes that were used, with their offsets, if they are recorded; the records whose
        # content was read; the storages that were found.
        self._used: list[tuple[int, bytes]] | None = [] if is_recorded else None
        self._checked: set[str] = set()
        self._found: set[str] = set()
        tail = min(size_bytes, _TAIL_BYTES)
        self._tail = read(start_bytes + size_bytes - tail, tail)
        try:
            self._records = self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self.wrong(f"its directory is damaged ({error})") from error

    def wrong(self, reason: str) -> FormatError:
        """Return the error for a malformed archive."""
        return FormatError(f"{self._label} as torch.save writes it: {reason}")

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self._size:
            raise self.wrong(f"it refers to bytes {offset}:{offset + size} of its {self._size}")
        in_tail = offset - (self._size - len(self._tail))
        if in_tail >= 0:
            content = self._tail[in_tail : in_tail + size]
        else:
            content = self._read(self._start + offset, size)
        if self._used is not None:
            self._used.append((offset, content))
        return content

    def _read_directory(self) -> dict[str, _Record]:
        end = self._bytes(self._size - _END.size, _END.size)
        signature, _, _, _, count, size, offset, comment = _END.unpack(end)
        # PyTorch's archives lack a comment, so the record is at a known offset.
        if signature != _END_SIGNATURE or comment:
            raise self.wrong("it does not end as an archive ends; is it cut off?")
        # A large archive has a 64-bit end of directory, with a locator of it before the end.
        locator = self._size - _END.size - _LOCATOR.size
        if locator >= 0 and self._bytes(locator, 4) == _LOCATOR_SIGNATURE:
            _, _, end64, _ = _LOCATOR.unpack(self._bytes(locator, _LOCATOR.size))
            fields = _END64.unpack(self._bytes(end64, _END64.size))
            if fields[0] != _END64_SIGNATURE:
                raise self.wrong("the end of its directory is not where it should be")
            count, size, offset = fields[7:]
        if size > self._max_directory_bytes:
            raise self.wrong(
                f"its directory has {size} bytes, more than {self._max_directory_bytes}"
            )
        self._directory = offset, self._bytes(offset, size)
        return self._read_entries(*self._directory, count)

    def _read_entries(self, offset: int, directory: bytes, count: int) -> dict[str, _Record]:
        records: dict[str, _Record] = {}
        prefix, at = None, 0
        # A false count must cost no more than the directory's own bytes.
        for _ in range(min(count, len(directory))):
            fields = _ENTRY.unpack_from(directory, at)
            signature, flags, method = fields[0], fields[3], fields[4]
            name_size, extra_size, comment_size = fields[10:13]
            if signature != _ENTRY_SIGNATURE:
                raise self.wrong("an entry of its directory is damaged")
            crc32_bytes = offset + at + _ENTRY_CRC32
            at += _ENTRY.size
            name = directory[at : at + name_size].decode("utf-8")
            extra = directory[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + comment_size
            (size_bytes, packed, header_bytes) = _read_entry(fields, extra)
            record = _Record(header_bytes, size_bytes, fields[7], crc32_bytes)
            if method != 0 or flags & ENCRYPTED or packed != size_bytes:
                record = record._replace(size_bytes=_NOT_STORED)
            # All records are in a single folder, named after the saved file.
            if prefix is None:
                prefix = name[: name.find("/") + 1]
            if name in records:
                raise self.wrong(f"it has two records {shortened(name)!r}")
            records[name] = record
        if at != len(directory):
            raise self.wrong("its directory does not have the length in its end record")
        prefix = prefix or ""
        return {n[len(prefix) :]: r for n, r in records.items() if n.startswith(prefix)}

    def list_headers(self) -> list[tuple[int, int]]:
        """Return the start and stop in the file of the records' own headers."""
        starts = [self._start + record.header_bytes for record in self._records.values()]
        return [(start, start + LOCAL_HEADER.size) for start in starts]

    def has(self, name: str) -> bool:
        """Return whether there is a record of that name."""
        return name in self._records

    def _find(self, name: str) -> tuple[int, _Record]:
        """Return the offset of a record's content in the archive, and its entry."""
        record = self._records.get(name)
        if record is None:
            raise self.wrong(f"it has no record {shortened(name)!r}")
        if record.size_bytes == _NOT_STORED:
            raise self.wrong(f"its record {shortened(name)!r} is compressed or encrypted")
        local = LOCAL_HEADER.unpack(self._bytes(record.header_bytes, LOCAL_HEADER.size))
        if local[0] != LOCAL_SIGNATURE:
            raise self.wrong(
                f"its record {shortened(name)!r} is not at the offset in its directory"
            )
        # The lengths of this header, not the directory's: only here `extra` has the padding.
        begin = record.header_bytes + LOCAL_HEADER.size + local[9] + local[10]
        if begin + record.size_bytes > self._size:
            raise self.wrong(f"its record {shortened(name)!r} is longer than the archive")
        return begin, record

    def content(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a small record."""
        begin, record = self._find(name)
        if record.size_bytes > max_bytes:
            raise self.wrong(f"its record {name!r} has {record.size_bytes} bytes, too many")
        content = self._bytes(begin, record.size_bytes)
        # PyTorch can be set not to compute checksums; they are 0 then.
        if record.crc32 and zlib.crc32(content) != record.crc32:
            raise self.wrong(f"its record {name!r} is damaged, by its own checksum")
        self._checked.add(name)
        return content

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Return a storage's start in the file, its size in bytes, and its checksum or 0."""
        begin, record = self._find(f"data/{key}")
        self._found.add(key)
        return self._start + begin, record.size_bytes, record.crc32

    def list_used(self) -> tuple[list[tuple[int, bytes]], int] | None:
        """Return the bytes by which the archive's storage was found, and the CRC-32's offset.

        Bytes are given with their offsets in the archive. Checksums of records whose content was
        not read are left out: archives that differ in nothing else have the same contents, except
        for elements. Returns None unless a single storage was found.
        """
        if self._used is None or len(self._found) != 1:
            return None
        (key,) = self._found
        storage = self._records[f"data/{key}"]
        used = dict.fromkeys(self._used)
        header = (storage.header_bytes, self._bytes(storage.header_bytes, LOCAL_HEADER.size))
        del used[header]
        pieces = [*used, *_leave_out(*header, [storage.header_bytes + _HEADER_CRC32])]
        at, directory = self._directory
        pieces.remove((at, directory))
        checksums = [
            r.crc32_bytes for name, r in self._records.items() if name not in self._checked
        ]
        return [*pieces, *_leave_out(at, directory, checksums)], storage.crc32_bytes


def _leave_out(
    offset: int, content: bytes, checksums: Iterable[int]
) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of bytes at `offset` that are not in one of the CRC-32s."""
    begin = 0
    for at in sorted(at - offset for at in checksums):
        yield offset + begin, content[begin:at]
        begin = at + 4
    yield offset + begin, content[begin:]


def _read_entry(fields: tuple[Any, ...], extra: bytes) -> list[int]:
    """Return size, packed size and offset of an entry's record; large values are in `extra`."""
    # Field 1 of `extra` has the 64-bit values of the fields that are 0xFFFFFFFF, in this order.
    values = [fields[9], fields[8], fields[16]]
    at = 0
    while at + 4 <= len(extra):
        field_id, size = struct.unpack_from("<2H", extra, at)
        at += 4
        if field_id == 1:
            wide = extra[at : at + size]
            for number, value in enumerate(values):
                if value == _WIDE:
                    (values[number],) = struct.unpack_from("<Q", wide)
                    wide = wide[8:]
        at += size
    return values


def is_wide(number: int) -> bool:
    """Return whether a size or an offset is written in 64 bits."""
    return number > _MAX_NARROW


def local_header(name: bytes, flags: int, crc32: int, size: int, extra: bytes = b"") -> bytes:
    """Return the header before a record, with the format's first date, as PyTorch writes it.

    The size of a large record is in `extra` (see `padded_extra`).
    """
    size = _WIDE if is_wide(size) else size
    fields = (LOCAL_SIGNATURE, 0, flags, 0, 0, 0, crc32, size, size, len(name), len(extra))
    return LOCAL_HEADER.pack(*fields) + name + extra


def directory_entry(name: bytes, flags: int, crc32: int, size: int, header: int) -> bytes:
    """Return a record's entry in the directory; `header` is the offset of its header."""
    # Values that do not fit follow in 64 bits each: the size twice, then the offset.
    wide = [size, size] if is_wide(size) else []
    narrow_size = _WIDE if wide else size
    if is_wide(header):
        wide, header = [*wide, header], _WIDE
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    sizes = (crc32, narrow_size, narrow_size, len(name), len(extra), 0, 0, 0, 0, header)
    return _ENTRY.pack(_ENTRY_SIGNATURE, 0, 0, flags, 0, 0, 0, *sizes) + name + extra


def padded_extra(start_bytes: int, name: bytes, size_bytes: int) -> bytes:
    """Return the extra field of a header at `start_bytes`, padded to align the record's content.

    The content of `size_bytes` begins at a page, or at a multiple of 64 bytes if it is small.
    """
    wide = is_wide(size_bytes)
    extra = struct.pack("<2H2Q", 1, 16, size_bytes, size_bytes) if wide else b""
    alignment = _PAGE_BYTES if size_bytes >= _SMALL_BYTES else _SMALL_ALIGNMENT_BYTES
    # Four bytes for the padding's own id and length.
    unpadded = LOCAL_HEADER.size + len(name) + len(extra) + 4
    padding = -(start_bytes + unpadded) % alignment
    return extra + struct.pack("<2sH", _PADDING_ID, padding) + b"Z" * padding


def descriptor(crc32: int, size: int) -> bytes:
    """Return the checksum and sizes that follow a record of `SIZES_FOLLOW`."""
    form = "<4sI2Q" if is_wide(size) else "<4s3I"
    return struct.pack(form, DESCRIPTOR_SIGNATURE, crc32, size, size)


def directory_end(count: int, size: int, begin: int) -> bytes:
    """Return the end records of a directory of `count` entries, `size` bytes from `begin` on."""
    if not is_wide(begin + size) and count <= _MAX_NARROW_ENTRIES:
        return _END.pack(_END_SIGNATURE, 0, 0, count, count, size, begin, 0)
    # 44 bytes follow; made by version 3.0 on Unix, readable from version 4.5 on, which has 64 bits.
    end = _END64.pack(_END64_SIGNATURE, 44, 0x031E, 45, 0, 0, count, count, size, begin)
    end += _LOCATOR.pack(_LOCATOR_SIGNATURE, 0, begin + size, 1)
    # An offset whose bits are all 1 in the narrow end refers readers to the wide end.
    few = min(count, 0xFFFF)
    return end + _END.pack(_END_SIGNATURE, 0, 0, few, few, min(size, _WIDE), _WIDE, 0)
