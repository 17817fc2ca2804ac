"""`reshard apply`: a checkpoint with a delta applied."""

from __future__ import annotations

from typing import Any

import click

from reshard.checkpoint.options import ConversionRequest, RunOptions, split_arguments
from reshard.cli.commands.convert import (
    describe_run,
    dry_run_option,
    expect_wait_read,
    run_and_report,
    wait_option,
)
from reshard.cli.options import as_path, json_option, options_of, quiet_option
from reshard.cli.program import DONE


@click.command()
@click.argument("base", type=click.Path(), callback=as_path)
@click.argument("deltas", type=click.Path(), nargs=-1, required=True)
@click.argument("target", type=click.Path(), callback=as_path)
@options_of(ConversionRequest)
@dry_run_option
@options_of(RunOptions)
@wait_option
@json_option
@quiet_option
def apply(
    base: str,
    deltas: tuple[str, ...],
    target: str,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    wait_for_ranks: float | None,
    **arguments: Any,
) -> int:
    """Apply DELTAS to the checkpoint BASE, as TARGET.

    DELTAS are files of `reshard diff`, applied in order. Without --to, TARGET has the layout and
    format of BASE; with it, those that `reshard convert` would write. Digests check that every
    block of BASE is what the delta was made from, in any layout, and that every new block is what
    it promises. TARGET appears only when it is complete, and the same command
    continues an interrupted run. Started by torchrun, the processes share the work.

    \b
    Examples:
      reshard apply llama-3-8b step2.delta llama-new
      reshard apply llama-3-8b step2.delta llama-new-tp4 --to tp=4

    \b
    Keys of --json:
      source, deltas, target, to, recipe, format, mesh {text, axes, devices}
      tensors, size_bytes, copy_bytes, read_bytes, written_bytes, resumed_bytes
      seconds_s, bytes_per_s, was_complete, by_process [{read_bytes, written_bytes, buffer_bytes}]
      files [{name, rank, size_bytes}]
      unknown, unused_rules, unused_recipe_rules, unused_axes, notes
    """
    from reshard.checkpoint.deltas.apply import plan_application

    expect_wait_read(wait_for_ranks, dry_run)
    asked, options = split_arguments(arguments)
    conversion = plan_application(base, deltas, target, **asked)
    if dry_run:
        describe_run(base, conversion, options, as_json, quiet)
        return DONE
    more = {"deltas": list(deltas)}
    places = base, target
    run_and_report(
        "applying", places, conversion, options, as_json, quiet, more, wait_s=wait_for_ranks
    )
    return DONE
