"""One rank of a job: tensors travel alike by shared memory, by gloo, and by direct reads.

Argument: what is checked.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import platform
import struct
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
import reshard.torch
from rank_cases import report_each
from refit_models import part
from reshard.errors import RunError
from reshard.runs import IntArray
from reshard.torch import is_usable, redistribute
from reshard.torch.exchange import exchange
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.exchange.one_host.shared_memory import NearMessage
from selection import choose

SHAPE = (48, 70)
RANKS = 4
# process_vm_readv, by machine.
CALLS = {"x86_64": 310, "aarch64": 270}
EPERM = 1
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


def new_group(mode: str = "always") -> dist.ProcessGroup:
    os.environ["RESHARD_DIRECT_READS"] = mode
    return dist.new_group(timeout=datetime.timedelta(seconds=60))


def reads_directly(group: dist.ProcessGroup) -> bool:
    shared = rank_group(group).shared_memory
    assert shared is not None
    return shared.takes_spans


def count_reads() -> list[int]:
    """Count the messages that are read directly, from here on."""
    counts, read = [0], NearMessage.read

    def counted(self: NearMessage, into: IntArray) -> None:
        counts[0] += 1
        read(self, into)

    NearMessage.read = counted  # type: ignore[method-assign]
    return counts


def refuse_reads() -> None:
    """Let the kernel refuse process_vm_readv to this process, as seccomp does in a container."""
    # Load the number of the call; if it is this one return EPERM, else permit it.
    steps = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, CALLS[platform.machine()]),
        (0x06, 0, 0, 0x00050000 | EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
    library = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter = 38, 22
    assert library.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert library.prctl(set_filter, 2, ctypes.byref(head), 0, 0) == 0, ctypes.get_errno()


def tensors_are_read_directly() -> None:
    rank, counts = dist.get_rank(), count_reads()
    exchange._MIN_SPANNED_BYTES = exchange._MIN_SPAN_BYTES = 0
    group = new_group("never" if rank == 2 else "")
    assert not reads_directly(group)
    group = new_group()
    for dtype in (torch.float32, torch.bfloat16):
        check(group, dtype, 64 << 20)
    assert counts[0]


def direct_reads_need_no_memory() -> None:
    # Elements that are cast or combined on arrival are staged.
    group = new_group()
    check(group, torch.float32, 2048)
    own, target = local("rows", dist.get_rank(), torch.float32, 0), SIDES["columns"]
    run = redistribute(
        own, target, source=SIDES["rows"], group=group, async_op=True, extra_bytes=2048
    )
    run.wait()
    assert run.extra_bytes == 0


def ranks_continue_without_direct_reads_once_refused() -> None:
    """All ranks raise where the kernel refuses, and the next group uses shared memory."""
    rank, group = dist.get_rank(), new_group()
    own, source, target = local("rows", rank, torch.float32, 0), SIDES["rows"], SIDES["columns"]
    redistribute(own, target, source=source, group=group)
    dist.barrier()
    if rank == 1:
        refuse_reads()
    dist.barrier()
    out = torch.zeros(target.local_shape(rank))
    with pytest.raises(RunError, match=r"not permitted\); RESHARD_DIRECT_READS=never"):
        redistribute(own, target, source=source, group=group, out=out)
    assert not is_usable(out)
    os.environ["RESHARD_DIRECT_READS"] = ""
    again = redistribute(own, target, source=source, group=group, out=out)
    assert not reads_directly(group)
    assert torch.equal(again, local("columns", rank, torch.float32, 0)) and is_usable(out)
    # No rank ends while others still move.
    dist.barrier()


def some_ranks_share_memory() -> None:
    rank = dist.get_rank()
    # The ranks without shared memory: none, all, and one, so that it is a host of its own.
    for apart in ((), (0, 1, 2, 3), (3,), (0, 2)):
        os.environ["RESHARD_SHARED_MEMORY"] = "never" if rank in apart else ""
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        together = set(range(RANKS)) - set(apart)
        assert near(rank_group(group)) == (together - {rank} if rank in together else set())
        for dtype in choose((torch.bfloat16,), (torch.float32, torch.bfloat16)):
            check(group, dtype, 64 << 20)
        # So little that messages wait for one another.
        if len(apart) < choose(2, RANKS + 1):
            check(group, torch.float32, choose(2048, 256))


def segments_are_used_again_and_freed_with_their_group() -> None:
    most = files()
    os.environ["RESHARD_SHARED_MEMORY"] = "always"
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    for turn in range(choose(3, 4)):
        # More than short messages, which use no segments of their receivers.
        check(group, torch.float32, 1 << 18)
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


CASES = {
    "shared": [some_ranks_share_memory, segments_are_used_again_and_freed_with_their_group],
    "direct": [tensors_are_read_directly, direct_reads_need_no_memory],
}
if platform.machine() in CALLS:
    CASES["direct"].append(ranks_continue_without_direct_reads_once_refused)


def main(which: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    report_each(CASES[which])


if __name__ == "__main__":
    main(sys.argv[1])
