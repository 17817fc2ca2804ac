"""Arguments that nothing reads in a run: each is an error that names what would read it.

An argument without an effect is most often a mistake: the user expects something that does not
happen. Commands and functions of the library call `expect_read` for each argument that they read in
some runs only.
"""

from __future__ import annotations

from reshard.errors import UsageError


def expect_read(argument: str, is_read: bool, reader: str) -> None:
    """Refuse an argument that nothing reads in this run.

    Args:
        argument: as the user wrote it: `--threads 2`, `adapters=['a']`.
        is_read: whether something reads it.
        reader: a clause about what would read it.

    Raises:
        UsageError: nothing reads it.

    >>> expect_read("--threads 2", False, "it is for --digest")
    Traceback (most recent call last):
    reshard.errors.UsageError: --threads 2 has no effect here: it is for --digest; leave it out
    """
    if not is_read:
        raise UsageError(f"{argument} has no effect here: {reader}; leave it out")
