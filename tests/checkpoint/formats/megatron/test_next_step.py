"""Megatron-core's distributed optimizer and PyTorch: training goes on, by what was recorded.

Megatron-core 0.16.1 took two steps on two ranks and saved; of its third step the gradients, after
clipping, and the weights are recorded as well. What it saved is converted, loaded by PyTorch into
FSDP2 and AdamW, and stepped with these gradients.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from live_processes import run_ranks
from reshard import checkpoint
from selection import keep_covering

SCRIPT = Path(__file__).with_name("next_step_process.py")
# In 32 bits AdamW of PyTorch and that of the run differ by how they round.
TOLERANCE = 1e-6


def settings_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The hyper-parameters of every parameter."""
    groups = checkpoint.open(folder).values["optimizer.param_groups"]
    keys = ("lr", "weight_decay", "betas", "eps", "step")
    return {name: {key: one[key] for key in keys} for one in groups for name in one["params"]}


def go_on(converted: Path, recording: Path, ranks: int) -> dict[str, np.ndarray]:
    """The weights that FSDP2 has after the recorded step."""
    groups = checkpoint.open(recording / "fully_reshardable").values["optimizer.param_groups"]
    gradients = state_of(recording / "then" / "gradients")
    job = converted.with_suffix(".job.pt")
    torch.save(
        {
            "gradients": {name: torch.from_numpy(one.copy()) for name, one in gradients.items()},
            "groups": [group["params"] for group in groups],
        },
        job,
    )
    for one in run_ranks(str(SCRIPT), ranks, converted, job):
        assert one.code == 0, one.output
    then = torch.load(f"{converted}.then.pt", weights_only=True)
    return {name: one.numpy() for name, one in then.items()}


def expect_next(found: dict[str, np.ndarray], recording: Path) -> None:
    """The weights are those of the recorded step, and not those before it."""
    before = state_of(recording / "fully_reshardable")
    then = state_of(recording / "then" / "next")
    for name, expected in then.items():
        master = before.get(f"optimizer.state.{name}.master", before[name])
        assert not np.array_equal(found[name], master), name
        if expected.dtype == np.float32:
            np.testing.assert_allclose(found[name], expected, 0, TOLERANCE, err_msg=name)
        else:
            # A value near the middle of two may be rounded to the other.
            wrong = np.abs(found[name].astype(expected.dtype).astype("f8") - expected.astype("f8"))
            spacing = np.abs(np.spacing(expected)).astype("f8")
            assert (wrong <= spacing).all(), name
            assert (wrong > 0).mean() <= 0.01, name


@pytest.mark.parametrize(
    ("name", "ranks"),
    keep_covering(
        1,
        itertools.product(("llama", "mixtral", "halves"), (2, 1)),
        "the same source over another number of ranks",
    ),
)
def test_fsdp2_goes_on_from_megatron_and_back(name: str, ranks: int, tmp_path: Path) -> None:
    recording = unpack(name, tmp_path)
    source, made = recording / "fully_reshardable", tmp_path / "made"
    to = {"to": f"fsdp={ranks}", "rules": ["*=fsdp, ..."]}
    checkpoint.convert(source, made, format="torch-dcp", training="fsdp2", **to)
    expect_next(go_on(made, recording, ranks), recording)
    # What FSDP2 saves of what it loaded is, converted back, what Megatron saved.
    back = tmp_path / "back"
    checkpoint.convert(Path(f"{made}.again"), back, to="full", format="torch-dist")
    found, expected = state_of(back), state_of(source)
    if name == "halves":
        # The weights in 16 bits are casts of those that FSDP2 has.
        expected = {
            key: expected.get(f"optimizer.state.{key}.master", one) for key, one in expected.items()
        }
    expect_same(found, expected)
    assert settings_of(back) == settings_of(source)


@pytest.mark.parametrize("through", ["deepspeed-zero1", "deepspeed-zero3", "deepspeed-universal"])
def test_training_goes_on_after_a_conversion_to_deepspeed_and_back(
    through: str, tmp_path: Path
) -> None:
    recording = unpack("llama", tmp_path)
    there, made = tmp_path / "there", tmp_path / "made"
    to = "full" if through == "deepspeed-universal" else "dp=2"
    checkpoint.convert(recording / "fully_reshardable", there, to=to, format=through)
    checkpoint.convert(there, made, to="full", format="torch-dcp", training="fsdp2")
    expect_next(go_on(made, recording, 1), recording)
