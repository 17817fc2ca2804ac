"""Messages of failures, and the exit codes of the command.

::

    0   done
    1   differs, or is damaged (decided by the command itself)
    2   wrong use or bad input: options, layouts, recipes, checkpoints that cannot be used
    3   failed while running: the system refused something, or the user interrupted

A failure prints a line on stderr. The traceback is printed only with `RESHARD_DEBUG=1`.
"""

from __future__ import annotations

import os
import traceback
from contextlib import suppress

import click

from reshard.cli.output import printable, write_error, write_json
from reshard.errors import ReshardError, RunError

DONE = 0
DIFFERS = 1
WRONG_USE = 2
FAILED = 3


def failure_of(error: BaseException) -> tuple[str, str, int, str]:
    """Return the report of an exception: its kind, the message, the exit code, and a hint.

    >>> from reshard.errors import RecipeError
    >>> failure_of(RecipeError("unknown recipe 'lama'"))
    ('RecipeError', "unknown recipe 'lama'", 2, '')
    """
    kind = type(error).__name__
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"Try '{context.command_path} --help'." if context else ""
        return "UsageError", error.format_message(), WRONG_USE, hint
    if isinstance(error, ReshardError):
        return kind, str(error), FAILED if isinstance(error, RunError) else WRONG_USE, ""
    if isinstance(error, KeyboardInterrupt):
        return "InterruptedRunError", "interrupted; nothing was written", FAILED, ""
    if isinstance(error, MemoryError):
        remedy = "give less --memory, fewer --threads or fewer ranks"
        return kind, f"out of memory; {remedy}", FAILED, ""
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return kind, f"{where}{error.strerror or error}", FAILED, ""
    message = f"internal error: {kind}: {error}; please report it; RESHARD_DEBUG=1 shows where"
    return "InternalError", message, FAILED, ""


def report(error: BaseException, as_json: bool) -> int:
    """Report a failure to the user, and return the exit code."""
    kind, message, exit_code, hint = failure_of(error)
    if os.environ.get("RESHARD_DEBUG") == "1":
        write_error("".join(traceback.format_exception(error)).rstrip())
    write_error("reshard: " + printable(message, keep="\n"))
    if hint:
        write_error(hint)
    if as_json:
        # If stdout itself failed, the line on stderr is the whole report.
        with suppress(OSError):
            write_json({"error": {"kind": kind, "message": message}})
    return exit_code
