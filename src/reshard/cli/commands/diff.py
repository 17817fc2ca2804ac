"""`reshard diff`: the changes between two checkpoints, as a file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.options import ConversionRequest, DiffOptions
from reshard.cli import output
from reshard.cli.endpoints import allow_copies_option, check_copies_option, open_selected_source
from reshard.cli.options import as_path, json_option, options_of, quiet_option
from reshard.cli.program import DONE
from reshard.cli.progress import shown_progress
from reshard.text import bytes_text, count_text, duration_text, printable

if TYPE_CHECKING:
    from reshard.checkpoint.deltas.create import DeltaReport


@click.command()
@click.argument("before", type=click.Path(), callback=as_path)
@click.argument("after", type=click.Path(), callback=as_path)
@click.option(
    "--output",
    "-o",
    "out",
    required=True,
    callback=as_path,
    metavar="DELTA",
    help="The file to write.",
)
@options_of(DiffOptions)
@options_of(ConversionRequest, "select")
@check_copies_option
@allow_copies_option
@json_option
@quiet_option
def diff(
    before: str,
    after: str,
    out: str,
    select: str | None,
    check_copies: str,
    allow: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **arguments: Any,
) -> int:
    """Write the changes from BEFORE to AFTER as a delta.

    For tensors that have the same type and shape in both, DELTA has the elements or blocks that
    changed; other tensors of AFTER are stored whole. `reshard apply` recreates AFTER from BEFORE,
    in any layout. --select applies to both; `apply` takes the same for BASE. Bytes that
    contradict the digests in a manifest of reshard are an error; with --trust-digests, blocks whose
    digests are equal in both manifests are not read.

    \b
    Examples:
      reshard diff llama-3-8b llama-step2 -o step2.delta
      reshard diff llama-3-8b llama-step2 -o step2-packed.delta --compress zstd

    \b
    Keys of --json:
      before, after, delta, tensors, changed, added, replaced, removed (names)
      blocks, changed_blocks, changed_bytes, payload_bytes, size_bytes
      read_bytes, seconds_s, notes
    """
    from reshard.checkpoint.deltas.create import diff as make_delta

    old, new = (
        open_selected_source(path, select, check_copies=check_copies, allow=allow)
        for path in (before, after)
    )
    with shown_progress("comparing", quiet) as progress:
        report = make_delta(old, new, out, DiffOptions(progress=progress, **arguments))
    if as_json:
        output.write_json(_as_json(before, after, out, report))
    elif not quiet:
        output.write("\n".join(_as_text(before, after, out, report)))
    return DONE


def _as_text(before: str, after: str, out: str, report: DeltaReport) -> list[str]:
    lines = [
        f"{printable(before)} to {printable(after)}: {len(report.changed)} of "
        f"{count_text(report.tensors, 'tensor')} changed, {bytes_text(report.changed_bytes)} of "
        f"elements in {report.changed_blocks} of {count_text(report.blocks, 'block')}"
    ]
    for what, names in (
        ("added", report.added),
        ("of another type or shape", report.replaced),
        ("removed", report.removed),
    ):
        if names:
            shown = ", ".join(printable(name) for name in names[: output.MAX_LISTED])
            more = (
                f", {len(names) - output.MAX_LISTED} more" if len(names) > output.MAX_LISTED else ""
            )
            lines.append(f"{what}: {shown}{more}")
    lines.append(
        f"{printable(out)} has {bytes_text(report.size_bytes)}; read "
        f"{bytes_text(report.read_bytes)} in {duration_text(report.seconds_s)}"
    )
    return [*lines, *(f"note: {printable(note)}" for note in report.notes)]


def _as_json(before: str, after: str, out: str, report: DeltaReport) -> dict[str, Any]:
    fields = dataclasses.asdict(report)
    del fields["path"]
    return {"before": before, "after": after, "delta": out, **fields}
