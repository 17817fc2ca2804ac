"""Tensors of CUDA devices between processes: `make gpu` runs this; it skips without a device."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from live_processes import expect_all_end_well, run_ranks

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_exchange_tensors_of_the_cpu_by_gloo(ranks: int) -> None:
    expect_all_end_well(run_ranks("gpu_process.py", ranks, "gloo", "cpu"))


@pytest.mark.skipif(not DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_a_device_each_exchange_by_nccl(ranks: int) -> None:
    if ranks > DEVICES:
        pytest.skip(f"{DEVICES} devices")
    expect_all_end_well(
        run_ranks("gpu_process.py", ranks, "cpu:gloo,cuda:nccl", "cuda", timeout_s=300)
    )


@pytest.mark.skipif(not DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("shared", ["", "never"])
def test_two_ranks_share_a_device_or_exchange_by_gloo(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_SHARED_MEMORY", shared)
    expect_all_end_well(run_ranks("gpu_process.py", 2, "gloo", "cuda", timeout_s=300))
