"""Megatron-core 0.16.1 goes on training from what was converted, under another parallelism.

A run saves; what is converted from that is loaded by Megatron-core's own code on other ranks, and
saved again: every tensor must be the same. Then both runs take one more step, each on its ranks.
`torch_dist` is loaded by `dist_checkpointing.load` with the model's and the optimizer's own sharded
states. The folders of ranks are loaded as Megatron-LM does (`torch.load`, `load_state_dict`,
`load_parameter_state`), by the test's own small loader: `megatron.training` is not in the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "megatron":
    pytest.skip("needs Megatron-core", allow_module_level=True)

import numpy as np

from reshard import checkpoint

from .ranks import SMALL, WIDER, run_ranks

DENSE: dict[str, Any] = {**SMALL, "fp32": True}
EXPERTS: dict[str, Any] = {**DENSE, "experts": 4}
SCALED: dict[str, Any] = {**SMALL, "fp16": True, "loss_scale": 64.0}
LEGACY = {"save_format": "legacy"}
# What the run is, how it saves, what that is converted to, and the ranks that go on.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str, str, int, dict[str, int]]] = {
    "torch_dist, tp and pp gone": (
        *(4, {**DENSE, "sizes": {"tp": 2, "pp": 2}}, {}, "torch-dist", "full", 2, {}),
    ),
    "torch_dist, to stages": (
        *(2, {**DENSE, "sizes": {"tp": 2}}, {}, "torch-dist", "pp=2", 2, {"pp": 2}),
    ),
    "torch_dist, bf16": (
        *(2, {**SMALL, "sizes": {"tp": 2}}, {}, "torch-dist", "full", 2, {"tp": 2}),
    ),
    "torch_dist, experts apart": (2, EXPERTS, {}, "torch-dist", "ep=2", 2, {"ep": 2}),
    "torch_dist, experts together": (
        *(2, {**EXPERTS, "sizes": {"ep": 2}}, {}, "torch-dist", "full", 2, {}),
    ),
    "torch_dist, fp16": (
        *(2, {**SCALED, "sizes": {"tp": 2}}, {}, "torch-dist", "full", 2, {"tp": 2}),
    ),
    "to folders, fp16": (
        *(2, {**SCALED, "sizes": {"tp": 2}}, {}, "megatron-legacy", "tp=2", 2, {"tp": 2}),
    ),
    "to folders": (
        *(2, {**DENSE, "sizes": {"tp": 2}}, {}, "megatron-legacy", "pp=2", 2, {"pp": 2}),
    ),
    "to folders, virtual stages": (
        *(2, {**DENSE, "layers": 4, "sizes": {"tp": 2}}, {}, "megatron-legacy", "pp=2,vp=2"),
        *(2, {"pp": 2, "vp": 2}),
    ),
    "to folders, tied": (
        *(2, {**DENSE, **WIDER, "tied": True}, {}, "megatron-legacy", "pp=2", 2, {"pp": 2}),
    ),
    "to folders, experts": (2, EXPERTS, {}, "megatron-legacy", "ep=2", 2, {"ep": 2}),
    "folders to torch_dist": (
        *(2, {**DENSE, "sizes": {"pp": 2}}, LEGACY, "torch-dist", "full", 2, {"tp": 2}),
    ),
    "folders to folders, not distributed": (
        *(2, {**SMALL, "sizes": {"pp": 2}, "distributed_optimizer": False}, LEGACY),
        *("megatron-legacy", "tp=2", 2, {"tp": 2}),
    ),
}


def read_state(folder: Path) -> dict[str, np.ndarray]:
    opened = checkpoint.open(folder)
    return {name: np.asarray(checkpoint.read_tensor(opened, name)) for name in opened}


# After two steps without an overflow.
SCALER = {
    "optimizer.grad_scaler.scale": 64.0,
    "optimizer.grad_scaler.growth_tracker": 2,
    "optimizer.grad_scaler.hysteresis_tracker": 2,
}


def scaler_of(folder: Path) -> dict[str, Any]:
    values = checkpoint.open(folder).values
    return {name: value for name, value in values.items() if "scaler" in name}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(case: str, tmp_path: Path) -> None:
    world, job, how, target, to, other_world, sizes = CASES[case]
    source, converted = tmp_path / "source", tmp_path / "converted"
    run_ranks(world, {**job, **how, "steps": 2, "save": str(source)}, tmp_path)
    rules = ["*=..."] if target == "torch-dist" and to != "full" else []
    checkpoint.convert(source, converted, to=to, format=target, rules=rules)
    # 1. What Megatron-core loads is what it saved.
    load_format = "legacy" if target == "megatron-legacy" else "torch_dist"
    other = {**job, "sizes": sizes, "load": str(converted), "load_format": load_format}
    other |= {"loss_scale": 1024.0}
    run_ranks(other_world, {**other, "steps": 0, "save": str(tmp_path / "again")}, tmp_path)
    expected, found = read_state(source), read_state(tmp_path / "again")
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    scalers = [scaler_of(one) for one in (source, tmp_path / "again")]
    assert scalers[0] == scalers[1]
    assert scalers[0] == (SCALER if job.get("fp16") else {})
    # 2. The next step of both.
    own = {**job, "load": str(source), "load_format": how.get("save_format", "torch_dist")}
    if "vp" in sizes:
        # The interleaved schedule takes other steps here: Megatron-core's own load is compared.
        own, world = {**own, "sizes": sizes}, other_world
    run_ranks(world, {**own, "steps": 1, "save": str(tmp_path / "own_next")}, tmp_path)
    run_ranks(other_world, {**other, "steps": 1, "save": str(tmp_path / "next")}, tmp_path)
    expected, found = read_state(tmp_path / "own_next"), read_state(tmp_path / "next")
    is_alike = sizes == own.get("sizes", {}) and world == other_world
    for name, array in expected.items():
        if is_alike:
            assert found[name].tobytes() == array.tobytes(), name
        else:
            # Sums in another order: in 32 bits their last digits, in 16 bits those of weights.
            wide = 2e-5 if job.get("fp32") else 2e-2
            error = np.abs(found[name].astype("f8") - array.astype("f8")).max()
            assert error <= wide * max(1e-3, np.abs(array.astype("f8")).max()), name
