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
from reshard.mesh import LARGEST_MESH, DeviceMesh
from reshard.notation.registry import NOTATIONS, Reading, read_sharding
from reshard.planning.plan import Plan, plan
from reshard.show.html_report import DrawnChange, Report, movement_figures
from reshard.show.mesh_pictures import element_texts, mesh_picture
from reshard.show.movement_table import movement_table
from reshard.show.pictures import LEAST_WIDTH, change_picture
from reshard.show.quantities import bytes_text, count_text
from reshard.show.rank_text import ranks_text
from reshard.show.text_width import shortened
from reshard.show.traffic import Traffic, busiest

MOST_DRAWN_ELEMENTS = 4096


class _Explain(click.Command):
    """A command whose arguments may begin with `-`, a dimension that is not cut."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # No option has a space or a comma behind its dash; a space before it makes it a text.
        texts = [f" {word}" if re.match(r"-[\s,|?!]", word) else word for word in args]
        return super().parse_args(ctx, texts)


_EXAMPLES = "".join(f"\n  {name:12} {item.example}" for name, item in NOTATIONS.items())


@click.command(cls=_Explain, epilog=f"\b\nNotations, by example:{_EXAMPLES}")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--mesh", "mesh_text", metavar="MESH", help="The devices, such as dp=2,tp=4.")
@click.option("--ranks", "rank_text", metavar="RANKS", help="Of the devices: 4-7, or 3,1,2,0.")
@click.option("--to-mesh", "target_mesh_text", metavar="MESH", help="Of TO, where it differs.")
@click.option("--to-ranks", "target_rank_text", metavar="RANKS", help="Of TO, where they differ.")
@click.option("--shape", "shape_text", metavar="SHAPE", help="Of the tensor: 4096x1024, 7, scalar.")
@click.option(
    "--notation",
    type=click.Choice(list(NOTATIONS)),
    help="Of both texts. [default: recognised from each]",
)
@click.option("--dtype", metavar="NAME", help="Of the elements, for sizes in bytes.")
@click.option(
    "--contents", is_flag=True, help="Draw the elements that each device holds; small tensors."
)
@json_option
@report_options
def explain(
    source: str,
    target: str,
    mesh_text: str | None,
    rank_text: str | None,
    target_mesh_text: str | None,
    target_rank_text: str | None,
    shape_text: str | None,
    notation: str | None,
    dtype: str | None,
    contents: bool,
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
      reshard explain "[[0], [1]]" "P('y', 'x')" --mesh x=2,y=3 --shape 6x6 --contents
      reshard explain "[Shard(0)]" "[Replicate()]" --mesh tp=2 --to-ranks 2-3 --shape 8x8 --json

    \b
    Keys of --json:
      moved_elements, lower_bound_elements, max_send_elements, max_receive_elements
      transfers [{source_rank, target_rank, box, source_box, target_box}]

    A box is [[start, stop], ...], one pair a dimension: `box` in the tensor, the others in the
    local array of each rank (of a rank that holds several boxes: in the one it is of).
    """
    check_report(report_path, overwrite, ranks_per_host)
    if contents and as_json:
        raise UsageError("--contents draws text and --json writes none; leave one of them out")
    shape = None if shape_text is None else shape_of(shape_text)
    mesh = _mesh(mesh_text, rank_text)
    if target_mesh_text is None and target_rank_text is None:
        target_mesh = mesh
    else:
        target_mesh = _mesh(target_mesh_text or mesh_text, target_rank_text)
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
        drawn = _contents(before, after, movement) if contents else []
        write("\n".join([*_as_text(before, after, movement), *drawn]))
    return DONE


def _mesh(text: str | None, ranks: str | None) -> DeviceMesh | None:
    if text is None:
        if ranks is not None:
            raise UsageError(f"ranks {ranks} of no mesh; give one: --mesh dp=2,tp=4")
        return None
    mesh = DeviceMesh.parse(text)
    if ranks is None:
        return mesh
    return DeviceMesh(mesh.name, mesh.shape, mesh.axis_names, ranks_of(ranks))


_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def ranks_of(text: str) -> list[int]:
    """The ranks that a list of numbers and ranges writes, in its order.

    Raises:
        UsageError: anything else.

    >>> ranks_of("4-6,1")
    [4, 5, 6, 1]
    """
    ranks: list[int] = []
    for word in text.split(","):
        match = _RANKS.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < LARGEST_MESH:
            raise UsageError(
                f"{word.strip()!r} in the ranks {text!r}; write numbers and ranges such as "
                f"0,2,4-7, below {LARGEST_MESH:,}"
            )
        ranks += range(first, last + 1)
    return ranks


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
        mesh = sharding.mesh
        places = f"over {mesh.text}" if mesh.shape else "on one device"
        if mesh.devices != tuple(range(mesh.size)):
            places += f" on ranks {shortened(','.join(map(str, mesh.devices)), 24)}"
        return f"{sharding}   {places}".strip()


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


def _contents(before: _Side, after: _Side, movement: Plan) -> list[str]:
    """Both meshes with the elements of each device."""
    lines = ["", "Elements by their place in each dimension, counted from 1:"]
    for side, layout in ((before, movement.source), (after, movement.target)):
        held = int(layout.cell_shape.prod(axis=1).sum())
        if held > MOST_DRAWN_ELEMENTS:
            raise UsageError(
                f"--contents of {held:,} elements on all devices; at most "
                f"{MOST_DRAWN_ELEMENTS:,} can be drawn, take a small --shape"
            )
        sharding = side.reading.sharding
        mesh = DeviceMesh.of(rank=layout.slots) if isinstance(sharding, Layout) else sharding.mesh
        drawn = mesh_picture(mesh, element_texts(layout), ascii=not can_draw_boxes())
        lines += ["", side.title, drawn]
    return lines


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
