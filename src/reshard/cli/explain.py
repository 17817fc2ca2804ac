"""`reshard explain`: what does it take to get from one sharding to another?"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import numpy as np

from reshard.cli.failures import DONE
from reshard.cli.options import json_option
from reshard.cli.output import can_draw_boxes, printable, write, write_json
from reshard.cli.report_file import check_report, report_options, write_report
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.registry import NOTATIONS, Reading, read_sharding
from reshard.planning.plan import Plan, plan
from reshard.show.html_report import DrawnChange, Report, movement_figures
from reshard.show.movement_table import movement_table
from reshard.show.pictures import LEAST_WIDTH, change_picture
from reshard.show.quantities import bytes_text, count_text
from reshard.show.rank_text import ranks_text
from reshard.show.traffic import Traffic, busiest


class _Explain(click.Command):
    """A command whose arguments may begin with `-`, a dimension that is not cut."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # No option has a space or a comma behind its dash; a space before it makes it a text.
        texts = [f" {word}" if re.match(r"-[\s,|?!]", word) else word for word in args]
        return super().parse_args(ctx, texts)


@click.command(cls=_Explain)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--mesh", "mesh_text", metavar="MESH", help="The devices, such as dp=2,tp=4.")
@click.option("--to-mesh", "target_mesh_text", metavar="MESH", help="Of TO, where it differs.")
@click.option("--shape", "shape_text", metavar="SHAPE", help="Of the tensor: 4096x1024, 7, scalar.")
@click.option(
    "--notation",
    type=click.Choice(list(NOTATIONS)),
    help="Of both texts. [default: recognised from each]",
)
@click.option("--dtype", metavar="NAME", help="Of the elements, for sizes in bytes.")
@json_option
@report_options
def explain(
    source: str,
    target: str,
    mesh_text: str | None,
    target_mesh_text: str | None,
    shape_text: str | None,
    notation: str | None,
    dtype: str | None,
    as_json: bool,
    report_path: str | None,
    overwrite: bool,
    ranks_per_host: int | None,
) -> int:
    """What moves when a tensor laid out as FROM becomes TO.

    FROM and TO are shardings in any notation, also two different ones; a prefix such as `jax:`
    says which. What a rank holds already stays; everything else is sent once.

    \b
    Examples:
      reshard explain "x, y" "y, x" --mesh x=2,y=3 --shape 6x6
      reshard explain "tp, -" "-, dp" --mesh tp=4 --to-mesh dp=2 --shape 64x48 --dtype bfloat16

    \b
    Keys of --json:
      moved_elements, lower_bound_elements, max_send_elements, max_receive_elements
      transfers [{source_rank, target_rank, box, source_box, target_box}]
    A box is [[start, stop], ...], one pair a dimension: `box` in the tensor, the others in the
    local array of each rank (of a rank that holds several boxes: in the one it is of).
    """
    check_report(report_path, overwrite, ranks_per_host)
    shape = None if shape_text is None else shape_of(shape_text)
    mesh = None if mesh_text is None else DeviceMesh.parse(mesh_text)
    target_mesh = mesh if target_mesh_text is None else DeviceMesh.parse(target_mesh_text)
    before = _side(source.strip(), mesh, shape, notation)
    after = _side(target.strip(), target_mesh, shape, notation)
    shape = shape if shape is not None else _shape_of_sides(before, after)
    movement = plan(before.layout(shape), after.layout(shape), dtype)
    if report_path is not None:
        page = _report(before, after, movement, ranks_per_host).html()
        write_report(report_path, page, overwrite)
    if as_json:
        write_json(_as_json(movement))
    else:
        write("\n".join(_as_text(before, after, movement)))
    return DONE


_SHAPE = re.compile(r"\d{1,18}(?:\s*[x×,]\s*\d{1,18})*", re.ASCII)


