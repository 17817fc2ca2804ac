"""One rank of a job: tensors travel alike by shared memory, by gloo, and by both at once."""

from __future__ import annotations

import datetime
import gc
import os
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

import reshard
import reshard.torch
from refit_models import part
from reshard.torch.exchange.groups import RankGroup, rank_group
from selection import choose

SHAPE = (48, 70)
RANKS = 4
MESH = reshard.DeviceMesh.of(tp=RANKS)
SIDES = {
    "rows": reshard.spec(MESH, "tp, -").layout(SHAPE),
    "columns": reshard.spec(MESH, "-, tp").layout(SHAPE),
    "copies": reshard.spec(MESH, "-, -").layout(SHAPE),
    "contributions": reshard.spec(MESH, "-, - | sum(tp)").layout(SHAPE),
}
MOVES = [
    ("rows", "columns"),
    ("columns", "rows"),
    ("rows", "copies"),
    ("contributions", "rows"),
    ("contributions", "copies"),
]


def whole(dtype: torch.dtype, turn: int) -> torch.Tensor:
    # Sums of four of them are whole numbers that every dtype here has.
    values = torch.arange(SHAPE[0] * SHAPE[1]).remainder(29 + turn)
    return values.view(SHAPE).to(dtype)


def local(side: str, rank: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    found = part(whole(dtype, turn), SIDES[side], rank)
    assert found is not None
    return found


def check(group: dist.ProcessGroup, dtype: torch.dtype, extra_bytes: int) -> None:
    rank = dist.get_rank()
    for turn, (before, after) in enumerate(MOVES):
        source, target = SIDES[before], SIDES[after]
        own = local(before, rank, dtype, turn)
        expected = local(after, rank, dtype, turn)
        if before == "contributions":
            expected = expected * RANKS
        out = torch.empty_like(expected)
        options = {"source": source, "group": group, "extra_bytes": extra_bytes}
        run = reshard.torch.redistribute(
            own, target, out=out, async_op=True, method="exchange", **options
        )
        # Another one between the same ranks, beside it.
        beside = reshard.torch.redistribute(
            own, target, async_op=True, method="exchange", **options
        )
        again = reshard.torch.redistribute(own, target, method="exchange", **options)
        assert torch.equal(run.wait(), expected), (before, after, dtype)
        assert torch.equal(beside.wait(), expected)
        assert torch.equal(again, expected)
        assert run.extra_bytes <= extra_bytes


def files() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except FileNotFoundError:
            continue
    return sum("memfd:reshard" in link for link in links)


def near(group: RankGroup) -> set[int]:
    return set() if group.shared_memory is None else set(group.shared_memory.ranks)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    # Who takes no part in shared memory: nobody, all, and one, so that it is a host of its own.
    for apart in ((), (0, 1, 2, 3), (3,), (0, 2)):
        os.environ["RESHARD_SHARED_MEMORY"] = "never" if rank in apart else ""
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        together = set(range(RANKS)) - set(apart)
        assert near(rank_group(group)) == (together - {rank} if rank in together else set())
        for dtype in choose((torch.bfloat16,), (torch.float32, torch.bfloat16)):
            check(group, dtype, 64 << 20)
        # So little that messages wait for one another.
        check(group, torch.float32, choose(2048, 256))
    most = files()
    os.environ["RESHARD_SHARED_MEMORY"] = "always"
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    for turn in range(4):
        check(group, torch.float32, 1 << 12)
        if turn == 1:
            most = files()
    # What one run used, the next one uses again.
    assert files() <= most, (files(), most)
    # With a group goes all that was kept for it, and nothing waits to be collected.
    gc.collect()
    gc.disable()
    found, before = weakref.ref(rank_group(group)), files()
    dist.destroy_process_group(group)
    del group
    assert found() is None and files() < before, (files(), before)
    dist.barrier()


if __name__ == "__main__":
    main()
