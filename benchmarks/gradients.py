"""What does a refit take that combines contributions into replicas, by programs and by exchange?

Four gloo ranks, each a process; every tensor is a DTensor that is partial over all ranks, and
becomes whole on all of them, as gradients of data parallel ranks do. The ways take turns in one
run, and all begin and end at a barrier; medians of seven:

    exchange    `Refit.prepare(..., method="exchange")`: every rank gets all contributions
    program     `method="program"`: the steps of all tensors' all-reduces together
    all_reduce  torch's, of one dense tensor of as many bytes, in place

Expected before the first run: a program moves half of what the exchange moves, and combines a
quarter of it on each rank, so 0.4 of its time; and 1.5 times as long as torch's, which packs
nothing.

    python benchmarks/gradients.py [--repeat 7] [--cases small layers large ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

from ranks import is_rank, run_as_ranks

RANKS = 4
CASES = {
    "small": (64, (64, 64)),
    "layers": (64, (256, 512)),
    "large": (16, (1024, 1024)),
    "one": (1, (4096, 4096)),
}


def run_as_rank(options: argparse.Namespace) -> None:
    """All cases, on one rank of the job."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from reshard.torch import Refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    is_first = dist.get_rank() == 0
    for case in options.cases:
        count, shape = CASES[case]
        source = {
            str(n): DTensor.from_local(torch.rand(shape), mesh, [Partial()], run_check=False)
            for n in range(count)
        }
        target = {
            name: DTensor.from_local(torch.zeros(shape), mesh, [Replicate()], run_check=False)
            for name in source
        }
        dense = torch.rand(count, *shape)
        prepared = {m: Refit.prepare(source, target, method=m) for m in ("exchange", "program")}
        ways: dict[str, Callable[[], object]] = {m: one.run for m, one in prepared.items()}
        ways["all_reduce"] = lambda dense=dense: dist.all_reduce(dense)  # type: ignore[misc]
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.repeat + 1):
            for way, action in ways.items():
                dist.barrier()
                begun_s = time.perf_counter()
                action()
                slowest = torch.tensor(time.perf_counter() - begun_s, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                # The first turn finds memory and connections that nobody has used.
                if turn:
                    taken[way].append(slowest.item())
        by_default = len(Refit.prepare(source, target).report.programs)
        if is_first:
            medians = {way: statistics.median(times) for way, times in taken.items()}
            ratios = [a / b for a, b in zip(taken["program"], taken["exchange"], strict=True)]
            told = "  ".join(f"{way} {median:6.3f} s" for way, median in medians.items())
            told += f"  program to exchange {statistics.median(ratios):.2f}"
            print(f"{case:8} {told}  by default {by_default} of {count} by programs", flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
