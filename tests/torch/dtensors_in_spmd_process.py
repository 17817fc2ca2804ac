"""One rank of four: DTensors as arrays in shards, and such arrays redistributed and refitted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import reshard
import reshard.spmd as sp
from rank_cases import report_each
from refit_models import expect
from reshard.errors import ReshardError
from reshard.torch import Refit, redistribute, refit


def refused(function: Callable[[], Any], message: str) -> None:
    try:
        function()
    except ReshardError as error:
        expect(message in str(error), f"{message!r} is not in {error}")
        return
    raise SystemExit(f"nothing was raised where {message!r} was expected")


def dtensors_become_arrays(mesh: Any) -> None:
    whole = torch.arange(30.0).reshape(6, 5)
    for placements in (
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
    ):
        tensor = distribute_tensor(whole, mesh, placements)
        x = sp.array(tensor)
        expect(torch.equal(torch.as_tensor(x.to_dense()), whole), f"sp.array of {placements}")
        expect(x.spec is reshard.sharding_of(tensor), f"{x.spec} of {placements}")
        expect(float(sp.sum(sp.array(tensor) * 2)) == float(whole.sum() * 2), "sum")
        # As the second operand of an operation, and with another sharding.
        total = sp.array(np.ones((6, 5), np.float32)) + tensor
        expect(torch.equal(torch.as_tensor(total.to_dense()), whole + 1), f"{placements} + 1")
        rows = sp.array(tensor, reshard.spec(x.mesh, "dim1, -"))
        expect(str(rows.spec) == "dim1, -", str(rows.spec))
    # 3 rows on 4 ranks: one has none.
    few = distribute_tensor(whole[:3], init_device_mesh("cpu", (4,)), [Shard(0)])
    expect(torch.equal(torch.as_tensor(sp.array(few).to_dense()), whole[:3]), "an empty shard")
    local = torch.ones(2, 2) * (1 + mesh.get_local_rank(0))
    pending = torch.distributed.tensor.DTensor.from_local(local, mesh, [Partial(), Replicate()])
    expect(float(sp.sum(sp.array(pending))) == 12.0, "contributions to a sum")
    refused(lambda: sp.array(tensor, runner=sp.in_process("torch")), "has one shard here")


def arrays_become_dtensors(mesh: Any) -> None:
    whole = torch.arange(30.0).reshape(6, 5)
    own = reshard.DeviceMesh.of(x=2, y=2)
    x = sp.array(whole.numpy().copy()).shard(reshard.spec(own, "x, y"))
    moved = redistribute(x, (mesh, [Shard(1), Replicate()]))
    expect(torch.equal(moved.full_tensor(), whole), "an array of spmd, redistributed")
    empty = distribute_tensor(torch.zeros(6, 5), mesh, [Shard(0), Shard(0)])
    refit({"w": x}, {"w": empty})
    expect(torch.equal(empty.full_tensor(), whole), "an array of spmd, refitted")
    refused(lambda: redistribute(x, (mesh, [Shard(0)] * 2), source=x.spec), "leave out source=")
    refused(lambda: redistribute(empty, x.spec, out=x), "immutable")
    refused(lambda: Refit.prepare({"w": empty}, {"w": x}), "immutable")
    refused(lambda: redistribute(sp.array(whole), (mesh, [Shard(0)] * 2)), "is not sharded")
    with sp.running(sp.in_process()):
        simulated = sp.array(whole.numpy(), reshard.spec(own, "x, y"))
    refused(lambda: redistribute(simulated, (mesh, [Shard(0)] * 2)), "are simulated")


def outputs_of_every_view_are_written_or_refused(mesh: Any) -> None:
    """Each view that torch makes gets the elements, or is refused and keeps its own."""
    whole = torch.arange(8.0).reshape(2, 4).to(torch.complex64)
    source = distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(1)])
    to = reshard.spec(reshard.DeviceMesh.of(x=4), "-, -")
    base = torch.zeros(4, 8, dtype=torch.complex64)
    views = {
        "plain": torch.zeros(2, 4, dtype=torch.complex64),
        "t": torch.zeros(4, 2, dtype=torch.complex64).t(),
        "steps": base[::2, 1::2],
        "narrow": base.clone().narrow(0, 1, 2)[:, 4:],
        "permuted": torch.zeros(4, 1, 2, dtype=torch.complex64).permute(1, 2, 0)[0],
        "as_strided": base.clone().as_strided((2, 4), (1, 2), 3),
        "interleaved": torch.zeros(16, dtype=torch.complex64).as_strided((2, 4), (3, 2)),
        "view_as_complex": torch.view_as_complex(torch.zeros(2, 4, 2)),
        "detached": torch.zeros(2, 4, dtype=torch.complex64, requires_grad=True).detach(),
        "diagonal": torch.zeros(4, 2, 4, dtype=torch.complex64).diagonal(0, 0, 2).contiguous(),
    }
    for name, view in views.items():
        redistribute(source, to, out=view)
        expect(torch.equal(view, whole), f"out= of a view {name}: {view}")
    wrong = {
        "conj": (torch.zeros(2, 4, dtype=torch.complex64).conj(), "lazy conj bit"),
        "conj of t": (torch.zeros(4, 2, dtype=torch.complex64).t().conj(), "lazy conj bit"),
        "expanded": (torch.zeros(1, 4, dtype=torch.complex64).expand(2, 4), "share memory"),
        "unfolded": (torch.zeros(5, dtype=torch.complex64).unfold(0, 4, 1), "share memory"),
    }
    for name, (view, message) in wrong.items():
        refused(lambda view=view: redistribute(source, to, out=view), message)  # type: ignore[misc]
        expect(not torch.any(view.resolve_conj()), f"{name} was written")
    real = distribute_tensor(whole.real.clone(), init_device_mesh("cpu", (4,)), [Shard(1)])
    imaginary = torch.zeros(2, 4, dtype=torch.complex64)
    redistribute(real, to, out=imaginary.imag)
    expect(torch.equal(imaginary.imag, whole.real), "out= of an imaginary part")
    refused(lambda: redistribute(real, to, out=imaginary.conj().imag), "lazy neg bit")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    report_each([outputs_of_every_view_are_written_or_refused], mesh)
    with sp.running(sp.over_processes()):
        report_each([dtensors_become_arrays, arrays_become_dtensors], mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
