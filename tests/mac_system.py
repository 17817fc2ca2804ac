"""A stand-in for macOS: its fcntl and its C library, over Linux's calls.

Commands and structures are decoded as the headers of macOS define them, so that a wrong number or
layout fails here. It has not been compared with a Mac.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest

from reshard import system

BLOCK_BYTES = 4096
REAL_CONTROL = fcntl.fcntl
LINUX_NAMES = ("O_DIRECT", "RWF_NOWAIT", "posix_fadvise", "posix_fallocate", "fdatasync")


class MacSystem:
    """The calls of macOS, a record of them, and errors to answer with.

    `errors` has an error number by the name of a call; `calls` has names with arguments.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, int] = {}
        self._library = ctypes.CDLL(None, use_errno=True)

    def install(self, patch: pytest.MonkeyPatch) -> MacSystem:
        """Put the stand-in in the place of the system, without what is Linux's own."""
        for name in (*LINUX_NAMES, "sched_getaffinity", "memfd_create"):
            patch.delattr(os, name, raising=False)
        patch.setattr(system, "IS_MACOS", True)
        patch.setattr(fcntl, "fcntl", self.control)
        patch.setattr(system, "_load_library", lambda: self)
        return self

    def names(self) -> list[str]:
        """Return the names of the calls so far."""
        return [call[0] for call in self.calls]

    def control(self, descriptor: int, command: int, argument: Any = 0) -> Any:
        """Answer as fcntl of macOS."""
        known: dict[int, tuple[str, Callable[..., None]]] = {
            42: ("F_PREALLOCATE", self._allocate),
            44: ("F_RDADVISE", self._advise),
            48: ("F_NOCACHE", self._uncache),
            51: ("F_FULLFSYNC", self._sync),
            99: ("F_PUNCHHOLE", self._punch),
        }
        if command not in known:
            return REAL_CONTROL(descriptor, command, argument)
        name, answer = known[command]
        if name in self.errors:
            self.calls.append((name, "refused"))
            raise OSError(self.errors[name], os.strerror(self.errors[name]))
        answer(name, descriptor, argument)
        return argument

    def _allocate(self, name: str, descriptor: int, argument: bytes) -> None:
        flags, mode, offset, length, _ = struct.unpack("@Iiqqq", argument)
        # F_ALLOCATEALL from the physical end of the file (F_PEOFPOSMODE).
        assert (flags, mode, offset) == (4, 3, 0)
        self.calls.append((name, length))
        # FALLOC_FL_KEEP_SIZE: the size of the file stays.
        size = ctypes.c_int64(os.fstat(descriptor).st_blocks * 512 + length)
        assert self._library.fallocate(descriptor, 1, ctypes.c_int64(0), size) == 0

    def _advise(self, name: str, descriptor: int, argument: bytes) -> None:
        self.calls.append((name, *struct.unpack("@qi4x", argument)))

    def _uncache(self, name: str, descriptor: int, argument: int) -> None:
        self.calls.append((name, argument))

    def _sync(self, name: str, descriptor: int, argument: int) -> None:
        self.calls.append((name,))

    def _punch(self, name: str, descriptor: int, argument: bytes) -> None:
        flags, reserved, offset, length = struct.unpack("@IIqq", argument)
        assert (flags, reserved) == (0, 0)
        if offset % BLOCK_BYTES or length % BLOCK_BYTES:
            raise OSError(errno.EINVAL, "Invalid argument")
        self.calls.append((name, offset, length))
        offset, length = ctypes.c_int64(offset), ctypes.c_int64(length)
        assert self._library.fallocate(descriptor, 3, offset, length) == 0

    def renamex_np(self, first: bytes, second: bytes, flags: int) -> int:
        """Swap two names."""
        # RENAME_SWAP.
        assert flags == 2
        self.calls.append(("renamex_np",))
        if "renamex_np" in self.errors:
            ctypes.set_errno(self.errors["renamex_np"])
            return -1
        return int(self._library.renameat2(-100, first, -100, second, 2))

    def malloc_zone_pressure_relief(self, zone: None, goal: ctypes.c_size_t) -> int:
        """Give memory back."""
        assert zone is None
        self.calls.append(("malloc_zone_pressure_relief", goal.value))
        return 0
