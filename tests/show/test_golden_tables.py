"""`print(plan)` and `print(job)` compared with files that were checked by eye.

`RESHARD_UPDATE_GOLDEN=1 pytest tests/show` writes the files anew; look at every change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.dtypes import dtype
from reshard.layout import Layout
from reshard.plans.tables import format_top_ranks

FOLDER = Path(__file__).parent.parent / "golden" / "tables"


def layout(text: str, *shape: int, **axes: int) -> Layout:
    return reshard.spec(reshard.DeviceMesh.of(**axes), text).layout(shape)


def between(name: str, source: Layout, target: Layout, width: str = "bfloat16") -> reshard.JobItem:
    return reshard.JobItem.between_ranks(name, dtype(width), source, target)


def model() -> reshard.Job:
    """Tensors of a model with more kinds than are listed, from 4 ranks to 6."""
    items = []
    for number in range(20):
        rows = layout("tp, -", 64 + number // 2, 96, tp=4)
        items.append(between(f"layers.{number}.weight", rows, layout("-, tp", *rows.shape, tp=6)))
    name = "embeddings.of.a.name.that.is.longer.than.a.column.should.be.weight"
    items.append(between(name, Layout.replicated((1000, 96), 4), layout("tp, -", 1000, 96, tp=6)))
    return reshard.Job(items)


CASES: dict[str, Callable[[], object]] = {
    "plan": lambda: reshard.plan(
        layout("x, y", 6, 6, x=2, y=3), layout("y, x", 6, 6, x=2, y=3), dtype="float32"
    ),
    "plan_without_dtype": lambda: reshard.plan(
        layout("tp, -", 4096, 4096, tp=8), layout("-, tp", 4096, 4096, tp=64)
    ),
    "plan_of_nothing": lambda: reshard.plan(layout("tp", 8, tp=2), layout("tp", 8, tp=2), "int8"),
    "plan_of_a_scalar": lambda: reshard.plan(
        Layout.whole((), [0], 4), Layout.replicated((), 4), "float64"
    ),
    "plan_of_partial_sums": lambda: reshard.plan(
        layout("-, - | sum(x)", 8, 8, x=4), layout("x, -", 8, 8, x=4), "float32"
    ),
    "job": model,
    "job_of_one": lambda: reshard.Job(
        [between("w", layout("tp, -", 8, 8, tp=2), layout("-, tp", 8, 8, tp=2))]
    ),
    "job_of_none": lambda: reshard.Job([]),
}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_as_they_were_checked(name: str) -> None:
    text = str(CASES[name]()) + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("RESHARD_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_every_golden_file_has_its_case() -> None:
    assert sorted(CASES) == sorted(path.stem for path in FOLDER.glob("*.txt"))


def test_who_is_busiest() -> None:
    assert format_top_ranks(np.array([3, 1, 1, 3]), range(4)) == "ranks 0,3: 1.50 times the mean"
    assert format_top_ranks(np.array([0, 5]), [1]) == "rank 1: 1.00 times the mean"
    assert format_top_ranks(np.array([0, 0]), [0, 1]) == ""
    assert format_top_ranks(np.array([], dtype=np.int64), [0]) == ""
