"""Bare files of ranks that PyTorch saved are the whole model, with its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint.torch_checkpoints import cut, mesh_of, standing_for
from live_processes import expect_all_end_well, run_ranks
from reshard.checkpoint import compare, convert, open_checkpoint, read_tensor
from reshard.errors import CheckpointError, CoverageError, FormatError, ReshardError
from selection import keep_spread

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WHOLE = torch.arange(11 * 6.0).reshape(11, 6)


def save(
    folder: Path, ranks: int, state: Callable[[int], Any], name: str = "rank{rank}.pt"
) -> None:
    """The files of ranks, each saved by a process that stands for one."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        with standing_for(rank, ranks):
            torch.save(state(rank), folder / name.format(rank=rank, ranks=ranks))


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def build_model() -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_files_of_fsdp2_ranks_are_the_model(tmp_path: Path, ranks: int) -> None:
    """FSDP2's own shards, uneven and empty ones too, with the state of AdamW by numbers."""
    expected = build_model()
    gradients = {name: torch.randn_like(one) for name, one in expected.named_parameters()}
    # What all ranks hold, one part behind the other.
    held: dict[Any, list[Any]] = {}

    def hold(key: Any, one: Any) -> None:
        if isinstance(one, DTensor):
            held.setdefault(key, []).append(one.to_local().detach().clone())
        else:
            held[key] = [one.clone()]

    for rank in range(ranks):
        with standing_for(rank, ranks):
            model = build_model()
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
            for name, parameter in model.named_parameters():
                size = -(-parameter.shape[0] // ranks)
                part = gradients[name][rank * size : (rank + 1) * size].clone()
                parameter.grad = DTensor.from_local(
                    part,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            optimizer.step()
            for name, one in model.state_dict().items():
                hold(name, one)
            for number, state in optimizer.state_dict()["state"].items():
                for key, one in state.items():
                    hold((number, key), one)
            extra = {"lr_scheduler": {"last_epoch": 4}, "rng": {"cpu": torch.tensor([rank])}}
            states = (
                ("model", model.state_dict()),
                ("optim", optimizer.state_dict()),
                ("extra_state", extra),
            )
            for kind, state in states:
                torch.save(state, tmp_path / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    whole = {key: torch.cat(found) if found[0].ndim else found[0] for key, found in held.items()}
    opened = open_checkpoint(tmp_path)
    assert opened.format == "rank-files"
    names = [name for name, _ in expected.named_parameters()]
    for key, tensor in whole.items():
        name = key if isinstance(key, str) else f"optimizer.state.{names[key[0]]}.{key[1]}"
        assert opened[name].shape == tuple(tensor.shape)
        assert read_tensor(opened, name).tobytes() == bits(tensor), name
    assert len(opened) == len(whole) + ranks
    assert opened.values["optimizer.param_groups"][0]["params"] == names
    assert opened.values["optimizer.param_groups"][0]["lr"] == 0.5
    assert opened.values["lr_scheduler.last_epoch"] == 4
    for rank in range(ranks):
        assert read_tensor(opened, f"rank_{rank}.rng.cpu").tolist() == [rank]
    target = tmp_path.parent / f"{tmp_path.name}-whole"
    convert(tmp_path, target, to="full", format="torch-pickle")
    found = torch.load(target / "pytorch_model.bin", weights_only=True)
    for name in expected.state_dict():
        assert torch.equal(found[name], whole[name])
    assert compare(tmp_path, target).is_same


def test_meshes_and_placements_are_read(tmp_path: Path) -> None:
    """Two axes, replicas, strides, a part of a mesh, a flattened one, and plain tensors."""

    def state(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        rows = torch.arange(96.0).reshape(16, 6)
        here = rows[[*range((rank % 4) * 4, (rank % 4) * 4 + 4)]].chunk(2)[rank // 4].clone()
        return {
            "both": cut(WHOLE, mesh, [Shard(0), Shard(1)]),
            "copies": cut(WHOLE, mesh, [Replicate(), Shard(0)]),
            "part": cut(WHOLE, mesh["tp"], [Shard(0)]),
            "other part": cut(WHOLE, mesh["dp"], [Shard(1)]),
            "strided": DTensor.from_local(
                here,
                mesh,
                [_StridedShard(0, split_factor=4), Shard(0)],
                run_check=False,
                shape=torch.Size([16, 6]),
                stride=(6, 1),
            ),
            "flat": cut(WHOLE, mesh._flatten("all"), [Shard(0)]),
            "plain": WHOLE,
            "nested": [{"w": cut(WHOLE.t().contiguous().t(), mesh, [Shard(0), Replicate()])}],
            "scalar": cut(torch.tensor(3.5), mesh, [Replicate(), Replicate()]),
            "step": 7,
        }

    source = tmp_path / "source"
    save(source, 8, state)
    opened = open_checkpoint(source)
    for name in ("both", "copies", "part", "other part", "flat", "plain", "nested.0.w"):
        assert read_tensor(opened, name).tobytes() == bits(WHOLE), name
    assert read_tensor(opened, "strided").tobytes() == bits(torch.arange(96.0).reshape(16, 6))
    assert read_tensor(opened, "scalar").tobytes() == bits(torch.tensor(3.5))
    assert opened.values == {"step": 7}
    assert opened["both"].spec == "dp, tp"
    convert(source, tmp_path / "cut", to="tp=3", rules=["[cb]o*=-, tp", "*=..."])
    assert compare(source, tmp_path / "cut").is_same


def test_a_mesh_may_have_its_ranks_in_another_order(tmp_path: Path) -> None:
    order = [2, 0, 3, 1]

    def state(rank: int) -> Any:
        mesh = DeviceMesh("cpu", torch.tensor(order))
        part = WHOLE.chunk(4)[order.index(rank)].clone()
        size = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        return {"w": DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **size)}

    save(tmp_path, 4, state, "mp_rank_{rank:02d}.pt")
    assert read_tensor(open_checkpoint(tmp_path), "w").tobytes() == bits(WHOLE)


REAL = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp import ShardedStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig
from torch.distributed.fsdp import fully_shard

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))

def train(model, optimizer):
    torch.manual_seed(1)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()

one = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(one.parameters())
train(one, optimizer)
os.makedirs(f"{folder}/local", exist_ok=True)
with FSDP.state_dict_type(one, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(True)):
    torch.save(one.state_dict(), f"{folder}/local/pytorch_model_fsdp_rank{rank}.bin")
configs = ShardedStateDictConfig(True), ShardedOptimStateDictConfig(True)
with FSDP.state_dict_type(one, StateDictType.SHARDED_STATE_DICT, *configs):
    torch.save(one.state_dict(), f"{folder}/fsdp1/pytorch_model_fsdp_rank{rank}.bin")
    state = FSDP.optim_state_dict(one, optimizer)
    torch.save(state, f"{folder}/fsdp1/optimizer_fsdp_rank{rank}.bin")
two = build()
for layer in two:
    fully_shard(layer)
fully_shard(two)
optimizer = torch.optim.AdamW(two.parameters())
train(two, optimizer)
torch.save(two.state_dict(), f"{folder}/fsdp2/model_world_size_2_rank_{rank}.pt")
torch.save(optimizer.state_dict(), f"{folder}/fsdp2/optim_world_size_2_rank_{rank}.pt")
whole = {name: one.full_tensor() for name, one in two.state_dict().items()}
state = {name: {key: (value.full_tensor() if hasattr(value, "full_tensor") else value)
    for key, value in optimizer.state[p].items()} for name, p in two.named_parameters()}
if rank == 0:
    torch.save({"model": whole, "state": state}, f"{folder}/whole.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes saved that trained a model under FSDP1 and under FSDP2."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "fsdp1").mkdir()
    (folder / "fsdp2").mkdir()
    script = folder / "train.py"
    script.write_text(REAL)
    expect_all_end_well(run_ranks(str(script), 2, folder))
    return folder


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_files_of_ranks_of_fsdp_are_read(trained: Path, kind: str) -> None:
    expected = torch.load(trained / "whole.pt", weights_only=True)
    opened = open_checkpoint(trained / kind)
    for name, tensor in expected["model"].items():
        assert read_tensor(opened, name).tobytes() == bits(tensor), name
    for name, state in expected["state"].items():
        for key, tensor in state.items():
            found = read_tensor(opened, f"optimizer.state.{name}.{key}")
            assert found.tobytes() == bits(tensor), (name, key)


def test_local_state_of_fsdp1_is_an_error(trained: Path) -> None:
    with pytest.raises(FormatError, match=r"FSDP1 \(LOCAL_STATE_DICT\): '.*_flat_param' is many"):
        open_checkpoint(trained / "local")


def plain_dtensor(rank: int) -> Any:
    return {"w": cut(WHOLE, mesh_of(4), [Shard(0)])}


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 4, plain_dtensor)
    (tmp_path / "rank2.pt").unlink()
    with pytest.raises(CheckpointError, match="none of rank 2"):
        open_checkpoint(tmp_path)
    (tmp_path / "rank3.pt").unlink()
    with pytest.raises(FormatError, match=r"'w'.*cut over 4 ranks.*files of 2"):
        open_checkpoint(tmp_path)


def test_shards_that_leave_a_hole_are_an_error(tmp_path: Path) -> None:
    # Every file says that it is one of two, and the mesh of each is of itself alone.
    def state(rank: int) -> Any:
        mesh = DeviceMesh("cpu", torch.tensor([rank]))
        half = WHOLE[:5].clone()
        size = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        return {"w": DTensor.from_local(half, mesh, [Shard(0)], run_check=False, **size)}

    save(tmp_path, 2, state)
    with pytest.raises((FormatError, CoverageError), match="'w'"):
        open_checkpoint(tmp_path)


def test_files_of_two_saves_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 4, plain_dtensor, "model_world_size_4_rank_{rank}.pt")
    save(tmp_path, 2, lambda rank: {"w": WHOLE}, "model_world_size_2_rank_{rank}.pt")
    with pytest.raises(CheckpointError, match="of 2 and of 4 ranks"):
        open_checkpoint(tmp_path)


