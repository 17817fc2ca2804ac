"""Memory that the processes of one host have in common, and how they tell that they have."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")


def name_host() -> tuple[str, int]:
    """What processes of one host have in common: a running system, and a memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return name, memory.stat().st_dev


def find_host_memory(least_bytes: int) -> Path:
    """A folder in memory with that much room; on disk otherwise: containers often have 64 MiB.

    >>> find_host_memory(1 << 60) == Path(tempfile.gettempdir())
    True
    """
    if os.access(_MEMORY, os.W_OK):
        found = os.statvfs(_MEMORY)
        if found.f_bavail * found.f_frsize >= least_bytes:
            return _MEMORY
    return Path(tempfile.gettempdir())
