"""Memory that the processes of one host have in common, and how they tell that they have.

The memory of this process: what work may allocate, and what is resident.

The latter, as the system counts it, has all that is in use, the interpreter and imported libraries
with it, and what was given back to the allocator but not yet to the system.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from reshard import system
from reshard.system import trim_memory


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


DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
"""What work on checkpoints may allocate, where nothing else is said."""

_MANY = 10_000


def release_freed_memory(tensors: int) -> None:
    """Give freed memory back to the system after work on many tensors, where the C library can.

    The allocator keeps what texts and tables of names took, several times what is in use. It takes
    some milliseconds, and is left out for few tensors.
    """
    if tensors >= _MANY:
        trim_memory()
