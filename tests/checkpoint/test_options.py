"""Options of conversions: their checks, their types, and the options of the command."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from reshard.checkpoint import keywords
from reshard.checkpoint.options import (
    PRETRAINED_OPTIONS,
    ConversionRequest,
    LoadOptions,
    RunOptions,
    option,
)
from reshard.cli.options import options_of
from reshard.errors import UsageError


def names_of(options: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(options)}


@pytest.mark.parametrize(
    ("options", "typed"),
    [(ConversionRequest, "RequestArguments"), (RunOptions, "RunArguments")],
)
def test_the_types_of_keywords_are_those_of_the_fields(options: type[Any], typed: str) -> None:
    known = {field.name: field.type for field in dataclasses.fields(options)}
    known.pop("kept", None)
    types = getattr(keywords, typed).__annotations__
    assert {name: one.__forward_arg__ for name, one in types.items()} == known


def test_load_takes_its_own_options_and_those_of_layouts() -> None:
    is_loaded = {
        field.name
        for field in dataclasses.fields(ConversionRequest)
        if field.metadata.get("is_loaded", True) and field.name != "kept"
    }
    assert {*keywords.LayoutArguments.__annotations__} == is_loaded
    assert {*keywords.LoadArguments.__annotations__} == is_loaded | names_of(LoadOptions)
    assert {*keywords.PretrainedArguments.__annotations__} == {*PRETRAINED_OPTIONS}


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


@dataclasses.dataclass
class Options:
    names: tuple[str, ...] = option((), "Names.", flag="--name", metavar="NAME")
    limit_bytes: int = option(1 << 20, "A limit.", metavar="SIZE")
    how: str | None = option(None, "How: {choices}.", choices=lambda: ["a", "b"])
    is_fast: bool = option(False, "Fast.", flag="--fast")
    internal: int = 3


def test_a_command_has_an_option_for_each_field_that_declares_one() -> None:
    found: dict[str, Any] = {}

    @click.command()
    @options_of(Options)
    def command(**arguments: Any) -> None:
        found.update(arguments)

    command.main(["--name", "x", "--name", "y", "--limit-bytes", "2KiB"], standalone_mode=False)
    assert found == {"names": ("x", "y"), "limit_bytes": 2048, "how": None, "is_fast": False}
    command.main(["--how", "b", "--fast"], standalone_mode=False)
    assert found == {"names": (), "limit_bytes": 1 << 20, "how": "b", "is_fast": True}
    with pytest.raises(click.BadParameter, match="'c' is not one of 'a', 'b'"):
        command.main(["--how", "c"], standalone_mode=False)
    assert "How: a, b." in command.get_help(click.Context(command))
