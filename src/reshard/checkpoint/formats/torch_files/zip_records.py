"""The records of a zip archive that are stored as they are: where in the file each lies.

1. The end of the archive says where its directory is, the directory where the records are.
2. A record's own header says where its content begins: it is padded, which the directory does
   not know.

A directory may have a million records: it is read once, and a record is a few numbers.

Source: the zip format (APPNOTE 6.3.3), and what PyTorch 1.6 and later write.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

from reshard.checkpoint.formats.torch_files.pickle_terms import shortened
from reshard.errors import FormatError

ReadRange = Callable[[int, int], bytes]

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

# Where its header is in the archive, its size, and its CRC-32 or 0.
_Record = tuple[int, int, int]
# The size of a record that is compressed or encrypted.
_NOT_AS_IT_IS = -1


class ZipRecords:
    """The records of the archive of `size_bytes` at `start_bytes` of a file.

    `read(offset, size)` returns bytes of the file. Errors begin with `label`, which says what
    should be what it is not. A directory of more than `most_bytes` is refused.
    """

    def __init__(
        self, read: ReadRange, start_bytes: int, size_bytes: int, label: str, most_bytes: int
    ) -> None:
        self._read = read
        self._start = start_bytes
        self._size = size_bytes
        self._label = label
        self._most_bytes = most_bytes
        tail = min(size_bytes, _TAIL_BYTES)
        self._tail = read(start_bytes + size_bytes - tail, tail)
        try:
            self._records = self._directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self.wrong(f"its directory is damaged ({error})") from error

    def wrong(self, reason: str) -> FormatError:
        """The error for an archive that is not what it should be."""
        return FormatError(f"{self._label} as torch.save writes it: {reason}")

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
        if size > self._most_bytes:
            raise self.wrong(f"its directory has {size} bytes, more than {self._most_bytes}")
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
                size = _NOT_AS_IT_IS
            # All records lie in one folder, which is named after the file that was saved.
            if prefix is None:
                prefix = name[: name.find("/") + 1]
            if name in records:
                raise self.wrong(f"it has two records {shortened(name)!r}")
            records[name] = header, size, crc32
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

    def list_headers(self) -> list[tuple[int, int]]:
        """Where in the file the records' own headers begin and end; `place` reads one of them."""
        starts = [self._start + header_bytes for header_bytes, _, _ in self._records.values()]
        return [(start, start + LOCAL_HEADER.size) for start in starts]

    def has(self, name: str) -> bool:
        """Whether there is a record of that name."""
        return name in self._records

    def place(self, name: str) -> tuple[int, _Record]:
        """Where in the archive the content of a record begins, and its entry."""
        record = self._records.get(name)
        if record is None:
            raise self.wrong(f"it has no record {shortened(name)!r}")
        header_bytes, size_bytes, _ = record
        if size_bytes == _NOT_AS_IT_IS:
            raise self.wrong(f"its record {shortened(name)!r} is compressed or encrypted")
        local = LOCAL_HEADER.unpack(self._bytes(header_bytes, LOCAL_HEADER.size))
        if local[0] != LOCAL_SIGNATURE:
            raise self.wrong(f"its record {shortened(name)!r} is not where its directory says")
        # The lengths of this header, not the directory's: only here `extra` has PyTorch's padding,
        # which lets storages begin at multiples of 64 bytes.
        begin = header_bytes + LOCAL_HEADER.size + local[9] + local[10]
        if begin + size_bytes > self._size:
            raise self.wrong(f"its record {shortened(name)!r} is longer than the archive")
        return begin, record

    def content(self, name: str, most_bytes: int) -> bytes:
        """The content of a small record."""
        begin, (_, size_bytes, crc32) = self.place(name)
        if size_bytes > most_bytes:
            raise self.wrong(f"its record {name!r} has {size_bytes} bytes, too many")
        content = self._bytes(begin, size_bytes)
        # PyTorch can be set not to compute checksums; they are 0 then.
        if crc32 and zlib.crc32(content) != crc32:
            raise self.wrong(f"its record {name!r} is damaged, by its own checksum")
        return content

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Where in the file a storage begins, its bytes as they are, and its checksum."""
        begin, (_, stored_bytes, crc32) = self.place(f"data/{key}")
        return self._start + begin, stored_bytes, crc32
