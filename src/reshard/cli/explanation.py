"""The change of a tensor between two shardings, as text, as JSON, as a report or as a program.

A tensor is planned as a job of its own. Elements that a rank holds already stay there. If several
ranks hold an element that another lacks, the senders are chosen so that the busiest of them sends
as little as possible.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.cli import output
from reshard.collectives.lowering import LOWERINGS
from reshard.collectives.program import Program, format_steps
from reshard.collectives.search.find_program import find_program
from reshard.collectives.search.states import JOINT
from reshard.collectives.steps import Exchange
from reshard.cost.estimate import Estimate
from reshard.cost.preset import Preset
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError, UsageError
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.registry import NATIVE, ParsedSharding
from reshard.plans.plan import Plan, plan
from reshard.plans.tables import MAX_ROWS, format_movements
from reshard.plans.traffic import Traffic, find_top_ranks
from reshard.show.device_picture import element_texts, mesh_picture
from reshard.show.html_report import DrawnChange, Report, movement_figures
from reshard.show.text_picture import MIN_WIDTH, change_picture
from reshard.text import bytes_text, count_text, duration_text, printable, ranks_text, shortened
from reshard.topology import Topology

MAX_DRAWN_ELEMENTS = 4096
# Up to this many ranks, each has a box of its own, even if the picture is longer than a screen.
MAX_BOXED_RANKS = 64
# Maximum width of a step and of a sharding in the table of a program.
MAX_STEP_COLUMNS = 36


class Side(Record):
    """A side of the change: a sharding as text, and its meaning."""

    text: str
    reading: ParsedSharding

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of its devices; None for a layout, which has ranks only."""
        sharding = self.reading.sharding
        return None if isinstance(sharding, Layout) else sharding.mesh

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout. Raises UsageError if a text has another shape."""
        sharding = self.reading.sharding
        if not isinstance(sharding, Layout):
            return sharding.layout(shape)
        if sharding.shape != shape:
            raise UsageError(
                f"`{self.text}` is of a tensor of shape {list(sharding.shape)}, not of "
                f"{list(shape)}; both sides and --shape must be of the same tensor"
            )
        return sharding

    @property
    def title(self) -> str:
        """The sharding in the native notation, with its mesh."""
        mesh = self.mesh
        if mesh is None:
            return printable(self.text)
        places = f"over {mesh.text}" if mesh.shape else "on one device"
        if mesh.devices != tuple(range(mesh.size)):
            places += f" on ranks {shortened(','.join(map(str, mesh.devices)), 24)}"
        return f"{self.reading.sharding}   {places}".strip()


def explanation_of(
    before: Side,
    after: Side,
    shape: tuple[int, ...] | None,
    dtype: str | None,
    steps: str = JOINT,
    machine: Preset | None = None,
) -> Explanation:
    """Explain a change. `shape` may be None if a side has a shape.

    `steps` are the allowed steps of a program: a key of `reshard.collectives.STEPS`. On a
    `machine` everything has its time.

    Raises:
        UsageError: no shape, two shapes, an unknown dtype; a machine and no dtype.
        LayoutError: a sharding that does not fit the shape; more ranks than the machine has.
    """
    if machine is not None and dtype is None:
        raise UsageError(
            f"times on {machine.name} depend on the size of elements; give --dtype, as bfloat16"
        )
    if shape is None:
        # Ragged and partitioned notations have layouts, which include the shape.
        shardings = [s.reading.sharding for s in (before, after)]
        shapes = [sharding.shape for sharding in shardings if isinstance(sharding, Layout)]
        if not shapes:
            raise UsageError(
                "a sharding does not determine the shape of the tensor; give it: --shape 4096x1024"
            )
        shape = shapes[0]
    direct = plan(before.layout(shape), after.layout(shape), dtype)
    return Explanation(before, after, direct, steps, machine)


class Explanation(Record):
    """A change of layout, its plan, program and estimates."""

    before: Side
    after: Side
    plan: Plan
    steps: str = JOINT
    machine: Preset | None = None

    @property
    def _dtype(self) -> DType:
        """The plan's dtype; int8 if it has none, so that an element counts as a byte."""
        return self.plan.dtype or as_dtype("int8")

    @cached_property
    def moving(self) -> Transfers:
        """The boxes that pass between ranks, by receiver and position in the tensor."""
        # `lexsort` sorts by its last key first: the receiver, then the position in row-major
        # order, then the order in the plan.
        moving = self.plan.transfers.moving
        place = moving.start.T[::-1]
        return moving.take(np.lexsort((moving.order, *place, moving.target_slot)))

    @cached_property
    def traffic(self) -> Traffic:
        """Elements between ranks."""
        ranks = max(self.plan.source.slots, self.plan.target.slots)
        return Traffic.of_transfers(self.moving, ranks)

    @cached_property
    def _found_program(self) -> Program | str:
        """The program of collectives, or the reason why none was found."""
        source, target = (side.reading.sharding for side in (self.before, self.after))
        # Collectives run along mesh axes, over the same devices on both sides.
        if isinstance(source, Layout) or isinstance(target, Layout):
            return "a side describes the part of each rank, without a mesh"
        if set(source.mesh.devices) != set(target.mesh.devices):
            return "the two sides are on different devices"
        try:
            program = find_program(source, target, self.plan.source.shape, steps=self.steps)
        except PlanError as error:
            return str(error)
        # An exchange between any ranks is not a collective of a group.
        if any(isinstance(step, Exchange) for step in program.steps):
            return "no collectives within groups of the mesh lead from one to the other"
        return program

    @property
    def program(self) -> Program | None:
        """The collectives that move the fewest elements; None if there are none."""
        return self._found_program if isinstance(self._found_program, Program) else None

    @property
    def why_no_program(self) -> str | None:
        """The reason why there is no program of collectives, or None."""
        return self._found_program if isinstance(self._found_program, str) else None

    @cached_property
    def _topology(self) -> Topology | None:
        """As many hosts of the machine as the ranks need."""
        if self.machine is None:
            return None
        # Whole hosts, since a preset describes hosts and not single ranks.
        ranks = max(self.plan.source.slots, self.plan.target.slots)
        return self.machine.topology(-(-ranks // self.machine.ranks_per_host))

    @cached_property
    def _exchange_seconds_s(self) -> float:
        return self.plan.estimate(self._topology).seconds_s if self._topology else 0.0

    @cached_property
    def _program_estimate(self) -> Estimate | None:
        if self.program is None or self.machine is None or self._topology is None:
            return None
        return self.program.estimate(self._dtype, self._topology, self.machine.library)

    def as_text(self) -> list[str]:
        """Return the lines: both layouts as pictures, figures, transfers, and collectives."""
        width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, 100))
        lines = []
        for word, side in (("from", self.before), ("to", self.after)):
            notation = side.reading.notation.name
            if notation != NATIVE:
                lines.append(f"{word:4} {printable(side.text)}   ({notation})")
        if lines:
            lines.append("")
        drawn = change_picture(
            self.plan.source,
            self.plan.target,
            width,
            titles=(self.before.title, self.after.title),
            plan=self.plan,
            transfers=self.moving,
            height=25,
            stacked_height=None if self._is_of_few_ranks else 22,
            ascii=not output.can_draw_boxes(),
        )
        lines.append(drawn)
        if figures := self._figures():
            lines += ["", *figures]
        return lines + self._program_lines()

    @property
    def is_on_same_devices(self) -> bool:
        """Whether both sides are over the same devices, so that collectives may lead there."""
        devices = [set(side.mesh.devices) for side in (self.before, self.after) if side.mesh]
        return len(devices) == 2 and devices[0] == devices[1]

    @property
    def _is_of_few_ranks(self) -> bool:
        return max(self.plan.source.slots, self.plan.target.slots) <= MAX_BOXED_RANKS

    def _program_text(self) -> str:
        """Return the program as a table, or the reason why there is none on equal devices."""
        if self.program is None:
            return self.why_no_program or "" if self.is_on_same_devices else ""
        if not self.program.steps:
            return ""
        # Messages that move as much are shown above.
        is_as_much = self.program.moved_elements == self.traffic.total
        return format_steps(
            self.program.shape,
            self.program.source,
            self.program.steps,
            None if is_as_much else self.program.lower_bound_elements,
            self._program_estimate,
            max_width=MAX_STEP_COLUMNS,
        )

    def _program_lines(self) -> list[str]:
        text = self._program_text()
        if not text:
            return []
        return ["", "as collectives:", text] if self.program else ["", f"as collectives: {text}"]

    def _figures(self) -> list[str]:
        """Return the lines on the ranks that move most; the picture has the total."""
        lines = []
        if self.traffic.total > self.plan.lower_bound_elements:
            lines.append(f"the least possible is {self._size(self.plan.lower_bound_elements)}")
        elif self.traffic.total:
            lines.append("no plan moves fewer elements")
        if self.traffic.total:
            both = (("sender", self.traffic.sent), ("receiver", self.traffic.received))
            for word, amounts in both:
                amount, ranks = find_top_ranks(amounts)
                lines.append(f"busiest {word}: {ranks_text(ranks)}, {self._size(amount)}")
            if self._topology is not None and self.machine is not None:
                time = duration_text(self._exchange_seconds_s)
                lines.append(f"as messages on {self.machine.name}: {time}")
            max_rows = MAX_ROWS if self._is_of_few_ranks else 8
            lines += ["", format_movements(self.moving, self.traffic, max_rows)]
        return lines

    def _size(self, elements: int) -> str:
        text = count_text(elements, "element")
        if self.plan.dtype is None:
            return text
        return f"{text} ({bytes_text(elements * self.plan.dtype.itemsize_bytes)})"

    def lowered(self, system: str) -> str:
        """Lower the program to another system: a key of `LOWERINGS`.

        Raises:
            UsageError: no program of collectives was found.
            NotationError: a step that the system cannot express.
        """
        if self.program is None:
            raise UsageError(f"no program of collectives to lower: {self.why_no_program}")
        return LOWERINGS[system](self.program, self.plan.dtype or "float32")

    def contents(self) -> list[str]:
        """Return the lines of both meshes with the elements of each device.

        Raises:
            UsageError: more elements than can be drawn.
        """
        lines = ["", "Elements by their place in each dimension, counted from 1:"]
        both = ((self.before, self.plan.source), (self.after, self.plan.target))
        for side, layout in both:
            held = int(layout.cell_shape.prod(axis=1).sum())
            if held > MAX_DRAWN_ELEMENTS:
                raise UsageError(
                    f"--contents of {held:,} elements on all devices; at most "
                    f"{MAX_DRAWN_ELEMENTS:,} can be drawn, take a small --shape"
                )
            mesh = side.mesh or DeviceMesh.of(rank=layout.slots)
            drawn = mesh_picture(mesh, element_texts(layout), ascii=not output.can_draw_boxes())
            lines += ["", side.title, drawn]
        return lines

    def report(self, ranks_per_host: int | None) -> Report:
        """Return the HTML report."""
        traffic, bound = self.traffic, self.plan.lower_bound_elements
        amount_text: Callable[[int], str] = partial(count_text, noun="element")
        short_text: Callable[[int], str] = count_text
        if self.plan.dtype is not None:
            traffic = traffic.times(self.plan.dtype.itemsize_bytes)
            bound = self.plan.lower_bound_bytes
            amount_text = short_text = bytes_text
        shape = "x".join(map(str, self.plan.source.shape)) or "scalar"
        dtype = f" of {self.plan.dtype.name}" if self.plan.dtype else ""
        titles = (self.before.title, self.after.title)
        return Report(
            title=f"{self.before.text} to {self.after.text}: {shape}{dtype}",
            figures=movement_figures(traffic, bound, len(self.moving), amount_text),
            changes=[DrawnChange("", *titles, self.plan, self.moving)],
            traffic=traffic,
            amount_text=amount_text,
            short_text=short_text,
            ranks_per_host=ranks_per_host,
            tables=self._tables(),
        )

    def _tables(self) -> list[tuple[str, str]]:
        """Return the tables of transfers and of collectives, with their headings."""
        tables = []
        if self.traffic.total:
            tables.append(("Transfers", format_movements(self.moving, self.traffic, MAX_ROWS)))
        if text := self._program_text():
            tables.append(("As collectives", text))
        return tables

    def as_json(self) -> dict[str, Any]:
        """Return the keys that `reshard explain --help` lists."""
        moving = self.moving
        # Shape (transfers, dimensions, 2): begin and end, in the tensor and in both local arrays.
        boxes = (
            np.stack((start, start + moving.shape), axis=-1).tolist()
            for start in (moving.start, moving.source_start, moving.target_start)
        )
        ends = (moving.source_slot.tolist(), moving.target_slot.tolist())
        keys = ("source_rank", "target_rank", "box", "source_box", "target_box")
        content: dict[str, Any] = {
            "moved_elements": self.traffic.total,
            "lower_bound_elements": self.plan.lower_bound_elements,
            "max_send_elements": find_top_ranks(self.traffic.sent)[0],
            "max_receive_elements": find_top_ranks(self.traffic.received)[0],
            "transfers": [
                dict(zip(keys, row, strict=True)) for row in zip(*ends, *boxes, strict=True)
            ],
            "program": None if self.program is None else _program_content(self.program),
            "why_no_program": self.why_no_program,
        }
        if self._topology is not None:
            content["seconds_s"] = self._exchange_seconds_s
        if self._program_estimate is not None:
            content["program"]["seconds_s"] = self._program_estimate.seconds_s
            parts = self._program_estimate.parts
            for step, part in zip(content["program"]["steps"], parts, strict=True):
                step["seconds_s"] = part.seconds_s
        return content


def _program_content(program: Program) -> dict[str, Any]:
    return {
        "steps": [
            {
                "step": step.name,
                "axes": [str(axis) for axis in step.axes],
                "dims": list(step.dims),
                "after": str(step.target),
                "moved_elements": step.moved_elements,
                "live_shard_elements": step.live_shard,
            }
            for step in program.steps
        ],
        "moved_elements": program.moved_elements,
        "peak_shard_elements": program.live_shard,
    }
