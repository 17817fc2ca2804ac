"""The group of commands, and a run of it from arguments to exit code.

A command is imported when it is called, so that `reshard --help` and each command start quickly.
Exit codes::

    0   done
    1   differs, or is damaged (decided by the command itself)
    2   wrong use or bad input: options, layouts, recipes, checkpoints that cannot be used
    3   failed while running: the system refused something, or the user interrupted

A failure prints a line on stderr. The traceback is printed only with `RESHARD_DEBUG=1`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

import click

from reshard import __version__
from reshard._contexts import pause_gc
from reshard.cli import output
from reshard.errors import ReshardError, RunError
from reshard.text import printable

DONE = 0
DIFFERS = 1
WRONG_USE = 2
FAILED = 3


class Commands(click.Group):
    """A group that lists commands in the order they were added, and suggests a similar name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names. Raises `click.UsageError`."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


class ModuleCommands(Commands):
    """A group whose commands are imported when they are called, each from the module of its name.

    Args:
        package: of the modules.
        summaries: a line for each command, by its name.
    """

    def __init__(self, *args: Any, package: str, summaries: dict[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.package, self.summaries = package, summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported when it is first called, or None for an unknown name."""
        if cmd_name not in self.summaries:
            return None
        if cmd_name not in self.commands:
            # A module allocates many objects that live on: collections take a tenth of the start.
            with pause_gc(freeze=True):
                module = import_module(f"{self.package}.{cmd_name}")
            self.add_command(getattr(module, cmd_name))
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))


# The name in the completion scripts that click generates for the program `reshard`.
COMPLETE_VARIABLE = "_RESHARD_COMPLETE"

_SUMMARIES = {
    "example": "Write a tiny Llama with random weights into FOLDER.",
    "inspect": "List tensors, dtypes, shapes, layouts, ranks and sizes of CHECKPOINT.",
    "plan": "Show what converting SOURCE would read, write and move, per rank.",
    "convert": "Convert the checkpoint SOURCE to another layout or format, as TARGET.",
    "verify": "Check whether LEFT and RIGHT have the same tensors.",
    "diff": "Write the changes from BEFORE to AFTER as a delta.",
    "apply": "Apply DELTAS to the checkpoint BASE, as TARGET.",
    "explain": "Show what moves when a tensor goes from the sharding FROM to the sharding TO.",
    "recipe": "Show recipes, and apply them to a checkpoint.",
    "calibrate": "Measure the links between the ranks of a job.",
    "clean": "List what unfinished conversions left at a URL.",
    "version": "Show the version of reshard, and with --all of what it uses.",
}


@click.group(
    cls=ModuleCommands,
    package="reshard.cli.commands",
    summaries=_SUMMARIES,
    context_settings={"help_option_names": ["--help", "-h"]},
)
@click.version_option(__version__, message="reshard %(version)s")
def program() -> None:
    """Convert checkpoints of large models between layouts, and verify the result.

    A checkpoint is a folder, a file, a URL (s3://, gs://, az://, http://, https://, hf://,
    file://), or an id of the Hugging Face Hub.

    \b
    Examples:
      reshard example tiny-llama
      reshard inspect llama-3-8b
      reshard plan llama-3-8b --to tp=4 --recipe llama
      reshard convert llama-3-8b llama-tp4 --to tp=4 --recipe llama
      reshard verify llama-3-8b llama-tp4
      reshard diff llama-3-8b llama-tp4 -o tp4.delta
      reshard apply llama-3-8b tp4.delta llama-again
      reshard explain "tp, -" "-, tp" --mesh tp=4 --shape 4096x1024
      reshard recipe check llama-3-8b --to tp=4,pp=2

    \b
    Exit codes:
      0  done
      1  different (verify), damaged (inspect --digest), not all matched (recipe check)
      2  wrong usage or bad input
      3  failed while running; run the same command again to continue

    \b
    With --json, each command prints one JSON object, described in its --help; an error is
    {"error": {"kind": ..., "message": ...}}.
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    output.prepare_streams()
    # Set by the shell, to request its completion script or the completions of a word.
    if asked := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(program, {}, "reshard", COMPLETE_VARIABLE, asked)
    try:
        # Not `program.main`, which would print errors and exit on its own.
        with program.make_context("reshard", list(arguments) or ["--help"]) as context:
            return cast(int, program.invoke(context))
    except click.exceptions.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        # Only help is written without `write`, which allows for a reader that left.
        return DONE
    except BaseException as error:
        return report(error, as_json="--json" in arguments)
    finally:
        output.settle_streams()


def failure_of(error: BaseException) -> tuple[str, str, int, str]:
    """Return the report of an exception: its kind, the message, the exit code, and a hint.

    >>> from reshard.errors import RecipeError
    >>> failure_of(RecipeError("unknown recipe 'lama'"))
    ('RecipeError', "unknown recipe 'lama'", 2, '')
    """
    kind = type(error).__name__
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"Try '{context.command_path} --help'." if context else ""
        return "UsageError", error.format_message(), WRONG_USE, hint
    if isinstance(error, ReshardError):
        return kind, str(error), FAILED if isinstance(error, RunError) else WRONG_USE, ""
    if isinstance(error, KeyboardInterrupt):
        return "InterruptedRunError", "interrupted; nothing was written", FAILED, ""
    if isinstance(error, MemoryError):
        remedy = "give less --memory, fewer --threads or fewer ranks"
        return kind, f"out of memory; {remedy}", FAILED, ""
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return kind, f"{where}{error.strerror or error}", FAILED, ""
    message = f"internal error: {kind}: {error}; please report it; RESHARD_DEBUG=1 shows where"
    return "InternalError", message, FAILED, ""


def report(error: BaseException, as_json: bool) -> int:
    """Report a failure to the user, and return the exit code."""
    kind, message, exit_code, hint = failure_of(error)
    if os.environ.get("RESHARD_DEBUG") == "1":
        import traceback

        output.write_error("".join(traceback.format_exception(error)).rstrip())
    output.write_error("reshard: " + printable(message, keep="\n"))
    if hint:
        output.write_error(hint)
    if as_json:
        # If stdout itself failed, the line on stderr is the whole report.
        with suppress(OSError):
            output.write_json({"error": {"kind": kind, "message": message}})
    return exit_code
