"""Syncs that are not made: a disk takes milliseconds for each, and no test loses its power."""

from __future__ import annotations

import os
from typing import Any


def skip_syncs() -> None:
    """Let `os.fsync` and `os.fdatasync` of this process and its forks check their argument only."""
    # Not every system has both.
    for name in filter(os.__dict__.get, ("fsync", "fdatasync")):
        setattr(os, name, check_descriptor)


def check_descriptor(file: Any) -> None:
    """Raise OSError unless `file` is open."""
    os.fstat(file if isinstance(file, int) else file.fileno())
