"""Descriptors of files, for the two roads to a disk: the page cache and direct I/O.

A file is opened once for each road. Direct I/O moves whole pages between the disk and our own
memory, and is several times faster for large blocks; the page cache takes any number of bytes
at any offset. Whether a file system does direct I/O is only known by asking, once when the file
is opened and again at each call, so a refusal is a return value here and not an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from reshard.system import MAX_CALL_BYTES

DIRECT_MINIMUM_BYTES = 64 * 1024
"""Below this the page cache is quicker: it reads ahead and gathers writes."""

# Requests up to this are not compared with the size of the file.
_UNCHECKED_BYTES = 1 << 20

CONTINUES = "run the same command again, it continues"


def read_up_to(file: BinaryIO, max_bytes: int) -> bytes:
    """Read at most `max_bytes` of an open file, from where it stands.

    Python allocates the memory of a whole request before it reads. So a request beyond the end of
    the file, by a limit or by a size in damaged metadata, is cut to what the file has.
    """
    if max_bytes > _UNCHECKED_BYTES:
        position = file.tell()
        max_bytes = min(max_bytes, max(0, file.seek(0, os.SEEK_END) - position))
        file.seek(position)
    return file.read(max_bytes)


def read_range(file: BinaryIO, start_bytes: int, size_bytes: int) -> bytes:
    """Read a range of an open file; returns fewer bytes only where the file ends.

    The system may give less than was asked for. Of a file without a descriptor, such as an object
    of a store, only one thread reads. Memory is taken as in `read_up_to`.
    """
    try:
        descriptor = file.fileno()
    except OSError:
        file.seek(start_bytes)
        return read_up_to(file, size_bytes)
    if size_bytes > _UNCHECKED_BYTES:
        size_bytes = min(size_bytes, max(0, os.fstat(descriptor).st_size - start_bytes))
    content = b""
    while more := os.pread(
        descriptor, min(size_bytes - len(content), MAX_CALL_BYTES), start_bytes + len(content)
    ):
        content += more
    return content


def close_descriptor(descriptor: int) -> int:
    """Close a descriptor if it is open; returns -1, which stands for closed."""
    if descriptor >= 0:
        os.close(descriptor)
    return -1


def reason(error: OSError) -> str:
    """The system's message for an error."""
    return error.strerror or str(error)


def describe_full(path: Path) -> str | None:
    """Return what is used up where a disk is full: bytes, or inodes; None if that is unknown.

    `path` is a file or folder that cannot be made or written, which need not exist.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    # File systems without a fixed number of inodes have none in all.
    if state.f_files and not state.f_favail and state.f_bavail:
        return "no inode is free, of which every file takes one: delete files that are not needed"
    return f"{state.f_bavail * state.f_frsize} bytes are free"


class Closable(Protocol):
    """Anything with `close()`."""

    def close(self) -> None:
        """Release all resources."""


class Closing:
    """The base class of context managers that are left by `close()`.

    >>> class Door(Closing):
    ...     def close(self):
    ...         print("shut")
    >>> with Door():
    ...     pass
    shut
    """

    __slots__ = ()

    def close(self) -> None:
        """Release all resources. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
