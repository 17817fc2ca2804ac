"""Worked changes of layout: every pair of a table of shardings, with its report.

A page without a server cannot run the library: no package index has NumPy's wheels for browsers.
So the changes that people ask for first are worked out when the site is built, and the page finds
two shardings however they are written, in any notation that can say them.

    tables.json                which texts mean which sharding, of each mesh
    MESH/FROM-TO.html          what `reshard explain --html` writes
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import reshard
from reshard.cli.explanation import Side, explanation_of
from reshard.errors import NotationError
from reshard.notation.registry import NOTATIONS, read_sharding

PAGE = Path(__file__).with_name("worked.html")


@dataclass(frozen=True, slots=True)
class Table:
    """Shardings of a tensor of one shape over one mesh, by native texts."""

    mesh: str
    shape: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def title(self) -> str:
        """The mesh and the shape."""
        return f"{self.mesh}, a tensor of {' x '.join(map(str, self.shape))}"


TABLES = (
    Table("tp=4", (8, 8), ("tp, -", "-, tp", "-, -", "-, - | sum(tp)", "tp@cyclic1, -")),
    Table(
        "x=2,y=3",
        (7, 6),
        ("x, y", "y, x", "x y, -", "y x, -", "-, x y", "x, -", "-, y", "-, -", "x, - | sum(y)"),
    ),
    Table("dp=2,tp=2", (6, 8), ("dp, tp", "tp, dp", "dp tp, -", "dp / tp, -", "-, tp", "dp, -")),
    Table(
        "dp=2,pp=2,tp=2",
        (4, 6, 4),
        ("dp, tp, -", "-, tp, dp", "pp, dp, tp", "dp tp, -, pp", "-, -, -", "dp, tp, - | sum(pp)"),
    ),
)


def write_worked_changes(folder: Path) -> None:
    """Work out every pair of every table, and write the pages into a folder."""
    listed = []
    for number, table in enumerate(TABLES):
        mesh = reshard.DeviceMesh.parse(table.mesh)
        (folder / str(number)).mkdir(parents=True)
        for before, after in itertools.product(range(len(table.texts)), repeat=2):
            page = _report(table, mesh, table.texts[before], table.texts[after])
            (folder / str(number) / f"{before}-{after}.html").write_text(page)
        listed.append(
            {"title": table.title, "shardings": [_written(mesh, text) for text in table.texts]}
        )
    content = json.dumps(listed, indent=1)
    (folder / "index.html").write_text(PAGE.read_text().replace("TABLES_OF_SHARDINGS", content))


def _written(mesh: reshard.DeviceMesh, text: str) -> dict[str, str]:
    """A sharding in every notation that can say it."""
    found = {}
    for name in NOTATIONS:
        try:
            found[name] = reshard.write_sharding(reshard.spec(mesh, text), name)
        except NotationError:
            continue
    return found


def _report(table: Table, mesh: reshard.DeviceMesh, before: str, after: str) -> str:
    sides = [Side(text, read_sharding(text, mesh, table.shape)) for text in (before, after)]
    found = explanation_of(sides[0], sides[1], table.shape, None)
    return found.report(None).html()
