"""One rank of a job: tensors of devices of a type, moved by a backend; arguments: both."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import reshard
import reshard.torch
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


def main() -> None:
    device = torch.device(sys.argv[2])
    if device.type == "cuda":
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(sys.argv[1], timeout=datetime.timedelta(seconds=120))
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        check(device, dtype, 64 << 20)
    check(device, torch.float32, 1 << 12)
    shared = rank_group(None).shared_memory
    if device.type == "cuda" and sys.argv[1] == "gloo" and shared is not None:
        assert shared.serves(device), "memory of the device is not shared"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
