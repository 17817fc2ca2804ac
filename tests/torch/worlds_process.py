"""One rank of two jobs of two, a trainer and an engine, that move tensors over a group of both.

Each job counts its ranks from 0. The group is made as trainers of reinforcement learning make one:
of a store and torch's helper, without what `new_group` knows of ranks. Arguments: three free ports.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import reshard
from rank_cases import report_each
from refit_models import CUTS, distributed, expect, expect_same, layouts_of, values, zeros
from reshard.errors import ReshardError, RunError, ShardError
from reshard.megatron import MegatronNames, MegatronRanks
from reshard.recipes.library import load_recipe
from reshard.torch import MegatronModel, Refit, by_recipe, redistribute, refit

SIDE_RANKS = 2
RANK = int(os.environ.get("RANK", 0))
IS_TRAINER = RANK < SIDE_RANKS
ROWS = {name: [Shard(0)] for name in CUTS}
COLUMNS = {name: [Replicate()] if "," not in CUTS[name] else [Shard(1)] for name in CUTS}
TIMEOUT = datetime.timedelta(seconds=30)


def begin_job(port: int) -> None:
    """The job of this rank's side, in which it is rank 0 or 1."""
    store = dist.TCPStore("127.0.0.1", port, SIDE_RANKS, RANK % SIDE_RANKS == 0, TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=RANK % SIDE_RANKS, world_size=SIDE_RANKS, timeout=TIMEOUT
    )


def group_of_both(port: int, name: str = "weights", **options: Any) -> dist.ProcessGroup:
    """A group of all ranks of both jobs, which torch's own functions know by their places in it."""
    ranks = 2 * SIDE_RANKS
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, ranks, RANK == 0, TIMEOUT))
    group, _ = c10d._new_process_group_helper(
        ranks, RANK, [], dist.Backend("gloo"), store, group_name=name, timeout=TIMEOUT, **options
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}
    return group


def dtensors_move_between_meshes_of_two_jobs(group: dist.ProcessGroup) -> None:
    """FSDP2 of one job to tensor parallelism of the other, each on a mesh of its own."""
    mesh = init_device_mesh("cpu", (SIDE_RANKS,), mesh_dim_names=("tp",))
    source = distributed(values(), mesh, ROWS) if IS_TRAINER else None
    target = None if IS_TRAINER else distributed(zeros(values()), mesh, COLUMNS)
    for planning in ("local", "centralized"):
        done = Refit.prepare(source, target, planning=planning, group=group)
        for turn in (0, 5):
            if source is not None:
                now = distributed(values(turn), mesh, ROWS)
                for name, tensor in source.items():
                    tensor.to_local().copy_(now[name].to_local())
            done.run()
            if target is not None:
                expect_same(target, distributed(values(turn), mesh, COLUMNS), "dtensors")


def layouts_count_the_ranks_of_their_own_job(group: dist.ProcessGroup) -> None:
    """Layouts count from 0 on either side; an offset is one of the group."""
    cut = {name: "-, tp" if cut == "tp, -" else cut for name, cut in CUTS.items()}
    at = RANK % SIDE_RANKS
    source = _laid(values(), layouts_of(SIDE_RANKS), at) if IS_TRAINER else None
    expected = _laid(values(), layouts_of(SIDE_RANKS, cut), at)
    for options in ({}, {"target_offset": SIDE_RANKS}, {"source_offset": 0}):
        target = None
        if not IS_TRAINER:
            target = _laid(zeros(values()), layouts_of(SIDE_RANKS, cut), at)
        refit(source, target, group=group, **options)
        if target is not None:
            for name, (tensor, _) in target.items():
                expect(torch.equal(tensor, expected[name][0]), f"{name} by layouts")


def _laid(tensors: Any, by_name: Any, rank: int) -> dict[str, Any]:
    found = {}
    for name, tensor in tensors.items():
        layout = by_name[name]
        boxes = layout.boxes(rank)
        part = tensor[tuple(slice(a, b) for a, b in zip(*boxes[0], strict=True))].clone()
        found[name] = (part, layout)
    return found


def a_tensor_is_redistributed_to_another_job_and_back(group: dist.ProcessGroup) -> None:
    """A tensor of one job, redistributed to the other, and back."""
    mesh = init_device_mesh("cpu", (SIDE_RANKS,), mesh_dim_names=("tp",))
    both = reshard.DeviceMesh.of(tp=SIDE_RANKS, devices=range(SIDE_RANKS, 2 * SIDE_RANKS))
    columns = reshard.spec(both, "-, tp")
    whole = values()["up.weight"]
    own = distributed({"up.weight": whole}, mesh, ROWS)["up.weight"] if IS_TRAINER else None
    target = columns if IS_TRAINER else (mesh, [Shard(1)])
    found = redistribute(own, target, group=group)
    if not IS_TRAINER:
        expect(torch.equal(found.full_tensor(), whole), "redistributed")
    back = reshard.spec(reshard.DeviceMesh.of(tp=SIDE_RANKS), "tp, -")
    again = redistribute(found, (mesh, [Shard(0)]) if IS_TRAINER else back, group=group)
    if IS_TRAINER:
        expect(torch.equal(again.full_tensor(), whole), "back again")
    begun = redistribute(own, target, group=group, async_op=True)
    found = begun.wait()
    if not IS_TRAINER:
        expect(torch.equal(found.full_tensor(), whole), "in the background")


