"""`reshard apply`: a checkpoint with a delta applied."""

from __future__ import annotations

from typing import Any

import click

from reshard.checkpoint.conversion.processes import running_processes
from reshard.checkpoint.deltas.application import plan_application, run_application
from reshard.cli.commands.convert import report_json, report_lines
from reshard.cli.failures import DONE
from reshard.cli.options import (
    as_path,
    conversion_options,
    json_option,
    memory_option,
    quiet_option,
    threads_option,
)
from reshard.cli.output import printable, write, write_error, write_json
from reshard.cli.progress import shown_progress
from reshard.errors import InterruptedRunError


@click.command()
@click.argument("base", callback=as_path)
@click.argument("deltas", nargs=-1, required=True)
@click.argument("target", callback=as_path)
@conversion_options
@memory_option
@threads_option
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists, at the very end.")
@click.option("--restart", is_flag=True, help="Begin anew what an interrupted run left.")
@json_option
@quiet_option
def apply(
    base: str,
    deltas: tuple[str, ...],
    target: str,
    extra_bytes: int,
    threads: int | None,
    overwrite: bool,
    restart: bool,
    as_json: bool,
    quiet: bool,
    **conversion_arguments: Any,
) -> int:
    """Write BASE with the changes of DELTAS as TARGET.

    DELTAS are files of `reshard diff`, applied one after the other. Without --to, TARGET is cut and
    stored as BASE is; with it, as `reshard convert` does. Every block of BASE must be what the
    delta was made from, in whatever cut, and every new one what the delta promises: digests are
    compared on both ends. TARGET appears whole or not at all, and the same command continues a run
    that was interrupted. Started by torchrun, the processes share the work.

    \b
    Examples:
      reshard apply llama-3-8b step2.delta llama-new
      reshard apply llama-3-8b step2.delta llama-new-tp4 --to tp=4 --recipe llama

    \b
    Keys of --json:
      source, deltas, target, to, format, mesh {text, axes, devices}
      tensors, size_bytes, read_bytes, written_bytes, resumed_bytes
      seconds_s, bytes_per_s, was_complete, by_process [{read_bytes, written_bytes, buffer_bytes}]
      files [{name, rank, size_bytes}]
      unmatched, unused_rules, unused_recipe_rules, unused_axes, notes
    """
    try:
        conversion = plan_application(base, deltas, target, **conversion_arguments)
        for loss in conversion.losses:
            write_error(f"note: {printable(loss)}")
        with (
            running_processes() as processes,
            shown_progress("applying", quiet or processes.rank > 0) as progress,
        ):
            report = run_application(
                conversion,
                extra_bytes=extra_bytes,
                threads=threads,
                overwrite=overwrite,
                restart=restart,
                progress=progress,
                processes=processes,
            )
            # What was done is said once.
            quiet, as_json = (quiet, as_json) if processes.rank == 0 else (True, False)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted; the same command continues") from None
    if as_json:
        write_json({**report_json(base, target, conversion, report), "deltas": list(deltas)})
    elif not quiet:
        write("\n".join(report_lines(base, target, conversion, report)))
    return DONE
