"""DeepSpeed and FSDP2: what one saved goes on in the other, and the next step is the same.

Both take steps of `torch.optim` on float32 weights of equal gradients: bit for bit over 1 and 2
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch

from checkpoint.training import resuming_process as fsdp2
from engines.deepspeed import ranks as jobs
from engines.deepspeed.training import held, make_config, start_engine
from reshard import checkpoint

RULES = ["*=fsdp, ..."]


def make_engine(stage: int, dtype: str, name: str, *, universal: bool = False) -> Any:
    torch.manual_seed(0)
    model = fsdp2.Model()
    config = make_config(stage, dtype, universal=universal, batch=4)
    return start_engine(model, fsdp2.groups(model, name), config)


def take_step(engine: Any, dtype: str, number: int) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    loss = engine(batch.to(kind)).square().mean()
    engine.backward(loss)
    engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The float32 weights."""
    return {name: kept["master"] for name, kept in held(engine, ()).items()}


def train(rank: int, stage: int, dtype: str, name: str, folder: str) -> None:
    engine = make_engine(stage, dtype, name)
    for number in range(fsdp2.STEPS):
        take_step(engine, dtype, number)
    engine.save_checkpoint(folder, tag="three")
    now = weights(engine)
    take_step(engine, dtype, fsdp2.STEPS)
    then = weights(engine)
    if rank == 0:
        torch.save({"now": now, "then": then}, f"{folder}.pt")


def resume_fsdp2(rank: int, name: str, folder: str, dtype: str) -> None:
    torch.distributed.init_process_group("gloo")
    fsdp2.resume(1, name, folder, has_values=False, is_mixed=dtype == "bf16")


def expect_equal(saved: Path, resumed: str, tolerance: float) -> None:
    before = torch.load(f"{saved}.pt", weights_only=True)
    after = torch.load(resumed, weights_only=True)
    for name, value in before["now"].items():
        assert torch.equal(value, after["now"][name]), name
    for name, value in before["then"].items():
        assert not torch.equal(value, before["now"][name]), name
        assert torch.allclose(value, after["then"][name], rtol=0, atol=tolerance), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", "fp32"), ("momentum", "fp32"), ("adamw", "bf16")]
)
def test_what_deepspeed_saved_goes_on_in_fsdp2(
    tmp_path: Path, stage: int, name: str, dtype: str
) -> None:
    saved, made = tmp_path / "saved", tmp_path / "made"
    jobs.run_ranks(train, 2, tmp_path / "train", stage, dtype, name, str(saved))
    for ranks, tolerance in ((1, 0.0), (3, 1e-6)):
        made = tmp_path / f"made{ranks}"
        checkpoint.convert(
            saved, made, to=f"fsdp={ranks}", rules=RULES, format="torch-dcp", training="fsdp2"
        )
        jobs.run_ranks(resume_fsdp2, ranks, tmp_path / f"resume{ranks}", name, str(made), dtype)
        expect_equal(saved, f"{made}.resumed.pt", tolerance)


def train_fsdp2(rank: int, name: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    fsdp2.train(1, name, folder)


def resume(rank: int, stage: int, name: str, folder: str, universal: bool) -> None:
    engine = make_engine(stage, "fp32", name, universal=universal)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    now = weights(engine)
    take_step(engine, "fp32", fsdp2.STEPS)
    then = weights(engine)
    if rank == 0:
        torch.save({"now": now, "then": then}, f"{folder}.resumed.pt")


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_what_fsdp2_saved_goes_on_in_deepspeed(tmp_path: Path, name: str) -> None:
    saved = tmp_path / "saved"
    jobs.run_ranks(train_fsdp2, 2, tmp_path / "train", name, str(saved))
    kinds = [("deepspeed-zero1", 1), ("deepspeed-zero1", 2), ("deepspeed-zero3", 3)]
    for number, (kind, stage) in enumerate(kinds):
        made = tmp_path / f"made{number}"
        checkpoint.convert(saved, made, to="dp=2", format=kind)
        jobs.run_ranks(resume, 2, tmp_path / f"resume{number}", stage, name, str(made), False)
        expect_equal(saved, f"{made}.resumed.pt", 0)
    # Other programs' universal checkpoints have Adam's state alone.
    if name == "adamw":
        made = tmp_path / "universal"
        checkpoint.convert(saved, made, to="full", format="deepspeed-universal")
        jobs.run_ranks(resume, 2, tmp_path / "resumed", 1, name, str(made), True)
        expect_equal(saved, f"{made}.resumed.pt", 0)
