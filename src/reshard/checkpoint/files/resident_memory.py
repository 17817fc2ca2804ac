"""The memory of this process: what work may allocate, and what is resident.

The latter, as the system counts it, has all that is in use, the interpreter and imported libraries
with it, and what was given back to the allocator but not yet to the system.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
"""What work on checkpoints may allocate, where nothing else is said."""

_MANY = 10_000


def resident_bytes() -> tuple[int, int]:
    """The resident memory of this process: how much it is, and the most that it was.

    Where the system does not say the first, it is the second.
    """
    # Of what was executed: `ru_maxrss` has the peak of the process that forked as well.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        now, most = (int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    except (OSError, ValueError, KeyError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, macOS in bytes.
        now = most = peak if sys.platform == "darwin" else peak * 1024
    return now, most


def give_back_memory(tensors: int) -> None:
    """Give freed memory back to the system after work on many tensors, where the C library can.

    The allocator keeps what texts and tables of names took, several times what is in use. It takes
    some milliseconds, and is left out for few tensors.
    """
    trim = _find_trim() if tensors >= _MANY else None
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _find_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        # Another C library than glibc.
        return None
