"""Layouts of engines, and where a recipe's cuts differ from them, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.cli.output import listing, mesh_json, printable
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.text import bytes_text, count_text, duration_text, rank_text, table

if TYPE_CHECKING:
    from reshard.layout import Layout
    from reshard.recipes.engine_layouts import EngineLayout
    from reshard.recipes.engine_layouts.layout_differences import LayoutDifference


def find_engine_layout(against: str, checkpoint: str, mesh: DeviceMesh) -> EngineLayout:
    """The layout of an engine by name, derived for a mesh, or that in a file.

    Raises:
        UsageError: a layout of other ranks than those of the mesh.
        ReshardError: a layout that cannot be derived or read.
    """
    from reshard.recipes.engine_layouts.document import read_layout_file
    from reshard.recipes.engine_layouts.engines import ENGINES, derive_layout

    derived = against in ENGINES
    engine = derive_layout(against, checkpoint, mesh) if derived else read_layout_file(against)
    ours, theirs = (_size_axes(one) for one in (mesh, engine.mesh))
    same_axes = sorted(ours) == sorted(theirs)
    if mesh.size != engine.mesh.size or (same_axes and ours != theirs):
        raise UsageError(
            f"the mesh {mesh.text}, and a layout of {engine.engine} for {engine.mesh.text}, whose "
            f"ranks are numbered in that order; give --to {engine.mesh.text}"
        )
    return engine


def _size_axes(mesh: DeviceMesh) -> list[tuple[str, int]]:
    pairs = zip(mesh.axis_names, mesh.shape, strict=True)
    return [(name, size) for name, size in pairs if size > 1]


@dataclass(frozen=True)
class EngineComparison:
    """What a recipe and an engine say of the tensors of a checkpoint.

    `unread` are tensors that no rank of the engine reads, `unknown` those that its layout has not:
    it is of another checkpoint.
    """

    engine: EngineLayout
    differences: tuple[LayoutDifference, ...]
    unread: tuple[str, ...]
    unknown: tuple[str, ...]
    same: int

    @classmethod
    def of(cls, engine: EngineLayout, layouts: Mapping[str, Layout]) -> EngineComparison:
        """Compare the layouts of a recipe with an engine's."""
        from reshard.recipes.engine_layouts.layout_differences import list_differences

        theirs = engine.source_layouts()
        read = {name: layout for name, layout in theirs.items() if layout.holders}
        differences = tuple(list_differences(layouts, read))
        counted = sum(len(one.names) for one in differences)
        return cls(
            engine,
            differences,
            tuple(name for name in layouts if name in theirs and name not in read),
            tuple(name for name in layouts if name not in theirs),
            sum(name in read for name in layouts) - counted,
        )

    @property
    def title(self) -> str:
        """The engine, its version and its parallelism."""
        return f"{self.engine.engine} {self.engine.version} for {self.engine.mesh.text}"

    @property
    def is_same(self) -> bool:
        """Whether every tensor that the engine reads is cut as it reads it."""
        return not self.differences and not self.unknown

    def as_text(self) -> list[str]:
        """Lines for people."""
        lines = ["", f"against {printable(self.title)}: {count_text(self.same, 'tensor')} alike"]
        for one in self.differences:
            lines += [
                f"{printable(one.pattern)}  {count_text(len(one.names), 'tensor')} cut otherwise, "
                f"on ranks {rank_text(one.ranks)}",
                f"    {printable(one.names[0])}, rank {one.rank}",
                f"      here  {one.ours}",
                f"      {printable(self.engine.engine)}  {one.theirs}",
            ]
        lines += listing(f"not read by {self.engine.engine}", self.unread)
        lines += listing("not in its layout, which is of another checkpoint", self.unknown)
        return lines

    def as_json(self) -> dict[str, Any]:
        """The value of the key `against`."""
        return {
            "engine": self.engine.engine,
            "version": self.engine.version,
            "mesh": self.engine.mesh.text,
            "same": self.same,
            "differences": [
                {
                    "pattern": one.pattern,
                    "tensors": list(one.names),
                    "ranks": list(one.ranks),
                    "example": {"rank": one.rank, "here": one.ours, "engine": one.theirs},
                }
                for one in self.differences
            ],
            "unread": list(self.unread),
            "unknown": list(self.unknown),
        }


def layout_lines(
    model: str, file: str, layout: EngineLayout, size_bytes: int, taken_s: float
) -> list[str]:
    """What was derived, for people."""
    first = layout.ranks[0]
    lines = [
        f"{printable(model)} by {printable(layout.engine)} {printable(layout.version)} for "
        f"{layout.mesh.text}: {count_text(len(layout.sources), 'tensor')}, "
        f"{count_text(len(layout.ranks), 'rank')}, in {duration_text(taken_s)}",
        f"wrote {printable(file)}, {bytes_text(size_bytes)}",
        "",
    ]
    alike: dict[tuple[int, int], list[int]] = {}
    for rank in layout.ranks:
        alike.setdefault((len(rank.parameters), rank.size_bytes), []).append(rank.rank)
    rows = [
        (rank_text(ranks), parameters, bytes_text(held))
        for (parameters, held), ranks in alike.items()
    ]
    lines += [table(rows, ("ranks", "parameters", "each holds"), "lrr"), ""]
    computed = (f"{name} ({', '.join(ops)})" for name, ops in layout.computed.items())
    lines += listing("computed while loading", computed)
    lines += listing("not filled", _list_unfilled(layout))
    lines += listing("read by no rank", layout.unread)
    if first.method == "values":
        lines.append("traced by values, since the loader looks at some")
    notes = dict.fromkeys([*layout.notes, *(note for rank in layout.ranks for note in rank.notes)])
    lines += [f"note: {printable(note)}" for note in notes]
    return lines


def _list_unfilled(layout: EngineLayout) -> list[str]:
    """The parameters of which some rank's loader leaves something as it is."""
    found: dict[str, None] = {}
    for rank in layout.ranks:
        for name, parameter in rank.parameters.items():
            if parameter.unfilled:
                found.setdefault(name)
    return list(found)


def layout_json(layout: EngineLayout) -> dict[str, Any]:
    """What was derived, for `--json`."""
    return {
        "engine": layout.engine,
        "version": layout.version,
        "mesh": mesh_json(layout.mesh),
        "ranks": [
            {
                "rank": rank.rank,
                "parameters": len(rank.parameters),
                "size_bytes": rank.size_bytes,
                "method": rank.method,
                "tied": [list(group) for group in rank.tied],
                "notes": list(rank.notes),
            }
            for rank in layout.ranks
        ],
        "computed": {name: list(operations) for name, operations in layout.computed.items()},
        "unfilled": _list_unfilled(layout),
        "unread": list(layout.unread),
        "notes": list(layout.notes),
    }
