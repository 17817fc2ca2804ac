"""Pictures compared with files that were checked by eye.

`RESHARD_UPDATE_GOLDEN=1 pytest tests/show` writes the files anew; look at every change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.layout import Layout
from reshard.show.text_picture import change_picture, picture

FOLDER = Path(__file__).parent.parent / "golden" / "pictures"
VOCABULARY = (30522, 384)


def layout(text: str, *shape: int, **axes: int) -> Layout:
    return reshard.spec(reshard.DeviceMesh.of(**axes), text).layout(shape)


def moved(source: Layout, target: Layout, dtype: str | None = None, **options: object) -> str:
    plan = reshard.plan(source, target, dtype=dtype)
    return change_picture(source, target, plan=plan, **options)


CASES: dict[str, Callable[[], str]] = {
    "rows": lambda: picture(layout("tp, -", *VOCABULARY, tp=4)),
    "rows_ascii": lambda: picture(layout("tp, -", *VOCABULARY, tp=4), ascii=True),
    "rows_and_columns": lambda: picture(layout("dp, tp", *VOCABULARY, dp=2, tp=4)),
    "nested_uneven": lambda: picture(layout("dp / tp, -", 6, 4, dp=2, tp=2)),
    "replicated": lambda: picture(layout("-, tp", 6, 4, dp=2, tp=2)),
    "replicated_512": lambda: picture(Layout.replicated((3, 4), 512)),
    "partial": lambda: picture(layout("-, tp | sum(dp)", 6, 4, dp=2, tp=2)),
    "line": lambda: picture(layout("tp", 384, tp=4)),
    "line_with_an_empty_part": lambda: picture(layout("tp", 6, tp=4)),
    "line_too_long_is_a_column": lambda: picture(layout("tp", 30522, tp=18)),
    "line_of_hundreds": lambda: picture(layout("tp", 30522, tp=300), height=15),
    "grid_of_a_thousand": lambda: picture(
        layout("tp, dp", 30522, 1024, tp=32, dp=32), width=60, height=13
    ),
    "scalar": lambda: picture(layout("", dp=2)),
    "no_elements": lambda: picture(layout("tp, -", 0, 4, tp=2)),
    "one_dimension_not_drawn": lambda: picture(layout("tp, -, dp", 4, 6, 8, tp=2, dp=2)),
    "a_cut_dimension_not_drawn": lambda: picture(layout("tp, pp, dp", 4, 6, 8, tp=2, dp=2, pp=2)),
    "stride": lambda: picture(layout("tp@stride2, -", 12, 8, tp=2)),
    "cyclic": lambda: picture(layout("-, tp@cyclic2", 8, 12, tp=2)),
    "halo": lambda: picture(layout("tp@halo[1,1], -", 12, 8, tp=3)),
    "padded": lambda: picture(layout("tp@pad, -", 10, 8, tp=4)),
    "heads": lambda: picture(layout("tp@heads4, -", 8, 64, tp=8)),
    "flat": lambda: picture(Layout.flat_ranges((4, 5), {0: (0, 7), 1: (7, 9), 2: (9, 20)})),
    "flat_3d": lambda: picture(
        Layout.flat_ranges((3, 4, 5), {0: (0, 17), 1: (17, 38), 2: (38, 60)})
    ),
    "not_covered": lambda: picture(Layout.flat_ranges((4, 5), {0: (0, 5), 1: (10, 20)})),
    "contents": lambda: picture(
        layout("dp, tp", 4, 4, dp=2, tp=2), labels=lambda slot: f"{slot}1 {slot}2\n{slot}3 {slot}4"
    ),
    "change_fewer_ranks": lambda: moved(
        layout("tp, -", *VOCABULARY, tp=4),
        layout("tp, -", *VOCABULARY, tp=2),
        "float32",
        titles=("tp, -   over tp=4", "tp, -   over tp=2"),
    ),
    "change_rows_to_columns": lambda: moved(
        layout("tp, -", *VOCABULARY, tp=4), layout("-, tp", *VOCABULARY, tp=3), "float32"
    ),
    "change_rows_to_columns_ascii": lambda: moved(
        layout("tp, -", *VOCABULARY, tp=4),
        layout("-, tp", *VOCABULARY, tp=3),
        "float32",
        ascii=True,
    ),
    "change_stacked": lambda: moved(
        layout("dp, tp", 64, 64, dp=2, tp=4),
        layout("tp, dp", 64, 64, dp=4, tp=2),
        "bfloat16",
        width=60,
        titles=("dp, tp   over dp=2,tp=4", "tp, dp   over dp=4,tp=2"),
    ),
    "change_with_notes": lambda: moved(
        layout("x, y", 6, 6, x=2, y=4), layout("y, x", 6, 6, x=2, y=4)
    ),
    "change_of_partial_sums": lambda: moved(
        layout("tp, - | sum(dp)", 8, 4, dp=2, tp=2), layout("tp dp, -", 8, 4, dp=2, tp=2)
    ),
    "change_transposed_mesh": lambda: moved(
        layout("x, y", 6, 6, x=2, y=3), layout("y, x", 6, 6, x=2, y=3)
    ),
    "change_of_nothing": lambda: moved(layout("tp, -", 8, 4, tp=2), layout("tp, -", 8, 4, tp=2)),
    "change_of_lines": lambda: change_picture(layout("tp", 96, tp=4), layout("tp", 96, tp=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_picture(name: str) -> None:
    drawn = CASES[name]() + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("RESHARD_UPDATE_GOLDEN") == "1":
        path.write_text(drawn, encoding="utf-8")
    assert drawn == path.read_text(encoding="utf-8")


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


def test_ascii_pictures_are_ascii() -> None:
    for name in CASES:
        if name.endswith("_ascii"):
            assert CASES[name]().isascii()
