"""One rank of a job of four: models as people write them, and what is no model that can be read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import reshard
from rank_cases import run_cases
from refit_models import expect, refused, whole
from reshard.errors import ShardError
from reshard.recipes.library import load_recipe
from reshard.torch import by_recipe, refit


class Block(nn.Module):
    """Two projections that tensor parallelism cuts, a norm and an embedding that it leaves."""

    def __init__(self, rows: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)


def fully_sharded_and_tensor_parallel() -> None:
    """What FSDP2 alone cuts lies on `mesh["dp"]`, which is another mesh on every rank of `tp`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Block(rows=9)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for part in (model.embed, model.norm, model):
        fully_shard(part, mesh=mesh["dp"])
    spread = {name: tensor.device_mesh.ndim for name, tensor in model.state_dict().items()}
    expect(set(spread.values()) == {1, 2}, f"{spread}, so this is not what people write")
    engine = Block(rows=9)
    done = refit(model, engine)
    for name, value in engine.state_dict().items():
        expect(torch.equal(value, expected[name]), f"{name} of an engine that has all")
    moved = torch.tensor([done.received_bytes])
    dist.all_reduce(moved)
    # Nobody receives what it has: each rank lacks what is on the other of `dp`, or of both.
    most = 4 * sum(value.nbytes for value in expected.values())
    expect(moved.item() < most, f"{moved.item()} bytes moved")
    # The other way round: a model of this kind is filled, every part of it.
    filled = Block(rows=9)
    with torch.no_grad():
        for value in filled.parameters():
            value.zero_()
    parallelize_module(filled, mesh["tp"], plan)
    for part in (filled.embed, filled.norm, filled):
        fully_shard(part, mesh=mesh["dp"])
    for planning in ("local", "centralized"):
        refit(engine, filled, planning=planning)
        for name, value in filled.state_dict().items():
            assert isinstance(value, DTensor)
            expect(torch.equal(value.full_tensor(), expected[name]), f"{name} of one that is cut")


def tied_on_other_ranks() -> None:
    """An engine's two names of one tensor, with layouts, of which trainers have no part."""
    names = ("embed.weight", "head.weight")
    layout = reshard.spec(reshard.DeviceMesh.of(tp=2), "tp, -").layout((8, 4))
    value, rank = whole(3, 8, 4), dist.get_rank()
    ties = {"head.weight": "embed.weight"}
    for source_name in names:
        memory = torch.zeros(4, 4)
        target: dict[str, Any] = dict.fromkeys(names, (memory if rank > 1 else None, layout))
        source = {source_name: value.clone()} if rank < 2 else None
        done = refit(source, target, target_offset=2, ties=ties)
        if rank > 1:
            expect(torch.equal(memory, value[4 * (rank - 2) :][:4]), "tied, with layouts")
            expect(done.received_bytes == memory.nbytes, "a tensor of two names came twice")
    # One rank has the head in memory of its own.
    own = torch.zeros(4, 4)
    memory = torch.zeros(4, 4)
    target = dict.fromkeys(names, (memory if rank > 1 else None, layout))
    if rank == 3:
        target["head.weight"] = own, layout
    refit({"embed.weight": value} if rank < 2 else None, target, target_offset=2, ties=ties)
    if rank > 1:
        expect(torch.equal(memory, value[4 * (rank - 2) :][:4]), "tied on one rank")
    expect(rank != 3 or torch.equal(own, value[4:]), "a head of its own")


def tied_by_recipe() -> None:
    """The same of `by_recipe`, whose ranks without a part list all names."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    shapes = dict.fromkeys(names, (8, 4))
    value, rank = whole(5, 8, 4), dist.get_rank()
    memory = torch.zeros(4, 4)
    target = by_recipe(
        dict.fromkeys(names, memory) if rank > 1 else None,
        reshard.DeviceMesh.of(tp=2),
        shapes,
        load_recipe("llama"),
        first_rank=2,
    )
    expect(not target.problems, str(target.problems))
    source = {names[0]: value} if rank < 2 else None
    refit(source, target, ties={names[1]: names[0]})
    if rank > 1:
        expect(torch.equal(memory, value[4 * (rank - 2) :][:4]), "tied, by a recipe")
    # What the model says need not be said again, and another offset is refused.
    refit(source, target, ties={names[1]: names[0]}, target_offset=2)
    refused(
        lambda: refit(source, target, ties={names[1]: names[0]}, target_offset=1),
        ShardError,
        "an offset of 1, but by_recipe has first_rank=2",
    )


def main() -> None:
    run_cases([fully_sharded_and_tensor_parallel, tied_on_other_ranks, tied_by_recipe])


if __name__ == "__main__":
    main()
