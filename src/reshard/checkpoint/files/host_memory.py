"""Memory that the processes of one host have in common, and how they tell that they have."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from reshard import system


def name_host() -> tuple[str, int]:
    """What processes of one host have in common: a running system, and a memory."""
    memory = system.find_host_memory() or Path(tempfile.gettempdir())
    return system.name_running_system(), memory.stat().st_dev


def find_host_memory(least_bytes: int) -> Path:
    """A folder in memory with that much room; on disk otherwise: containers often have 64 MiB.

    >>> find_host_memory(1 << 60) == Path(tempfile.gettempdir())
    True
    """
    memory = system.find_host_memory()
    if memory is not None:
        found = os.statvfs(memory)
        if found.f_bavail * found.f_frsize >= least_bytes:
            return memory
    return Path(tempfile.gettempdir())
