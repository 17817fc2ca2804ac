"""Write docs/options.md, and the types of keywords in src/reshard/checkpoint/keywords.py.

Both are made from the fields of `reshard.checkpoint.options`. Run it after a change of a field:

    python tools/options_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from reshard.checkpoint.options import (
    PRETRAINED_OPTIONS,
    CompareOptions,
    ConversionRequest,
    DiffOptions,
    LoadOptions,
    Options,
    RunOptions,
    describe_option,
    find_options,
)
from reshard.cli.options import flag_of
from reshard.cli.program import program

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "options.md"
OPTIONS = ROOT / "src" / "reshard" / "checkpoint" / "options.py"
KEYWORDS = ROOT / "src" / "reshard" / "checkpoint" / "keywords.py"

_PAGE_HEAD = """# Options

All options of conversions, runs, deltas, loads and comparisons: as keywords in Python, as options
of the [command](command.md), with types and defaults. The keywords are fields of values, which are
checked when they are created, and which functions take instead of the keywords. This page is made
from these fields (`tools/options_page.py`). A type that ends in *bytes* is a number of bytes, in
the command with a unit (`256MiB`); an option of the command that takes a list is repeated.
"""
_SECTIONS: list[tuple[type[Options], str, str]] = [
    (
        ConversionRequest,
        "The result",
        "Keywords of `reshard.checkpoint.convert`, `plan_conversion`, `apply` and "
        "`plan_application`, and options of `reshard plan`, `convert` and `apply`. "
        "`load` takes those that are marked with *.",
    ),
    (
        RunOptions,
        "The run",
        "Keywords of `reshard.checkpoint.convert`, `apply` and `run_conversion`, and options of "
        "`reshard convert` and `apply`.",
    ),
    (
        DiffOptions,
        "Deltas",
        "Keywords of `reshard.checkpoint.diff`, and options of `reshard diff`.",
    ),
    (LoadOptions, "Loads", "Keywords of `reshard.checkpoint.load`, in Python alone."),
    (
        CompareOptions,
        "Comparisons",
        "Keywords of `reshard.checkpoint.compare`, and options of `reshard verify`, whose LEFT is "
        "the left side. Elements and parts are those of the left side; `include` and `exclude` "
        "select from both if no option changes names.",
    ),
]

_KEYWORDS_HEAD = '''"""The types of keywords, such as those of `convert` and `load`.

Only type checkers and editors use this module, which is not imported at run time.
`tools/options_page.py` writes it from the fields of `reshard.checkpoint.options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.checkpoint.blocks.block_io import OpenFiles
    from reshard.checkpoint.naming.renaming import Names
    from reshard.checkpoint.options import LayoutFile, RecipeName, Target
    from reshard.checkpoint.processes import Processes
    from reshard.checkpoint.storage.local_files import SourceFile
    from reshard.checkpoint.storage.threads import ProgressFunction
    from reshard.recipes.rules import Rule
'''


def options_page() -> str:
    """Return the page of all options as Markdown."""
    lines = [_PAGE_HEAD]
    for options, title, text in _SECTIONS:
        lines += [f"## {title}", "", f"`{options.__name__}`. {text}", ""]
        lines += ["| keyword | command | type | default | effect |", "|---|---|---|---|---|"]
        is_request = options is ConversionRequest
        for name, field in find_options(options).items():
            mark = " *" if is_request and field.metadata["is_loaded"] else ""
            flag = "" if field.metadata["flag"] is None else f"`{flag_of(field)}`"
            effect = describe_option(field, "`{}`".format, ("text", "python"))
            row = f"`{name}`{mark}", flag, _write_type(field), _write_default(field), effect
            lines.append(_write_row(row))
        lines.append("")
    lines += ["## The command alone", "", "| command | of | effect |", "|---|---|---|"]
    lines += map(_write_row, _list_command_options())
    return "\n".join([*lines, ""])


def _write_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _list_command_options() -> list[tuple[str, str, str]]:
    """Return the options of the commands that are not fields, the commands, and their help."""
    fields = [field for options, _, _ in _SECTIONS for field in find_options(options).values()]
    known = {flag_of(field) for field in fields if field.metadata["flag"] is not None}
    commands: dict[tuple[str, str], list[str]] = {}
    with click.Context(program) as context:
        for name in ("plan", "convert", "apply", "verify", "diff"):
            command = program.get_command(context, name)
            for option in command.params if command is not None else ():
                if isinstance(option, click.Option) and option.opts[0] not in known:
                    commands.setdefault((option.opts[0], option.help or ""), []).append(name)
    return [(f"`{flag}`", ", ".join(names), text) for (flag, text), names in commands.items()]


def _write_type(field: Any) -> str:
    aliases = re.findall(r"^    (\w+) = (.+)$", OPTIONS.read_text(encoding="utf-8"), re.MULTILINE)
    written = field.type.removesuffix(" | None")
    written = dict(aliases).get(written, written)
    return f"`{written}`" + (", bytes" if field.name.endswith("_bytes") else "")


def _write_default(field: Any) -> str:
    if field.metadata["unset"] is not None:
        return describe_option(field, "`{}`".format, ["unset"])
    if field.default in (None, ()):
        return ""
    if field.name.endswith("_bytes"):
        return f"{field.default // 2**20} MiB"
    return f"`{field.default}`"


def keywords_module() -> str:
    """Return the text of the module with the types of keywords."""
    classes = ConversionRequest, RunOptions, LoadOptions, CompareOptions, DiffOptions
    request, run, load, compare, diff = map(find_options, classes)
    loaded = [name for name, field in request.items() if field.metadata["is_loaded"]]
    others = [name for name in request if name not in loaded]
    described = [
        ("LayoutArguments(TypedDict", "layouts and names", request, loaded),
        ("RequestArguments(LayoutArguments", "a `ConversionRequest`", request, others),
        ("RunArguments(TypedDict", "`RunOptions`", run, run),
        ("ConvertArguments(RequestArguments, RunArguments", "`convert`", {}, ()),
        ("LoadArguments(LayoutArguments", "`load`", load, load),
        ("CompareArguments(TypedDict", "`compare`", compare, compare),
        ("DiffArguments(TypedDict", "`diff`", diff, diff),
        ("PretrainedArguments(TypedDict", "`plan_for_pretrained`", request, PRETRAINED_OPTIONS),
    ]
    written = [_write_class(*arguments) for arguments in described]
    return "\n\n".join([_KEYWORDS_HEAD, *written])


def _write_class(opening: str, owner: str, fields: dict[str, Any], names: Iterable[str]) -> str:
    lines = [f"class {opening}, total=False):", f'    """The keywords of {owner}."""']
    typed = [f"    {name}: {fields[name].type}" for name in names]
    return "\n".join([*lines, *([""] if typed else []), *typed, ""])


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
    KEYWORDS.write_text(keywords_module(), encoding="utf-8")
