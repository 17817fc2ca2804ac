"""What Megatron-core saved goes on in DeepSpeed, and back: by a recorded step.

Of Megatron's next step the gradients and the weights after it are recorded. DeepSpeed 0.19 loads
what was converted, on two ranks, and steps with these gradients; what it saves is converted back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("deepspeed")

import torch

from checkpoint.formats.megatron.held_model import HeldModel, make_adamw
from checkpoint.formats.megatron.recordings import expect_same, state_of, unpack
from engines.deepspeed import ranks as jobs
from engines.deepspeed.training import held, make_config, start_engine
from reshard import checkpoint

TOLERANCE = 1e-6


def resume(rank: int, folder: str, stage: int, dtype: str, job: str, universal: bool) -> None:
    said = torch.load(job, weights_only=True)
    model = HeldModel({name: tuple(one.shape) for name, one in said["gradients"].items()})
    config = make_config(stage, dtype, universal=universal)
    engine = start_engine(model, make_adamw(model, said["groups"]), config)
    path, _ = engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert path is not None
    engine.save_checkpoint(f"{folder}.again", tag="two")
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    loss = engine({name: one.to(kind) for name, one in said["gradients"].items()})
    engine.backward(loss)
    engine.step()
    then = {name: kept["master"] for name, kept in held(engine, ()).items()}
    if rank == 0:
        torch.save(then, f"{folder}.then.pt")


CASES = [
    ("llama", "deepspeed-zero1", 1),
    ("llama", "deepspeed-zero3", 3),
    ("mixtral", "deepspeed-zero1", 2),
    ("mixtral", "deepspeed-universal", 1),
]


@pytest.mark.parametrize(("name", "kind", "stage"), CASES)
def test_deepspeed_goes_on_from_megatron_and_back(
    name: str, kind: str, stage: int, tmp_path: Path
) -> None:
    recording = unpack(name, tmp_path)
    source, made = recording / "fully_reshardable", tmp_path / "made"
    # Partitions are read by their place: in the groups, and in their order, that Megatron has.
    groups = checkpoint.open(source).values["optimizer.param_groups"]
    gradients = state_of(recording / "then" / "gradients")
    job = tmp_path / "job.pt"
    torch.save(
        {
            "gradients": {key: torch.from_numpy(one.copy()) for key, one in gradients.items()},
            "groups": [one["params"] for one in groups],
        },
        job,
    )
    universal = kind == "deepspeed-universal"
    checkpoint.convert(source, made, to="full" if universal else "dp=2", format=kind)
    jobs.run_ranks(resume, 2, tmp_path / "ranks", str(made), stage, "fp32", str(job), universal)
    then = torch.load(f"{made}.then.pt", weights_only=True)
    before = state_of(source)
    for key, expected in state_of(recording / "then" / "next").items():
        assert not np.array_equal(then[key].numpy(), before[key]), key
        np.testing.assert_allclose(then[key].numpy(), expected, 0, TOLERANCE, err_msg=key)
    back = tmp_path / "back"
    checkpoint.convert(Path(f"{made}.again"), back, to="full", format="torch-dist")
    expect_same(state_of(back), before)