def test_parts_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    def wrong_shape(rank: int) -> Any:
        part = torch.ones(5 if rank == 1 else 3, 6)
        size = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        return {"w": DTensor.from_local(part, mesh_of(4), [Shard(0)], run_check=False, **size)}

    save(tmp_path, 4, wrong_shape)
    with pytest.raises(FormatError, match=r"'w'.*rank 1 has \[5, 6\].*expected \[3, 6\]"):
        open_checkpoint(tmp_path)

    def partial(rank: int) -> Any:
        return {"w": DTensor.from_local(WHOLE, mesh_of(4), [Partial()], run_check=False)}

    save(tmp_path, 4, partial)
    with pytest.raises(FormatError, match="'w' is partial"):
        open_checkpoint(tmp_path)

    def other_type(rank: int) -> Any:
        return {"w": cut(WHOLE.double() if rank == 2 else WHOLE, mesh_of(4), [Shard(0)])}

    save(tmp_path, 4, other_type)
    with pytest.raises(FormatError, match=r"'w' is float32.*but float64.*rank2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("step", keep_spread(1, range(3), "other bytes of the same file"))
def test_changed_bytes_are_an_error_or_a_checkpoint(tmp_path: Path, step: int) -> None:
    source = tmp_path / "source"
    save(source, 2, lambda rank: {"w": cut(WHOLE, mesh_of(2), [Shard(0)])})
    content = (source / "rank1.pt").read_bytes()
    for at in range(step, len(content), 61):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        (source / "rank1.pt").write_bytes(changed)
        with contextlib.suppress(ReshardError):
            opened = open_checkpoint(source)
            if opened.size_bytes < 10_000:
                convert(source, tmp_path / "target", to="full", overwrite=True)
