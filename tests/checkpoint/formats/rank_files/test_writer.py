"""Files of ranks that are written are what PyTorch loads on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.tensor import DTensor

from checkpoint.torch_checkpoints import standing_for
from live_processes import expect_all_end_well, run_ranks
from reshard.checkpoint import compare, convert, open_checkpoint
from reshard.errors import RecipeError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def training() -> tuple[Any, Any]:
    """A model after a step of AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def write_source(folder: Path) -> Path:
    """The same in canonical names."""
    model, optimizer = training()
    names = [name for name, _ in model.named_parameters()]
    state = {
        f"optimizer.state.{names[number]}.{key}": one
        for number, own in optimizer.state_dict()["state"].items()
        for key, one in own.items()
    }
    groups = [{**group, "params": names} for group in optimizer.state_dict()["param_groups"]]
    folder.mkdir()
    extra = {"optimizer.param_groups": groups, "lr_scheduler.last_epoch": 4}
    torch.save({**model.state_dict(), **state, **extra}, folder / "model.pt")
    return folder


RULES = ["*running*=...", "*num_batches*=...", "*.step=...", "*=fsdp, ..."]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_rank_loads_its_file(tmp_path: Path, ranks: int) -> None:
    source, target = write_source(tmp_path / "source"), tmp_path / "target"
    convert(source, target, to=f"fsdp={ranks}", rules=RULES, format="rank-files")
    model, optimizer = training()
    expected = {
        "model": model.state_dict(),
        "optim": {
            f"{number}.{key}": one
            for number, own in optimizer.state_dict()["state"].items()
            for key, one in own.items()
        },
    }
    for rank in range(ranks):
        with standing_for(rank, ranks):
            found = torch.load(target / f"model_world_size_{ranks}_rank_{rank}.pt")
            state = torch.load(target / f"optim_world_size_{ranks}_rank_{rank}.pt")
            extra = torch.load(target / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
            assert extra == {"lr_scheduler.last_epoch": 4}
            assert list(found) == list(expected["model"])
            assert state["param_groups"] == optimizer.state_dict()["param_groups"]
            moments = {
                f"{number}.{key}": one
                for number, own in state["state"].items()
                for key, one in own.items()
            }
            for kind, tensors in (("model", found), ("optim", moments)):
                assert set(tensors) == set(expected[kind])
                for name, tensor in tensors.items():
                    whole = expected[kind][name]
                    assert tensor.shape == whole.shape
                    if isinstance(tensor, DTensor):
                        size = -(-whole.shape[0] // ranks)
                        part = whole[rank * size : (rank + 1) * size]
                        assert torch.equal(tensor.to_local(), part), name
                        assert list(tensor.device_mesh.get_coordinate() or ()) == [rank]
                    else:
                        assert torch.equal(tensor, whole), name
    # What was written is read again under the same names.
    (target / "reshard.manifest.json").unlink()
    assert compare(source, target).is_same
    assert open_checkpoint(target).values == open_checkpoint(source).values


LOADING = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, folder, axis = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)) if axis == "fsdp" else None
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
name = f"{folder}/target/{{}}_world_size_2_rank_{rank}.pt"
model.load_state_dict(torch.load(name.format("model"), weights_only=True))
optimizer.load_state_dict(torch.load(name.format("optim"), weights_only=True))

def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()

found = {key: whole(value) for key, value in model.state_dict().items()}
state = {number: {key: whole(value) for key, value in own.items()}
    for number, own in optimizer.state_dict()["state"].items()}
# The state is used: one more step.
model(torch.ones(4, 5)).sum().backward()
optimizer.step()
if rank == 0:
    torch.save({"model": found, "state": state}, folder + "/found.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("axis", ["dim0", "fsdp"])
def test_fsdp2_resumes_from_files_of_ranks(tmp_path: Path, axis: str) -> None:
    """FSDP2's own mesh has no names: they are read and written as dim0 and so on."""
    source = write_source(tmp_path / "source")
    rules = [rule.replace("=fsdp", f"={axis}") for rule in RULES]
    convert(source, tmp_path / "target", to=f"{axis}=2", rules=rules, format="rank-files")
    script = tmp_path / "load.py"
    script.write_text(LOADING)
    expect_all_end_well(run_ranks(str(script), 2, tmp_path, axis))
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    model, optimizer = training()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor), name
    for number, own in optimizer.state_dict()["state"].items():
        for key, tensor in own.items():
            assert torch.equal(found["state"][number][key], tensor), (number, key)


