"""The pictures of MLIR's notes on resharding, entered by hand, and any mesh at all."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given

import reshard
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.show.device_picture import element_texts, mesh_picture
from reshard.show.text_picture import picture
from strategies import Shape, specs_with_shapes

# As the notes draw them, with the axes called a, b, c; arrows are letters and dashes in ASCII.
NOTES = {
    ("a=2,b=3", "2x6", "-, a b"): """
b ------------->
+----+----+----+ a |
| 11 | 12 | 13 |   |
| 21 | 22 | 23 |   |
+----+----+----+   |
| 14 | 15 | 16 |   |
| 24 | 25 | 26 |   |
+----+----+----+   v
""",
    ("a=2,b=3", "2x6", "-, a"): """
b ------------------------------->
+----------+----------+----------+ a |
| 11 12 13 | 11 12 13 | 11 12 13 |   |
| 21 22 23 | 21 22 23 | 21 22 23 |   |
+----------+----------+----------+   |
| 14 15 16 | 14 15 16 | 14 15 16 |   |
| 24 25 26 | 24 25 26 | 24 25 26 |   |
+----------+----------+----------+   v
""",
    ("a=2,b=2,c=2", "4x8", "a, b c"): """
c -------------->
+-------+-------+ b | a |
| 11 12 | 13 14 |   |   |
| 21 22 | 23 24 |   |   |
+-------+-------+   |   |
| 15 16 | 17 18 |   |   |
| 25 26 | 27 28 |   |   |
+-------+-------+   v   |
+-------+-------+ b |   |
| 31 32 | 33 34 |   |   |
| 41 42 | 43 44 |   |   |
+-------+-------+   |   |
| 35 36 | 37 38 |   |   |
| 45 46 | 47 48 |   |   |
+-------+-------+   v   v
""",
    ("a=2,b=2,c=2", "4x8", "a, c"): """
c -------------------------->
+-------------+-------------+ b | a |
| 11 12 13 14 | 15 16 17 18 |   |   |
| 21 22 23 24 | 25 26 27 28 |   |   |
+-------------+-------------+   |   |
| 11 12 13 14 | 15 16 17 18 |   |   |
| 21 22 23 24 | 25 26 27 28 |   |   |
+-------------+-------------+   v   |
+-------------+-------------+ b |   |
| 31 32 33 34 | 35 36 37 38 |   |   |
| 41 42 43 44 | 45 46 47 48 |   |   |
+-------------+-------------+   |   |
| 31 32 33 34 | 35 36 37 38 |   |   |
| 41 42 43 44 | 45 46 47 48 |   |   |
+-------------+-------------+   v   v
""",
    ("a=2,b=3", "6x6", "a, b"): """
b ---------------------->
+-------+-------+-------+ a |
| 11 12 | 13 14 | 15 16 |   |
| 21 22 | 23 24 | 25 26 |   |
| 31 32 | 33 34 | 35 36 |   |
+-------+-------+-------+   |
| 41 42 | 43 44 | 45 46 |   |
| 51 52 | 53 54 | 55 56 |   |
| 61 62 | 63 64 | 65 66 |   |
+-------+-------+-------+   v
""",
    ("a=2,b=3", "6x6", "b, a"): """
b ------------------------------->
+----------+----------+----------+ a |
| 11 12 13 | 31 32 33 | 51 52 53 |   |
| 21 22 23 | 41 42 43 | 61 62 63 |   |
+----------+----------+----------+   |
| 14 15 16 | 34 35 36 | 54 55 56 |   |
| 24 25 26 | 44 45 46 | 64 65 66 |   |
+----------+----------+----------+   v
""",
    ("a=2,b=6", "6x6", "a, b"): """
b ---------------------------->
+----+----+----+----+----+----+ a |
| 11 | 12 | 13 | 14 | 15 | 16 |   |
| 21 | 22 | 23 | 24 | 25 | 26 |   |
| 31 | 32 | 33 | 34 | 35 | 36 |   |
+----+----+----+----+----+----+   |
| 41 | 42 | 43 | 44 | 45 | 46 |   |
| 51 | 52 | 53 | 54 | 55 | 56 |   |
| 61 | 62 | 63 | 64 | 65 | 66 |   |
+----+----+----+----+----+----+   v
""",
    ("a=3", "6x6", "-, a"): """
