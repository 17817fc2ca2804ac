"""Megatron-core's distributed optimizer and PyTorch's AdamW: what one saved goes on in the other.

Both are of one model, Megatron's, and compute with float32. Its sums over ranks of tensor
parallelism are rounded in another order than those of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch

from engines.megatron_core.ranks import SMALL, run_ranks
from live_processes import free_port
from reshard import checkpoint

STEPS = 2
TOLERANCE = 2e-6
JOB: dict[str, Any] = {**SMALL, "fp32": True}
SIZES = {"tp": 2}


def run_adamw(mode: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the next step."""
    job = folder.with_suffix(".json")
    job.write_text(json.dumps({**JOB, "first": STEPS}))
    program = Path(__file__).with_name("megatron_adamw_process.py")
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, program, mode, job, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return torch.load(f"{folder}.pt", weights_only=True)


def weights(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    opened = checkpoint.open(folder)
    return {name: checkpoint.read_tensor(opened, name) for name in names}


def expect_equal(found: dict[str, torch.Tensor], other: Path) -> None:
    for name, value in weights(other, [*found]).items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=TOLERANCE, err_msg=name)


def test_what_megatron_saved_goes_on_in_adamw(tmp_path: Path) -> None:
    saved, then, made = tmp_path / "saved", tmp_path / "then", tmp_path / "made"
    job = {**JOB, "sizes": SIZES}
    run_ranks(4, {**job, "steps": STEPS, "save": str(saved)}, tmp_path)
    run_ranks(4, {**job, "load": str(saved), "steps": 1, "save": str(then)}, tmp_path)
    checkpoint.convert(saved, made, to="full", format="torch-dcp", training="fsdp2")
    expect_equal(run_adamw("resume", made), then)


def test_what_adamw_saved_goes_on_in_megatron(tmp_path: Path) -> None:
    saved, then, made = tmp_path / "saved", tmp_path / "then", tmp_path / "made"
    found = run_adamw("train", saved)
    checkpoint.convert(saved, made, to="full", format="torch-dist")
    run_ranks(
        4, {**JOB, "sizes": SIZES, "load": str(made), "steps": 1, "save": str(then)}, tmp_path
    )
    expect_equal(found, then)
