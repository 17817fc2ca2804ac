"""How long does planning take, and how much of it is one rank's part?

Shapes only; the transfer columns are written out. Each turn is a process of its own, so that
nothing found before is used again, and its time begins when its imports are done. Medians.

    chunks   one tensor, 1,024 row chunks to 1,024 column chunks: 1,048,576 transfers
    llama    the 1,138 tensors of a Llama-3.1-405B, each cut by rows over 64 ranks ("fsdp"), to
             tp=8,pp=16,dp=8 by the llama recipe. Tensors of equal layouts share one plan, and
             its columns.
    flat     one tensor of 8,192 x 28,672, flattened and cut evenly over 2,999 ranks, to 3,001
    boxes    one tensor of 20,000 x 20,000, cut at random into 10,000 boxes on a rank each, to
             10,000 others

Of each: the layouts (for llama, 1,138 names matched by the recipe), the transfers of all ranks,
the part of one rank that only receives and of one that sends as well, and the peak of memory
that planning all ranks adds to the imports.

The peer, where torch is installed, is the planner of PyTorch's distributed checkpoint, which
makes one Python object for each pair of overlapping chunks (`create_read_items_for_chunk_list`).
It is asked for an evenly chosen part of the ranks, and its time multiplied accordingly.

Then whole models as jobs, with senders chosen for all tensors together (benchmarks/jobs.py): a
70B-like model from N to N/2 ranks, for N of 64 to 512 and, one rank's part only, 100,000; and 256
experts, each by itself and stacked; and the 200 tensors of one flat buffer of FSDP from 1,024
ranks to 768. Of each: the layouts; the classes (what all ranks must know:
needs, classes and shares of senders) and one rank's part, in a process of their own, with the
memory they add; the transfers of all ranks; how many transfers are parts of a box that several
send; and the load of the busiest sender, over the mean of all senders. Megatron's figures are
those that the project's issue gives: processor time on every rank.

Expected before the first run: chunks in 0.2 s; llama's all ranks in 1 s and 300 MB, its one
rank's part in 20 ms; of the jobs' ranks 10 ms for the part and 20 ms for the classes, all ranks
0.1 s for 36,000 and 0.6 s for 288,000 transfers; 100 ms and 200 MB for one of 100,000 ranks. Of
the layouts that form no grid: flat in 1 s and 300 MB, its one rank's part in 50 ms; boxes in 2 s.

    python benchmarks/plan.py [--chunks 1024] [--repeat 5] [--cases chunks llama dense-64]
                              [--without-peer]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jobs
import numpy as np
from llama import llama_shapes

import reshard
from reshard.layout import Box, Layout
from reshard.plans.job import Job, JobItem
from reshard.plans.plan import Plan
from reshard.recipes import assign, load_recipe

MIB = 1 << 20


@dataclass(frozen=True)
class Movement:
    """What is planned: both layouts of every tensor, and the ranks that the peer is asked for."""

    source: dict[str, Layout]
    target: dict[str, Layout]
    receiver: int
    sender: int
    peer_ranks: range
    ranks: int

    def plans(self) -> list[Plan]:
        """One a tensor; those of equal layouts are one."""
        return [Plan(self.source[name], target) for name, target in self.target.items()]


def chunks(count: int) -> Movement:
    """Row chunks to column chunks."""
    mesh = reshard.DeviceMesh.of(x=count)
    rows, columns = (
        reshard.spec(mesh, text).layout((8 * count, 8 * count)) for text in ("x, -", "-, x")
    )
    return Movement({"w": rows}, {"w": columns}, 5, 5, range(0, count, 16), count)


def llama(_: int) -> Movement:
    """64 ranks of FSDP to 1,024 of three parallelisms."""
    # Llama-3.1-405B, from its published config.json.
    shapes = llama_shapes(hidden=16384, inner=53248, key_value=8 * 128, layers=126)
    rows = reshard.DeviceMesh.of(fsdp=64)
    row_chunks = {
        ndim: reshard.spec(rows, ", ".join(["fsdp", *["-"] * (ndim - 1)])) for ndim in (1, 2)
    }
    source = {name: row_chunks[len(shape)].layout(shape) for name, shape in shapes.items()}
    config = {"num_attention_heads": 128, "num_key_value_heads": 8, "num_hidden_layers": 126}
    mesh = reshard.DeviceMesh.of(tp=8, pp=16, dp=8)
    target = assign(shapes, mesh, recipe=load_recipe("llama"), config=config).layouts
    # The receiver is in the middle of the mesh; PyTorch is asked for one rank of each stage.
    tp, pp, dp = 3, 7, 5
    receiver = (tp * 16 + pp) * 8 + dp
    return Movement(source, target, receiver, 29, range(0, 128, 8), mesh.size)


def flat(_: int) -> Movement:
    """Ranges of a flattened tensor, that begin and end within its rows."""
    shape, ranks = (8192, 28672), (2999, 3001)
    total = shape[0] * shape[1]
    source, target = (
        Layout.flat_ranges(shape, {i: (total * i // n, total * (i + 1) // n) for i in range(n)})
        for n in ranks
    )
    return Movement({"w": source}, {"w": target}, 3000, 7, range(0, 3001, 300), 3001)


def boxes(_: int) -> Movement:
    """Boxes that form no grid, on a rank each."""
    count, shape = 10_000, (20_000, 20_000)
    source, target = (
        Layout.from_boxes(shape, enumerate(random_boxes(shape, count, seed))) for seed in (1, 2)
    )
    return Movement({"w": source}, {"w": target}, 7, 7, range(0, count, 1000), count)


def random_boxes(shape: tuple[int, ...], count: int, seed: int) -> list[Box]:
    """A tensor cut `count - 1` times, each time a box that was drawn, anywhere."""
    draw = random.Random(seed)
    found = [Box((0,) * len(shape), shape)]
    while len(found) < count:
        number, d = draw.randrange(len(found)), draw.randrange(len(shape))
        start, stop = found[number]
        if stop[d] - start[d] < 2:
            continue
        at = draw.randrange(start[d] + 1, stop[d])
        found[number] = Box(start, (*stop[:d], at, *stop[d + 1 :]))
        found.append(Box((*start[:d], at, *start[d + 1 :]), stop))
    draw.shuffle(found)
    return found


CASES = {"chunks": chunks, "llama": llama, "flat": flat, "boxes": boxes}


@dataclass(frozen=True)
class Model:
    """A job, a rank on both of its sides, and Megatron's seconds."""

    items: Callable[[], list[JobItem]]
    rank: int
    megatron_s: float | None = None
    is_simulated: bool = False


