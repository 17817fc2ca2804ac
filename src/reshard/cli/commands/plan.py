"""`reshard plan`: the reads, writes and transfers of a conversion, without running it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.checkpoint.options import ConversionRequest, RunOptions
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
from reshard.cli.options import (
    as_path,
    check_picture,
    check_report,
    json_option,
    options_of,
    report_options,
)
from reshard.cli.program import DONE
from reshard.mesh import DeviceMesh
from reshard.system import resident_bytes
from reshard.text import bytes_text, count_text, file_table, printable, rank_table

if TYPE_CHECKING:
    from reshard.checkpoint.contents import StoredTensor
    from reshard.checkpoint.conversion.conversion import Conversion
    from reshard.geometry.layout_change import LayoutChange
    from reshard.plans.job import JobItem
    from reshard.show.html_report import DrawnChange, Report

# Memory of a run per block: a flag, and its digest in an array and in the manifest's text.
_BLOCK_RECORD_BYTES = 64
_MAX_DRAWN = 6


@click.command()
@click.argument("source", type=click.Path(), callback=as_path)
@source_options
@options_of(ConversionRequest)
@for_option
@config_option
@options_of(RunOptions, "extra_bytes", "threads")
@click.option("--picture", "drawn", metavar="NAME", help="Draw a tensor's layouts.")
@json_option
@report_options
def plan(
    source: str,
    target_kind: str | None,
    config: str | None,
    extra_bytes: int,
    threads: int | None,
    drawn: str | None,
    as_json: bool,
    report_path: str | None,
    overwrite: bool,
    ranks_per_host: int | None,
    **conversion_arguments: Any,
) -> int:
    """Show what converting SOURCE would read, write and move, per rank.

    Nothing is written, except the report of --html.

    "Read" counts the files of each rank of SOURCE; "written" counts the files of each target rank.
    "Sent" and "received" count what would pass between the ranks if the conversion ran among them;
    what a rank already has does not move.

    \b
    Examples:
      reshard plan llama-3-8b --to tp=4
      reshard plan llama-tp4 --to tp=2 --rule '*norm*=-' --rule '*=tp, -' --json
      reshard plan llama-3-8b --to tp=4 --picture lm_head.weight
      reshard plan llama-3-8b --to tp=4 --html report.html --ranks-per-host 2

    \b
    Keys of --json:
      source, to, recipe, format, mesh {text, axes, devices}, size_bytes, copy_bytes
      ranks [{rank, read_bytes, written_bytes, sent_bytes, received_bytes}]
      read_bytes, written_bytes, moved_bytes, lower_bound_bytes
      extra_bytes (of buffers), peak_bytes (of all that is resident), threads
      tensors [{name, dtype, shape, cut_before, cut, size_bytes}]
      files [{name, rank, size_bytes}]
      unknown, unused_rules, unused_recipe_rules, unused_axes, notes
    """
    from reshard.checkpoint.conversion.plan import unwritten_target

    check_picture(drawn, as_json)
    check_report(report_path, overwrite, ranks_per_host)
    target = str(unwritten_target(source))
    conversion = plan_from_options(source, target, target_kind, config, **conversion_arguments)
    workers = conversion.threads(extra_bytes, threads)
    memory = _estimate_memory(conversion, extra_bytes, threads)
    drawing = _drawing(conversion, drawn) if drawn is not None else None
    if report_path is not None:
        report = _report_page(source, conversion, ranks_per_host)
        output.write_whole(Path(report_path), report.html(), overwrite, "report")
    if as_json:
        output.write_json(_as_json(source, conversion, workers, memory))
    else:
        output.write("\n".join(_as_text(source, conversion, workers, memory, drawing)))
    return DONE


def _estimate_memory(
    conversion: Conversion, extra_bytes: int, threads: int | None
) -> tuple[int, int]:
    """Return the bytes of a conversion's buffers, and the peak that is resident with all else.

    The rest is not modelled but measured: this process, which has just planned the conversion, has
    loaded the same modules and describes the same tensors as a process that begins to convert.
    """
    # Computed first, since it creates columns that a run has in memory too.
    buffers_bytes = conversion.extra_bytes(extra_bytes, threads)
    records_bytes = conversion.work_items.count * _BLOCK_RECORD_BYTES
    resident, most = resident_bytes()
    moved = (conversion.read_bytes_by_rank, conversion.write_bytes_by_rank)
    # The system makes a page of a buffer resident only when a byte is written to it.
    used_bytes = min(buffers_bytes, sum(sum(by_rank.values()) for by_rank in moved))
    return buffers_bytes, max(most, resident + used_bytes + records_bytes)


def _drawing(conversion: Conversion, name: str) -> str:
    from reshard.geometry.transfers import Transfers
    from reshard.plans.plan import Plan
    from reshard.show.text_picture import MIN_WIDTH, change_picture

    before = conversion.source[name]
    after = conversion.write_plan.tensors[name]
    width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, 100))
    item = next(item for item in conversion.job.items if item.name == name)
    drawn = change_picture(
        before.layout,
        after.layout,
        width,
        titles=(
            _title(before, conversion.source.mesh),
            _title(after, conversion.write_plan.mesh),
        ),
        plan=Plan(item.change.source, item.change.target, item.dtype),
        # The job chose the senders, for all its tensors together.
        transfers=conversion.job.transfers.get(name, Transfers.none(len(before.shape))),
        height=25,
        stacked_height=36,
        ascii=not output.can_draw_boxes(),
    )
    return f"{output.name_text(name)}  {'x'.join(map(str, before.shape)) or 'scalar'}\n{drawn}"


def _title(tensor: StoredTensor, mesh: DeviceMesh | None) -> str:
    return output.cut_text(tensor) + (f"  over {mesh.text}" if mesh is not None else "")


def _per_rank(conversion: Conversion) -> list[dict[str, int]]:
    read, written = conversion.read_bytes_by_rank, conversion.write_bytes_by_rank
    sent = conversion.job.sent_bytes.tolist()
    received = conversion.job.received_bytes.tolist()
    # Ranks of either side: a rank that only reads does not receive.
    ranks = sorted({*range(len(sent)), *range(len(received)), *read, *written})
    return [
        {
            "rank": rank,
            "read_bytes": read.get(rank, 0),
            "written_bytes": written.get(rank, 0),
            "sent_bytes": sent[rank] if rank < len(sent) else 0,
            "received_bytes": received[rank] if rank < len(received) else 0,
        }
        for rank in ranks
    ]


def _as_text(
    source: str, conversion: Conversion, workers: int, memory: tuple[int, int], drawing: str | None
) -> list[str]:
    write_plan, job = conversion.write_plan, conversion.job
    stored = [file.stored for file in write_plan.files]
    lines = [
        f"{printable(source)} to {conversion.request.to_text}{recipe_text(conversion)}: "
        f"{count_text(len(write_plan.tensors), 'tensor')}, "
        f"{size_text(conversion.source.size_bytes, write_plan.copy_bytes)}, "
        f"as {write_plan.format}",
        "",
        rank_table(_per_rank(conversion)),
        "",
        file_table([(file.name, file.rank, file.size_bytes) for file in stored]),
        "",
        f"moved between ranks: {bytes_text(job.moved_bytes)}, the least possible is "
        f"{bytes_text(job.lower_bound_bytes)}",
        f"peak memory: about {bytes_text(memory[1])} resident in a process, "
        f"{bytes_text(memory[0])} of buffers for {count_text(workers, 'thread')}",
        *matching_lines(conversion),
    ]
    if drawing is not None:
        lines += ["", drawing]
    return lines


def _as_json(
    source: str, conversion: Conversion, workers: int, memory: tuple[int, int]
) -> dict[str, Any]:
    write_plan, job = conversion.write_plan, conversion.job
    return {
        "source": source,
        "to": conversion.request.to_text,
        "recipe": conversion.recipe_name,
        "format": write_plan.format,
        "mesh": output.mesh_json(write_plan.mesh),
        "size_bytes": conversion.source.size_bytes,
        "copy_bytes": write_plan.copy_bytes,
        "ranks": _per_rank(conversion),
        "read_bytes": sum(conversion.read_bytes_by_rank.values()),
        "written_bytes": sum(conversion.write_bytes_by_rank.values()),
        "moved_bytes": job.moved_bytes,
        "lower_bound_bytes": job.lower_bound_bytes,
        "extra_bytes": memory[0],
        "peak_bytes": memory[1],
        "threads": workers,
        "tensors": [
            {
                "name": name,
                "dtype": tensor.dtype.name,
                "shape": list(tensor.shape),
                "cut_before": output.cut_text(conversion.source.tensors[name]),
                "cut": output.cut_text(tensor),
                "size_bytes": tensor.size_bytes,
            }
            for name, tensor in write_plan.tensors.items()
        ],
        "files": [output.file_json(file.stored) for file in write_plan.files],
        **matching_json(conversion),
    }


def _report_page(source: str, conversion: Conversion, ranks_per_host: int | None) -> Report:
    """Return the HTML report of a conversion: what moves, and how its largest tensors are sharded.

    Tensors that change alike are drawn once, those with most bytes first.
    """
    from reshard.show.html_report import Figure, Report, movement_figures

    job = conversion.job
    traffic = job.traffic
    # Layout changes are interned, so tensors that change alike share a key.
    alike: dict[LayoutChange, list[JobItem]] = {}
    for item in job.items:
        alike.setdefault(item.change, []).append(item)
    # The kinds of change with most bytes first; the rest is counted in a remark.
    drawn = sorted(alike.values(), key=lambda items: -sum(map(_size_bytes, items)))
    transfers = sum(len(group.transfers.moving) for group in job.transfers.groups)
    left_out = sum(len(items) for items in drawn[_MAX_DRAWN:])
    remarks = [f"Not drawn: {count_text(left_out, 'smaller tensor')}."] if left_out else []
    write_plan = conversion.write_plan
    return Report(
        title=f"{source} to {conversion.request.to_text}",
        figures=[
            Figure("tensors", count_text(len(write_plan.tensors))),
            Figure("size", bytes_text(conversion.source.size_bytes)),
            *movement_figures(traffic, job.lower_bound_bytes, transfers, bytes_text),
        ],
        changes=[_draw_change(conversion, items) for items in drawn[:_MAX_DRAWN]],
        traffic=traffic,
        amount_text=bytes_text,
        short_text=bytes_text,
        ranks_per_host=ranks_per_host,
        remarks=remarks,
    )


def _size_bytes(item: JobItem) -> int:
    elements = 1
    for size in item.change.source.shape:
        elements *= size
    return elements * item.dtype.itemsize_bytes


def _draw_change(conversion: Conversion, items: list[JobItem]) -> DrawnChange:
    from reshard.geometry.transfers import Transfers
    from reshard.plans.plan import Plan
    from reshard.show.html_report import DrawnChange

    first = items[0]
    shape = "x".join(map(str, first.change.source.shape)) or "scalar"
    others = f" and {len(items) - 1:,} more like it" if len(items) > 1 else ""
    meshes = (conversion.source.mesh, conversion.write_plan.mesh)
    cuts = (
        output.cut_text(conversion.source[first.name]),
        output.cut_text(conversion.write_plan.tensors[first.name]),
    )
    before, after = (
        cut + (f"   over {mesh.text}" if mesh is not None else "")
        for cut, mesh in zip(cuts, meshes, strict=True)
    )
    heading = f"{first.name}{others}: {shape} of {first.dtype.name}"
    nothing = Transfers.none(first.change.source.ndim)
    transfers = conversion.job.transfers.get(first.name, nothing)
    return DrawnChange(
        heading,
        before,
        after,
        Plan(first.change.source, first.change.target, first.dtype),
        transfers,
    )
