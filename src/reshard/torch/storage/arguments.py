"""Validation of arguments that reading and writing share."""

from __future__ import annotations

from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.errors import UsageError


def count_threads(thread_count: int | None) -> int:
    """Return the number of threads of a rank; 4 if None.

    Raises UsageError if `thread_count` is not an integer of at least 1.
    """
    if thread_count is not None and (type(thread_count) is not int or thread_count < 1):
        raise UsageError(f"thread_count={thread_count!r}; give a whole number from 1")
    return choose_threads(thread_count)
