"""One rank of a job: what several ranks are sent is packed once, in whatever memory there is."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

import reshard
from rank_cases import reported
from reshard.layout import Box, Layout
from reshard.torch.exchange import exchange as exchange_module
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.packing.messages import RankTransfers

ROWS, COLUMNS = 90, 48
# The columns that each of ranks 1 to 3 receives; rank 0 has all.
WANTED = {1: (0, 30), 2: (0, 30), 3: (7, 48)}


def movement_of(rank: int, dtype: torch.dtype) -> RankTransfers:
    shape = (ROWS, COLUMNS)
    source = Layout.from_boxes(shape, [(0, Box((0, 0), shape))])
    boxes = [(slot, Box((0, low), (ROWS, high))) for slot, (low, high) in sorted(WANTED.items())]
    target = Layout.from_boxes(shape, boxes)
    plan = reshard.plan(source, target, dtype="float32")
    own = torch.zeros(shape) if rank == 0 else None
    low, high = WANTED.get(rank, (0, 0))
    local = None if rank == 0 else torch.zeros((ROWS, high - low), dtype=dtype)
    return RankTransfers.of(plan.change, plan.for_rank(rank), rank, own, local, dtype)


def check(limit_bytes: int, dtype: torch.dtype, is_grouped: bool, is_hosted: bool = False) -> int:
    """Move it twice; how many pieces were packed, or unpacked, each time."""
    rank, copies = dist.get_rank(), [0]
    made = exchange_module.copiers

    def counting(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        listed = list(pairs)
        calls = made(listed)

        def counted() -> None:
            copies[0] += len(listed)
            for call in calls:
                call()

        return [counted] * bool(listed)

    movement = movement_of(rank, dtype)
    exchange_module.copiers = counting
    try:
        exchange = MessageExchange(
            [movement],
            None,
            torch.device("cpu"),
            limit_bytes,
            is_grouped=is_grouped,
            is_hosted=is_hosted,
        )
    finally:
        exchange_module.copiers = made
    assert exchange.extra_bytes <= limit_bytes
    for turn in range(2):
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + turn
        if movement.sources[0] is not None:
            movement.sources[0].copy_(whole)
        exchange.run()
        if movement.targets[0] is not None:
            low, high = WANTED[rank]
            expected = whole[:, low:high].to(dtype)
            assert torch.equal(movement.targets[0], expected)
    assert copies[0] % 2 == 0
    return copies[0] // 2


def check_pieces(dtype: torch.dtype) -> None:
    """Compare the number of packed pieces with that of the rows of the messages."""
    # Rows of a message in each limit, and so pieces of ranks 1 and 2 together, and of rank 3.
    for limit_bytes in (64, 1 << 11, 1 << 13, 1 << 20):
        message = limit_bytes // 4
        pieces = []
        for low, high in (WANTED[1], WANTED[3]):
            row_bytes = (high - low) * dtype.itemsize
            if row_bytes > message:
                pieces.append(ROWS * -(-row_bytes // (message // 16 * 16)))
            else:
                pieces.append(-(-ROWS // (message // row_bytes)))
        found = check(limit_bytes, dtype, is_grouped=False)
        # A row, or a part of one, is dense: it is sent where it lies unless it is cast.
        is_packed = message >= 2 * 48 * dtype.itemsize or dtype is torch.bfloat16
        if dist.get_rank() == 0 and is_packed:
            assert found == sum(pieces), (found, pieces, limit_bytes, dtype)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        with reported(f"{name}_pieces_for_several_ranks_are_packed_once"):
            check_pieces(dtype)
        with reported(f"grouped_messages_of_{name}_arrive"):
            check(1 << 13, dtype, is_grouped=True)
        # As tensors of a device travel by gloo: even what is dense is staged.
        with reported(f"messages_of_{name}_staged_in_host_memory_arrive"):
            check(1 << 13, dtype, is_grouped=False, is_hosted=True)


if __name__ == "__main__":
    main()