MODELS = {
    "dense-64": Model(lambda: jobs.dense(64), 5, 0.26),
    "dense-128": Model(lambda: jobs.dense(128), 5, 0.88),
    "dense-256": Model(lambda: jobs.dense(256), 5, 3.1),
    "dense-512": Model(lambda: jobs.dense(512), 5, 13.3),
    "experts": Model(jobs.experts, 77, 2.8),
    "stacked-experts": Model(jobs.stacked_experts, 77),
    "flat-buffer": Model(jobs.flat_buffer, 7),
    "dense-100000": Model(lambda: jobs.dense(100_000), 4321, is_simulated=True),
}


def timed(name: str, function: Callable[[], object]) -> dict[str, float]:
    """Seconds by the clock, and of a processor: those say less of what else the machine does."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    function()
    return {name: time.perf_counter() - begin_s, f"{name} CPU": time.process_time() - begin_cpu_s}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_all_ranks(movement: Movement) -> dict[str, float]:
    """Every box that is copied, of all tensors and ranks."""
    before_bytes = peak_bytes()
    plans: list[Plan] = []

    def plan() -> None:
        plans.extend(movement.plans())
        for plan in plans:
            _ = plan.transfers

    taken = timed("all ranks", plan)
    return taken | {
        "extra_bytes": peak_bytes() - before_bytes,
        "transfers": sum(len(plan.transfers) for plan in plans),
        "written_out": sum(len(plan.transfers) for plan in set(plans)),
    }


def plan_receiver(movement: Movement) -> dict[str, float]:
    """The part of a rank that holds nothing of the source, where there is one."""
    return timed("one receiver", lambda: plan_one_rank(movement, movement.receiver))


def plan_sender(movement: Movement) -> dict[str, float]:
    """The part of a rank on both sides."""
    return timed("one sender", lambda: plan_one_rank(movement, movement.sender))


def plan_one_rank(movement: Movement, rank: int) -> None:
    """What one rank receives, keeps and sends."""
    for plan in set(movement.plans()):
        plan.for_rank(rank)


def plan_by_peer(movement: Movement) -> dict[str, float]:
    """PyTorch's read items, for all ranks by multiplication."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def boxes(layout: Layout, slot: int) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
            for box in layout.boxes(slot)
        ]

    asked = []
    for name, source in movement.source.items():
        stored = [chunk for slot in source.holders for chunk in boxes(source, slot)]
        size = torch.Size(source.shape)
        metadata = TensorStorageMetadata(properties=TensorProperties(), size=size, chunks=stored)
        target = movement.target[name]
        for rank in movement.peer_ranks:
            if wanted := boxes(target, rank):
                asked.append((name, metadata, wanted))

    def plan() -> None:
        for name, metadata, wanted in asked:
            create_read_items_for_chunk_list(name, metadata, wanted)

    factor = movement.ranks / len(movement.peer_ranks)
    return {name: value * factor for name, value in timed("PyTorch's", plan).items()}


