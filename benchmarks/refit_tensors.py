"""What do refits of very many small tensors cost, on the processor?

A mixture of experts, whose tensors are small here so that their number is what takes time: layers
of 384 experts (16 in the smallest model), three weights each, beside attention and norms. On four
gloo ranks, to tensor parallelism over 2 with 2 copies:

    layouts     the trainer's experts lie whole, each on one rank; all else over tp
    dtensors    FSDP2 over all ranks, to tensor parallelism: DTensors on both sides

Told, in processor time (user and system) of the slowest rank:

    prepare     `Refit.prepare`, the first of its kind
    again       for a second target of the same kind, while the first refit is there
    run         `Refit.run`
    raw         one `torch._foreach_copy_` over the same views into and out of dense memory, and
                `all_to_all_single` of as many bytes

`run` and `raw` take turns in one run; medians of five.

    python benchmarks/refit_tensors.py [--tensors 1600 20000 60000] [--kind layouts]
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import resource
import statistics
import sys
from collections.abc import Callable
from typing import Any

from ranks import is_rank, run_as_ranks

RANKS = 4
HIDDEN, INNER = 64, 32
REPEAT = 5
# The source, and what makes a target.
Models = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def shapes_of(tensors: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Every tensor with its shape, and the dimension that tensor parallelism cuts."""
    found: dict[str, tuple[tuple[int, ...], int | None]] = {}
    experts = 384 if tensors > 5000 else 16
    for layer in range(tensors):
        of_layer: dict[str, tuple[tuple[int, ...], int | None]] = {
            "self_attn.q_proj": ((HIDDEN, HIDDEN), 0),
            "self_attn.k_proj": ((HIDDEN // 4, HIDDEN), 0),
            "self_attn.o_proj": ((HIDDEN, HIDDEN), 1),
            "input_layernorm": ((HIDDEN,), None),
            "post_attention_layernorm": ((HIDDEN,), None),
            "mlp.gate": ((16, HIDDEN), None),
        }
        for expert in range(experts):
            of_layer[f"mlp.experts.{expert}.gate_proj"] = ((INNER, HIDDEN), 0)
            of_layer[f"mlp.experts.{expert}.up_proj"] = ((INNER, HIDDEN), 0)
            of_layer[f"mlp.experts.{expert}.down_proj"] = ((HIDDEN, INNER), 1)
        found |= {f"model.layers.{layer}.{name}": how for name, how in of_layer.items()}
        if len(found) >= tensors:
            break
    return dict(list(found.items())[:tensors])


def models_by_layouts(
    shapes: Any, rank: int
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Of `(tensor, Layout)`."""
    import torch

    import reshard

    before, after = reshard.DeviceMesh.of(dp=2, tp=2), reshard.DeviceMesh.of(dp=2, tp=2)
    known: dict[Any, Any] = {}

    def lay(mesh: Any, shape: tuple[int, ...], cut: int | None) -> Any:
        key = (id(mesh), shape, cut)
        if key not in known:
            text = ", ".join("tp" if d == cut else "-" for d in range(len(shape)))
            known[key] = reshard.spec(mesh, text).layout(shape)
        return known[key]

    def lay_whole(shape: tuple[int, ...], holder: int) -> Any:
        return known.setdefault((holder, shape), reshard.Layout.whole(shape, [holder], RANKS))

    def part(layout: Any, make: Callable[[Any], Any]) -> tuple[Any, Any]:
        shape = layout.local_shape(rank)
        return (None if shape is None else make(shape).to(torch.bfloat16)), layout

    source = {}
    for name, (shape, cut) in shapes.items():
        layout = lay(before, shape, cut)
        if ".experts." in name:
            layout = lay_whole(shape, int(name.split(".experts.")[1].split(".")[0]) % RANKS)
        source[name] = part(layout, torch.rand)

    def make_target() -> dict[str, Any]:
        return {n: part(lay(after, shape, cut), torch.zeros) for n, (shape, cut) in shapes.items()}

    return source, make_target


def distribute(
    mesh: Any, shape: tuple[int, ...], placements: Any, fill: Callable[[Any], Any]
) -> Any:
    """This rank's end of a DTensor, in bfloat16; what is cut is cut evenly."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    local = list(shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= size
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    how = {"run_check": False, "shape": torch.Size(shape), "stride": strides}
    return DTensor.from_local(fill(local).to(torch.bfloat16), mesh, placements, **how)


def models_by_dtensors(
    shapes: Any, rank: int
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Of DTensors."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    del rank
    fsdp = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))

    source = {
        n: distribute(fsdp, shape, [Shard(0)], torch.rand) for n, (shape, _) in shapes.items()
    }

    def make_target() -> dict[str, Any]:
        return {
            name: distribute(
                mesh, shape, [Replicate(), Replicate() if cut is None else Shard(cut)], torch.zeros
            )
            for name, (shape, cut) in shapes.items()
        }

    return source, make_target


def spent_s() -> float:
    """Processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(action: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of the slowest rank, and what the action gives here."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun_s = spent_s()
    found = action()
    most = torch.tensor(spent_s() - begun_s, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most), found


def make_raw(refit: Any, group: Any) -> Callable[[], None]:
    """Copies of the views that a refit reads and writes, and an exchange of as many bytes."""
    import torch
    import torch.distributed as dist

    from reshard.torch.exchange.packing.messages import RankTransfers, list_pieces

    rank = dist.get_rank()
    tensors = []
    for item in refit.part_items:
        views = (
            item.match.source_view(refit.source_tensors, rank),
            item.match.target_view(refit.target_tensors, rank),
        )
        tensors.append(RankTransfers.of(item.change, item.transfers, rank, *views))
    sent, received, local = list_pieces(tensors, rank)
    lists: dict[bool, list[Any]] = {}
    sizes: dict[bool, list[int]] = {}
    for is_sent, by_peer in ((True, sent), (False, received)):
        of_peer = [[p.view for p in by_peer.get((0, peer), [])] for peer in range(RANKS)]
        lists[is_sent] = [view for views in of_peer for view in views]
        sizes[is_sent] = [sum(view.numel() for view in views) for views in of_peer]

    def dense(views: list[Any]) -> tuple[Any, list[Any]]:
        memory = torch.zeros(sum(view.numel() for view in views), dtype=torch.bfloat16)
        parts = memory.split([view.numel() for view in views]) if views else ()
        shaped = [part.view(v.shape) for part, v in zip(parts, views, strict=True)]
        return memory, shaped

    (packed, outgoing), (arrived, incoming) = dense(lists[True]), dense(lists[False])
    kept = local.get(0, [])
    from_views = lists[True], [copy.source for copy in kept]
    into = [copy.target for copy in kept]

    def run() -> None:
        # As a refit copies: an engine's tensors may be inference tensors.
        with torch.inference_mode():
            torch._foreach_copy_([*outgoing, *into], [*from_views[0], *from_views[1]])
            dist.all_to_all_single(arrived, packed, sizes[False], sizes[True], group=group)
            torch._foreach_copy_(lists[False], incoming)

    return run


def run_as_rank(options: argparse.Namespace) -> None:
    """The whole comparison, on one rank of the job."""
    import torch
    import torch.distributed as dist

    from reshard.torch import Refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    makers = {"layouts": models_by_layouts, "dtensors": models_by_dtensors}
    for tensors in options.tensors:
        source, make_target = makers[options.kind](shapes_of(tensors), rank)
        first, again = list[float](), list[float]()
        targets = [make_target(), make_target()]
        for number in range(options.repeat):
            # Another tie, of names that nothing has: of such a refit no rank knows a plan.
            prepare = functools.partial(Refit.prepare, source, ties={"none": f"of {number}"})
            for target, taken in zip(targets, (first, again), strict=True):
                taken_s, refit = measure(functools.partial(prepare, target))
                taken.append(taken_s)
        raw = make_raw(refit, None)
        runs: dict[str, list[float]] = {"run": [], "raw": []}
        for turn in range(options.repeat + 1):
            for way, action in (("run", refit.run), ("raw", raw)):
                taken_s, _ = measure(action)
                # The first turn finds memory and connections that nobody has used.
                if turn:
                    runs[way].append(taken_s)
        if not rank:
            medians = {
                name: statistics.median(of)
                for name, of in {"prepare": first, "again": again, **runs}.items()
            }
            told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())
            moved_bytes = refit.sent_bytes
            print(
                f"{tensors:6} {options.kind}: {told}, run {medians['run'] / medians['raw']:.2f} of "
                f"raw; {moved_bytes / 2**20:.1f} MiB sent by rank 0",
                flush=True,
            )
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1600, 20000, 60000])
    parser.add_argument("--kind", choices=["layouts", "dtensors"], default="layouts")
    parser.add_argument("--repeat", type=int, default=REPEAT, help="turns of each way")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
