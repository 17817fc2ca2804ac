"""Optimizer states of Optax, as Orbax saved them, and as they are placed for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.formats.orbax.optax_states import name_states, place_states
from reshard.checkpoint.training.state import find_training_state
from reshard.dtypes import dtype


def test_adamw_behind_a_clipping(saved: Path) -> None:
    found = checkpoint.open(saved / "manager")
    parameters = ("dense.bias", "dense.kernel")
    keys = ("exp_avg", "exp_avg_sq", "step")
    state = {f"optimizer.state.{name}.{key}" for name in parameters for key in keys}
    assert {*found} == state | {"params.dense.bias", "params.dense.kernel", "step"}
    assert found.paths["optimizer.state.dense.bias.exp_avg"] == (
        *("opt_state", 1, 0, "mu", "dense", "bias"),
    )
    assert checkpoint.read_tensor(found, "optimizer.state.dense.bias.step") == 1
    training = find_training_state(found)
    assert training is not None
    assert dict(training.weights) == {name: f"params.{name}" for name in parameters}
    assert {*training.optimizer["dense.kernel"]} == {*keys}


def test_it_goes_back_to_where_it_was(saved: Path, tmp_path: Path) -> None:
    rules = ["*kernel*=a, -", "*=..."]
    checkpoint.convert(saved / "manager", tmp_path / "t", to="a=2", rules=rules, format="orbax")
    trees = [
        json.loads((folder / "_METADATA").read_text())["tree_metadata"]
        for folder in (saved / "manager" / "10" / "default", tmp_path / "t")
    ]
    assert trees[0].keys() == trees[1].keys()
    assert checkpoint.compare(saved / "manager", tmp_path / "t").is_same


def test_state_of_other_programs_is_placed_as_adamw(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    arrays = {"up.weight": tensor("float32", (4, 2), 1)}
    for key in ("exp_avg", "exp_avg_sq"):
        arrays[f"optimizer.state.up.weight.{key}"] = tensor("float32", (4, 2), 2)
    seven = np.array(7, dtype=np.float32).view(np.uint32)
    arrays["optimizer.state.up.weight.step"] = Tensor(dtype("float32"), seven)
    write_file(tmp_path / "s" / "model.safetensors", arrays)
    checkpoint.convert(tmp_path / "s", tmp_path / "t", to="full", format="orbax")
    tree = json.loads((tmp_path / "t" / "_METADATA").read_text())["tree_metadata"]
    assert {*tree} == {
        "('params', 'up', 'weight')",
        "('opt_state', '0', 'mu', 'up', 'weight')",
        "('opt_state', '0', 'nu', 'up', 'weight')",
        "('opt_state', '0', 'count')",
        "('opt_state', '1')",
        "('opt_state', '2')",
    }
    found = checkpoint.open(tmp_path / "t")
    for key in ("exp_avg", "exp_avg_sq", "step"):
        name = f"optimizer.state.up.weight.{key}"
        source = checkpoint.open(tmp_path / "s")
        read = checkpoint.read_tensor(found, name)
        assert np.array_equal(read, checkpoint.read_tensor(source, name))


def test_momentum_and_what_only_looks_like_it() -> None:
    weights = [("params", "a", "w"), ("params", "b", "w")]
    momentum = [("opt", 0, "trace", *path[1:]) for path in weights]
    found = name_states([*weights, *momentum])
    assert found[momentum[0]] == ("optimizer.state.a.w.momentum_buffer",)
    # A layer that is called `mu` has no `nu` beside it.
    assert name_states([("params", "mu", "w")]) == {("params", "mu", "w"): ("params.mu.w",)}
    other = ("params", "trace", "x")
    assert name_states([*weights, other])[other] == ("params.trace.x",)


def test_two_optimizers_of_one_parameter() -> None:
    paths = [("params", "w")]
    paths += [(opt, node, "w") for opt in ("one", "two") for node in ("mu", "nu")]  # type: ignore[misc]
    names = [name for found in name_states(paths).values() for name in found]
    assert len(names) == len(set(names)) == 5
    assert "two.mu.w" in names


def test_what_has_a_place_keeps_it() -> None:
    paths = {"optimizer.state.w.exp_avg": ("opt", 3, "mu", "w")}
    assert place_states(paths, paths) == ({}, [])
