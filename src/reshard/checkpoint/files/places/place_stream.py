"""An object as an open file, for headers: what is read brings what lies behind it.

A read at the beginning, and one that goes on behind what is there, bring a long window; one
elsewhere, as of the record of one tensor among others, a short one.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any

from reshard.checkpoint.files.places.object_source import ObjectSource, ObjectState

# A header of a few thousand tensors, in one answer.
_WINDOW_BYTES = 256 << 10
_SHORT_WINDOW_BYTES = 16 << 10


class PlaceStream(io.RawIOBase):
    """The bytes of an object, by windows around what is asked for.

    Reading raises OSError where the object has changed since `state` was seen.
    """

    def __init__(self, source: ObjectSource, key: str, state: ObjectState, name: str) -> None:
        super().__init__()
        self._source, self._key, self._state, self.name = source, key, state, name
        self._at = self._window_start = 0
        self._window = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte, counted from the begin, from here, or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._state.size_bytes}
        if base[whence] + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._at = base[whence] + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or as much of it as there is up to the end."""
        target = memoryview(buffer).cast("B")
        size = min(len(target), max(self._state.size_bytes - self._at, 0))
        begin = self._at - self._window_start
        if size and not (begin >= 0 and begin + size <= len(self._window)):
            goes_on = not self._at or 0 <= begin <= len(self._window) + _WINDOW_BYTES
            window_bytes = _WINDOW_BYTES if goes_on else _SHORT_WINDOW_BYTES
            wanted = min(max(size, window_bytes), self._state.size_bytes - self._at)
            content = self.fetch(self._at, wanted)
            self._window, self._window_start, begin = content, self._at, 0
        target[:size] = self._window[begin : begin + size]
        self._at += size
        return size

    def fetch(self, start: int, size: int) -> memoryview:
        """Bytes of the object and no more, by a request of their own. Raises OSError."""
        content = memoryview(bytearray(size))
        try:
            found = self._source.read_into(self._key, start, content)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.name) from error
        if found != self._state:
            raise OSError(errno.ESTALE, "it was replaced while it was read", self.name)
        return content
