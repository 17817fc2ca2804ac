"""What does a transformer block move and take, beside JAX with Shardy and PyTorch's DTensor?

The block of tests/spmd/transformer_block.py: 2048 tokens, 512 channels, 8 experts, two for a token,
float32, over dp=2 tp=2, tp=4 and dp=4, parameters and batch in the same shardings for all, forward
and with backward, gradients in their parameters' shardings. Bytes are those that all ranks receive,
an all-reduce counted as a reduce-scatter and an all-gather:

- jax: `jax.jit`, collectives read from the compiled text, on four devices of the CPU;
- dtensor: CommDebugMode, and the tensors of what it counts, on a fake process group of four ranks;
- eager, basic, aggressive, cost: the trace; hand: eager with the placements of `place_by_hand`;
- bytes: by cost on links so slow (1 GB/s, 1 us) that the bytes are what takes time;
- fsdp-jax, fsdp-basic, fsdp-cost: the same with parameters cut over dp as well;
- auto, auto-bytes: shardings that `sp.auto` chooses on both kinds of links, without a limit, and
  within nine tenths of the memory that a rank holds then.

Estimated times are those of the trace.

`--times` runs eager, `sp.jit`, `sp.auto` and `jax.jit` in turns in one process, on a smaller batch:
medians of five of processor time. There *rows* computes the two experts of each token alone, by
`sp.expert_routing`, experts cut over tp, and *ragged_dot* is what JAX has for that; the others
compute all experts for every token.

    python benchmarks/spmd_block.py [--ways jax,dtensor,eager,cost,fsdp-cost,auto] [--times]
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec
from reshard.cost import load_preset
from reshard.topology import Link, Topology

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spmd"))
block: Any = import_module("transformer_block")

RANKS = 4
LARGE = block.Sizes(4, 512, 512, 8, 4, 1024, 8, 4096)
SMALL = block.Sizes(4, 128, 512, 8, 4, 1024, 8, 4096)
MESHES: tuple[dict[str, int], ...] = ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4})
SLOW = Topology.of(hosts=1, ranks_per_host=RANKS, within_host=Link(1e9, 1e-6))
FAST = load_preset("h100-8").topology()
STRATEGIES = ("eager", "basic", "aggressive", "widest", "cost")
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\((?P<rest>.*)"
)
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}


def received_bytes(kind: str, result_bytes: float, ranks: int) -> float:
    """By each rank of a group, from the bytes of its result."""
    factors = {
        "all-reduce": 2 * (ranks - 1) / ranks,
        "all-gather": (ranks - 1) / ranks,
        "reduce-scatter": ranks - 1,
        "all-to-all": (ranks - 1) / ranks,
    }
    return result_bytes * factors[kind]


def place_by_hand(mesh: DeviceMesh, p: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Parameters and where values are placed, by hand, for few bytes forward.

    Another than the eager program's over tp=4 alone: the embedding is reduce-scattered over the
    batch, attention's small weights are gathered, so that it runs on whole sequences, and only
    experts and logits gather their input.
    """
    if mesh.axis_names != ("tp",):
        return p, block.loss.__defaults__[0]
    small = {n: p[n].with_sharding(mesh, [[], []]) for n in ("wq", "wk", "wv", "wo")}
    batch, whole = [["tp"], [], []], [[], [], []]
    places = {"embedded": batch, "to_attention": batch, "to_experts": whole, "to_logits": whole}
    return p | small, lambda name, x: x.with_sharding(mesh, places[name])


def count_chosen(mesh: DeviceMesh, backward: bool, topology: Topology) -> str:
    """With shardings that `sp.auto` chooses: without a limit, and in nine tenths of the memory."""
    p = {name: sp.abstract(shape) for name, shape in LARGE.shapes().items()}
    tokens = sp.abstract((LARGE.batch, LARGE.length), "int64")

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return block.loss(p, tokens, targets, LARGE)

    function = sp.value_and_grad(loss) if backward else loss
    lines, limit = [], None
    for _ in range(2):
        began = time.process_time()
        found = sp.auto(function, mesh, p, tokens, tokens, topology=topology, live_bytes=limit)
        took = time.process_time() - began
        lines.append(f"{said_of(found.trace)}; chosen in {took:.1f} s")
        limit = max(found.trace.peak_bytes.values()) * 9 // 10
    return "\n    ".join(lines)


