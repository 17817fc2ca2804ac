"""A reader who follows the lines of a picture finds the holders of every element."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, HALO
from reshard.show.text_picture import change_picture, movement_text, picture
from reshard.text import display_width

LINES = set("│─┌┐└┘├┤┬┴┼╵╷╴╶")
BORDER_LINE = re.compile(r"^\s*\d* ?[│├┌└].*[│┤┐┘]$")

PAIRS = [
    ("-", "-"),
    ("dp", "tp"),
    ("tp", "dp"),
    ("dp tp", "-"),
    ("-", "tp pp"),
    ("dp / tp", "pp"),
    ("tp@stride2", "dp"),
    ("pp", "tp@cyclic2"),
    ("tp@balanced", "dp pp"),
    ("tp@halo[1,1]", "-"),
    ("tp@halo[1,1]", "dp@halo[1,0]"),
    ("tp@pad", "dp"),
    ("tp@heads2", "dp"),
]


@st.composite
def spec_layouts(draw: st.DrawFn) -> Layout:
    mesh = reshard.DeviceMesh.of(
        **{axis: draw(st.integers(1, 4), label=axis) for axis in ("dp", "tp", "pp")}
    )
    shape = (draw(st.integers(4, 12)), draw(st.integers(1, 12)))
    rows, columns = draw(st.sampled_from(PAIRS))
    used = f"{rows} {columns}"
    free = [axis for axis in ("dp", "tp", "pp") if axis not in used]
    partial = f" | sum({free[0]})" if free and draw(st.booleans()) else ""
    try:
        return reshard.spec(mesh, f"{rows}, {columns}{partial}").layout(shape)
    except reshard.errors.RuleError:
        return Layout.replicated(shape, 2)


@st.composite
def flat_layouts(draw: st.DrawFn) -> Layout:
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    total = shape[0] * shape[1]
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    edges = [0, *cuts, total]
    ranges = {slot: (edges[slot], edges[slot + 1]) for slot in range(len(edges) - 1)}
    return Layout.flat_ranges(shape, ranges)


LAYOUTS = st.one_of(spec_layouts(), flat_layouts())


def expanded(text: str) -> set[int]:
    """The ranks that `rank_text` wrote, several texts joined by + or / included."""
    ranks: set[int] = set()
    for word in re.findall(r"\d+,\d+\.\.\d+|\d+-\d+|\d+", text):
        numbers = [int(number) for number in re.findall(r"\d+", word)]
        if ".." in word:
            ranks |= set(range(numbers[0], numbers[2] + 1, numbers[1] - numbers[0]))
        elif "-" in word:
            ranks |= set(range(numbers[0], numbers[1] + 1))
        else:
            ranks.add(numbers[0])
    return ranks


class Reader:
    """Reads a two-dimensional picture: the text of the box that an element lies in."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        self.columns = {
            m.start() + (len(m[0]) - 1) // 2: int(m[0]) for m in re.finditer(r"\d+", lines[0])
        }
        self.rows = {}
        for y, line in enumerate(lines[1:], start=1):
            match = re.match(r"\s*(\d+) [├┌└│]", line)
            if match:
                self.rows[y] = int(match[1])
        width = max(map(len, lines))
        self.cells = [line.ljust(width) for line in lines]

    def box(self, row: int, column: int) -> str:
        y = max(y for y, index in self.rows.items() if index <= row) + 1
        x = max(x for x, index in self.columns.items() if index <= column) + 1
        inside = {(y, x)}
        waiting = [(y, x)]
        while waiting:
            y, x = waiting.pop()
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near not in inside and self.cells[near[0]][near[1]] not in LINES:
                    inside.add(near)
                    waiting.append(near)
        return "".join(self.cells[y][x] for y, x in sorted(inside)).strip()


def held_as_halo(layout: Layout, row: int, column: int) -> set[int]:
    """Slots that have an element only as a halo copy, from the run tables one cell at a time."""
    slots = set()
    for cell, slot in enumerate(layout.cell_slot.tolist()):
        roles = []
        for d, index in enumerate((row, column)):
            runs = layout.tables[d].runs_of(int(layout.cell_part[cell, d]))
            roles.append([role for a, b, _, role in runs if a <= index < b])
        owned = all(any(role not in (HALO, FRESH_HALO) for role in found) for found in roles)
        if all(roles) and not owned:
            slots.add(slot)
    return slots


@given(LAYOUTS)
def test_every_element_is_drawn_in_a_box_with_its_holders(layout: Layout) -> None:
    reader = Reader(picture(layout, width=400, height=100))
    owners: dict[tuple[int, int], set[int]] = {}
    for slot in layout.holders:
        for box in layout.boxes(slot):
            for row in range(box.start[0], box.stop[0]):
                for column in range(box.start[1], box.stop[1]):
                    owners.setdefault((row, column), set()).add(slot)
    for row in range(layout.shape[0]):
        for column in range(layout.shape[1]):
            text = reader.box(row, column)
            bracketed = "".join(re.findall(r"\([^)]*\)", text))
            assert expanded(re.sub(r"\([^)]*\)", "", text)) == owners.get((row, column), set())
            assert expanded(bracketed) == held_as_halo(layout, row, column)


