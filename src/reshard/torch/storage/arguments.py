"""Arguments that reading and writing have in common, checked."""

from __future__ import annotations

import os
from pathlib import Path

from reshard.checkpoint.conversion.conversion import DEFAULT_THREADS
from reshard.errors import UsageError


def as_path(path: object) -> Path:
    """A path that is given as text or as a Path.

    Raises UsageError for anything else, bytes among them.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UsageError(f"a checkpoint at {path!r}; give a path as text, or a Path")
    return Path(path)


def count_threads(thread_count: int | None) -> int:
    """How many threads a rank has; 4 when None.

    Raises UsageError for what is no whole number from 1.
    """
    threads = DEFAULT_THREADS if thread_count is None else thread_count
    if type(threads) is not int or threads < 1:
        raise UsageError(f"thread_count={threads!r}; give a whole number from 1")
    return threads
