"""Checkpoints that PyTorch itself saves, of as many ranks as wanted, in one process.

Each rank's part of the save is done with PyTorch's planner and writer under a process group
that stands for that rank and talks to nobody; what the ranks would exchange is handed over
here. The files are those that a job of that many processes writes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

State = dict[str, Any]


@contextlib.contextmanager
def standing_for(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which this process is `rank` of `ranks`."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks."""
    ranks = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def cut(whole: Any, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """This rank's part of a tensor, cut as PyTorch cuts."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def save(
    folder: Path,
    ranks: int,
    state: Callable[[int], State],
    planner: Callable[[], Any] = DefaultSavePlanner,
    **writer_arguments: Any,
) -> None:
    """What `torch.distributed.checkpoint.save` of `ranks` ranks writes; `state` gives each's."""
    writer = dcp.FileSystemWriter(folder, **writer_arguments)
    planners, plans = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in range(ranks):
            with standing_for(rank, ranks):
                planners.append(planner())
                planners[rank].set_up_planner(state(rank), writer.storage_meta(), rank == 0)
                writer.set_up_storage_writer(rank == 0)
                plans.append(writer.prepare_local_plan(planners[rank].create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        results = []
        for rank in range(ranks):
            with standing_for(rank, ranks):
                plan = planners[rank].finish_plan(plans[rank])
                results.append(writer.write_data(plan, planners[rank]).wait())
        writer.finish(metadata, results)


def load(folder: Path, state: State, ranks: int = 1, rank: int = 0) -> None:
    """What `torch.distributed.checkpoint.load` reads into `state` on one rank of a job."""
    reader = dcp.FileSystemReader(folder)
    planner = dcp.DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, rank == 0)
    reader.set_up_storage_reader(metadata, rank == 0)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    # A load's global plan is made of the local ones as they are.
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
    reader.read_data(plan, planner).wait()
