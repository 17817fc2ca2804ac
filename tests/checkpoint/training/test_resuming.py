"""Training goes on: saved by FSDP2 on some ranks, converted, resumed on others, one step further.

The next step of the resumed run is compared with that of the run that was saved: bit for bit where
the arithmetic is the same, which it is over 1, 2 and 4 ranks, whose means of equal gradients are
exact; over 3 ranks and with tensor parallelism sums are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoint.training import resuming_process as process
from live_processes import run_ranks
from reshard import checkpoint

SCRIPT = Path(__file__).with_name("resuming_process.py")
KINDS = ("adamw", "foreach", "fused", "amsgrad", "momentum")
RULES = ["*up.weight=fsdp, tp", "*=fsdp, ..."]


def run(mode: str, ranks: int, tp: int, folders: dict[str, Path]) -> None:
    cases = [f"{name}={folder}" for name, folder in folders.items()]
    for one in run_ranks(str(SCRIPT), ranks, mode, tp, *cases):
        assert one.code == 0, one.output


def expect_equal(saved: Path, resumed: Path, tolerance: float) -> None:
    before = torch.load(f"{saved}.pt", weights_only=True)
    after = torch.load(f"{resumed}.resumed.pt", weights_only=True)
    for name, value in before["now"].items():
        assert torch.equal(value, after["now"][name]), name
    for name, value in before["then"].items():
        assert not torch.equal(value, before["now"][name]), name
        assert torch.allclose(value, after["then"][name], rtol=0, atol=tolerance), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two ranks, by optimizer."""
    parent = tmp_path_factory.mktemp("saved")
    folders = {name: parent / name for name in KINDS}
    run("train", 2, 1, folders)
    return folders


def convert(
    saved: dict[str, Path], names: Sequence[str], parent: Path, to: str, **arguments: str
) -> dict[str, Path]:
    parent.mkdir(exist_ok=True)
    made = {name: parent / f"{name}-made" for name in names}
    for name, folder in made.items():
        checkpoint.convert(saved[name], folder, to=to, rules=RULES, format="torch-dcp", **arguments)
    return made


def test_every_optimizer_resumes_on_other_ranks(saved: dict[str, Path], tmp_path: Path) -> None:
    made = convert(saved, KINDS, tmp_path, "fsdp=3,tp=1")
    run("resume", 3, 1, made)
    for name in KINDS:
        expect_equal(saved[name], made[name], 1e-6)


def test_a_single_rank_resumes_bit_for_bit(saved: dict[str, Path], tmp_path: Path) -> None:
    made = convert(saved, KINDS, tmp_path, "fsdp=1,tp=1")
    run("resume", 1, 1, made)
    for name in KINDS:
        expect_equal(saved[name], made[name], 0)


def test_tensor_parallel_ranks_go_on(saved: dict[str, Path], tmp_path: Path) -> None:
    made = convert(saved, ["adamw", "momentum"], tmp_path, "fsdp=2,tp=2")
    run("resume", 4, 2, made)
    for name, folder in made.items():
        expect_equal(saved[name], folder, 1e-6)
    # And what they save goes on without it.
    there = {"adamw": tmp_path / "tp"}
    run("train", 4, 2, there)
    back = convert(there, ["adamw"], tmp_path / "back", "fsdp=2,tp=1")
    run("resume", 2, 1, back)
    expect_equal(there["adamw"], back["adamw"], 1e-6)


def test_state_resumes_through_the_names_of_other_programs(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    names = ["adamw", "amsgrad", "momentum"]
    there = convert(saved, names, tmp_path / "there", "fsdp=2,tp=1", training="reshard")
    made = convert(there, names, tmp_path / "back", "fsdp=4,tp=1", training="fsdp2")
    run("resume", 4, 1, made)
    for name in names:
        expect_equal(saved[name], made[name], 0)


def test_a_file_of_torch_save_resumes_on_ranks_and_back(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    """A program of one process, whose optimizer has numbers for parameters."""
    names = ["adamw", "amsgrad", "momentum"]
    there = {}
    for name in names:
        folder = tmp_path / name
        checkpoint.convert(saved[name], folder, to="full", format="torch-pickle", training="torch")
        (path,) = (one for one in folder.iterdir() if one.suffix != ".json")
        there[name] = path.rename(tmp_path / f"{name}.pt")
    for name, path in there.items():
        state = torch.load(path, weights_only=True)
        model = process.Model()
        optimizer = process.groups(model, name)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert (state["step"], state["scheduler"]) == (process.STEPS, {"last_epoch": 3})
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        now = {key: value.clone() for key, value in model.state_dict().items()}
        process.step(model, optimizer, process.STEPS)
        torch.save({"now": now, "then": model.state_dict()}, f"{path}.resumed.pt")
        expect_equal(saved[name], path, 0)
    made = convert(there, names, tmp_path / "back", "fsdp=2,tp=1", training="fsdp2")
    for name in names:
        (made[name] / "reshard.manifest.json").unlink()
    run("resume-state", 2, 1, made)
    for name in names:
        expect_equal(saved[name], made[name], 0)
