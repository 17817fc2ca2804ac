"""The example model is small, always the same, and written only into an empty folder."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import reshard
from reshard.checkpoint import example_model
from reshard.checkpoint.example_model import write_example_model
from reshard.errors import RunError, UsageError

DIGEST = "4b6a0e4816a3157578b40aab33447cef06c9eaad2d9ff3607267997abc97c836"


def test_the_example_has_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    folder = write_example_model(tmp_path / "new" / "model")
    weights = folder / "model.safetensors"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights.name]
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == DIGEST


def test_the_example_is_what_safetensors_and_a_recipe_expect(tmp_path: Path) -> None:
    folder = write_example_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert abs(tensors["lm_head.weight"].std() - config["initializer_range"]) < 1e-3
    assert (tensors["model.norm.weight"] == 1).all()
    assert len({array.tobytes() for array in tensors.values() if array.ndim == 2}) == 16
    plan = reshard.checkpoint.plan_conversion(folder, tmp_path / "to", to="tp=4", recipe="auto")
    (note,) = plan.notes
    assert re.fullmatch(
        r"names and shapes checked: the record of Llama\w+ .* loads 21 tensors", note
    )
    part = reshard.checkpoint.load(folder, to="tp=4", recipe="auto", rank=3)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert np.array_equal(part[name], tensors[name][24:])


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    with pytest.raises(UsageError, match=r"not empty \(it has '\.hidden'\); give a new"):
        write_example_model(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        write_example_model(tmp_path / ".hidden")
    with pytest.raises(RunError, match="Not a directory"):
        write_example_model(tmp_path / ".hidden" / "model")
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_run_that_fails_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(example_model, "_values", fail)
    with pytest.raises(RunError, match="No space left"):
        write_example_model(tmp_path)
    assert not [*tmp_path.iterdir()]
