"""What Accelerate saves under FSDP2, as files of ranks and as DCP, is read, and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs the environment of transformers", allow_module_level=True)

import torch

from live_processes import run_rank_programs
from reshard.checkpoint import convert, open_checkpoint, read_tensor

PROGRAM = Path(__file__).with_name("accelerate_process.py")


def run_ranks(action: str, folder: Path) -> None:
    run_rank_programs([sys.executable, PROGRAM, action, folder], 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved after a step."""
    folder = tmp_path_factory.mktemp("accelerate")
    run_ranks("save", folder)
    return folder


def test_files_of_ranks_have_the_weights_and_the_optimizer(saved: Path) -> None:
    expected = torch.load(saved / "whole.pt", weights_only=True)
    opened = open_checkpoint(saved / "files")
    assert opened.format == "rank-files"
    assert not opened.unread
    for name, tensor in expected["weights"].items():
        assert read_tensor(opened, name).tobytes() == tensor.numpy().tobytes(), name
    for name, tensor in expected["state"].items():
        found = read_tensor(opened, f"optimizer.state.{name}")
        assert found.tobytes() == tensor.numpy().tobytes(), name
    assert len(opened.tensors) == len(expected["weights"]) + len(expected["state"])


def test_accelerate_loads_what_was_converted(saved: Path) -> None:
    """Weights of ranks' files as DCP, and those of DCP as ranks' files."""
    rules = ["*=dim0, ..."]
    (saved / "converted dcp").mkdir()
    convert(
        saved / "files",
        saved / "converted dcp" / "pytorch_model_fsdp_0",
        to="dim0=2",
        rules=rules,
        format="torch-dcp",
        exclude=["optimizer.*"],
        rename=["*=model.*"],
    )
    made = saved / "converted files"
    convert(
        saved / "dcp" / "pytorch_model_fsdp_0",
        made,
        to="dim0=2",
        rules=rules,
        format="rank-files",
        rename=["model.*=*"],
    )
    for rank in range(2):
        name = f"model_world_size_2_rank_{rank}.pt"
        (made / name).rename(made / f"pytorch_model_fsdp_0_rank{rank}.bin")
    run_ranks("load", saved)
