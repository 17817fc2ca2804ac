"""A group of commands, of `reshard` itself or of one of its commands."""

from __future__ import annotations

import difflib

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
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.commands, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(self.commands)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)