def job_of_one_rank(items: list[JobItem], rank: int) -> dict[str, float]:
    """What one rank does."""
    before_bytes = peak_bytes()
    job = Job(items)
    taken = timed("classes", lambda: job.assignment) | timed("one rank", lambda: job.for_rank(rank))
    return taken | {
        "rank_bytes": peak_bytes() - before_bytes,
        "own_transfers": job.for_rank(rank).count,
    }


def job_of_all_ranks(items: list[JobItem], _: int) -> dict[str, float]:
    """The transfers of all ranks, classes included."""
    before_bytes = peak_bytes()
    job = Job(items)
    taken = timed("all ranks", lambda: job.transfers)
    extra_bytes = peak_bytes() - before_bytes
    parts = sum(
        int((found.transfers.elements != found.whole_shape[found.box].prod(axis=1)).sum())
        for found in job.transfers.groups
    )
    senders = job.sent_bytes[job.sent_bytes > 0]
    return taken | {
        "extra_bytes": extra_bytes,
        "transfers": job.transfers.count,
        "parts": parts,
        "max_over_mean": float(senders.max() / np.mean(senders)),
    }


TURNS = {
    "all": plan_all_ranks,
    "receiver": plan_receiver,
    "sender": plan_sender,
    "peer": plan_by_peer,
}


def turn(case: str, what: str, count: str) -> None:
    """The hidden command, in a process of its own."""
    if case in MODELS:
        of_model: list[list[JobItem]] = []
        taken = timed("layouts", lambda: of_model.append(MODELS[case].items()))
        measure = job_of_one_rank if what == "rank" else job_of_all_ranks
        print(json.dumps(taken | measure(of_model[0], MODELS[case].rank)))
        return
    made: list[Movement] = []
    taken = timed("layouts", lambda: made.append(CASES[case](int(count))))
    print(json.dumps(taken | TURNS[what](made[0])))


def medians(case: str, turns: list[str], chunks: int) -> dict[str, float]:
    """Each turn in a process of its own, the ways taking turns."""
    taken: dict[str, list[float]] = {}
    for what in turns:
        command = [sys.executable, __file__, "--turn", case, what, str(chunks)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        for name, value in json.loads(answer).items():
            taken.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def show_times(median: dict[str, float], *names: str) -> None:
    for name in names:
        if name in median:
            print(f"  {name:13} {median[name]:9.4f} s, {median[f'{name} CPU']:9.4f} s of CPU")


def show_plan(case: str, median: dict[str, float]) -> None:
    print(
        f"{case}: {median['transfers']:,.0f} transfers, "
        f"{median['written_out']:,.0f} of different plans"
    )
    show_times(median, "layouts", "all ranks", "one receiver", "one sender", "PyTorch's")
    print(f"  all ranks add {median['extra_bytes'] / MIB:.0f} MiB")
    if "PyTorch's" in median:
        ratio = median["PyTorch's"] / median["all ranks"]
        print(f"  PyTorch's takes {ratio:.0f} times as long")


def show_job(case: str, median: dict[str, float]) -> None:
    own = f"{median['own_transfers']:,.0f} transfers of one rank"
    everything = f", {median['transfers']:,.0f} of all" if "transfers" in median else ""
    print(f"{case}: {own}{everything}")
    show_times(median, "layouts", "classes", "one rank", "all ranks")
    print(f"  one rank adds {median['rank_bytes'] / MIB:.0f} MiB")
    if "transfers" in median:
        print(
            f"  {median['parts']:,.0f} transfers are parts of a box; the busiest sender has "
            f"{median['max_over_mean']:.3f} of the mean"
        )
    megatron_s = MODELS[case].megatron_s
    if megatron_s is not None:
        own_s = median["classes CPU"] + median["one rank CPU"]
        print(
            f"  Megatron's {megatron_s} s on every rank are {megatron_s / own_s:.0f} times as long"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    names = [*CASES, *MODELS]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--without-peer", action="store_true", help="leave PyTorch out")
    options = parser.parse_args()
    turns = [what for what in TURNS if what != "peer" or not options.without_peer]
    for case in options.cases:
        if case in MODELS:
            of_job = ["rank"] if MODELS[case].is_simulated else ["rank", "all"]
            show_job(case, medians(case, of_job * options.repeat, options.chunks))
        else:
            show_plan(case, medians(case, turns * options.repeat, options.chunks))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        turn(*sys.argv[2:])
    else:
        main()
