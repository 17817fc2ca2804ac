"""A recipe is one file: what that takes, and what has it then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from cli.command_runs import run_here
from reshard.checkpoint import compare, convert
from reshard.recipes import assign, choose_recipe, library, shipped_recipes

FILE = """
name = "perceptron"
description = "Two linear layers"
model_types = ["perceptron"]
axes = ["tp"]

[[rules]]
pattern = "up.weight"
spec = "tp@heads{num_heads}, -"

[[rules]]
pattern = "down.weight"
spec = "-, tp"

[[rules]]
pattern = "norm"
spec = "-"
"""
CONFIG = {"model_type": "perceptron", "num_heads": 3}


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of shipped recipes, with one file more."""
    shipped = tmp_path / "shipped"
    shutil.copytree(str(library.SHIPPED), shipped)
    (shipped / "perceptron.toml").write_text(FILE)
    monkeypatch.setattr(library, "SHIPPED", shipped)


def test_it_is_found_by_name_and_by_model() -> None:
    assert "perceptron" in shipped_recipes()
    recipe = choose_recipe(CONFIG)
    assert recipe is not None
    assert recipe.name == "perceptron"
    shapes = {"up.weight": (6, 4), "down.weight": (4, 6), "norm": (4,)}
    found = assign(shapes, reshard.DeviceMesh.of(tp=2), (), recipe, CONFIG)
    assert [found.layouts[name].local_shape(1) for name in shapes] == [(2, 4), (4, 3), (4,)]


def test_the_command_shows_it() -> None:
    run = run_here("recipe", "show", "perceptron")
    assert run.code == 0, run.errors
    assert "Two linear layers" in run.output


def test_a_checkpoint_is_converted_by_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        "up.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
        "down.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    convert(tmp_path / "model", tmp_path / "cut", to="tp=2", recipe="auto")
    assert compare(tmp_path / "model", tmp_path / "cut").is_same
