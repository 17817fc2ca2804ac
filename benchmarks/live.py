"""What does it cost to give a tensor another layout between the ranks of a running job?

Four gloo ranks, each a process, a tensor of 256 MiB of float32. The ways take turns in one run,
and all begin and end at a barrier; medians of seven:

    new       `reshard.torch.redistribute`, which allocates its result
    out       the same with `out=`: into memory that exists
    program   the same with `out=` and `method="program"`, where there is a program
    raw       `all_to_all_single` of the same bytes between the same ranks, what stays on a rank
              included, dense on both sides: nothing is packed or unpacked
    dtensor   `DTensor.redistribute`
    reduce    of contributions, torch's own: `all_reduce`, or `reduce_scatter_tensor` of dense parts

Two more cases are of `PartitionedTensor`, 8 partitions a rank of sizes that ranks know alone: new
results of `to_aligned` and `to_unaligned`, the exchange of splits included, and raw as above.

Extra memory is how far resident memory of a rank rises above what it was before, less the result.
Processor time is that of all ranks and their threads, user's and system's: other work on the
machine changes it far less than the clock.

Expected before the first run: 1.3 of raw where one side is dense (packing is one more pass over
memory, and overlaps sending), 1.6 where neither is; at most 32 MiB extra; DTensor 5 to 10 times
raw, and half a GiB extra, as it goes through replicas on the CPU.

Programs, expected before the first run: as long as out where a program's only step moves what the
exchange moves, half as long for P-R, which is 1.5 tensors a rank instead of 3.

    python benchmarks/live.py [--size-mib 256] [--repeat 7] [--cases S0-S1 ...] [--extra-mib 64]
                              [--ways out program ...] [--json FILE]
    torchrun --nproc-per-node 4 benchmarks/live.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import is_rank, run_as_ranks

MIB = 1 << 20
RANKS = 4


@dataclass(frozen=True)
class Side:
    """The ranks of a mesh in its shape, and placements as words."""

    ranks: Any
    words: str


ALL = [0, 1, 2, 3]
SQUARE = [[0, 1], [2, 3]]
CASES = {
    "S0-S1": (Side(ALL, "S0"), Side(ALL, "S1")),
    "S0-R": (Side(ALL, "S0"), Side(ALL, "R")),
    "S0S1-S1S0": (Side(SQUARE, "S0 S1"), Side(SQUARE, "S1 S0")),
    "S0S0-S1S1": (Side(SQUARE, "S0 S0"), Side(SQUARE, "S1 S1")),
    "R-S0": (Side(ALL, "R"), Side(ALL, "S0")),
    "1D-2D": (Side(ALL, "S0"), Side(SQUARE, "S0 S1")),
    "2-to-2-others": (Side([0, 1], "S0"), Side([2, 3], "S1")),
    "S0S1-S0R": (Side(SQUARE, "S0 S1"), Side(SQUARE, "S0 R")),
    "S0R-S1S0": (Side(SQUARE, "S0 R"), Side(SQUARE, "S1 S0")),
    "S0-S0-turned": (Side(ALL, "S0"), Side([3, 1, 2, 0], "S0")),
    "P-R": (Side(ALL, "P"), Side(ALL, "R")),
    "P-S0": (Side(ALL, "P"), Side(ALL, "S0")),
    "PS0-S1S0": (Side(SQUARE, "P S0"), Side(SQUARE, "S1 S0")),
}
PARTITIONED = {"to-aligned": True, "to-unaligned": False}
EVERY = [*CASES, *PARTITIONED]
WAYS = ("new", "out", "program", "raw", "dtensor", "reduce")


@dataclass(frozen=True)
class Measured:
    """The slowest rank's time, the most extra memory of any rank; all ranks' processor time, and
    how many pages the system gave them meanwhile."""

    seconds_s: float
    extra_bytes: int
    processor_s: float
    page_faults: int


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def measured(action: Callable[[], Any], result_bytes: int) -> Measured:
    """What an action takes on all ranks together; `result_bytes` is not counted as extra."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    # Peak resident memory counts from here.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start_s, processor_start_s = time.perf_counter(), time.process_time()
    kept = action()
    seconds_s = time.perf_counter() - start_s
    spent = [
        time.process_time() - processor_start_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    ]
    together = torch.tensor(spent, dtype=torch.float64)
    extra_bytes = status_bytes("VmHWM") - before_bytes - result_bytes
    most = torch.tensor([seconds_s, max(extra_bytes, 0)], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    del kept
    processor_s, page_faults = together.tolist()
    return Measured(most[0].item(), int(most[1].item()), processor_s, int(page_faults))


def shape_of(size_mib: int) -> tuple[int, int]:
    """The shape of a tensor of so many MiB of float32, as square as it gets."""
    side = 1
    while 4 * side * side < size_mib * MIB:
        side *= 2
    return side, size_mib * MIB // 4 // side


def sides_of(case: str) -> list[tuple[Any, list[Any], Any]]:
    """Torch's mesh and placements, and the sharding that they are, before and after."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    from reshard.torch.endpoint import sharding_of_placements

    words = {"R": Replicate(), "P": Partial("sum"), "S0": Shard(0), "S1": Shard(1)}
    found = []
    for one in CASES[case]:
        mesh, placements = DeviceMesh("cpu", one.ranks), [words[w] for w in one.words.split()]
        found.append((mesh, placements, sharding_of_placements(mesh, placements, 2)))
    return found


def ways_of(
    case: str, size_mib: int, extra_bytes: int, chosen: Sequence[str] = WAYS
) -> dict[str, tuple[Callable[[], Any], int]]:
    """The ways to move one case on this rank, each with the bytes of what it allocates anew."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    import reshard.torch
    from reshard.collectives import Exchange, find_program

    rank = dist.get_rank()
    shape = shape_of(size_mib)
    (first, held, before), (second, wanted, after) = sides_of(case)
    source, target = before.layout(shape), after.layout(shape)
    plan = reshard.plan(source, target, dtype="float32")
    own_shape = source.local_shape(rank) if rank < source.slots else None
    out_shape = target.local_shape(rank) if rank < target.slots else None
    own = torch.rand(own_shape or (0,))
    out = torch.zeros(out_shape or (0,))
    tensor = DTensor.from_local(
        own, first, held, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    counts = [[0] * RANKS for _ in range(RANKS)]
    transfers = plan.transfers
    for sender, receiver, elements in zip(
        transfers.source_slot.tolist(),
        transfers.target_slot.tolist(),
        transfers.elements.tolist(),
        strict=True,
    ):
        counts[sender][receiver] += elements
    sends, receives = counts[rank], [row[rank] for row in counts]
    packed, unpacked = torch.rand(sum(sends)), torch.zeros(sum(receives))

    def by_reshard(into: Any, method: str) -> Any:
        return reshard.torch.redistribute(
            tensor, (second, wanted), out=into, extra_bytes=extra_bytes, method=method
        )

    into = out if out_shape else None
    result_bytes = out.numel() * 4
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "new": (lambda: by_reshard(None, "exchange"), result_bytes),
        "out": (lambda: by_reshard(into, "exchange"), 0),
        "program": (lambda: by_reshard(into, "program"), 0),
        "raw": (lambda: dist.all_to_all_single(unpacked, packed, receives, sends), 0),
        "dtensor": (lambda: tensor.redistribute(second, wanted), result_bytes),
    }
    if CASES[case][0].ranks != CASES[case][1].ranks:
        del ways["dtensor"]
    if case == "P-R":
        summed = torch.zeros(shape)
        ways["reduce"] = (lambda: dist.all_reduce(summed), 0)
    if case == "P-S0":
        scattered = torch.zeros(shape[0] // RANKS, shape[1])
        ways["reduce"] = (lambda: dist.reduce_scatter_tensor(scattered, own), 0)
    steps = find_program(before, after, shape).steps
    if any(isinstance(step, Exchange) for step in steps):
        del ways["program"]
    return {way: ways[way] for way in chosen if way in ways}


def ways_of_partitions(
    is_aligning: bool, size_mib: int, chosen: Sequence[str]
) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is measured of partitions, with the size of its result here."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from reshard.torch import PartitionedTensor

    rank, partitions = dist.get_rank(), 8
    mesh = init_device_mesh("cpu", (RANKS,))
    rows, columns = size_mib * MIB // RANKS // 4096, 1024
    # Sizes that differ by rank and by partition, of the same number of rows on every rank.
    shares = [1 + (n + rank) % partitions for n in range(partitions)]
    splits = [rows * one // sum(shares) for one in shares]
    splits[-1] += rows - sum(splits)
    unaligned = PartitionedTensor.of_splits(torch.rand(rows, columns), splits, mesh)
    tensor = unaligned if is_aligning else unaligned.to_aligned()
    result = tensor.to_aligned() if is_aligning else tensor.to_unaligned()
    most = partitions // RANKS
    to_each = torch.tensor(splits).view(RANKS, most).sum(dim=1) * columns
    from_each = torch.zeros_like(to_each)
    dist.all_to_all_single(from_each, to_each)
    sends, receives = (to_each, from_each) if is_aligning else (from_each, to_each)
    packed, unpacked = torch.rand(int(sends.sum())), torch.zeros(int(receives.sum()))
    counts = receives.tolist(), sends.tolist()
    result_bytes = result.local.nbytes
    # Every conversion exchanges the splits, which a result of another would know.
    again = PartitionedTensor.of_splits(
        tensor.local, tensor.splits, mesh, aligned=not is_aligning, num_partitions=partitions
    )
    convert = again.to_aligned if is_aligning else again.to_unaligned
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "new": (convert, result_bytes),
        "raw": (lambda: dist.all_to_all_single(unpacked, packed, *counts), 0),
    }
    return {way: ways[way] for way in chosen if way in ways}


def to_raw(medians: dict[str, float], way: str) -> str:
    """A way's median over raw's, where raw was measured."""
    return f"{medians[way] / medians['raw']:6.2f}" if "raw" in medians else "     -"


def run_as_rank(options: argparse.Namespace) -> None:
    """All cases, on one rank of the job."""
    import torch
    import torch.distributed as dist

    from reshard.torch import keep_memory
    from reshard.torch.exchange.packing.copies import DEFAULT_KEPT_BYTES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch._logging.set_logs(all=40)
    is_first = dist.get_rank() == 0
    if is_first:
        print(
            f"{'case':14} {'way':8} {'median':>8}  {'min-max':>13}  {'to raw':>6}  "
            f"{'processor':>9}  {'to raw':>6}  {'extra':>8}  {'faults':>7}"
        )
    told: dict[str, dict[str, float]] = {}
    ways: dict[str, tuple[Callable[[], Any], int]] = {}
    for case in options.cases:
        # What the case before had is given back, before as much is taken again.
        ways.clear()
        keep_memory(0)
        keep_memory(DEFAULT_KEPT_BYTES)
        if case in PARTITIONED:
            ways = ways_of_partitions(PARTITIONED[case], options.size_mib, options.ways)
        else:
            ways = ways_of(case, options.size_mib, options.extra_mib * MIB, options.ways)
        taken: dict[str, list[Measured]] = {way: [] for way in ways}
        for turn in range(options.repeat + 1):
            for way, (action, result_bytes) in ways.items():
                found = measured(action, result_bytes)
                # The first turn finds memory and connections that nobody has used.
                if turn:
                    taken[way].append(found)
        medians = {way: statistics.median(one.seconds_s for one in taken[way]) for way in taken}
        processor = {way: statistics.median(one.processor_s for one in taken[way]) for way in taken}
        for way, of_way in taken.items():
            seconds_s = [one.seconds_s for one in of_way]
            extra_mib = max(one.extra_bytes for one in of_way) / MIB
            if is_first:
                print(
                    f"{case:14} {way:8} {medians[way]:6.3f} s  "
                    f"{min(seconds_s):6.3f}-{max(seconds_s):6.3f}  {to_raw(medians, way)}  "
                    f"{processor[way]:7.3f} s  {to_raw(processor, way)}  {extra_mib:4.0f} MiB  "
                    f"{statistics.median(one.page_faults for one in of_way):7.0f}",
                    flush=True,
                )
        told[case] = medians
    if is_first and options.json:
        sizes = {"size_mib": options.size_mib, "shape": shape_of(options.size_mib)}
        Path(options.json).write_text(json.dumps(sizes | {"median_s": told}, indent=1))
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=256, help="of the whole tensor")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each way")
    parser.add_argument("--extra-mib", type=int, default=64, help="limit of extra memory")
    parser.add_argument("--cases", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", help="a file for the medians, by case and way")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