def shape_of(text: str) -> tuple[int, ...]:
    """The shape that `6x6` writes; `scalar` has no dimensions.

    Raises:
        UsageError: anything else.

    >>> shape_of("30522x384"), shape_of("7"), shape_of("scalar")
    ((30522, 384), (7,), ())
    """
    words = text.strip()
    if words.casefold() == "scalar":
        return ()
    if not _SHAPE.fullmatch(words):
        raise UsageError(f"{text!r} is no shape; write sizes such as 4096x1024, 7, or scalar")
    return tuple(int(size) for size in re.findall(r"\d+", words))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two shardings: its text as given, and what it says."""

    text: str
    reading: Reading

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Where the elements are. Raises UsageError where a text has another shape."""
        sharding = self.reading.sharding
        if not isinstance(sharding, Layout):
            return sharding.layout(shape)
        if sharding.shape != shape:
            raise UsageError(
                f"`{self.text}` is of a tensor of shape {list(sharding.shape)}, not of "
                f"{list(shape)}; both sides and --shape must be of one tensor"
            )
        return sharding

    @property
    def title(self) -> str:
        """The sharding in the native notation, with its mesh."""
        sharding = self.reading.sharding
        if isinstance(sharding, Layout):
            return printable(self.text)
        return f"{sharding or 'a scalar'}   over {sharding.mesh.text}"


def _side(
    text: str, mesh: DeviceMesh | None, shape: tuple[int, ...] | None, notation: str | None
) -> _Side:
    return _Side(text, read_sharding(text, mesh, shape, notation))


def _shape_of_sides(*sides: _Side) -> tuple[int, ...]:
    for side in sides:
        if isinstance(side.reading.sharding, Layout):
            return side.reading.sharding.shape
    raise UsageError("no shape; a sharding fits tensors of many sizes, give one: --shape 4096x1024")


def _as_text(before: _Side, after: _Side, movement: Plan) -> list[str]:
    width = max(LEAST_WIDTH, min(shutil.get_terminal_size().columns, 100))
    lines = []
    for word, side in (("from", before), ("to", after)):
        notation = side.reading.notation.name
        if notation != "native":
            lines.append(f"{word:4} {printable(side.text)}   ({notation})")
    if lines:
        lines.append("")
    drawn = change_picture(
        movement.source,
        movement.target,
        width,
        titles=(before.title, after.title),
        plan=movement,
        height=25,
        ascii=not can_draw_boxes(),
    )
    return [*lines, drawn, "", *_numbers(movement)]


def _numbers(movement: Plan) -> list[str]:
    def size(elements: int) -> str:
        text = count_text(elements, "element")
        if movement.dtype is None:
            return text
        return f"{text} ({bytes_text(elements * movement.dtype.itemsize_bytes)})"

    lines = [
        f"moved: {size(movement.moved_elements)}, "
        f"the least possible is {size(movement.lower_bound_elements)}"
    ]
    if movement.moved_elements:
        for word, amounts in (
            ("sender", movement.sent_elements),
            ("receiver", movement.received_elements),
        ):
            most, ranks = busiest(amounts)
            lines.append(f"busiest {word}: {ranks_text(ranks)}, {size(most)}")
        lines += ["", movement_table(movement, Traffic.of_plan(movement))]
    return lines


def _report(before: _Side, after: _Side, movement: Plan, ranks_per_host: int | None) -> Report:
    traffic, bound = Traffic.of_plan(movement), movement.lower_bound_elements
    amount_text: Callable[[int], str] = partial(count_text, noun="element")
    short_text: Callable[[int], str] = count_text
    if movement.dtype is not None:
        traffic, bound = traffic.times(movement.dtype.itemsize_bytes), movement.lower_bound_bytes
        amount_text = short_text = bytes_text
    shape = "x".join(map(str, movement.source.shape)) or "scalar"
    dtype = f" of {movement.dtype.name}" if movement.dtype else ""
    return Report(
        title=f"{before.text} to {after.text}: {shape}{dtype}",
        figures=movement_figures(traffic, bound, len(movement.transfers.moving), amount_text),
        changes=[DrawnChange("", before.title, after.title, movement)],
        traffic=traffic,
        amount_text=amount_text,
        short_text=short_text,
        ranks_per_host=ranks_per_host,
    )


def _as_json(movement: Plan) -> dict[str, Any]:
    moving = movement.transfers.moving
    return {
        "moved_elements": movement.moved_elements,
        "lower_bound_elements": movement.lower_bound_elements,
        "max_send_elements": int(movement.sent_elements.max(initial=0)),
        "max_receive_elements": int(movement.received_elements.max(initial=0)),
        "transfers": [
            {
                "source_rank": source,
                "target_rank": target,
                "box": box,
                "source_box": source_box,
                "target_box": target_box,
            }
            for source, target, box, source_box, target_box in zip(
                moving.source_slot.tolist(),
                moving.target_slot.tolist(),
                *(
                    np.stack((start, start + moving.shape), axis=-1).tolist()
                    for start in (moving.start, moving.source_start, moving.target_start)
                ),
                strict=True,
            )
        ],
    }
