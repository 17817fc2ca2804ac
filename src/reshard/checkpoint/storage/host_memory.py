"""Memory limits, freed memory, and memory shared by the processes of a host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from reshard import system


def name_host() -> tuple[str, int]:
    """Return a key shared by the processes of a host: its running system and its shared memory."""
    memory = system.find_host_memory() or Path(tempfile.gettempdir())
    return system.name_running_system(), memory.stat().st_dev


def find_host_memory(min_bytes: int) -> Path:
    """Return the shared-memory folder if it has room, or else a folder on disk; containers often
    have 64 MiB.

    >>> find_host_memory(1 << 60) == Path(tempfile.gettempdir())
    True
    """
    memory = system.find_host_memory()
    if memory is not None:
        state = os.statvfs(memory)
        if state.f_bavail * state.f_frsize >= min_bytes:
            return memory
    return Path(tempfile.gettempdir())


DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
"""The memory that a run on checkpoints may allocate by default."""

_MANY_TENSORS = 10_000


def release_freed_memory(tensors: int) -> None:
    """Return freed memory to the system, if the C library can, after work on many tensors.

    The allocator keeps the memory of freed strings and tables, several times what is in use. This
    takes some milliseconds, so it is skipped for few tensors.
    """
    if tensors >= _MANY_TENSORS:
        system.trim_memory()