def test_placements_over_two_axes_are_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    state = {
        "both": torch.randn(8, 6),
        "strided": torch.randn(16, 6),
        "copies": torch.randn(9, 4),
        "whole": torch.randn(3),
    }
    torch.save(state, source / "model.pt")
    rules = ["both=dp, tp", "strided=tp / dp, -", "copies=tp, -", "whole=..."]
    convert(source, tmp_path / "target", to="dp=2, tp=4", rules=rules, format="rank-files")
    for rank in range(8):
        with standing_for(rank, 8):
            found = torch.load(tmp_path / "target" / f"model_world_size_8_rank_{rank}.pt")
            dp, tp = divmod(rank, 4)
            assert found["both"].device_mesh.mesh_dim_names == ("dp", "tp")
            part = state["both"].chunk(2)[dp].tensor_split([2, 4, 6], 1)[tp]
            assert torch.equal(found["both"].to_local(), part)
            part = state["strided"].chunk(4)[tp].chunk(2)[dp]
            assert torch.equal(found["strided"].to_local(), part)
            part = state["copies"].split(3)[tp] if tp < 3 else state["copies"][:0]
            assert torch.equal(found["copies"].to_local(), part)
            assert torch.equal(found["whole"], state["whole"])
    (tmp_path / "target" / "reshard.manifest.json").unlink()
    assert compare(source, tmp_path / "target").is_same


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"to": "2"}, UsageError, "over a mesh by rules"),
        ({"to": "tp=2", "rules": ["*=..."]}, UsageError, "no tensor is cut"),
        ({"to": "tp=2", "rules": ["*=tp@balanced, ..."]}, RecipeError, "'w'"),
    ],
)
def test_shardings_that_dtensors_cannot_express_are_errors(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"w": torch.randn(5, 6)}, source / "model.pt")
    with pytest.raises(kind, match=message):
        convert(source, tmp_path / "target", format="rank-files", **arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_states_of_single_ranks_stay_whole(tmp_path: Path, ranks: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    states = {f"rank_{rank}.rng.cpu": torch.arange(5) + rank for rank in range(2)}
    steps = {f"rank_{rank}.step": 3 + rank for rank in range(2)}
    weights = {"up.weight": torch.randn(4, 3)}
    torch.save({**weights, **states, **steps}, source / "model.pt")
    # The rule is for all tensors, also for those that only one rank can have.
    convert(source, target, to=f"fsdp={ranks}", rules=["*=fsdp, ..."], format="rank-files")
    assert compare(source, target).is_same
    first = torch.load(target / f"extra_state_world_size_{ranks}_rank_0.pt", weights_only=True)
    assert torch.equal(first["rng.cpu"], states["rank_0.rng.cpu"])
    if ranks > 1:
        second = torch.load(target / f"extra_state_world_size_{ranks}_rank_1.pt", weights_only=True)
        assert torch.equal(second["rng.cpu"], states["rank_1.rng.cpu"])
        assert second["step"] == 4
    # Without the manifest too, and from there to both ranks again.
    (target / "reshard.manifest.json").unlink()
    assert compare(source, target).is_same
    again = tmp_path / "again"
    convert(target, again, to="fsdp=2", rules=["*=fsdp, ..."], format="rank-files")
    assert compare(source, again).is_same


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_of_single_ranks_keep_their_names(tmp_path: Path, ranks: int) -> None:
    """Also where every rank has the same, and a NaN is equal on all ranks."""
    values = {"rank_0.step": 3, "rank_1.step": 3, "rank_0.seed": 5, "loss": float("nan")}
    (tmp_path / "source").mkdir()
    torch.save({"w": torch.ones(4), **values}, tmp_path / "source" / "model.pt")
    target = tmp_path / "target"
    convert(tmp_path / "source", target, to=f"fsdp={ranks}", rules=["*=fsdp"], format="rank-files")
    assert repr(dict(sorted(open_checkpoint(target).values.items()))) == repr(
        dict(sorted(values.items()))
    )
    assert compare(tmp_path / "source", target).is_same


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_is_not_written_under_numbers(tmp_path: Path, ranks: int) -> None:
    """A reader gives it the names of parameters, which are not those of the manifest."""
    source, target = write_source(tmp_path / "source"), tmp_path / "target"
    options = {"to": f"fsdp={ranks}", "rules": RULES, "format": "rank-files"}
    with pytest.raises(UsageError, match=r"'optimizer.state.0.\w+' has the number of"):
        convert(source, target, training="torch", **options)
    assert not target.exists()
    convert(source, target, training="reshard", **options)
    assert "optimizer.state.0.weight.exp_avg" in open_checkpoint(target).tensors
