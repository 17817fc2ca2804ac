"""Checkpoints cut by an engine's layout: what each rank reads, and nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard import DeviceMesh, checkpoint
from reshard.binding import View
from reshard.errors import RecipeError, UsageError
from reshard.layout import Box
from reshard.recipes.engine_layouts import EngineLayout, ParameterLayout, RankLayout, SourcePiece

QUERIES, HIDDEN = 8, 4
TENSORS = {
    "q": np.arange(QUERIES * HIDDEN, dtype=np.float32).reshape(QUERIES, HIDDEN),
    "k": np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN),
    "norm": np.arange(3, dtype=np.float32),
}


def engine(ranks: int = 4) -> EngineLayout:
    """Queries over all ranks, each of two key heads on half of them; the norm is not read."""
    rows = QUERIES // ranks

    def rank(number: int) -> RankLayout:
        head = number * 2 // ranks
        pieces = [
            SourcePiece(
                Box((0, 0), (rows, HIDDEN)), "q", View(rows * HIDDEN * number, (HIDDEN, 1))
            ),
            SourcePiece(Box((rows, 0), (rows + 1, HIDDEN)), "k", View(HIDDEN * head, (HIDDEN, 1))),
        ]
        one = ParameterLayout.of("qk", (rows + 1, HIDDEN), "float32", pieces)
        return RankLayout(number, {"qk": one}, ("norm",))

    sources = {name: (str(array.dtype), array.shape) for name, array in TENSORS.items()}
    return EngineLayout("toy", "1", DeviceMesh.of(tp=ranks), sources, [*map(rank, range(ranks))])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def test_ranks_hold_what_the_engine_reads(model: Path, tmp_path: Path) -> None:
    report = checkpoint.convert(model, tmp_path / "cut", layout=engine(), replicas="every")
    assert report.tensors == 3
    cut = checkpoint.open(tmp_path / "cut")
    assert cut.mesh is DeviceMesh.of(tp=4)
    assert [cut["q"].layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 2, 4, 6]
    assert [cut["k"].layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 0, 1, 1]
    assert cut["norm"].layout.holders == (0,)
    assert checkpoint.compare(model, tmp_path / "cut").is_same


def test_a_layout_file_does_the_same(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text(reshard.to_json(engine()))
    planned = checkpoint.plan_conversion(model, tmp_path / "cut", layout=path, to="tp=4")
    assert any("not wholly, read by toy" in note for note in planned.notes)
    other = checkpoint.plan_conversion(model, tmp_path / "cut", layout=engine(2))
    assert other.resolved["layout"] != planned.resolved["layout"]


def test_a_part_that_no_rank_reads_is_kept(model: Path, tmp_path: Path) -> None:
    """A vocabulary of which an engine leaves out the end."""
    layout = engine(2)
    piece = SourcePiece(Box((0,), (2,)), "norm", View(0, (1,)))
    short = ParameterLayout.of("norm", (2,), "float32", [piece])
    ranks = [
        dataclasses.replace(layout.ranks[0], parameters={**layout.ranks[0].parameters}),
        *(
            dataclasses.replace(one, parameters={**one.parameters, "norm": short}, unread=())
            for one in layout.ranks[1:]
        ),
    ]
    layout = dataclasses.replace(layout, ranks=ranks)
    checkpoint.convert(model, tmp_path / "cut", layout=layout)
    cut = checkpoint.open(tmp_path / "cut")
    assert cut["norm"].layout.holders == (0, 1)
    assert checkpoint.compare(model, tmp_path / "cut").is_same


def test_layouts_of_other_checkpoints_are_refused(model: Path, tmp_path: Path) -> None:
    layout = engine()
    cases = {
        "are not in the layout": {k: v for k, v in layout.sources.items() if k != "norm"},
        "has 1 tensors .first: 'more'": {**layout.sources, "more": ("float32", (1,))},
        "'norm' has shape .3. in": {**layout.sources, "norm": ("float32", (4,))},
    }
    for message, sources in cases.items():
        ranks = [dataclasses.replace(one, unread=()) for one in layout.ranks]
        other = dataclasses.replace(layout, sources=sources, ranks=ranks)
        with pytest.raises(RecipeError, match=message):
            checkpoint.plan_conversion(model, tmp_path / "cut", layout=other)


def test_arguments_that_contradict_each_other(model: Path, tmp_path: Path) -> None:
    def plan(**arguments: object) -> object:
        return checkpoint.plan_conversion(model, tmp_path / "cut", **arguments)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="cannot go together with rules"):
        plan(layout=engine(), rules=["*=..."])
    with pytest.raises(UsageError, match="cannot go together with a recipe"):
        plan(layout=engine(), recipe="llama")
    with pytest.raises(UsageError, match="with a layout for tp=4"):
        plan(layout=engine(), to="tp=2")
    with pytest.raises(RecipeError, match="cannot read the layout file"):
        plan(layout=tmp_path / "missing.json")
    (tmp_path / "wrong.json").write_text(reshard.to_json(reshard.Layout.replicated((2,), 2)))
    with pytest.raises(RecipeError, match="has a Layout, no layout of an engine"):
        plan(layout=tmp_path / "wrong.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="is not JSON"):
        plan(layout=tmp_path / "binary.json")
