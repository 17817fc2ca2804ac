"""One rank of two: moves between ranks under torch.compile, with fake tensors and groups."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rank_cases import report_each
from refit_models import expect, refused
from reshard.errors import UsageError
from reshard.torch import Refit, redistribute, refit


def compiled_functions_redistribute_and_refit(mesh: Any) -> None:
    whole = torch.arange(6.0)
    target = torch.zeros(6)
    prepared = Refit.prepare({"w": distribute_tensor(whole, mesh, [Shard(0)])}, {"w": target})

    def function(x: DTensor) -> torch.Tensor:
        moved = redistribute(x * 2, (mesh, [Replicate()]))
        prepared.run()
        return moved + 1

    compiled = torch.compile(function, backend="eager")
    found = compiled(distribute_tensor(whole, mesh, [Shard(0)]))
    expect(torch.equal(found.to_local(), whole * 2 + 1), f"{found} of a compiled function")
    expect(torch.equal(target, whole), "a refit in a compiled function")


def fake_tensors_are_refused(mesh: Any) -> None:
    with FakeTensorMode():
        x = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)])
        refused(lambda: redistribute(x, (mesh, [Replicate()])), UsageError, "FakeTensorMode")
        refused(lambda: refit({"w": x}, {"w": torch.zeros(6)}), UsageError, "FakeTensorMode")


def fake_groups_are_refused() -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with LocalTensorMode(4):
        local = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.arange(8.0), local, [Shard(0)])
        refused(lambda: redistribute(x, (local, [Replicate()])), UsageError, "LocalTensorMode")
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    refused(lambda: redistribute(x, (x.device_mesh, [Replicate()])), UsageError, "backend 'fake'")
    refused(lambda: refit({"w": x}, {"w": torch.zeros(8)}), UsageError, "backend 'fake'")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    report_each([fake_tensors_are_refused, compiled_functions_redistribute_and_refit], mesh)
    dist.barrier()
    report_each([fake_groups_are_refused])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
