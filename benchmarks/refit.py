"""What does it cost to fill an inference model from a trainer's, between the ranks of a job?

A Qwen3-32B with every width divided by `--scale`, all 64 layers, bfloat16: tensor parallel over 4
gloo ranks, to tensor parallel over 2 with 2 copies, on the same ranks. The ways take turns in one
run, and all begin and end at a barrier; medians of seven:

    refit     `Refit.run`, prepared once
    raw       `all_to_all_single` of the same bytes between the same ranks, dense on both sides
    raw+kept  and a copy of as many bytes as stay on their rank, which refit copies too

Also told: what `Refit.prepare` takes, locally and centralized, and how often the runs planned.

Expected before the first run: 1.3 of raw+kept, as packing is one more pass over half of the
tensors; row-cut ones (`o_proj`, `down_proj`) are packed and unpacked.

    python benchmarks/refit.py [--scale 8] [--repeat 7] [--extra-mib 64] [--cast]
    torchrun --nproc-per-node 4 benchmarks/refit.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from ranks import is_rank, run_as_ranks

MIB = 1 << 20
RANKS = 4
LAYERS = 64


def shapes_of(scale: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of the model with its shape, and how tensor parallelism cuts it."""
    hidden, inner, vocabulary = 5120 // scale, 25600 // scale, 151936 // scale
    queries, keys, head = 64 * 128 // scale, 8 * 128 // scale, 128 // scale
    found = {"model.embed_tokens": ((vocabulary, hidden), "tp, -")}
    for layer in range(LAYERS):
        of_layer = {
            "self_attn.q_proj": ((queries, hidden), "tp, -"),
            "self_attn.k_proj": ((keys, hidden), "tp, -"),
            "self_attn.v_proj": ((keys, hidden), "tp, -"),
            "self_attn.o_proj": ((hidden, queries), "-, tp"),
            "self_attn.q_norm": ((head,), "-"),
            "self_attn.k_norm": ((head,), "-"),
            "mlp.gate_proj": ((inner, hidden), "tp, -"),
            "mlp.up_proj": ((inner, hidden), "tp, -"),
            "mlp.down_proj": ((hidden, inner), "-, tp"),
            "input_layernorm": ((hidden,), "-"),
            "post_attention_layernorm": ((hidden,), "-"),
        }
        found |= {f"model.layers.{layer}.{name}": how for name, how in of_layer.items()}
    return found | {"model.norm": ((hidden,), "-"), "lm_head": ((vocabulary, hidden), "tp, -")}


def run_as_rank(options: argparse.Namespace) -> None:
    """The whole comparison, on one rank of the job."""
    import torch
    import torch.distributed as dist

    import reshard
    from reshard.plans.plan import Plan
    from reshard.torch import Refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, is_first = dist.get_rank(), dist.get_rank() == 0
    before, after = reshard.DeviceMesh.of(tp=4), reshard.DeviceMesh.of(dp=2, tp=2)
    given_dtype = torch.float32 if options.cast else torch.bfloat16
    source: dict[str, Any] = {}
    target: dict[str, Any] = {}
    counts = torch.zeros(RANKS, RANKS, dtype=torch.int64)
    for name, (shape, cut) in shapes_of(options.scale).items():
        layouts = [reshard.spec(mesh, cut).layout(shape) for mesh in (before, after)]
        local, empty = (layout.local_shape(rank) for layout in layouts)
        source[name] = (torch.rand(local).to(given_dtype), layouts[0])
        target[name] = (torch.zeros(empty, dtype=torch.bfloat16), layouts[1])
        transfers = reshard.plan(*layouts).transfers
        for sender, receiver, elements in zip(
            transfers.source_slot.tolist(),
            transfers.target_slot.tolist(),
            transfers.elements.tolist(),
            strict=True,
        ):
            counts[sender, receiver] += elements
    kept_elements = int(counts.diagonal()[rank])
    counts.fill_diagonal_(0)
    sends, receives = counts[rank].tolist(), counts[:, rank].tolist()
    packed = torch.rand(sum(sends)).to(torch.bfloat16)
    unpacked = torch.zeros(sum(receives), dtype=torch.bfloat16)
    kept = torch.rand(kept_elements).to(given_dtype)
    copied = torch.zeros(kept_elements, dtype=torch.bfloat16)

    prepared = {}
    for planning in ("centralized", "local"):
        dist.barrier()
        found = Refit.prepare(
            source,
            target,
            planning=planning,
            cast=options.cast,
            extra_bytes=options.extra_mib * MIB,
        )
        prepared[planning] = found
        report = found.report
        if is_first:
            print(
                f"prepare {planning:12} {report.planning_s:6.3f} s to plan, "
                f"{report.gathered_bytes / 1024:7.1f} KiB gathered, "
                f"{report.scattered_bytes / 1024:7.1f} KiB scattered, peak memory "
                f"+{report.peak_memory_bytes / MIB:.0f} MiB"
            )
    del prepared["centralized"]
    refit = prepared["local"]
    plans = [0]
    made = Plan.__init__

    def counted(one: Any, *arguments: Any) -> None:
        plans[0] += 1
        made(one, *arguments)

    Plan.__init__ = counted  # type: ignore[method-assign]

    def raw() -> None:
        dist.all_to_all_single(unpacked, packed, receives, sends)

    def raw_and_kept() -> None:
        raw()
        copied.copy_(kept)

    ways: dict[str, Callable[[], Any]] = {"refit": refit.run, "raw": raw, "raw+kept": raw_and_kept}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.repeat + 1):
        for way, action in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            action()
            most = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            # The first turn finds memory and connections that nobody has used.
            if turn:
                taken[way].append(float(most))
    moved_bytes = 2 * int(counts.sum())
    extra = torch.tensor(refit.extra_bytes)
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    if is_first:
        print(
            f"{len(source)} tensors, {moved_bytes / MIB:.0f} MiB moved, extra memory at most "
            f"{int(extra) / MIB:.0f} MiB a rank, {plans[0]} plans made by {options.repeat + 1} runs"
        )
        medians = {way: statistics.median(of) for way, of in taken.items()}
        for way, of in taken.items():
            print(
                f"{way:9} {medians[way]:6.3f} s  {min(of):6.3f}-{max(of):6.3f}  "
                f"{moved_bytes / medians[way] / 1e9:5.2f} GB/s  "
                f"{medians[way] / medians['raw']:5.2f} of raw, "
                f"{medians[way] / medians['raw+kept']:5.2f} of raw+kept"
            )
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=int, default=8, help="divides every width")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each way")
    parser.add_argument("--extra-mib", type=int, default=64, help="limit of extra memory")
    parser.add_argument("--cast", action="store_true", help="from float32")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