a ---------------------->
+-------+-------+-------+
| 11 12 | 13 14 | 15 16 |
| 21 22 | 23 24 | 25 26 |
| 31 32 | 33 34 | 35 36 |
| 41 42 | 43 44 | 45 46 |
| 51 52 | 53 54 | 55 56 |
| 61 62 | 63 64 | 65 66 |
+-------+-------+-------+
""",
}


@pytest.mark.parametrize("case", NOTES, ids=lambda case: f"{case[2]} of {case[1]} on {case[0]}")
def test_a_picture_of_the_notes(case: tuple[str, str, str]) -> None:
    mesh = reshard.DeviceMesh.parse(case[0])
    layout = reshard.spec(mesh, case[2]).layout([int(size) for size in case[1].split("x")])
    assert mesh_picture(mesh, element_texts(layout), ascii=True) == NOTES[case].strip()


def test_the_pictures_of_one_dimension_with_contents_of_the_notes() -> None:
    """The first two examples call the six elements of one dimension 11 12 13 21 22 23."""
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    names = np.array([11, 12, 13, 21, 22, 23])
    source, target = (reshard.spec(mesh, text).layout((6,)) for text in ("a b", "b a"))
    held = {rank: names[rank : rank + 1] for rank in range(6)}
    moved = reshard.plan(source, target).run(held)
    contents = {rank: [" ".join(map(str, array))] for rank, array in moved.items()}
    assert mesh_picture(mesh, contents) == (
        """
b ─────────────▶
┌────┬────┬────┐ a │
│ 11 │ 13 │ 22 │   │
├────┼────┼────┤   │
│ 12 │ 21 │ 23 │   │
└────┴────┴────┘   ▼
""".strip()
    )


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a, b", [["11", "12", "13"], ["21", "22", "23"]]),
        ("b, a", [["11", "21"], ["12", "22"], ["13", "23"]]),
    ],
)
def test_devices_placed_on_a_tensor_as_in_the_notes(text: str, drawn: list[list[str]]) -> None:
    """Their last drawings but one: which device has which tile of a tensor."""
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    layout = reshard.spec(mesh, text).layout((60, 60))
    lines = picture(layout, labels=lambda slot: f"{slot // 3 + 1}{slot % 3 + 1}").split("\n")
    boxes = [re.findall(r"│ +(\d\d)(?= )", line) for line in lines]
    assert [row for row in boxes if row] == drawn


def test_devices_stand_where_the_mesh_has_them() -> None:
    mesh = reshard.DeviceMesh.of(x=2, devices=[7, 3])
    drawn = mesh_picture(mesh, {3: ["three"], 7: ["7"]}, ascii=True)
    assert "| 7     | three |" in drawn
    assert "|       | three |" in mesh_picture(mesh, {3: ["three"]}, ascii=True)


def test_no_axes_and_no_elements() -> None:
    one = reshard.DeviceMesh("mesh", (), ())
    assert mesh_picture(one, {0: ["1"]}, ascii=True) == "+---+\n| 1 |\n+---+"
    assert element_texts(Layout.replicated(())) == {0: ["1"]}
    assert element_texts(Layout.replicated((0, 3))) == {0: []}


def test_pads_and_several_boxes() -> None:
    two = reshard.DeviceMesh.of(x=2)
    assert element_texts(reshard.spec(two, "x@pad").layout((3,))) == {0: ["1 2"], 1: ["3 -"]}
    ragged = Layout.flat_ranges((2, 3), {0: (0, 2), 1: (2, 6)})
    assert element_texts(ragged) == {0: ["11 12"], 1: ["13", "21 22 23"]}


def test_a_mesh_of_thousands_is_refused() -> None:
    with pytest.raises(UsageError, match="8192 devices"):
        mesh_picture(reshard.DeviceMesh.of(x=8192), {})


@given(specs_with_shapes())
def test_every_element_of_every_rank_is_written(case: tuple[reshard.ShardingSpec, Shape]) -> None:
    spec, shape = case
    layout = spec.layout(shape)
    texts = element_texts(layout)
    assert texts.keys() == set(layout.holders)
    wide = any(size > 9 for size in shape)
    for rank, lines in texts.items():
        found = [word for line in lines for word in line.split() if word != "-"]
        elements = sum(int(layout.cell_elements[cell]) for cell in layout.cells_of(rank))
        assert len(found) == elements
        for box in layout.boxes(rank):
            if 0 not in box.shape:
                first = ("," if wide else "").join(str(start + 1) for start in box.start) or "1"
                assert first in found
    drawn = mesh_picture(spec.mesh, texts).split("\n")
    words = re.findall(r"[^\s│─▶▼┌┐└┘├┤┬┴┼]+", "\n".join(drawn))
    assert set(words) <= {w for lines in texts.values() for line in lines for w in line.split()} | {
        *spec.mesh.axis_names
    }
