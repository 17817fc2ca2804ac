"""Options that several commands share. Parameters have the names they have in the library.

`options_of` makes the options of a command from the fields of an options class, such as
`ConversionRequest`; the other functions are options that only the command has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.cli import output
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.checkpoint.options import Options

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def size_bytes(text: str) -> int:
    """Return the number of bytes of a size: a number, with or without a unit.

    Raises:
        UsageError: an unknown unit, a missing number, or less than a byte.

    >>> size_bytes("256MiB"), size_bytes("1GB"), size_bytes("1.5GiB"), size_bytes("4096")
    (268435456, 1000000000, 1610612736, 4096)
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    units = {unit.casefold(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].casefold()) if match else None
    size = 0
    if match and factor:
        # In integers, since a float would lose bytes of large sizes.
        whole, _, decimals = match[1].partition(".")
        size = int(whole + decimals) * factor // 10 ** len(decimals)
    if size < 1:
        raise UsageError(
            f"{text!r} is not a size; write 256MiB, 1.5GiB (units of 1024), 1GB (of 1000), or a "
            "number of bytes"
        )
    return size


def as_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Read a size, as the callback of an option. Raises `click.BadParameter`."""
    if value is None:
        return None
    try:
        return size_bytes(value)
    except UsageError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def as_path(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse an empty path, as the callback of an argument: an unset variable of a shell.

    Raises `click.BadParameter`.
    """
    if not value:
        raise click.BadParameter(
            "an empty path; write `.` for the current folder", context, parameter
        )
    return value


# click.Choice has a type parameter from 8.2 on.
if TYPE_CHECKING:
    _TextChoice = click.Choice[str]
else:
    _TextChoice = click.Choice


class Choice(_TextChoice):
    """A choice between words. Some words have other spellings.

    Args:
        choices: the words.
        translate: returns the word for another spelling of it. For an unknown text, raises
            UsageError or returns the text.
        hint: returns the end of the error for an unknown word.
    """

    def __init__(
        self,
        choices: Sequence[str],
        translate: Callable[[str], str] = str,
        hint: Callable[[], str] = str,
    ) -> None:
        super().__init__(choices)
        self._translate, self._hint = translate, hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word. Raises `click.BadParameter`."""
        try:
            value = self._translate(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(error.message + self._hint(), ctx, param) from None


def cast_type_choice(choices: Sequence[str]) -> Choice:
    """Return the choice of a type to cast to: its short name, or that in PyTorch and config.json.

    The value is the short name, which journals have.
    """

    def translate(value: str) -> str:
        from reshard.elements import CAST_TYPES, cast_type

        full = cast_type(value).name
        return next(name for name in choices if CAST_TYPES[name] == full)

    return Choice(choices, translate)


def _list_broken_formats() -> str:
    """Return the end of an error, which lists plug-ins that could not be loaded."""
    from reshard.checkpoint.formats.registry import describe_broken_formats

    return describe_broken_formats()


def _translate_condition(word: str) -> str:
    """Return the current name of a condition, which an earlier version called `word`."""
    from reshard.recipes.overrides import FORMER_ALLOWANCES

    return FORMER_ALLOWANCES.get(word, word)


_CHOICES: dict[str, Callable[[Sequence[str]], Choice]] = {
    "format": partial(Choice, hint=_list_broken_formats),
    "dtype": cast_type_choice,
    "allow": partial(Choice, translate=_translate_condition),
}


def options_of(options: type[Options], *names: str) -> Callable[[Command], Command]:
    """Make the options of a command from the fields of an options class.

    The type of an option follows from its field: `()` as the default makes it repeatable, False a
    flag without a value, a name that ends in `_bytes` a size, and `threads` a number.

    Args:
        options: a class whose fields are declared by `reshard.checkpoint.options.option`.
        names: the fields; all that are options of the command if none is given.
    """
    # Imported here, since commands without such options start without it.
    from reshard.checkpoint.options import find_options

    fields = find_options(options)
    chosen = names or [name for name, field in fields.items() if field.metadata["flag"] is not None]

    def add(command: Command) -> Command:
        # Decorators apply from the last to the first: reversed, the help lists them in order.
        for name in reversed(chosen):
            command = _make_option(fields, fields[name])(command)
        return command

    return add


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the name that a field has as an option of the command."""
    return field.metadata["flag"] or f"--{field.name.replace('_', '-')}"


def _make_option(
    fields: Mapping[str, dataclasses.Field[Any]], field: dataclasses.Field[Any]
) -> Callable[[Command], Command]:
    from reshard.checkpoint.options import describe_option, list_choices

    def refer(name: str) -> str:
        return flag_of(fields[name])

    default: Any = field.default
    text = describe_option(field, refer, ("text", "unset"))
    settings: dict[str, Any] = {"metavar": field.metadata["metavar"]}
    choices = list_choices(field)
    if choices is not None:
        settings["type"] = _CHOICES.get(field.name, Choice)(choices)
    if default is False:
        settings["is_flag"] = True
    elif default == ():
        settings["multiple"] = True
        text += " Repeatable."
    elif field.name.endswith("_bytes"):
        settings["callback"] = as_size
        if default is not None:
            settings |= {"default": f"{default // 1024**2}MiB", "show_default": True}
    elif field.name == "threads":
        settings["type"] = click.IntRange(min=1)
    return click.option(flag_of(field), field.name, help=text, **settings)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of text."
)
quiet_option = click.option(
    "--quiet", "-q", is_flag=True, help="Show no progress and no report; errors are still shown."
)


def check_picture(drawn: str | None, as_json: bool, quiet: bool = False) -> None:
    """Refuse a picture in JSON, or if nothing is shown. Raises `click.UsageError`."""
    for option, is_given in (("--json", as_json), ("--quiet", quiet)):
        if drawn is not None and is_given:
            raise click.UsageError(
                f"--picture draws text and {option} writes none; leave one of them out",
                click.get_current_context(),
            )


_REPORT_OPTIONS = (
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
    for option in reversed(_REPORT_OPTIONS):
        command = option(command)
    return command


def check_report(report_path: str | None, overwrite: bool, ranks_per_host: int | None) -> None:
    """Check the options of a report, before any work is done.

    Raises:
        UsageError: the report exists already, its folder does not exist, or options of a report
            are given without `--html`.
    """
    if report_path is None:
        for name, value in (("--overwrite", overwrite), ("--ranks-per-host", ranks_per_host)):
            if value:
                raise UsageError(f"{name} needs a report; give --html FILE too")
        return
    if not report_path:
        raise UsageError("--html with an empty name; give a file, such as report.html")
    output.check_place(Path(report_path), overwrite, "report", "report.html")
