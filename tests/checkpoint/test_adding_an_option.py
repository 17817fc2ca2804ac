"""Adding an option takes one field; the rest is made from it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from reshard.checkpoint import options
from reshard.checkpoint.options import ConversionRequest, option
from reshard.cli.options import options_of

TOOLS = Path(__file__).parents[2] / "tools"


class NewRequest(ConversionRequest):
    """The request of a conversion that has one more option."""

    padding: int | None = option(
        None, "Pad rows to a multiple, after {dtype}.", unset="no padding", metavar="ROWS"
    )


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return import_module("options_page")


def test_the_page_and_the_keywords_are_those_of_the_fields(tool: ModuleType) -> None:
    advice = "python tools/options_page.py writes them"
    assert tool.PAGE.read_text() == tool.options_page(), advice
    assert tool.KEYWORDS.read_text() == tool.keywords_module(), advice


def test_a_field_is_an_option_everywhere(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @options_of(NewRequest)
    def command(padding: str, **others: object) -> None:
        click.echo(f"padding {padding} of {len(others) + 1} options")

    flags = [name for parameter in command.params for name in parameter.opts]
    assert CliRunner().invoke(command, ["--padding", "64"]).output == (
        f"padding 64 of {len(flags)} options\n"
    )
    help_text = " ".join(command.get_help(click.Context(command)).split())
    assert (
        "--padding ROWS Pad rows to a multiple, after --dtype. [default: no padding]" in help_text
    )
    assert "padding: Pad rows to a multiple, after `dtype`." in (NewRequest.__doc__ or "")
    assert NewRequest(padding=64).list_recorded()["padding"] == 64
    monkeypatch.setattr(tool, "ConversionRequest", NewRequest)
    monkeypatch.setattr(tool, "_SECTIONS", [(NewRequest, "The result", "")])
    row = (
        "| `padding` * | `--padding` | `int` | no padding | Pad rows to a multiple, after `dtype`."
    )
    assert row in tool.options_page()
    assert "    padding: int | None\n" in tool.keywords_module()


def test_a_field_without_a_text_is_no_option() -> None:
    class Forgotten(ConversionRequest):
        padding: int = 0

    assert "padding" not in options.find_options(Forgotten)
