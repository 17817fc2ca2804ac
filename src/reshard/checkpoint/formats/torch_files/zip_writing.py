"""The structures of new zip archives: headers, entries of the directory, and its end.

Records of 4 GiB and more, and places beyond 4 GiB, are described by the format's 64-bit fields.

Source: the zip format (APPNOTE 6.3.3).
"""

from __future__ import annotations

import struct

from reshard.checkpoint.formats.torch_files.zip_records import LOCAL_HEADER

PAGE_BYTES = 4096
SMALL_ALIGNMENT_BYTES = 64
# Storages smaller than this are not worth a page's padding.
_SMALL_BYTES = 4 * PAGE_BYTES
# Beyond this, sizes and places are said in 64 bits. The directory, which lies behind the records,
# may then begin a little further on in 32 bits.
_LARGEST_NARROW = 0xFFFFFFFE - (1 << 20)
_MOST_NARROW_ENTRIES = 0xFFFE
# Two bits of a header's flags: the name is UTF-8, checksum and sizes follow the record.
UTF8 = 0x0800
CHECKSUM_FOLLOWS = 0x0008
# The extra field with which PyTorch pads; readers skip fields that they do not know.
_PADDING_ID = b"FB"


def is_wide(number: int) -> bool:
    """Whether a size or a place is said in 64 bits."""
    return number > _LARGEST_NARROW


def local_header(name: bytes, flags: int, checksum: int, size: int, extra: bytes = b"") -> bytes:
    """The header in front of a record. The time is the format's first, as PyTorch has it.

    The size of a large record stands in `extra` (see `padded_extra`).
    """
    size = 0xFFFFFFFF if is_wide(size) else size
    fields = (b"PK\x03\x04", 0, flags, 0, 0, 0, checksum, size, size, len(name), len(extra))
    return struct.pack("<4s5H3I2H", *fields) + name + extra


def directory_entry(name: bytes, flags: int, checksum: int, size: int, header: int) -> bytes:
    """A record's entry in the directory; `header` is where its header begins."""
    # What does not fit stands in a field of 64 bits each: the size twice, then the place.
    wide = [size, size] if is_wide(size) else []
    said = 0xFFFFFFFF if wide else size
    if is_wide(header):
        wide, header = [*wide, header], 0xFFFFFFFF
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    numbers = (checksum, said, said, len(name), len(extra), 0, 0, 0, 0, header)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, flags, 0, 0, 0, *numbers) + name + extra


def padded_extra(start_bytes: int, name: bytes, size_bytes: int) -> bytes:
    """The extra field of a header at `start_bytes`, padded so that its record of `size_bytes`
    begins at a page, or at 64 bytes if it is small."""
    wide = is_wide(size_bytes)
    extra = struct.pack("<2H2Q", 1, 16, size_bytes, size_bytes) if wide else b""
    alignment = PAGE_BYTES if size_bytes >= _SMALL_BYTES else SMALL_ALIGNMENT_BYTES
    # Four bytes for the padding's own name and length.
    bare = LOCAL_HEADER.size + len(name) + len(extra) + 4
    padding = -(start_bytes + bare) % alignment
    return extra + struct.pack("<2sH", _PADDING_ID, padding) + b"Z" * padding


def directory_end(count: int, size: int, begin: int) -> bytes:
    """What stands behind the directory of `count` entries, whose `size` bytes begin at `begin`."""
    if not is_wide(begin + size) and count <= _MOST_NARROW_ENTRIES:
        return struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, begin, 0)
    # 44 bytes follow; made by version 3.0 on Unix, readable from version 4.5 on, which has 64 bits.
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, size, begin
    ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + size, 1)
    # The narrow end sends readers to the wide one by a place of all ones.
    few = min(count, 0xFFFF)
    said = (0, 0, few, few, min(size, 0xFFFFFFFF), 0xFFFFFFFF, 0)
    return end + struct.pack("<4s4H2IH", b"PK\x05\x06", *said)
