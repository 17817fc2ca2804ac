"""`reshard convert`: the same checkpoint, sharded for other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard._validation import check_used
from reshard.checkpoint.options import ConversionRequest, RunOptions, split_arguments
from reshard.cli import output
from reshard.cli.endpoints import (
    config_option,
    for_option,
    matching_json,
    matching_lines,
    plan_from_options,
    recipe_text,
    size_text,
    source_options,
)
from reshard.cli.options import as_path, json_option, options_of, quiet_option
from reshard.cli.program import DONE
from reshard.cli.progress import shown_progress
from reshard.errors import InterruptedRunError
from reshard.text import bytes_text, count_text, duration_text, printable, rate_text, table

if TYPE_CHECKING:
    from reshard.checkpoint.conversion.conversion import Conversion, ConversionReport


dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="List what would be written, tensor by tensor, and write nothing. Fails for the same "
    "reasons as the run would.",
)
wait_option = click.option(
    "--wait-for-ranks",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long to wait until all processes of torchrun have started. [default: 300]",
)


@click.command()
@click.argument("source", type=click.Path(), callback=as_path)
@click.argument("target", type=click.Path(), callback=as_path)
@source_options
@options_of(ConversionRequest)
@for_option
@config_option
@dry_run_option
@options_of(RunOptions)
@wait_option
@json_option
@quiet_option
def convert(
    source: str,
    target: str,
    target_kind: str | None,
    config: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    wait_for_ranks: float | None,
    **arguments: Any,
) -> int:
    """Convert the checkpoint SOURCE to another layout or format, as TARGET.

    TARGET appears only when it is complete. If a conversion is interrupted, run the same command
    again and it continues. Started by torchrun, the processes share the work. SOURCE and TARGET
    may be URLs.

    \b
    Examples:
      reshard convert llama-3-8b llama-tp4 --to tp=4
      reshard convert llama-tp4 llama-tp4-bf16 --dtype bf16
      reshard convert llama-tp4 llama-tp2 --to tp=2 --rule '*norm*=-' --rule '*=tp, -'
      reshard convert llama-3-8b llama-megatron --to tp=2 --target-names megatron
      reshard convert llama-megatron llama-hf --for hf

    \b
    A rule is a glob on tensor names and a spec with one item per dimension:
      'tp, -'       shard the first dimension over the mesh axis tp, not the second
      '-, dp tp'    shard the second dimension over dp and tp together
      'tp, ...'     shard the first, for any number of dimensions

    With --dry-run, --json has `dry_run`, and tensors and files as in `reshard plan --json`.

    \b
    Keys of --json:
      source, target, to, recipe, format, mesh {text, axes, devices}
      tensors, size_bytes, copy_bytes, read_bytes, written_bytes, resumed_bytes
      seconds_s, bytes_per_s, was_complete, by_process [{read_bytes, written_bytes, buffer_bytes}]
      files [{name, rank, size_bytes}]
      unknown, unused_rules, unused_recipe_rules, unused_axes, notes
    """
    expect_wait_read(wait_for_ranks, dry_run)
    asked, options = split_arguments(arguments)
    conversion = plan_from_options(source, target, target_kind, config, **asked)
    if dry_run:
        describe_run(source, conversion, options, as_json, quiet)
    else:
        places = source, target
        run_and_report(
            "converting", places, conversion, options, as_json, quiet, wait_s=wait_for_ranks
        )
    return DONE


def expect_wait_read(wait_for_ranks: float | None, dry_run: bool) -> None:
    """Refuse a time to wait for processes if there are none. Raises `UsageError`."""
    check_used(
        f"--wait-for-ranks {wait_for_ranks}",
        wait_for_ranks is None or ("WORLD_SIZE" in os.environ and not dry_run),
        "processes that torchrun starts wait for each other"
        + (", and with --dry-run they do not" if dry_run else ", and it did not start this one"),
    )


def describe_run(
    source: str, conversion: Conversion, options: RunOptions, as_json: bool, quiet: bool
) -> None:
    """Describe what a run would write, without writing; raises the errors that it would raise."""
    from reshard.checkpoint.conversion.run import find_begun_run

    conversion.expect_runnable(options.extra_bytes, options.threads)
    begun = find_begun_run(conversion, options)
    if as_json:
        output.write_json(_as_dry_json(source, conversion, begun))
    elif not quiet:
        output.write("\n".join(_as_dry_text(source, conversion, begun)))


def run_and_report(
    verb: str,
    places: tuple[str, str],
    conversion: Conversion,
    options: RunOptions,
    as_json: bool,
    quiet: bool,
    more: Mapping[str, Any] | None = None,
    *,
    wait_s: float | None,
) -> None:
    """Run a conversion, and report the outcome.

    `places` are the source and the target as the user named them, `more` further keys of --json;
    `wait_s` is how long to wait for other processes.

    Raises:
        InterruptedRunError: ctrl-C.
    """
    from reshard.checkpoint.conversion.run import run_conversion
    from reshard.checkpoint.processes import DEFAULT_WAIT_S, running_processes

    # Before the work, not after hours of it.
    for loss in conversion.losses:
        output.write_error(f"note: {printable(loss)}")
    try:
        with (
            running_processes(wait_s=wait_s or DEFAULT_WAIT_S) as processes,
            shown_progress(verb, quiet or processes.rank > 0) as progress,
        ):
            options = options.replace(progress=progress, processes=processes)
            report = run_conversion(conversion, options)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted; the same command continues") from None
    # Process 0 reports.
    if processes.rank > 0:
        return
    if as_json:
        output.write_json({**_report_json(*places, conversion, report), **(more or {})})
    elif not quiet:
        output.write("\n".join(_report_lines(*places, conversion, report)))


def _report_lines(
    source: str, target: str, conversion: Conversion, report: ConversionReport
) -> list[str]:
    lines = [
        f"{printable(source)} to {printable(target)}, for {conversion.resolved['to']}"
        f"{recipe_text(conversion)}: "
        f"{count_text(report.tensors, 'tensor')}, "
        f"{size_text(report.size_bytes, report.copy_bytes)}, {count_text(report.files, 'file')}"
    ]
    if report.was_complete:
        lines.append("an earlier run had done all of it")
    else:
        rate = _bytes_per_s(report)
        lines.append(
            f"read {bytes_text(report.read_bytes)}, wrote {bytes_text(report.written_bytes)} in "
            f"{duration_text(report.seconds_s)}" + (f", {rate_text(rate)}" if rate else "")
        )
        if len(report.by_process) > 1:
            lines += [
                f"  process {rank} read {bytes_text(read)}, wrote {bytes_text(written)}, "
                f"in buffers of {bytes_text(buffers)}"
                for rank, (read, written, buffers) in enumerate(_by_process(report))
            ]
        if report.resumed_bytes:
            lines.append(
                f"continued an earlier run, which had done {bytes_text(report.resumed_bytes)}"
            )
    return lines + matching_lines(conversion) + output.noted(_run_notes(conversion, report))


def _run_notes(conversion: Conversion, report: ConversionReport) -> list[str]:
    """Return the notes that only a run can give, such as on elements that overflowed."""
    return [note for note in report.notes if note not in conversion.notes]


def _as_dry_text(source: str, conversion: Conversion, begun: Path | None) -> list[str]:
    """Return the lines of a dry run: each tensor and file that would be written."""
    write_plan = conversion.write_plan
    kinds = [
        (tensor.dtype.name, "x".join(map(str, tensor.shape)) or "scalar", output.cut_text(tensor))
        for tensor in write_plan.tensors.values()
    ]
    headers = ("dtype", "shape", "sharding")
    most = output.name_columns(zip(headers, *kinds, strict=True))
    tensors = [
        (output.name_text(name, most), *kind)
        for name, kind in zip(write_plan.tensors, kinds, strict=True)
    ]
    files = [
        (file.stored.name, file.stored.rank, bytes_text(file.stored.size_bytes))
        for file in write_plan.files
    ]
    size_bytes = sum(tensor.size_bytes for tensor in write_plan.tensors.values())
    lines = [
        f"{printable(source)} would be written to {printable(str(conversion.target))}, for "
        f"{conversion.resolved['to']}{recipe_text(conversion)}, as {write_plan.format}: "
        f"{count_text(len(tensors), 'tensor')}, "
        f"{size_text(size_bytes, write_plan.copy_bytes)}, {count_text(len(files), 'file')}",
        "",
        table(tensors, ("tensor", *headers), "llll"),
        "",
        table(files, ("file", "rank", "size"), "lrr"),
        "",
    ]
    if write_plan.values or write_plan.items:
        others = [*write_plan.items, *write_plan.values]
        lines += output.listing("and values other than tensors", others)
    if begun is not None:
        lines.append(f"an earlier run left work in {printable(str(begun))}")
    return lines + matching_lines(conversion)


def _as_dry_json(source: str, conversion: Conversion, begun: Path | None) -> dict[str, Any]:
    write_plan = conversion.write_plan
    return {
        "source": source,
        "target": str(conversion.target),
        "dry_run": True,
        "to": conversion.resolved["to"],
        "recipe": conversion.recipe_name,
        "format": write_plan.format,
        "mesh": output.mesh_json(write_plan.mesh),
        "size_bytes": sum(tensor.size_bytes for tensor in write_plan.tensors.values()),
        "copy_bytes": write_plan.copy_bytes,
        "begun": None if begun is None else str(begun),
        "tensors": [
            {
                "name": name,
                "dtype": tensor.dtype.name,
                "shape": list(tensor.shape),
                "cut": output.cut_text(tensor),
                "size_bytes": tensor.size_bytes,
            }
            for name, tensor in write_plan.tensors.items()
        ],
        "files": [output.file_json(file.stored) for file in write_plan.files],
        **matching_json(conversion),
    }


def _by_process(report: ConversionReport) -> list[tuple[int, int, int]]:
    """Return the bytes that each process read, wrote, and allocated."""
    pairs = zip(report.by_process, report.buffers_by_process, strict=True)
    return [(read, written, buffers) for (read, written), buffers in pairs]


def _bytes_per_s(report: ConversionReport) -> float | None:
    """Return the bytes of tensors that this run converted per second; None if it had no work."""
    # An earlier run's bytes took none of this run's seconds.
    converted = report.size_bytes - report.resumed_bytes
    return converted / report.seconds_s if converted > 0 and report.seconds_s > 0 else None


def _report_json(
    source: str, target: str, conversion: Conversion, report: ConversionReport
) -> dict[str, Any]:
    write_plan, matching = conversion.write_plan, matching_json(conversion)
    return {
        "source": source,
        "target": target,
        "to": conversion.resolved["to"],
        "recipe": conversion.recipe_name,
        "format": write_plan.format,
        "mesh": output.mesh_json(write_plan.mesh),
        "tensors": report.tensors,
        "size_bytes": report.size_bytes,
        "copy_bytes": report.copy_bytes,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "resumed_bytes": report.resumed_bytes,
        "seconds_s": report.seconds_s,
        "bytes_per_s": _bytes_per_s(report),
        "was_complete": report.was_complete,
        "by_process": [
            {"read_bytes": read, "written_bytes": written, "buffer_bytes": buffers}
            for read, written, buffers in _by_process(report)
        ],
        "files": [output.file_json(file.stored) for file in write_plan.files],
        **matching,
        "notes": [*matching["notes"], *_run_notes(conversion, report)],
    }
