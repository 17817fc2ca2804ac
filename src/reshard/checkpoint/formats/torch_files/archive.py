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

import struct
import zlib
from collections.abc import Iterator

from reshard.checkpoint.formats.torch_files.archived_tensors import (
    TORCH_DTYPES,
    TYPED_STORAGES,
    ArchivedTensor,
    archived_tensor,
)
from reshard.checkpoint.formats.torch_files.pickle_terms import shortened
from reshard.checkpoint.formats.torch_files.restricted_pickle import read_inert
from reshard.checkpoint.formats.torch_files.zip_records import (
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    ReadRange,
    ZipRecords,
)
from reshard.errors import FormatError

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
# Room for the description, and for the padding in front of the storage.
FRONT_BYTES = 64 << 10
# The mark between a record and its size, and two bits of a header's flags.
_MARK = b"PK\x07\x08"
_SIZE_FOLLOWS = 8
_ENCRYPTED = 1


def read_archive(read: ReadRange, start_bytes: int, size_bytes: int, label: str) -> ArchivedTensor:
    """The tensor in the archive of `size_bytes` at `start_bytes` of a file.

    `read(offset, size)` returns bytes of the file; `label` names the archive in errors.

    Raises:
        FormatError: no such archive, one that is damaged, or one of something else.
        UnreadableTensorError: a tensor of another class, or of another element type.
    """
    what = f"{label} is no tensor"
    archive = ZipRecords(read, start_bytes, size_bytes, what, _LARGEST_DIRECTORY_BYTES)
    order = archive.content("byteorder", 16) if archive.has("byteorder") else b"little"
    if order != b"little":
        raise archive.wrong(f"its byte order is {order!r}, expected b'little'; save it again")
    pickle = archive.content("data.pkl", _LARGEST_PICKLE_BYTES)
    return archived_tensor(archive, read_inert(pickle, label))


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
        return archived_tensor(self, read_inert(pickle, self._label))

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