def a_fully_sharded_module_becomes_a_plain_one(group: dist.ProcessGroup) -> None:
    """A module under FSDP2 to a plain module of an engine whose ranks have all of it."""
    torch.manual_seed(0)
    trainer = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    expected = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    if IS_TRAINER:
        fully_shard(trainer)
    engine = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    refit(trainer if IS_TRAINER else None, None if IS_TRAINER else engine, group=group)
    for name, tensor in engine.state_dict().items() if not IS_TRAINER else ():
        expect(torch.equal(tensor, expected[name]), name)


def recipes_count_the_ranks_of_their_own_job(group: dist.ProcessGroup) -> None:
    """A recipe's layouts, and Megatron's ranks, are those of their own job."""
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    whole = {name: torch.rand(shape, generator=_seed()) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (SIDE_RANKS,), mesh_dim_names=("tp",))
    source = distributed(whole, mesh, {n: [Shard(0)] for n in whole}) if IS_TRAINER else None
    target = None
    if not IS_TRAINER:
        own = {"model.embed_tokens.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(4)}
        cut = reshard.DeviceMesh.of(tp=SIDE_RANKS)
        target = by_recipe(own, cut, shapes, load_recipe("llama"))
        expect(not target.problems, str(target.problems))
    refit(source, target, group=group)
    if target is not None:
        at = dist.get_rank()
        expect(torch.equal(own["model.norm.weight"], whole["model.norm.weight"]), "norm")
        half = whole["model.embed_tokens.weight"][4 * at : 4 * at + 4]
        expect(torch.equal(own["model.embed_tokens.weight"], half), "embedding")


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def ranks_of_megatron_are_those_of_their_own_job(group: dist.ProcessGroup) -> None:
    """Tensor parallelism of Megatron in one job, by sizes, by groups and by lists of ranks."""
    whole = torch.rand(8, 4, generator=_seed())
    pair = dist.new_group([0, 1])
    for how in ("names", "groups", "lists", "module"):
        source = target = None
        if IS_TRAINER:
            module = torch.nn.Module()
            at = dist.get_rank()
            module.weight = torch.nn.Parameter(whole[4 * at : 4 * at + 4].clone())
            module.weight.tensor_model_parallel = True
            module.weight.partition_dim, module.weight.partition_stride = 0, 1
            source = MegatronModel(module, MegatronNames(MegatronRanks(tp=2)))
            if how != "names":
                tp = pair if how == "groups" else [0, 1]
                source = MegatronModel(module, groups={"tp": tp, "pp": [at]})
            if how == "module":
                module.pg_collection = {"tp": pair, "pp": [at]}
                source = module
        else:
            target = {"weight": torch.zeros(8, 4)}
        refit(source, target, group=group)
        if target is not None:
            expect(torch.equal(target["weight"], whole), f"Megatron's by {how}")


def a_group_without_ranks_of_a_part_is_refused(port: int) -> None:
    """A group without ranks that have a part says which."""
    if RANK == 1:
        return
    place = {0: 0, 2: 1, 3: 2}[RANK]
    store = dist.PrefixStore("few", dist.TCPStore("127.0.0.1", port, 3, RANK == 0, TIMEOUT))
    group, _ = c10d._new_process_group_helper(
        3, place, [], dist.Backend("gloo"), store, group_name="few", timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(3)}
    source = None
    if IS_TRAINER:
        mesh = reshard.DeviceMesh.of(tp=SIDE_RANKS)
        layout = reshard.spec(mesh, "tp, -").layout((8, 4))
        source = {"weight": (torch.ones(4, 4), layout)}
    target = None if IS_TRAINER else {"weight": torch.zeros(8, 4)}
    try:
        refit(source, target, group=group)
    except ShardError as error:
        expect("rank 1 has no part of the source" in str(error) or "weight" in str(error), error)
    else:
        raise SystemExit("a part is nowhere, and nobody says so")
    whole = {"weight": torch.ones(8, 4)} if IS_TRAINER else None
    refit(whole, target, group=group)
    expect(target is None or bool((target["weight"] == 1).all()), "from one rank of a job")


def all_ranks_raise_if_a_trainer_dies(group: dist.ProcessGroup) -> None:
    """All others raise at once, with its rank, host and process."""
    source = {"weight": torch.ones(1 << 16)} if IS_TRAINER else None
    target = None if IS_TRAINER else {"weight": torch.zeros(1 << 16)}
    done = Refit.prepare(source, target, group=group)
    done.run()
    if RANK == 1:
        os._exit(7)
    begun_s = time.monotonic()
    try:
        done.run()
    except RunError as error:
        expect("rank 1 (host " in str(error), str(error))
        expect(isinstance(error, ReshardError), str(error))
    else:
        raise SystemExit("a rank has ended, and nobody says so")
    expect(time.monotonic() - begun_s < 5, f"{time.monotonic() - begun_s} s")


def main(*ports: int) -> None:
    begin_job(ports[0 if IS_TRAINER else 1])
    group = group_of_both(ports[2])
    report_each(
        [
            dtensors_move_between_meshes_of_two_jobs,
            layouts_count_the_ranks_of_their_own_job,
            a_tensor_is_redistributed_to_another_job_and_back,
            a_fully_sharded_module_becomes_a_plain_one,
            recipes_count_the_ranks_of_their_own_job,
            ranks_of_megatron_are_those_of_their_own_job,
        ],
        group,
    )
    report_each([a_group_without_ranks_of_a_part_is_refused], ports[3])
    report_each([all_ranks_raise_if_a_trainer_dies], group)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)
