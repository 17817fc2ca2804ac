"""Take Linux's own calls away from every Python that has this folder in PYTHONPATH.

What is missing then is what macOS misses, together with what macOS has under other names: calls of
`os`, `mmap`, `fcntl` and `socket`, functions of the C library, and the folders /proc and /dev/shm.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

MISSING = {
    os: (
        *("O_DIRECT", "O_PATH", "O_TMPFILE", "O_NOATIME", "O_LARGEFILE", "RWF_NOWAIT", "RWF_DSYNC"),
        *("posix_fadvise", "posix_fallocate", "fdatasync", "copy_file_range", "splice"),
        *("POSIX_FADV_WILLNEED", "POSIX_FADV_DONTNEED", "POSIX_FADV_SEQUENTIAL"),
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC"),
        *("MFD_ALLOW_SEALING", "pidfd_open", "eventfd", "setns", "unshare", "getrandom"),
        *("getxattr", "setxattr", "listxattr", "getresuid"),
    ),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MAP_POPULATE"),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"),
    socket: ("MSG_CMSG_CLOEXEC", "TCP_INFO", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "SO_PEERCRED"),
}
FUNCTIONS = ("renameat2", "fallocate", "malloc_trim", "madvise", "process_vm_readv", "prctl")
FOLDERS = ("/proc", "/dev/shm")


class Library(ctypes.CDLL):
    """A C library without functions of Linux's own."""

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def hide_folders(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of paths that does not find those of Linux's own."""

    def find(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            if any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS):
                raise FileNotFoundError(2, "No such file or directory", text)
        return call(path, *arguments, **options)

    return find


def take_calls_away() -> None:
    """Take the calls away from this process."""
    for module, names in MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = hide_folders(io.open)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
        setattr(os, name, hide_folders(getattr(os, name)))
    reach = os.access
    os.access = lambda path, *arguments, **options: (
        not str(path).startswith(FOLDERS) and reach(path, *arguments, **options)
    )
    ctypes.CDLL = Library  # type: ignore[misc]


# Not where pytest looks for doctests.
if __name__ == "sitecustomize":
    take_calls_away()
