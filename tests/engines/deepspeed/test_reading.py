"""What DeepSpeed's ranks hold is what is read of the files they save; so is what its tools make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "deepspeed":
    pytest.skip("needs DeepSpeed", allow_module_level=True)

import torch

import reshard
from engines.deepspeed.cases import PARALLEL, SAVED
from engines.deepspeed.parallel_training import ParallelCase, save_parallel
from engines.deepspeed.ranks import run_ranks
from engines.deepspeed.training import Case, train_and_save


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_state_and_merged_weights(case: Case, tmp_path: Path) -> None:
    """Bit for bit: float32 weights, moments, and what `zero_to_fp32` makes."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = tmp_path / case.name
    run_ranks(train_and_save, case.ranks, tmp_path / "log", case, folder, 2, 0)
    checkpoint = reshard.checkpoint.open(folder)

    def read(name: str) -> bytes:
        return reshard.checkpoint.read_tensor(checkpoint, name).tobytes()

    def content(value: torch.Tensor) -> bytes:
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    for name, states in torch.load(folder / "held.pt")["saved"].items():
        for key, value in states.items():
            assert read(f"optimizer.state.{name}.{key}") == content(value), (name, key)
    if case.stage == 0 or "data_types" in case.config:
        return
    shared = checkpoint.values.get("shared_params", {})
    for name, value in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items():
        master = f"optimizer.state.{shared.get(name, name)}.master"
        if master in checkpoint.tensors:
            assert read(master) == content(value), name


@pytest.mark.parametrize("case", PARALLEL, ids=lambda case: case.name)
def test_experts_stages_and_parts(case: ParallelCase, tmp_path: Path) -> None:
    """What every rank held of experts, stages and tensors, under the names of the whole model."""
    folder = tmp_path / case.name
    run_ranks(save_parallel, case.ranks, tmp_path / "log", case, folder, 2)
    checkpoint = reshard.checkpoint.open(folder)
    for name, states in torch.load(folder / "held.pt")["saved"].items():
        # Under stage 3 weights are the float32 ones alone.
        assert (name in checkpoint.tensors) == (case.stage != 3)
        for key, value in states.items():
            found = reshard.checkpoint.read_tensor(checkpoint, f"optimizer.state.{name}.{key}")
            assert found.tobytes() == value.contiguous().numpy().tobytes(), (name, key)
