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
from reshard.layout import Layout
from reshard.recipes.library import load_recipe
from reshard.recipes.naming import Fusion
from reshard.torch import MegatronModel, Refit, by_recipe, refit


class Block(nn.Module):
    """Two projections that tensor parallelism cuts, a norm and an embedding that it leaves."""

    def __init__(self, rows: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)


def norms_sharded_on_part_of_the_mesh_are_complete_copies() -> None:
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


def tied_names_on_other_ranks_are_filled() -> None:
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


def tied_names_of_recipes_are_filled() -> None:
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


def plain_tensors_that_are_parts_are_refused() -> None:
    """Plain tensors that are parts, and not copies, are told apart or refused."""
    rank, value = dist.get_rank(), whole(7, 8, 4)
    target = {"w": torch.zeros(8, 4)} if rank > 1 else None
    part = value[4 * rank : 4 * rank + 4].clone() if rank < 2 else None
    source = None if part is None else {"w": part}
    whole_target = None if target is None else {"w": torch.zeros(4, 4)}
    words = "w: a plain tensor of the source is whole on every rank, but ranks 0 and 1 have"
    for planning in ("local", "centralized"):
        refused(lambda p=planning: refit(source, whole_target, planning=p), ShardError, words)
    # Who says that either will do gets one of them.
    refit(source, whole_target, check_replicas=False)
    if whole_target is not None:
        halves = value[:4], value[4:]
        expect(any(torch.equal(whole_target["w"], half) for half in halves), "neither of both")
    # A part that says so itself.
    if part is not None:
        part = nn.Parameter(part)
        part.tensor_model_parallel, part.partition_dim = True, 0
        source = {"w": part}
    words = "w: a part of a tensor, by Megatron's tensor_model_parallel=True"
    refused(lambda: refit(source, whole_target, check_replicas=False), ShardError, words)


def replicas_that_differ_in_an_element_are_found() -> None:
    """Copies that differ in one element are found on request, on either side."""
    rank, value = dist.get_rank(), whole(7, 64, 64)
    layout = Layout.replicated((64, 64), 4)
    source, target = value.clone(), torch.zeros(64, 64)
    done = Refit.prepare({"w": (source, layout)}, {"w": (target, layout)})
    done.run()
    done.compare_replicas()
    for side, tensor in (("source", source), ("target", target)):
        if rank == 2:
            tensor[33, 31] += 1
        refused(
            done.compare_replicas,
            ShardError,
            f"w of the {side}, part (0, 0): rank 0 and rank 2 differ",
        )
        tensor.copy_(value)
    done.compare_replicas()
    # Parts that nobody else has are no replicas.
    rows = reshard.spec(reshard.DeviceMesh.of(x=4), "x, -").layout((8, 4))
    Refit.prepare(
        {"w": (whole(rank, 2, 4), rows), "n": torch.tensor(1.0)},
        {"w": (torch.zeros(2, 4), rows), "n": torch.tensor(0.0)},
    ).compare_replicas()


def targets_that_share_elements_are_refused() -> None:
    """Targets that share elements are refused; those that lie between one another are not."""
    memory = torch.zeros(8, 8)
    source = {"a": whole(1, 8, 4), "b": whole(2, 8, 4)}
    refit(source, {"a": memory[:, :4], "b": memory[:, 4:]})
    expect(torch.equal(memory[:, 4:], source["b"]), "columns of one matrix")
    memory.zero_()
    overlap = {"a": memory[:, :4], "b": memory[:, 3:7]}
    words = "b and a of the target share some of their memory"
    refused(lambda: refit(source, overlap), ShardError, words)
    flat = torch.zeros(63)
    overlap = {"a": flat[:32].view(8, 4), "b": flat[31:].view(8, 4)}
    if dist.get_rank():
        overlap = {name: torch.zeros(8, 4) for name in source}
    refused(lambda: refit(source, overlap), ShardError, f"rank 0: {words}")
    expect(not memory.any(), "something was written")


def plans_list_the_moves_that_run() -> None:
    """Who sends what to whom, before anything runs; it is what runs."""
    rows = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((8, 4))
    columns = reshard.spec(reshard.DeviceMesh.of(x=2), "-, x").layout((8, 4))
    rank, value = dist.get_rank(), whole(4, 8, 4)
    source = {"w": (value[4 * rank :][:4].clone() if rank < 2 else None, rows)}
    target = {"w": (torch.zeros(8, 2) if rank > 1 else None, columns)}
    for planning in ("local", "centralized"):
        done = Refit.prepare(source, target, target_offset=2, planning=planning)
        expected = {
            (sender, 2 + half): ((4 * sender, 4 * sender + 4), (2 * half, 2 * half + 2))
            for sender in range(2)
            for half in range(2)
        }
        found = {(one.sender, one.receiver): one.slices for one in done.plan}
        if planning == "centralized" and rank:
            expected = {pair: box for pair, box in expected.items() if rank in pair}
        expect(found == expected, f"{found}")
        sent = sum(one.size_bytes for one in done.plan.sent_by(rank))
        received = sum(one.size_bytes for one in done.plan.received_by(rank))
        expect((sent, received) == (done.sent_bytes, done.received_bytes), f"{sent}, {received}")
        if planning == "local":
            expect("rank 0 -> 3: w[0:4, 2:4], float32, 32 B" in str(done.plan), str(done.plan))
    # What stays is a move too; pieces of fused tensors are where they are in them.
    fused = Fusion(("a", "b"), (4, 2), 2)
    parts = {"a": whole(1, 8, 4), "b": whole(2, 4, 4)} if rank == 1 else None
    qkv = {"ab": torch.zeros(12, 4)} if rank < 2 else None
    done = Refit.prepare(parts, qkv, target_names={"ab": fused})
    to_own = [one.slices[0] for one in done.plan if one.sender == one.receiver]
    expect(sorted(to_own) == [(0, 4), (4, 6), (6, 10), (10, 12)], f"{to_own}")


def groups_may_be_lists_of_ranks() -> None:
    """Megatron's groups as lists; one that this rank is not in is told."""
    rank, value = dist.get_rank(), whole(9, 8, 4)
    module = nn.Module()
    module.weight = nn.Parameter(value[4 * (rank % 2) :][:4].clone())
    module.weight.tensor_model_parallel = True
    module.weight.partition_dim, module.weight.partition_stride = 0, 1
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = {"tp": pair, "dp": [rank % 2, 2 + rank % 2], "pp": [rank]}
    target = {"weight": torch.zeros(8, 4)}
    refit(MegatronModel(module, groups=groups), target)
    expect(torch.equal(target["weight"], value), "by lists of ranks")
    wrong = MegatronModel(module, groups={**groups, "tp": [4, 5]})
    words = "[4, 5]; give the torch process group that this rank is in, or a list of its ranks"
    refused(lambda: refit(wrong, target), ShardError, words)


def main() -> None:
    run_cases(
        [
            norms_sharded_on_part_of_the_mesh_are_complete_copies,
            tied_names_on_other_ranks_are_filled,
            tied_names_of_recipes_are_filled,
            plain_tensors_that_are_parts_are_refused,
            replicas_that_differ_in_an_element_are_found,
            targets_that_share_elements_are_refused,
            plans_list_the_moves_that_run,
            groups_may_be_lists_of_ranks,
        ]
    )


if __name__ == "__main__":
    main()
