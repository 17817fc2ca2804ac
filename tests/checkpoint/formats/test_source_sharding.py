"""Experts on groups of ranks that no mesh of the files tells apart, in the formats that have them.

Four ranks, experts over two groups of two: each group shards its own experts over `fsdp`, under the
same names as the other's, and the mesh of their DTensors is the group alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from checkpoint import torch_checkpoints
from reshard import checkpoint
from reshard.errors import CoverageError, FormatError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXPERTS = torch.arange(8 * 3 * 2.0).reshape(8, 3, 2)
ROUTER = torch.arange(8 * 2.0).reshape(8, 2)
RULES = ["*experts.*=ep / fsdp, ..."]
# The group of each rank, where groups take every other rank, and where they are neighbours.
APART, TOGETHER = (0, 1, 0, 1), (0, 0, 1, 1)


def state_of(rank: int, groups: tuple[int, ...]) -> dict[str, Any]:
    """Return the state of a rank of four, as FSDP2 beside expert parallelism has it."""
    group = groups[rank]
    own = DeviceMesh("cpu", [other for other in range(4) if groups[other] == group])
    experts = EXPERTS[4 * group : 4 * group + 4].clone()
    everyone = torch_checkpoints.mesh_of(4)
    return {
        "moe.experts.w": torch_checkpoints.cut(experts, own, [Shard(0)]),
        "moe.router.weight": torch_checkpoints.cut(ROUTER, everyone, [Shard(0)]),
    }


def save_files(folder: Path, state: Callable[[int], Any], ranks: int = 4) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        with torch_checkpoints.standing_for(rank, ranks):
            name = f"model_world_size_{ranks}_rank_{rank}.pt"
            torch.save(state(rank), folder / name)
    return folder


def save_apart(folder: Path, state: Callable[[int], Any], ranks: int = 4) -> Path:
    for rank in range(ranks):
        with torch_checkpoints.standing_for(rank, ranks):
            dcp.save(state(rank), checkpoint_id=folder, use_collectives=False)
    return folder


WRITERS = {"rank-files": save_files, "torch-dcp": save_apart}


@pytest.mark.parametrize("groups", [APART, TOGETHER])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_rule_gives_the_axis_that_the_files_lack(
    tmp_path: Path, writer: str, groups: tuple[int, ...]
) -> None:
    """With the axes in either order; the files tell which ranks are of one group."""
    folder = WRITERS[writer](tmp_path / "ranks", lambda rank: state_of(rank, groups))
    with pytest.raises(CoverageError, match=r"moe\.experts\.w: rank") as caught:
        checkpoint.load(folder)
    mesh = "fsdp=2,ep=2" if groups is APART else "ep=2,fsdp=2"
    assert f"--source-mesh {mesh} --source-rule '*experts.*=ep / fsdp, ...'" in str(caught.value)
    for mesh in ("fsdp=2,ep=2", "ep=2,fsdp=2"):
        loaded = checkpoint.load(checkpoint.open(folder, mesh=mesh, rules=RULES))
        torch.testing.assert_close(torch.from_numpy(loaded["moe.experts.w"]), EXPERTS)
        torch.testing.assert_close(torch.from_numpy(loaded["moe.router.weight"]), ROUTER)


def test_experts_on_groups_that_replicate_and_shard_are_read(tmp_path: Path) -> None:
    """HSDP beside expert parallelism: the mesh of each group has two axes."""

    def state(rank: int) -> dict[str, Any]:
        own = DeviceMesh("cpu", torch.arange(8).reshape(4, 2)[:, rank % 2].reshape(2, 2))
        experts = EXPERTS[4 * (rank % 2) : 4 * (rank % 2) + 4].clone()
        return {"experts.w": torch_checkpoints.cut(experts, own, [Replicate(), Shard(0)])}

    folder = save_files(tmp_path / "ranks", state, 8)
    with pytest.raises(CoverageError, match="--source-mesh dp=2,fsdp=2,ep=2 --source-rule"):
        checkpoint.load(folder)
    for mesh in ("dp=2,fsdp=2,ep=2", "ep=2,dp=2,fsdp=2"):
        loaded = checkpoint.load(checkpoint.open(folder, mesh=mesh, rules=RULES))
        torch.testing.assert_close(torch.from_numpy(loaded["experts.w"]), EXPERTS)


def test_another_order_than_that_of_the_text_is_noted(tmp_path: Path) -> None:
    folder = save_files(tmp_path / "ranks", lambda rank: state_of(rank, APART))
    opened = checkpoint.open(folder, mesh="ep=2,fsdp=2", rules=RULES)
    assert "ranks of the source's mesh ep=2,fsdp=2 are 0, 2, 1, 3" in opened.notes[0]
    assert checkpoint.open(folder, mesh="fsdp=2,ep=2", rules=RULES).notes == ()


@pytest.mark.parametrize("writer", WRITERS)
def test_plain_experts_among_dtensors_are_read(tmp_path: Path, writer: str) -> None:
    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(2)
        return {
            "experts.w": EXPERTS[4 * rank : 4 * rank + 4].clone(),
            "router.weight": torch_checkpoints.cut(ROUTER, mesh, [Shard(0)]),
            "norm": torch.ones(3),
        }

    folder = WRITERS[writer](tmp_path / "ranks", state, 2)
    with pytest.raises(CoverageError, match=r"--source-mesh ep=2 --source-rule '\*experts"):
        checkpoint.load(folder)
    loaded = checkpoint.load(checkpoint.open(folder, mesh="ep=2", rules=["experts.*=ep, ..."]))
    torch.testing.assert_close(torch.from_numpy(loaded["experts.w"]), EXPERTS)
    assert loaded["norm"].shape == (3,)


def test_state_of_the_optimizer_follows_its_parameter(tmp_path: Path) -> None:
    folder = save_files(tmp_path / "ranks", lambda rank: state_of(rank, APART))
    for rank in range(4):
        with torch_checkpoints.standing_for(rank, 4):
            first, second = state_of(rank, APART).values()
            state = {0: {"exp_avg": -first, "step": torch.tensor(3.0)}, 1: {"exp_avg": -second}}
            groups = [{"lr": 0.1, "params": [0, 1]}]
            name = f"optim_world_size_4_rank_{rank}.pt"
            torch.save({"state": state, "param_groups": groups}, folder / name)
    loaded = checkpoint.load(checkpoint.open(folder, mesh="fsdp=2,ep=2", rules=RULES))
    found = torch.from_numpy(loaded["optimizer.state.moe.experts.w.exp_avg"])
    torch.testing.assert_close(found, -EXPERTS)


@pytest.mark.parametrize("writer", WRITERS)
def test_rules_that_the_files_contradict_are_refused(tmp_path: Path, writer: str) -> None:
    folder = WRITERS[writer](tmp_path / "ranks", lambda rank: state_of(rank, APART))
    with pytest.raises(FormatError, match=r"moe\.experts\.w.*correct the mesh"):
        checkpoint.open(folder, mesh="ep=2,fsdp=2", rules=["*experts.*=-, ep / fsdp, ..."])
    with pytest.raises(UsageError, match=r"no source rule matches .* for moe\.experts\.w"):
        checkpoint.open(folder, mesh="ep=2,fsdp=2", rules=["*router*=ep / fsdp, ..."])
    with pytest.raises(UsageError, match=r"give a mesh of 4"):
        checkpoint.open(folder, mesh="ep=2", rules=RULES)


def test_parts_that_pytorch_dropped_as_copies_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "together"
    torch_checkpoints.save(folder, 4, lambda rank: state_of(rank, APART))
    with pytest.raises(CoverageError, match="4 of 8 are lost") as caught:
        checkpoint.load(folder)
    assert "use_collectives=False" in str(caught.value)
    with pytest.raises(UsageError, match=r"stored by ranks .* no rule restores them"):
        checkpoint.open(folder, mesh="ep=2,fsdp=2", rules=RULES)
    allowed = checkpoint.open(folder, allow=["differing-copies"])
    assert checkpoint.load(allowed)["moe.experts.w"].shape == (4, 3, 2)


def test_a_router_of_as_many_rows_as_experts_is_ordinary(tmp_path: Path) -> None:
    folder = tmp_path / "together"

    def state(rank: int) -> dict[str, Any]:
        mesh = torch_checkpoints.mesh_of(2)
        return {
            "moe.experts.w": torch_checkpoints.cut(EXPERTS, mesh, [Shard(0)]),
            "moe.router.weight": torch_checkpoints.cut(ROUTER, mesh, [Shard(0)]),
            "moe.shared_expert_gate.weight": ROUTER[:1].clone(),
        }

    torch_checkpoints.save(folder, 2, state)
    torch.testing.assert_close(torch.from_numpy(checkpoint.load(folder)["moe.experts.w"]), EXPERTS)
