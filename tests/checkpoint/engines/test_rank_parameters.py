"""A rank's parameters in memory: what an engine's layout says, from any cut of the checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard import Box, DeviceMesh, View, checkpoint
from reshard.errors import RecipeError, ShardError, UsageError
from reshard.recipes import (
    Computed,
    Constant,
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)

TENSORS = {
    "gate": np.arange(32, dtype=np.float32).reshape(8, 4),
    "up": np.arange(32, 64, dtype=np.float32).reshape(8, 4),
    "decay": np.linspace(0, 1, 4, dtype=np.float32),
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
}


def rank(number: int) -> RankLayout:
    box = Box((0, 0), (4, 4))
    view = View(16 * number, (4, 1))
    pieces = [
        SourcePiece(box, "gate", view),
        # Transposed: column by column.
        SourcePiece(Box((4, 0), (8, 4)), "up", View(16 * number, (1, 4))),
    ]
    parameters = [
        ParameterLayout.of("gate_up", (8, 4), "float32", pieces),
        ParameterLayout.of(
            "A",
            (4,),
            "float32",
            computed=[Computed(Box((0,), (4,)), ("exp", "neg"), ("decay",), View(0, (1,)))],
        ),
        ParameterLayout.of(
            "embed",
            (4, 4),
            "float32",
            [SourcePiece(Box((0, 0), (3, 4)), "embed", View(0, (4, 1)))],
            constants=[Constant(Box((3, 0), (4, 4)), 0.5)],
        ),
        ParameterLayout.of("cache", (2,), "float32", unfilled=[Box((0,), (2,))]),
    ]
    named = {one.name: one for one in parameters}
    named["head"] = dataclasses.replace(named["embed"], name="head")
    return RankLayout(number, named, tied=(("embed", "head"),))


def engine() -> EngineLayout:
    sources = {name: (str(array.dtype), array.shape) for name, array in TENSORS.items()}
    return EngineLayout("toy", "1", DeviceMesh.of(tp=2), sources, (rank(0), rank(1)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def check(arrays: dict[str, Any], number: int) -> None:
    assert [*arrays] == ["gate_up", "A", "embed", "head"]
    rows = slice(4 * number, 4 * number + 4)
    assert (arrays["gate_up"][:4] == TENSORS["gate"][rows]).all()
    assert (arrays["gate_up"][4:] == TENSORS["up"][rows].T).all()
    assert np.allclose(arrays["A"], -np.exp(TENSORS["decay"]))
    assert (arrays["embed"][:3] == TENSORS["embed"]).all()
    assert (arrays["embed"][3] == 0.5).all()
    assert arrays["head"] is arrays["embed"]


@pytest.mark.parametrize("number", [0, 1])
def test_parameters_of_a_rank(model: Path, number: int) -> None:
    check(checkpoint.load_parameters(model, engine(), number), number)


def test_parameters_of_a_sharded_checkpoint(model: Path, tmp_path: Path) -> None:
    checkpoint.convert(
        model, tmp_path / "cut", to="tp=2", rules=["gate=tp, -", "up=-, tp", "*=..."]
    )
    (tmp_path / "layout.json").write_text(reshard.to_json(engine()))
    for number in (0, 1):
        arrays = checkpoint.load_parameters(tmp_path / "cut", tmp_path / "layout.json", number)
        check(arrays, number)


def test_some_parameters_into_given_arrays(model: Path) -> None:
    out = {"head": np.zeros((4, 4), np.float32), "gate_up": np.zeros((8, 4), np.float32)}
    found = checkpoint.load_parameters(model, engine(), 1, names=["gate_up", "head"], out=out)
    assert found["head"] is out["head"] and found["gate_up"] is out["gate_up"]
    assert (out["head"][:3] == TENSORS["embed"]).all()
    with pytest.raises(ShardError, match="no array for 'A'"):
        checkpoint.load_parameters(model, engine(), names=["A"], out=out)


def test_unavailable_parameters_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="rank 7 of a layout for tp=2"):
        checkpoint.load_parameters(model, engine(), 7)
    with pytest.raises(UsageError, match="rank 0 of toy has no parameter 'qkv'"):
        checkpoint.load_parameters(model, engine(), names=["qkv"])
    with pytest.raises(UsageError, match="does not fill all of 'cache'"):
        checkpoint.load_parameters(model, engine(), names=["cache"])
    save_file({**TENSORS, "gate": TENSORS["gate"][:4]}, model / "model.safetensors")
    with pytest.raises(RecipeError, match="of another checkpoint"):
        checkpoint.load_parameters(model, engine())
