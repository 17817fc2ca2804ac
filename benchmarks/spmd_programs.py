"""How much does a program of `sp.jit` take beyond its kernels, beside the same function eager?

One process, float64 in shards of 8x8, one thread, so that the kernels are short: 20 layers of
`tanh(x @ w * 0.5 + x)`, 80 operators, on 1, 4 and 8 shards. Medians in microseconds an operator and
shard, less the same kernels called in a loop by hand, all in turns in one run; goal: at most 3. And
the transformer block of tests/spmd/transformer_block.py, forward and with its gradient: bytes that
move by the trace, time of tracing and preparing, and of a run on PyTorch's shards, both ways.

`--compiled`, alone: elementwise layers of a gated MLP's kind on 4 PyTorch shards of 512 x 1024, and
the block forward, as `torch.compile` compiles what is between movements, beside plain programs.

`--reused`, alone: what it saves on NumPy's shards that results are written where operands were.

    python benchmarks/spmd_programs.py [--repeat 200] [--without-block] [--compiled] [--reused]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.programs import steps as reused_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spmd"))

LAYERS = 20
OPERATORS = 4 * LAYERS


def layers(x: Any, w: Any) -> Any:
    for _ in range(LAYERS):
        x = sp.tanh(x @ w * 0.5 + x)
    return x


def by_hand(shards: list[Any], w: Any, namespace: Any) -> list[Any]:
    tanh, matmul, multiply, add = (
        getattr(namespace, name) for name in ("tanh", "matmul", "multiply", "add")
    )
    half = namespace.asarray(0.5) if namespace.__name__ != "numpy" else 0.5
    found = []
    for x in shards:
        for _ in range(LAYERS):
            x = tanh(add(multiply(matmul(x, w), half), x))
        found.append(x)
    return found


def medians_us(actions: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    taken: dict[str, list[int]] = {name: [] for name in actions}
    for turn in range(repeat + 3):
        for name, action in actions.items():
            start = time.perf_counter_ns()
            action()
            if turn >= 3:
                taken[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(times) / 1000 for name, times in taken.items()}


def overhead(library: str, ranks: int, repeat: int) -> None:
    runner = sp.in_process(library)
    mesh = DeviceMesh.of(x=ranks)
    random = np.random.default_rng(0)
    with sp.running(runner):
        x = sp.array(random.normal(size=(8 * ranks, 8)), spec(mesh, "x, -"))
        w = sp.array(random.normal(size=(8, 8)), spec(mesh, "-, -"))
    jitted = sp.jit(layers)
    shards, whole = list(x.shards.values()), w.shards[0]
    found = medians_us(
        {
            "hand": lambda: by_hand(shards, whole, runner.library.namespace),
            "program": lambda: jitted(x, w),
            "eager": lambda: layers(x, w),
        },
        repeat,
    )
    each = OPERATORS * ranks
    print(
        f"{library}, {ranks} shards: kernels {found['hand'] / each:.2f} us an operator and shard, "
        f"beyond them the program {(found['program'] - found['hand']) / each:.2f}, "
        f"eager {(found['eager'] - found['hand']) / each:.2f}"
    )


def elementwise(x: Any, y: Any) -> Any:
    for _ in range(8):
        x = sp.abs(x * 0.5 + y)
    return x


def reused(repeat: int) -> None:
    """Processor time with and without memory that is used again, of growing shards."""
    plain = reused_memory.MIN_REUSED_BYTES
    mesh = DeviceMesh.of(x=4)
    for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
        x, y = (
            sp.array(np.random.default_rng(n).normal(size=(size // 256, 128)), spec(mesh, "x, -"))
            for n in range(2)
        )
        programs = {}
        for name, least in (("memory of its own", 1 << 62), ("reused", plain)):
            reused_memory.MIN_REUSED_BYTES = least
            programs[name] = sp.jit(elementwise)
            programs[name](x, y)
        taken: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(repeat):
            for name, program in programs.items():
                start = time.process_time()
                program(x, y)
                taken[name].append(time.process_time() - start)
        said = ", ".join(
            f"{name} {statistics.median(times) * 1e6 / (24 * 4):.1f}"
            for name, times in taken.items()
        )
        print(f"{size / 2**20:.2f} MiB a shard: {said} us an operator and shard", flush=True)


def gated(x: Any, gate: Any) -> Any:
    for _ in range(4):
        x = sp.rms_norm(sp.silu(x) * gate + x)
    return x


def compiled(repeat: int) -> None:
    import torch

    torch.set_num_threads(1)
    mesh = DeviceMesh.of(tp=4)
    random = np.random.default_rng(0)
    rows = spec(mesh, "tp, -")
    with sp.running(sp.in_process("torch")):
        given: tuple[Any, ...] = tuple(
            sp.array(random.normal(size=(2048, 1024)).astype("float32"), rows) for _ in range(2)
        )
        compare_compiled("elementwise layers", gated, given, repeat)
        block = import_module("transformer_block")
        sizes = block.Sizes(4, 128, 512, 8, 4, 1024, 8, 4096)
        shardings = block.shardings(mesh)
        p = {
            name: sp.array(one, shardings[name])
            for name, one in block.make_parameters(sizes, "float32").items()
        }
        batch = [sp.array(one, block.batch_sharding(mesh)) for one in block.make_batch(sizes)]

        def loss(p: Any, tokens: Any, targets: Any) -> Any:
            return block.loss(p, tokens, targets, sizes)

        compare_compiled("the block, forward", loss, (p, *batch), repeat)


def compare_compiled(name: str, function: Any, given: tuple[Any, ...], repeat: int) -> None:
    ways = {"eager": function, "program": sp.jit(function)}
    ways["compiled"] = sp.jit(function, compile=True)
    ways["compiled"](*given)
    start = time.perf_counter()
    ways["compiled"](*given)
    first_s = time.perf_counter() - start
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, action in ways.items():
            start = time.process_time()
            action(*given)
            taken[way].append(time.process_time() - start)
    found = {way: statistics.median(times) * 1e3 for way, times in taken.items()}
    said = ", ".join(f"{way} {one:.1f} ms of processor" for way, one in found.items())
    print(f"{name}, tp=4: {said}; compiled in {first_s:.0f} s")


def transformer(axes: dict[str, int]) -> None:
    import torch

    torch.set_num_threads(1)
    block = import_module("transformer_block")
    sizes = block.Sizes(4, 128, 512, 8, 4, 1024, 8, 4096)
    mesh = DeviceMesh.of(**axes)
    with sp.running(sp.in_process("torch")):
        given = block.shardings(mesh)
        p = {
            name: sp.array(one, given[name])
            for name, one in block.make_parameters(sizes, "float32").items()
        }
        tokens, targets = (
            sp.array(one, block.batch_sharding(mesh)) for one in block.make_batch(sizes)
        )

        def loss(p: Any, tokens: Any, targets: Any) -> Any:
            return block.loss(p, tokens, targets, sizes)

        for name, function in (("forward", loss), ("with backward", sp.value_and_grad(loss))):
            for strategy in ("eager", "basic", "aggressive"):
                jitted = sp.jit(function, strategy=strategy)
                start = time.perf_counter()
                jitted(p, tokens, targets)
                first_s = time.perf_counter() - start
                given = (p, tokens, targets)
                actions = {
                    "jitted": functools.partial(jitted, *given),
                    "eager": functools.partial(function, *given),
                }
                found = medians_us(actions, 5)
                traced = jitted.trace(p, tokens, targets)
                print(
                    f"{axes}, {name}, {strategy}: {traced.moved_bytes / 1e6:.1f} MB, "
                    f"{len(traced.operations)} operations, first call {first_s:.2f} s, "
                    f"run {found['jitted'] / 1000:.0f} ms, eager {found['eager'] / 1000:.0f} ms"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--without-block", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--reused", action="store_true")
    options = parser.parse_args()
    if options.reused:
        reused(min(options.repeat, 15))
        return
    if options.compiled:
        compiled(min(options.repeat, 9))
        return
    for library in ("numpy", "torch"):
        for ranks in (1, 4, 8):
            overhead(library, ranks, options.repeat)
    if not options.without_block:
        for axes in ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}):
            transformer(axes)


if __name__ == "__main__":
    main()