def said_of(traced: sp.Trace) -> str:
    steps = Counter(
        str(step).split("(")[0]
        for one in traced.operations
        for reshard in one.reshards
        if reshard.moved_bytes
        for step in reshard.program.steps
    )
    peak = max(traced.peak_bytes.values()) / 1e6
    time_ms = traced.seconds_s * 1e3
    return f"{said(traced.moved_bytes, steps)}; {time_ms:.3f} ms, a rank holds {peak:.0f} MB"


def count_here(mesh: DeviceMesh, way: str, backward: bool) -> str:
    topology = SLOW if way in ("bytes", "auto-bytes") else FAST
    if way.startswith("auto"):
        return count_chosen(mesh, backward, topology)
    is_fsdp = way.startswith("fsdp-")
    way = way.removeprefix("fsdp-")
    given = block.shardings(mesh, is_fsdp)
    p = {name: sp.abstract(shape, "float32", given[name]) for name, shape in LARGE.shapes().items()}
    tokens = sp.abstract((LARGE.batch, LARGE.length), "int64", block.batch_sharding(mesh))

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        if way != "hand":
            return block.loss(p, tokens, targets, LARGE)
        p, place = place_by_hand(mesh, p)
        return block.loss(p, tokens, targets, LARGE, place)

    function = sp.value_and_grad(loss) if backward else loss
    strategy = {"hand": "eager", "bytes": "cost"}.get(way, way)
    sp.trace(function, p, tokens, tokens, strategy=strategy, topology=topology)
    began = time.process_time()
    traced = sp.trace(function, p, tokens, tokens, strategy=strategy, topology=topology)
    took = time.process_time() - began
    return f"{said_of(traced)}; traced again in {took:.2f} s"


def said(moved_bytes: float, kinds: Counter[str]) -> str:
    each = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{moved_bytes / 1e6:.1f} MB in {kinds.total()} collectives ({each})"


def all_experts_in_jax(n: Any, which: Any, best: Any, gate: Any, up: Any, down: Any) -> Any:
    import jax
    import jax.numpy as jnp

    shares = (jax.nn.one_hot(which, gate.shape[0]) * best[..., None]).sum(-2)
    inner = jax.nn.silu(jnp.einsum("btd,edf->btef", n, gate))
    inner = inner * jnp.einsum("btd,edf->btef", n, up) * shares[..., None]
    return jnp.einsum("btef,efd->btd", inner, down)


