"""One rank of a job: tensors of devices of a type, moved by a backend; arguments: both.

Exchanges, arrays in shards with their programs and gradients, and loads into tensors of the device.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
import reshard.spmd as sp
import reshard.torch
from rank_cases import report_each, reported
from refit_models import part
from reshard.torch.exchange.groups import rank_group

SHAPE = (48, 64)
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 2))
MESH = reshard.DeviceMesh.of(tp=RANKS)
SIDES = {
    "rows": reshard.spec(MESH, "tp, -").layout(SHAPE),
    "columns": reshard.spec(MESH, "-, tp").layout(SHAPE),
    "copies": reshard.spec(MESH, "-, -").layout(SHAPE),
    "contributions": reshard.spec(MESH, "-, - | sum(tp)").layout(SHAPE),
}
MOVES = [
    ("rows", "columns"),
    ("columns", "copies"),
    ("copies", "rows"),
    ("contributions", "rows"),
    ("contributions", "copies"),
]


def local(side: str, dtype: torch.dtype) -> torch.Tensor:
    """What this rank has of a tensor of small whole numbers, on the CPU."""
    whole = torch.arange(SHAPE[0] * SHAPE[1]).remainder(13).view(SHAPE).to(dtype)
    found = part(whole, SIDES[side], RANK)
    assert found is not None
    return found


def check(device: torch.device, dtype: torch.dtype, extra_bytes: int) -> None:
    for before, after in MOVES:
        expected = local(after, dtype) * (RANKS if before == "contributions" else 1)
        # A view whose rows are apart, and a dense one.
        wide = torch.zeros(SHAPE[0], 2 * SHAPE[1], dtype=dtype, device=device)
        outs = [None, wide[: expected.shape[0], : expected.shape[1]]]
        options: dict[str, Any] = {
            "source": SIDES[before],
            "extra_bytes": extra_bytes,
            "method": "exchange",
        }
        for out in outs:
            own = local(before, dtype).to(device)
            found = reshard.torch.redistribute(own, SIDES[after], out=out, **options)
            assert found.device == device, found.device
            assert torch.equal(found.cpu(), expected), (before, after, dtype)
        own = local(before, dtype).to(device)
        begun = reshard.torch.redistribute(own, SIDES[after], async_op=True, **options)
        # What is computed meanwhile, on the same stream, does not come between.
        busy = torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
        found = begun.wait()
        assert torch.equal(found.cpu(), expected) and busy.eq(256).all()
        assert begun.extra_bytes <= extra_bytes


def arrays_programs_and_gradients_stay_on_the_device(device: torch.device) -> None:
    """Eager operations, a program and a gradient, of whole numbers: exact in any order."""
    x, up, down = (
        torch.arange(rows * columns).remainder(5).sub(2).view(rows, columns).double()
        for rows, columns in ((6, 8), (8, 12), (12, 4))
    )

    def loss(x: Any, up: Any, down: Any) -> Any:
        return sp.sum(sp.square(sp.square(x @ up) @ down))

    leaf = up.clone().requires_grad_()
    expected = ((x @ leaf).square() @ down).square().sum()
    expected.backward()
    with sp.running(sp.over_processes()):
        placed = [
            sp.array(data.to(device), reshard.spec(MESH, text))
            for data, text in ((x, "-, -"), (up, "-, tp"), (down, "tp, -"))
        ]
        for function in (loss, sp.jit(loss)):
            found = function(*placed).to_dense()
            assert found.device == device, found.device
            assert found.cpu() == expected.detach()
        gradient = sp.grad(loss, argnums=1)(*placed)
        assert gradient.spec == placed[1].spec
        assert gradient.shards[RANK].device == device
        assert torch.equal(gradient.to_dense().cpu(), leaf.grad)


def checkpoints_fill_tensors_of_the_device(device: torch.device) -> None:
    """A checkpoint fills a DTensor and a plain tensor of the device."""
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"cut": whole, "plain": whole.clone()}, Path(folder) / "model.safetensors")
        mesh = init_device_mesh(device.type, (RANKS,))
        cut = distribute_tensor(torch.zeros(SHAPE, device=device), mesh, [Shard(1)])
        plain = torch.zeros(SHAPE, device=device)
        reshard.torch.load(folder, {"cut": cut, "plain": plain})
    assert cut.to_local().device == plain.device == device
    assert torch.equal(cut.to_local().cpu(), part(whole, SIDES["columns"], RANK))
    assert torch.equal(plain.cpu(), whole)


def main() -> None:
    device = torch.device(sys.argv[2])
    if device.type == "cuda":
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(sys.argv[1], timeout=datetime.timedelta(seconds=120))
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        with reported(f"tensors_of_{dtype}_move"):
            check(device, dtype, 64 << 20)
    with reported("tensors_move_in_little_memory"):
        check(device, torch.float32, 1 << 12)
    shared = rank_group(None).shared_memory
    if device.type == "cuda" and sys.argv[1] == "gloo" and shared is not None:
        with reported("memory_of_the_device_is_shared"):
            assert shared.serves(device)
    report_each(
        [
            arrays_programs_and_gradients_stay_on_the_device,
            checkpoints_fill_tensors_of_the_device,
        ],
        device,
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
