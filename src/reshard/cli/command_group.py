"""Groups of commands, of `reshard` itself or of one of its commands."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

import click


class Commands(click.Group):
    """Commands in the order they were added; the error for a misspelt one names its near match."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names. Raises `click.UsageError`."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


class ModuleCommands(Commands):
    """Commands of which each is imported when it is called, from a module of its own name.

    Args:
        package: where the modules are.
        summaries: one line for each command, by its name.
    """

    def __init__(self, *args: Any, package: str, summaries: dict[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.package, self.summaries = package, summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command, imported if it was not yet, or None if there is none of that name."""
        if cmd_name not in self.summaries:
            return None
        if cmd_name not in self.commands:
            module = import_module(f"{self.package}.{cmd_name}")
            self.add_command(getattr(module, cmd_name))
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries, for which nothing is imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))
