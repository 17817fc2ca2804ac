"""Options of conversions: their checks, their types, and the options of the command."""

from __future__ import annotations

from typing import Any

import click
import pytest

from reshard.checkpoint.options import (
    CompareOptions,
    ConversionRequest,
    DiffOptions,
    LoadOptions,
    Options,
    RunOptions,
    find_options,
    option,
)
from reshard.cli.options import options_of
from reshard.errors import UsageError


@pytest.mark.parametrize(
    "options", [ConversionRequest, RunOptions, LoadOptions, CompareOptions, DiffOptions]
)
def test_every_field_is_an_option_that_the_docstring_has(options: type[Options]) -> None:
    # `kept` is set by planning alone.
    assert {*options.field_names} - {"kept"} == {*find_options(options)}
    for name in find_options(options):
        assert f"\n        {name}: " in (options.__doc__ or ""), name


@pytest.mark.parametrize("options", [ConversionRequest, RunOptions, CompareOptions, DiffOptions])
def test_options_are_a_value_or_keywords(options: type[Options]) -> None:
    value = options()
    assert options.of(value, {}) is value
    assert options.of(None, {}) == value
    with pytest.raises(UsageError, match=f"a {options.__name__}, and the keyword 'any' too"):
        options.of(value, {"any": 1})
    with pytest.raises(UsageError, match=f"options 'tp=2'; expected a {options.__name__}"):
        options.of("tp=2", {})


def test_journals_have_the_given_options_that_change_the_result() -> None:
    always = {"to", "rules", "recipe", "options", "strategy", "replicas", "most_file_bytes"}
    always |= {"source_names", "target_names"}
    assert {*ConversionRequest().list_recorded()} == always
    given = ConversionRequest(to="full", dtype="bf16", allow=["unknown"], format="torch-dcp")
    assert {*given.list_recorded()} == always | {"dtype"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads=0; expected a whole number from 1"),
        ({"threads": True}, "threads=True; expected"),
        ({"extra_bytes": -1}, "extra_bytes=-1; expected a whole number from 0"),
        ({"extra_bytes": 1.5}, "extra_bytes=1.5; expected"),
        ({"extra_bytes": None}, "extra_bytes=None; expected"),
        ({"discard_others": True}, "discard_others without overwrite"),
        ({"stop": True}, "stop=True"),
    ],
)
def test_options_of_a_run_are_checked_when_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantize": "int4"}, "quantize 'int4'; expected one of fp8-block128"),
        ({"check_copies": "some"}, "check_copies 'some'; expected one of sample, all, none"),
        ({"dequantize": True, "quantize": "fp8-block128"}, "convert in two steps"),
        ({"quantize": "fp8-block128", "source_names": {}}, "with names of other programs"),
        ({"adapters": ["a"], "dequantize": True}, "with the adapters first"),
    ],
)
def test_requests_are_checked_when_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConversionRequest(**arguments)


class Some(Options):
    """Some options."""

    names: tuple[str, ...] = option((), "Names.", flag="--name", metavar="NAME")
    limit_bytes: int = option(1 << 20, "A limit.", metavar="SIZE")
    how: str | None = option(None, "How: {choices}.", choices=lambda: ["a", "b"])
    is_fast: bool = option(False, "Fast, unlike {how}.", flag="--fast")
    in_python: int | None = option(None, "In Python alone.", flag=None)
    internal: int = 3


def test_a_command_has_an_option_for_each_declared_field() -> None:
    found: dict[str, Any] = {}

    @click.command()
    @options_of(Some)
    def command(**arguments: Any) -> None:
        found.update(arguments)

    command.main(["--name", "x", "--name", "y", "--limit-bytes", "2KiB"], standalone_mode=False)
    assert found == {"names": ("x", "y"), "limit_bytes": 2048, "how": None, "is_fast": False}
    command.main(["--how", "b", "--fast"], standalone_mode=False)
    assert found == {"names": (), "limit_bytes": 1 << 20, "how": "b", "is_fast": True}
    with pytest.raises(click.BadParameter, match="'c' is not one of 'a', 'b'"):
        command.main(["--how", "c"], standalone_mode=False)
    text = command.get_help(click.Context(command))
    assert "How: a, b." in text
    assert "Names. Repeatable." in text
    assert "Fast, unlike --how." in text
