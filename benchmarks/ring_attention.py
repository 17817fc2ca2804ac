"""Ring attention with a causal mask: the sequence in zigzag beside the sequence in order.

Gloo processes, float32, one thread each, both cuts in turns in one job, forward and with the
gradient. In order, the last rank's queries see all keys and the first's only their own; in zigzag
all see equally many, for up to half as many bytes more.

A line for each: the median milliseconds of the clock, those of the busiest rank's processor and of
all together, and the bytes that ranks receive by the trace.

    python benchmarks/ring_attention.py [--ranks 2] [--length 4096] [--heads 4] [--width 64]
        [--repeat 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard.spmd as sp
from reshard import DeviceMesh, spec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CUTS = {"in order": "-, -, x, -", "in zigzag": "-, -, x@zigzag, -"}


def attend(q: Any, k: Any, v: Any) -> Any:
    return sp.attention(q, k, v, is_causal=True)


def weigh(q: Any, k: Any, v: Any) -> Any:
    return sp.sum(sp.square(attend(q, k, v)))


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(arguments: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = DeviceMesh.of(x=dist.get_world_size())
    shape = 1, arguments.heads, arguments.length, arguments.width
    arrays = [np.random.default_rng(n).normal(size=shape).astype("float32") for n in range(3)]
    functions = {"forward": attend, "with its gradient": sp.grad(weigh, (0, 1, 2))}
    with sp.running(sp.over_processes()):
        given = {
            name: [sp.array(one, spec(mesh, cut)) for one in arrays] for name, cut in CUTS.items()
        }
        for what, function in functions.items():
            taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CUTS}
            for turn in range(arguments.repeat + 1):
                for name, operands in given.items():
                    dist.barrier()
                    began, used = time.perf_counter(), processor_s()
                    function(*operands)
                    own = torch.tensor(processor_s() - used, dtype=torch.float64)
                    dist.barrier()
                    clock_s, every = time.perf_counter() - began, own.clone()
                    dist.all_reduce(own, dist.ReduceOp.MAX)
                    dist.all_reduce(every)
                    if turn:
                        taken[name].append((clock_s, own.item(), every.item()))
            for name, rows in taken.items():
                clock, busiest, every_ms = (
                    statistics.median(one) * 1e3 for one in zip(*rows, strict=True)
                )
                moved = sp.trace(function, *given[name]).moved_bytes
                if dist.get_rank() == 0:
                    print(
                        f"{what}, {name}: {clock:.0f} ms, busiest rank {busiest:.0f} ms, all "
                        f"{every_ms:.0f} ms, {moved / 1e6:.1f} MB; load {os.getloadavg()[0]:.0f}",
                        flush=True,
                    )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments)
        return
    from live_processes import run_rank_programs

    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    print(run_rank_programs(command, arguments.ranks, timeout_s=500)[0].strip(), flush=True)


if __name__ == "__main__":
    main()
