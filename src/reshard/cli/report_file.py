"""A report with pictures, as a file: the options of it, and writing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from reshard.cli.whole_file import check_place, write_whole
from reshard.errors import UsageError

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
    """The options of a report: `report_path`, `overwrite`, `ranks_per_host`."""
    # Decorators apply from the last to the first: reversed, the help lists them in order.
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_report(report_path: str | None, overwrite: bool, ranks_per_host: int | None) -> None:
    """Refuse what cannot be, before any work is done.

    Raises:
        UsageError: a report that exists, or whose folder does not; options of a report
            without one.
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
    """Write a report that `check_report` has looked at.

    Raises:
        UsageError: a file that was created meanwhile, without `overwrite`.
        RunError: what the system refuses.
    """
    write_whole(Path(report_path), page, overwrite, "report")
