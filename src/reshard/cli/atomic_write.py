"""Text files that are written completely or not at all.

An existing file is replaced only with `--overwrite`.

The options of HTML reports (`report_options`) are here too, since each report is such a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from reshard.errors import UsageError
from reshard.system import sync


def check_place(path: Path, overwrite: bool, what: str, example: str) -> None:
    """Check that a file can be written at `path`, before any work is done.

    `what` is a word for the file in errors, `example` a file name to suggest.

    Raises:
        UsageError: the path is a folder or an existing file, or its folder does not exist.
        RunError: the system does not permit access to the path.
    """
    from reshard.checkpoint.storage.filesystem import translate_os_errors

    with translate_os_errors(f"look at the {what}", path):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give a file for the {what}: {path}/{example}")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is no folder; make it first, or write elsewhere")
        if not overwrite and os.path.lexists(path):
            raise _there_already(path)


def write_whole(path: Path, text: str, overwrite: bool, what: str) -> None:
    """Write a file at a path that `check_place` has accepted.

    Raises:
        UsageError: the file was created in the meantime, and `overwrite` is not set.
        RunError: the system fails to write the file.
    """
    from reshard.checkpoint.storage.filesystem import translate_os_errors
    from reshard.checkpoint.storage.permissions import common_mode_bits, restrict_mode

    # In the same folder, since a rename works only within a file system.
    draft = path.with_name(f".reshard-{what}.{os.getpid()}")
    with translate_os_errors(f"write the {what}", path):
        try:
            replaced = common_mode_bits([path])
            with open(draft, "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                sync(file.fileno())
            # A report that replaces a private file stays private.
            restrict_mode(draft, replaced)
            _put_in_place(draft, path, overwrite)
        finally:
            # A rename moves the draft; a link or a failure leaves it.
            draft.unlink(missing_ok=True)


def _put_in_place(draft: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:
        # A link fails if the file exists; a rename would replace it.
        try:
            os.link(draft, path)
        except FileExistsError:
            raise _there_already(path) from None
        except OSError:
            # Some file systems do not support links: check, then rename.
            if os.path.lexists(path):
                raise _there_already(path) from None
        else:
            return
    os.replace(draft, path)


def _there_already(path: Path) -> UsageError:
    return UsageError(f"{path} exists; give --overwrite to replace it, or another name")


Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--html",
        "report_path",
        metavar="FILE",
        help="Write an HTML report with pictures.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace the report if FILE exists."),
    click.option(
        "--ranks-per-host",
        type=click.IntRange(min=1),
        metavar="N",
        help="Add the traffic between hosts of N ranks to the report.",
    ),
)


def report_options(command: Command) -> Command:
    """Return the options of a report: `report_path`, `overwrite`, `ranks_per_host`."""
    # Decorators apply from the last to the first: reversed, the help lists them in order.
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_report(report_path: str | None, overwrite: bool, ranks_per_host: int | None) -> None:
    """Check the options of a report, before any work is done.

    Raises:
        UsageError: the report exists already, its folder does not exist, or options of a report
            are given without `--html`.
    """
    if report_path is None:
        for name, given in (("--overwrite", overwrite), ("--ranks-per-host", ranks_per_host)):
            if given:
                raise UsageError(f"{name} is about the report; give --html FILE too")
        return
    if not report_path:
        raise UsageError("--html with an empty name; give a file, such as report.html")
    check_place(Path(report_path), overwrite, "report", "report.html")


def write_report(report_path: str, page: str, overwrite: bool) -> None:
    """Write a report whose options `check_report` has accepted.

    Raises:
        UsageError: the file was created in the meantime, and `overwrite` is not set.
        RunError: the system fails to write the file.
    """
    write_whole(Path(report_path), page, overwrite, "report")
