"""The memory of this process: what work may allocate, and what is resident.

The latter, as the system counts it, has all that is in use, the interpreter and imported libraries
with it, and what was given back to the allocator but not yet to the system.
"""

from __future__ import annotations

from reshard.system import trim_memory

DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
"""What work on checkpoints may allocate, where nothing else is said."""

_MANY = 10_000


def give_back_memory(tensors: int) -> None:
    """Give freed memory back to the system after work on many tensors, where the C library can.

    The allocator keeps what texts and tables of names took, several times what is in use. It takes
    some milliseconds, and is left out for few tensors.
    """
    if tensors >= _MANY:
        trim_memory()
