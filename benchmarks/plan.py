"""How long does planning take, and how much of it is one rank's part?

Shapes only; the transfer columns are written out. The peer, where torch is installed, is the
planner of PyTorch's distributed checkpoint, which makes one Python object for each pair of
overlapping chunks (`create_read_items_for_chunk_list`), on the same chunks in the same run,
alternating; medians.

Expected before measuring: one tensor of 1,024 row chunks to 1,024 column chunks (1,048,576
transfers) in some tenths of a second, since a transfer is a row of NumPy columns; one rank's
part in about 10 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import reshard
from reshard.planning.plan import Plan


def timed(function: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    function()
    return time.perf_counter() - begin_s


def fresh_plan(source: reshard.Layout, target: reshard.Layout) -> Plan:
    """A plan that nobody keeps, so that nothing found before is used again."""
    return Plan(source, target)


def layouts(chunks: int) -> tuple[reshard.Layout, reshard.Layout]:
    mesh = reshard.DeviceMesh.of(x=chunks)
    shape = (8 * chunks, 8 * chunks)
    rows, columns = (reshard.spec(mesh, text).layout(shape) for text in ("x, -", "-, x"))
    return rows, columns


def torch_planner(chunks: int, ranks: int) -> Callable[[], object] | None:
    """PyTorch's read items for `ranks` of the target's column chunks, or None without torch."""
    try:
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            TensorProperties,
            TensorStorageMetadata,
        )
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
    except ImportError:
        return None
    size = 8 * chunks

    def chunk(offset: tuple[int, int], shape: tuple[int, int]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))

    metadata = TensorStorageMetadata(
        properties=TensorProperties(),
        size=torch.Size((size, size)),
        chunks=[chunk((8 * i, 0), (8, size)) for i in range(chunks)],
    )
    wanted = [chunk((0, 8 * i), (size, 8)) for i in range(ranks)]
    return lambda: create_read_items_for_chunk_list("w", metadata, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    source, target = layouts(options.chunks)
    # PyTorch is asked for a sixteenth of the ranks, and its time taken 16 times.
    share = max(1, options.chunks // 16)
    peer = torch_planner(options.chunks, share)
    ours, one_rank, theirs = [], [], []
    for _ in range(options.repeat):
        ours.append(timed(lambda: fresh_plan(source, target).transfers))
        one_rank.append(timed(lambda: fresh_plan(source, target).for_rank(5)))
        if peer is not None:
            theirs.append(timed(peer) * options.chunks / share)
    count = len(fresh_plan(source, target).transfers)
    assert count == options.chunks**2, f"{count} transfers"
    print(f"{options.chunks} row chunks to {options.chunks} column chunks, {count:,} transfers")
    print(f"  all ranks      {statistics.median(ours):8.3f} s")
    print(f"  one rank's     {statistics.median(one_rank):8.4f} s")
    if theirs:
        ratio = statistics.median(t / o for t, o in zip(theirs, ours, strict=True))
        print(f"  PyTorch's      {statistics.median(theirs):8.3f} s, {ratio:.0f} times as long")


if __name__ == "__main__":
    main()
