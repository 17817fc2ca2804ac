"""A report as a file: there whole or not at all, and never over another without being told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from reshard.checkpoint.durability import refusals_explained
from reshard.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--html",
        "report_path",
        metavar="FILE",
        help="Write a report with pictures to open in a browser.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace the report if FILE exists."),
    click.option(
        "--ranks-per-host",
        type=click.IntRange(min=1),
        metavar="N",
        help="In the report, how much passes between hosts of N ranks.",
    ),
)


def report_options(command: Command) -> Command:
    """The options of a report: `report_path`, `overwrite`, `ranks_per_host`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_report(report_path: str | None, overwrite: bool, ranks_per_host: int | None) -> None:
    """Refuse what cannot be, before any work is done.

    Raises:
        UsageError: a report that is there already, or whose folder is not; options of a report
            without one.
    """
    if report_path is None:
        for name, given in (("--overwrite", overwrite), ("--ranks-per-host", ranks_per_host)):
            if given:
                raise UsageError(f"{name} is about the report; give --html FILE too")
        return
    path = Path(report_path)
    if not report_path:
        raise UsageError("--html with an empty name; give a file, such as report.html")
    with refusals_explained("look at the report", path):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give a file for the report: {path}/report.html")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is no folder; make it first, or write elsewhere")
        if not overwrite and os.path.lexists(path):
            raise _there_already(path)


def write_report(report_path: str, page: str, overwrite: bool) -> None:
    """Write a report that `check_report` has looked at.

    Raises:
        UsageError: a file that has come to be there, without `overwrite`.
        RunError: what the system refuses.
    """
    path = Path(report_path)
    draft = path.with_name(f".reshard-report.{os.getpid()}")
    with refusals_explained("write the report", path):
        try:
            with open(draft, "x", encoding="utf-8", newline="\n") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            _put_in_place(draft, path, overwrite)
        finally:
            draft.unlink(missing_ok=True)


def _put_in_place(draft: Path, path: Path, overwrite: bool) -> None:
    if not overwrite:
        # A link is made only where there is nothing; a rename would replace it.
        try:
            os.link(draft, path)
        except FileExistsError:
            raise _there_already(path) from None
        except OSError:
            # Some file systems have no links: look, then rename.
            if os.path.lexists(path):
                raise _there_already(path) from None
        else:
            return
    os.replace(draft, path)


def _there_already(path: Path) -> UsageError:
    return UsageError(f"{path} exists; give --overwrite to replace it, or another name")
