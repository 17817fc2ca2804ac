"""One rank of a job of four: models refitted in every way, each compared with whole values.

A case that fails ends the process with what differs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from reshard.torch.refitting import refit


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


SHAPES = {"embed.weight": (31, 8), "up.weight": (12, 8), "down.weight": (8, 12), "norm": (8,)}


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: whole(seed + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def cut(
    given: Mapping[str, torch.Tensor], mesh: DeviceMesh, places: Mapping[str, list[Any]]
) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(value, mesh, places[name], src_data_rank=None)
        for name, value in given.items()
    }


def same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    if found.keys() != expected.keys():
        raise SystemExit(f"{what}: {sorted(found)}, expected {sorted(expected)}")
    for name, value in expected.items():
        a, b = (v.to_local() if isinstance(v, DTensor) else v for v in (found[name], value))
        if a.dtype != b.dtype or not torch.equal(a, b):
            raise SystemExit(f"{what}: {name} differs on rank {dist.get_rank()}\n{a}\n{b}")


COLUMN, ROW, ALL = [Shard(0)], [Shard(1)], [Replicate()]
TP4 = {"embed.weight": COLUMN, "up.weight": COLUMN, "down.weight": ROW, "norm": ALL}
TP2_DP2 = {name: [Replicate(), *places] for name, places in TP4.items()}


def collocated() -> None:
    mesh4 = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    mesh22 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = cut(values(), mesh4, TP4)
    target = cut({n: torch.zeros_like(v) for n, v in values().items()}, mesh22, TP2_DP2)
    addresses = {n: v.to_local().data_ptr() for n, v in target.items()}
    done = refit(source, target)
    same(target, cut(values(), mesh22, TP2_DP2), "collocated")
    for name, value in values(7).items():
        source[name].to_local().copy_(cut({name: value}, mesh4, TP4)[name].to_local())
    done.run()
    same(target, cut(values(7), mesh22, TP2_DP2), "the second run")
    assert addresses == {n: v.to_local().data_ptr() for n, v in target.items()}


def main() -> None:
    dist.init_process_group("gloo")
    collocated()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
