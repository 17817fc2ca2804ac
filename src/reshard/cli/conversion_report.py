"""The report of a conversion that is planned: what moves, and how its largest tensors are cut."""

from __future__ import annotations

from reshard.checkpoint.conversion.conversion import Conversion
from reshard.cli.output import cut_text
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.job import JobItem
from reshard.plans.plan import Plan
from reshard.show.html_report import DrawnChange, Figure, Report, movement_figures
from reshard.text import bytes_text, count_text

MOST_DRAWN = 6


def conversion_report(source: str, conversion: Conversion, ranks_per_host: int | None) -> Report:
    """The report of a conversion of the checkpoint `source`.

    Tensors that change alike are drawn once, those with most bytes first.
    """
    job = conversion.job
    traffic = job.traffic
    # Layout changes are interned, so tensors that change alike share a key.
    alike: dict[LayoutChange, list[JobItem]] = {}
    for item in job.items:
        alike.setdefault(item.change, []).append(item)
    # The kinds of change with most bytes first; the rest is counted in a remark.
    drawn = sorted(alike.values(), key=lambda items: -sum(map(_size_bytes, items)))
    transfers = sum(len(found.transfers.moving) for found in job.transfers.groups)
    left_out = sum(len(items) for items in drawn[MOST_DRAWN:])
    remarks = [f"Not drawn: {count_text(left_out, 'smaller tensor')}."] if left_out else []
    write_plan = conversion.write_plan
    return Report(
        title=f"{source} to {conversion.request.to_text}",
        figures=[
            Figure("tensors", count_text(len(write_plan.tensors))),
            Figure("size", bytes_text(conversion.source.size_bytes)),
            *movement_figures(traffic, job.lower_bound_bytes, transfers, bytes_text),
        ],
        changes=[_draw_change(conversion, items) for items in drawn[:MOST_DRAWN]],
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
    first = items[0]
    shape = "x".join(map(str, first.change.source.shape)) or "scalar"
    others = f" and {len(items) - 1:,} more like it" if len(items) > 1 else ""
    meshes = (conversion.source.mesh, conversion.write_plan.mesh)
    cuts = (
        cut_text(conversion.source[first.name]),
        cut_text(conversion.write_plan.tensors[first.name]),
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
