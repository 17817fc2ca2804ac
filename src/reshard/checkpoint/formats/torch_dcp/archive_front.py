"""What does the beginning of an archive say of its tensor, while its end is not at hand?

Of an archive that is compressed, the beginning can be had without the rest. `torch.save` writes
the description in front of the storage, and each record behind a header of its own::

    [header data.pkl][what the tensor is][its size]...[header data/0][the storage ...
    |<----------------------- front ------------------------------->|

1. Records follow each other. A size that its header leaves open stands behind the record,
   after a mark; the mark counts only where size and checksum fit.
2. The first record of data is the storage. How long it must be, the description says.

Nothing is believed for good: who has the whole archive reads it by its directory
(`torch_archive`), and both must say the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from reshard.checkpoint.formats.torch_dcp.archive import (
    ALLOWED,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    ArchivedTensor,
    archived_tensor,
)
from reshard.checkpoint.formats.torch_dcp.restricted_pickle import read_pickle, shortened
from reshard.errors import FormatError

# Room for the description, and for the padding in front of the storage.
FRONT_BYTES = 64 << 10
_MARK = b"PK\x07\x08"
_SIZE_FOLLOWS = 8
_ENCRYPTED = 1


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
        """What the description says, and where the storage begins."""
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
            at = stop + 16 if is_open else stop

    def _end_of(self, name: str, begin: int) -> int:
        """Where a record ends whose size stands behind it."""
        stop = begin
        while (stop := self._front.find(_MARK, stop)) >= 0:
            behind = self._front[stop + 4 : stop + 16]
            if len(behind) == 12:
                crc32, packed, size = struct.unpack("<3I", behind)
                is_long = packed == size == stop - begin
                # PyTorch can be told not to compute checksums; they are 0 then.
                if is_long and crc32 in (0, zlib.crc32(self._front[begin:stop])):
                    return stop
            stop += 1
        raise self.wrong(
            f"its record {shortened(name)!r} does not end in its first {len(self._front)} bytes"
        )