@given(LAYOUTS, st.integers(40, 90), st.integers(9, 40), st.booleans())
def test_lines_fit_the_width_and_boxes_end_in_one_column(
    layout: Layout, width: int, height: int, ascii: bool
) -> None:
    lines = picture(layout, width, height=height, ascii=ascii).split("\n")
    assert all(display_width(line) <= width and line == line.rstrip() for line in lines)
    if not ascii:
        boxes = [line for line in lines if BORDER_LINE.match(line)]
        assert len(boxes) <= height
        assert len({display_width(line) for line in boxes}) == 1


@given(st.tuples(spec_layouts(), spec_layouts()), st.integers(40, 120))
def test_changes_fit_the_width(pair: tuple[Layout, Layout], width: int) -> None:
    source, target = pair
    if source.shape != target.shape:
        target = Layout.replicated(source.shape, 3)
    lines = change_picture(source, target, width).split("\n")
    assert all(display_width(line) <= width for line in lines)


@pytest.mark.parametrize("columns", [60, 2])
def test_omitted_intervals_are_counted(columns: int) -> None:
    mesh = reshard.DeviceMesh.of(tp=500, dp=columns)
    text = picture(reshard.spec(mesh, "tp, dp").layout((1000, 60)), height=21)
    rows = [int(m) for m in re.findall(r"^ *(\d+) [├┌└]", text, re.MULTILINE)]
    (left_out,) = {int(m) for m in re.findall(r"… (\d+) more *│$", text, re.MULTILINE)}
    assert rows[0] == 0 and rows[-1] == 1000
    # Drawn rows and those left out make up all 500; one gap is between the drawn ones.
    assert len(rows) - 2 + left_out == 500


def test_boxes_of_a_change_say_where_their_elements_come_from() -> None:
    four, two = (reshard.DeviceMesh.of(tp=n) for n in (4, 2))
    source = reshard.spec(four, "tp, -").layout((8, 3))
    target = reshard.spec(two, "tp, -").layout((8, 3))
    text = change_picture(source, target, plan=reshard.plan(source, target))
    boxes = re.findall(r"│ +(\d(?: ← [\d,]+)?) +│", text)
    assert {box for box in boxes if "←" in box} == {"0 ← 1", "1 ← 2,3"}
    assert "18 of 24 elements move, 6 stay." in text
    assert "←" not in change_picture(source, target)


def test_interleaved_boxes_have_the_senders_of_their_own_part() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    source = reshard.spec(mesh, "tp").layout((8,))
    target = reshard.spec(mesh, "tp@cyclic2").layout((8,))
    text = change_picture(source, target, 120, plan=reshard.plan(source, target))
    boxes = re.findall(r"│ +(\d(?: ← \d)?)(?= )", text)
    assert boxes == ["0", "1", "0", "1 ← 0", "0 ← 1", "1"]


def test_movement_in_elements_and_bytes() -> None:
    whole, halves = Layout.replicated((6,)), Layout.flat_ranges((6,), {0: (0, 3), 1: (3, 6)})
    assert movement_text(reshard.plan(whole, halves)) == "3 of 6 elements move, 3 stay."
    assert (
        movement_text(reshard.plan(whole, halves, dtype="float32"))
        == "12 B of 24 B move (3 of 6 elements), 12 B stay."
    )
    assert movement_text(reshard.plan(whole, whole, dtype="int8")) == "Nothing moves: 6 B stay."


def test_callable_labels_are_written_once_where_they_agree() -> None:
    layout = Layout.replicated((2, 2), 4)
    assert picture(layout, labels=lambda slot: "same").count("same") == 1
    text = picture(layout, labels=lambda slot: "ab"[slot % 2])
    assert "a,b" in text


def test_labels_too_wide_for_a_box_are_shortened() -> None:
    layout = Layout.replicated((2, 2), 1)
    text = picture(layout, 40, labels=lambda slot: "x" * 100)
    assert "xxx…" in text
    scattered = Layout.whole((2, 2), [n * n for n in range(40)], 2000)
    assert "40 ranks" in picture(scattered, 40)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 39}, "width 39"),
        ({"height": 8}, "height 8"),
        ({"labels": "names"}, "labels 'names'"),
    ],
)
def test_unusable_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        picture(Layout.replicated((2, 2)), **options)


def test_too_little_space_for_the_indices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # The longest indices have 18 digits, for which the least width would do.
    monkeypatch.setattr("reshard.show.text_picture.MIN_WIDTH", 20)
    with pytest.raises(UsageError, match="no room"):
        picture(Layout.replicated((2**58, 2**58, 0)), 20)


def test_a_change_is_of_one_shape_and_its_own_plan() -> None:
    one, two = Layout.replicated((2, 2)), Layout.replicated((2, 2), 2)
    with pytest.raises(UsageError, match="one tensor"):
        change_picture(one, Layout.replicated((2, 3)))
    with pytest.raises(UsageError, match="not the plan"):
        change_picture(one, two, plan=reshard.plan(two, one))


def test_titles_too_long_for_half_stand_above() -> None:
    layout = Layout.replicated((2, 2))
    text = change_picture(layout, layout, 60, titles=("a" * 50, "b" * 70))
    assert "▼" in text
    assert "a" * 50 in text and "b" * 59 + "…" in text