def chosen_experts_in_jax(n: Any, which: Any, best: Any, gate: Any, up: Any, down: Any) -> Any:
    """Rows sorted by expert, and `jax.lax.ragged_dot`."""
    import jax
    import jax.numpy as jnp

    order = jnp.argsort(which.reshape(-1))
    counts = jnp.bincount(which.reshape(-1), length=gate.shape[0])
    rows = n.reshape(-1, n.shape[-1])[order // which.shape[-1]]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, counts))
    made = jax.lax.ragged_dot(inner * jax.lax.ragged_dot(rows, up, counts), down, counts)
    back = jnp.zeros_like(made).at[order].set(made).reshape(*which.shape, n.shape[-1])
    return (back * best[..., None]).sum(-2)


def loss_in_jax(p: Any, tokens: Any, targets: Any, sizes: Any, experts: Any) -> Any:
    """The loss of the block in JAX, by its own functions."""
    import jax
    import jax.numpy as jnp

    b, t, d, h = sizes.batch, sizes.length, sizes.model, sizes.head
    cos, sin = map(jnp.asarray, block._angles(sizes, "float32"))

    def norm(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight

    def rotate(x: Any) -> Any:
        first, second = x[..., : h // 2], x[..., h // 2 :]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def apart(x: Any, count: int) -> Any:
        return x.reshape(b, t, count, h).transpose(0, 2, 1, 3)

    x = jnp.take(p["table"], tokens, axis=0)
    n = norm(x, p["norm1"])
    q = rotate(apart(n @ p["wq"], sizes.heads)).reshape(b, sizes.groups, -1, t, h)
    k = rotate(apart(n @ p["wk"], sizes.groups))
    v = apart(n @ p["wv"], sizes.groups)
    scores = jnp.einsum("bgqth,bgsh->bgqts", q, k) / math.sqrt(h)
    shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf))
    seen = jnp.einsum("bgqts,bgsh->bgqth", shares, v).reshape(b, sizes.heads, t, h)
    x = x + seen.transpose(0, 2, 1, 3).reshape(b, t, d) @ p["wo"]
    n = norm(x, p["norm2"])
    best, which = jax.lax.top_k(jax.nn.softmax(n @ p["router"]), 2)
    best = best / best.sum(-1, keepdims=True)
    x = x + experts(n, which, best, p["gate"], p["up"], p["down"])
    logits = jax.nn.log_softmax(norm(x, p["norm3"]) @ p["unembed"])
    return -jnp.take_along_axis(logits, targets[..., None], axis=-1).mean()


def prepare_in_jax(
    axes: dict[str, int],
    backward: bool,
    sizes: Any,
    experts: Any = all_experts_in_jax,
    is_fsdp: bool = False,
) -> tuple[Any, Any]:
    """The compiled function, and its arguments."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    devices = np.array(jax.devices()).reshape(tuple(axes.values()))
    jax_mesh, mesh = jax.sharding.Mesh(devices, tuple(axes)), DeviceMesh.of(**axes)

    def named(one: ShardingSpec) -> NamedSharding:
        parts = [part.split() for part in str(one).split(", ")]
        dims = [None if part == ["-"] else tuple(part) for part in parts]
        return NamedSharding(jax_mesh, PartitionSpec(*dims))

    given = {name: named(one) for name, one in block.shardings(mesh, is_fsdp).items()}
    data = block.make_parameters(sizes, "float32")
    p = {name: jax.device_put(one, given[name]) for name, one in data.items()}
    batch = [
        jax.device_put(one.astype("int32"), named(block.batch_sharding(mesh)))
        for one in block.make_batch(sizes)
    ]

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return loss_in_jax(p, tokens, targets, sizes, experts)

    whole = NamedSharding(jax_mesh, PartitionSpec())
    function = jax.value_and_grad(loss) if backward else loss
    jitted = jax.jit(function, out_shardings=(whole, given) if backward else whole)
    return jitted.lower(p, *batch).compile(), (p, *batch)


def group_size(text: str) -> int:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(counted[1])
    return RANKS


def count_in_jax(axes: dict[str, int], backward: bool, is_fsdp: bool) -> str:
    text = prepare_in_jax(axes, backward, LARGE, is_fsdp=is_fsdp)[0].as_text()
    moved, kinds = 0.0, Counter[str]()
    for line in text.splitlines():
        if not (found := COLLECTIVE.search(line)):
            continue
        size = sum(
            ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found["result"])
        )
        if found["kind"] == "collective-permute":
            moved += size * line.split("source_target_pairs=")[1].split("}}")[0].count("{")
        else:
            moved += RANKS * received_bytes(found["kind"], size, group_size(line))
        kinds[found["kind"]] += 1
    loops = len(re.findall(r" while\(", text))
    return said(moved, kinds) + (f"; {loops} loops, counted once" if loops else "")


def count_in_dtensor(axes: dict[str, int], backward: bool) -> str:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = DeviceMesh.of(**axes)
    torch_mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)
    )
    names = {
        "all_reduce": "all-reduce",
        "all_gather_into_tensor": "all-gather",
        "reduce_scatter_tensor": "reduce-scatter",
        "all_to_all_single": "all-to-all",
    }

    class Sizing(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.moved, self.kinds = 0.0, Counter[str]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if any(issubclass(one, DTensor) for one in types):
                # DTensor's own operations on shards, and its collectives, come here afterwards.
                return NotImplemented
            found = func(*args, **(kwargs or {}))
            namespace, name = str(func).split(".")[:2]
            if "c10d" in namespace and name in names:
                group = dist.distributed_c10d._resolve_process_group(args[-1])
                size = found.numel() * found.element_size()
                self.moved += RANKS * received_bytes(names[name], size, group.size())
                self.kinds[names[name]] += 1
            return found

    def spread(one: torch.Tensor, spec: ShardingSpec) -> Any:
        dims = str(spec).split(", ")
        placed = [Shard(dims.index(axis)) if axis in dims else Replicate() for axis in axes]
        return distribute_tensor(one, torch_mesh, placed)

    given = block.shardings(mesh)
    p = {
        name: spread(torch.as_tensor(one), given[name]).requires_grad_()
        for name, one in block.make_parameters(LARGE, "float32").items()
    }
    batch = [
        spread(torch.as_tensor(one).contiguous(), block.batch_sharding(mesh))
        for one in block.make_batch(LARGE)
    ]

    def norm(x: Any, shape: Any, weight: Any, epsilon: float) -> Any:
        return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + epsilon) * weight

    # Its own one adds in place to a mean that waits for its sum, which DTensor refuses.
    torch.nn.functional.rms_norm = norm

    def attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    # The CPU's kernel has no sharding strategy in DTensor.
    torch.nn.functional.scaled_dot_product_attention = attention
    sizing, counting = Sizing(), CommDebugMode()
    with implicit_replication(), counting, sizing:
        value = block.loss_in_torch(p, *batch, LARGE)
        if backward:
            value.backward()
            for name, one in p.items():
                one.grad.redistribute(torch_mesh, p[name].placements)
        else:
            value.full_tensor()
    return f"{said(sizing.moved, sizing.kinds)}; CommDebugMode {counting.get_total_counts()}"


def prepare_rows(mesh: DeviceMesh, backward: bool, p: dict[str, Any]) -> tuple[Any, Any]:
    """The loss by the experts that tokens chose, experts cut over `tp`, and its parameters."""
    axes = [axis for axis in mesh.axis_names if axis == "tp"]
    experts = block.chosen_experts(axes)

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return block.loss(p, tokens, targets, SMALL, experts=experts)

    cut = [axes, [], []]
    weights = {name: p[name].with_sharding(mesh, cut) for name in ("gate", "up", "down")}
    return sp.value_and_grad(loss) if backward else loss, p | weights


def time_turns(axes: dict[str, int], backward: bool) -> str:
    import jax
    import torch

    torch.set_num_threads(1)
    mesh = DeviceMesh.of(**axes)

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return block.loss(p, tokens, targets, SMALL)

    function = sp.value_and_grad(loss) if backward else loss
    compiled, arguments = prepare_in_jax(axes, backward, SMALL)
    ragged, _ = prepare_in_jax(axes, backward, SMALL, chosen_experts_in_jax)
    with sp.running(sp.in_process("torch")):
        given = block.shardings(mesh)
        p = {
            name: sp.array(torch.as_tensor(one), given[name])
            for name, one in block.make_parameters(SMALL, "float32").items()
        }
        batch = [sp.array(one, block.batch_sharding(mesh)) for one in block.make_batch(SMALL)]
        ways: dict[str, Callable[[], Any]] = {
            "jax.jit": lambda: jax.block_until_ready(compiled(*arguments)),
            "jax.jit, ragged_dot": lambda: jax.block_until_ready(ragged(*arguments)),
            "eager": lambda: function(p, *batch),
        }
        for strategy in ("eager", "cost"):
            jitted = sp.jit(function, strategy=strategy)
            ways[f"sp.jit, {strategy}"] = lambda jitted=jitted: jitted(p, *batch)
        by_rows, with_experts = prepare_rows(mesh, backward, p)
        jitted_rows = sp.jit(by_rows)
        ways["eager, rows"] = lambda: by_rows(with_experts, *batch)
        ways["sp.jit, rows"] = lambda: jitted_rows(with_experts, *batch)
        shapes = {name: sp.abstract(one.shape) for name, one in p.items()}
        tokens = sp.abstract(batch[0].shape, batch[0].dtype)
        found = sp.auto(function, mesh, shapes, tokens, tokens)
        placed = found.place(p, *batch)
        ways["sp.auto"] = lambda: found.program(*placed)
        first = {name: run() for name, run in ways.items()}
        values = {name: float(one[0] if backward else one) for name, one in first.items()}
        if max(values.values()) - min(values.values()) > 1e-3:
            raise SystemExit(f"losses differ: {values}")
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(5):
            for name, run in ways.items():
                began = time.process_time()
                run()
                taken[name].append(time.process_time() - began)
    medians = {name: 1000 * statistics.median(one) for name, one in taken.items()}
    return ", ".join(
        f"{name} {one:.0f} ms ({one / medians['jax.jit']:.2f})" for name, one in medians.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    others = "bytes", "hand", "fsdp-cost", "auto", "auto-bytes"
    every = ",".join(("jax", "dtensor", *STRATEGIES, *others))
    parser.add_argument("--ways", default=every)
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    for axes in MESHES:
        named = ",".join(f"{axis}={size}" for axis, size in axes.items())
        for backward in (False, True):
            what = f"{named}, {'with backward' if backward else 'forward'}"
            if options.times:
                print(f"{what}: {time_turns(axes, backward)}", flush=True)
                continue
            for way in options.ways.split(","):
                if way.removeprefix("fsdp-") == "jax":
                    found = count_in_jax(axes, backward, way != "jax")
                elif way == "dtensor":
                    found = count_in_dtensor(axes, backward)
                else:
                    found = count_here(DeviceMesh.of(**axes), way, backward)
                print(f"{what}, {way}: {found}", flush=True)


if __name__ == "__main__":
    main()
