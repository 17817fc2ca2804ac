"""Arguments that reading and writing have in common, checked."""

from __future__ import annotations

from reshard.checkpoint.storage.remote_files import default_threads
from reshard.errors import UsageError


def count_threads(thread_count: int | None) -> int:
    """How many threads a rank has; 4 when None.

    Raises UsageError for what is no whole number from 1.
    """
    threads = default_threads(thread_count)
    if type(threads) is not int or threads < 1:
        raise UsageError(f"thread_count={threads!r}; give a whole number from 1")
    return threads
