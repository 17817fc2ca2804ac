"""Checkpoints in the names of Megatron FSDP, saved by PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.formats.megatron.recordings import state_of
from reshard import checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

from torch.distributed import checkpoint as dcp  # noqa: E402

LAYER = "decoder.layers.0.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"


def save(
    folder: Path, shape: tuple[int, int] = (8, 4), *, has_optimizer: bool = True
) -> dict[str, Any]:
    """Save a model as Megatron FSDP names it; the tensors by the names they should get."""
    up, norm = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape), torch.ones(4)
    halves = dict(zip("wv", (one.clone() for one in up.chunk(2)), strict=True))
    model = {f"module.{LAYER}_{half}": one for half, one in halves.items()}
    kept = {
        f"module.module.{LAYER}_{half}": {"exp_avg": one * 2, "exp_avg_sq": one * 3}
        for half, one in halves.items()
    } | {f"module.module.{NORM}": {"exp_avg": norm * 2, "exp_avg_sq": norm * 3}}
    meta = {name: {"lr": 0.1, "wd_mult": 0.0 if "norm" in name else 1.0} for name in kept}
    state = {
        "args": {"num_layers": 1},
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {**model, f"module.{NORM}": norm},
    }
    if has_optimizer:
        state["optimizer"] = {"state": kept, "param_to_group_meta": meta}
    folder.mkdir(parents=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    found = {LAYER: up, NORM: norm}
    for name, tensor in list(found.items() if has_optimizer else ()):
        found[f"optimizer.state.{name}.exp_avg"] = tensor * 2
        found[f"optimizer.state.{name}.exp_avg_sq"] = tensor * 3
    return found


def test_names_halves_and_groups(tmp_path: Path) -> None:
    expected = save(tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    opened = checkpoint.open(tmp_path)
    assert opened.format == "megatron-fsdp"
    found = state_of(opened)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.numpy()), name
    assert opened.values["iteration"] == 7
    assert opened.values["args.num_layers"] == 1
    assert opened.values["optimizer.param_groups"] == [
        {"lr": 0.1, "wd_mult": 1.0, "params": [LAYER]},
        {"lr": 0.1, "wd_mult": 0.0, "params": [NORM]},
    ]
    target = tmp_path / "target"
    checkpoint.convert(tmp_path, target, to="full", format="torch-dist")
    assert {*state_of(target)} == {*expected}


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_folder_of_another_name_is_known_by_its_contents(
    has_optimizer: bool, tmp_path: Path
) -> None:
    expected = save(tmp_path / "source", has_optimizer=has_optimizer)
    opened = checkpoint.open(tmp_path / "source")
    assert opened.format == "megatron-fsdp"
    target = tmp_path / "target"
    checkpoint.convert(tmp_path / "source", target, to="full", format="torch-dist")
    found = state_of(target)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.numpy()), name


def test_wrapped_models_of_other_programs_keep_their_names(tmp_path: Path) -> None:
    state = {"model": {"module.weight": torch.ones(3)}, "args": {"lr": 0.1}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "source"), no_dist=True)
    assert checkpoint.open(tmp_path / "source").format == "torch-dcp"
    assert [*checkpoint.open(tmp_path / "source").tensors] == ["model.module.weight"]


def test_other_checkpoints_in_folders_of_steps_are_left_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    state = {"weights": torch.ones(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    assert checkpoint.open(folder).format == "torch-dcp"
    assert [*checkpoint.open(folder).tensors] == ["weights"]
