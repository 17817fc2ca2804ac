"""Experts by the rows that there are, beside all experts for every token.

2048 tokens, 512 channels, 8 experts of 1024, two for a token, SwiGLU, float32 on PyTorch's shards
in one process, one thread, experts and heads of the batch cut as the block of
tests/spmd/transformer_block.py has them:

    one-hot     all experts for every token, weighed by shares that are mostly zero
    loop        sp.expert_routing, with a product for each expert that has rows
    kernel      the same with one kernel for all experts of a rank
    program     that, by sp.eagerly in a program of sp.jit

For each mesh, forward and with its gradient: median milliseconds of a processor, all in turns in
one process, and the bytes that ranks receive by the trace.

    python benchmarks/experts.py [--repeat 5] [--tokens 2048] [--mesh "tp=4"]
"""

from __future__ import annotations

import argparse
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
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.gradients import expert_routing as expert_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spmd"))
block: Any = import_module("transformer_block")

WIDTH, INNER, COUNT, CHOSEN = 512, 1024, 8, 2
MESHES: dict[str, tuple[dict[str, int], str, str]] = {
    "dp=2, tp=2": ({"dp": 2, "tp": 2}, "dp, -", "tp, -, -"),
    "tp=4": ({"tp": 4}, "tp, -", "tp, -, -"),
    "dp=4": ({"dp": 4}, "dp, -", "-, -, -"),
}


def choose(x: Any, router: Any) -> tuple[Any, Any]:
    best, which = sp.top_k(sp.softmax(x @ router), CHOSEN)
    return best / sp.sum(best, axis=-1, keepdims=True), which


def by_one_hot(x: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
    best, which = choose(x, router)
    hot = sp.one_hot(which, COUNT, dtype="float32")
    shares = sp.sum(hot * sp.expand_dims(best, axis=-1), axis=-2)
    inner = sp.silu(sp.einsum("td,ndh->tnh", x, gate)) * sp.einsum("td,ndh->tnh", x, up)
    return sp.einsum("tnh,nhd,tn->td", inner, down, shares)


def make_routed(axes: list[str]) -> Callable[..., Any]:
    experts = block.experts_of_rows(axes)

    def by_rows(x: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
        best, which = choose(x, router)
        return experts(x, which, best, gate, up, down)

    return by_rows


def with_slopes(function: Callable[..., Any]) -> Callable[..., Any]:
    return sp.value_and_grad(lambda *given: sp.sum(sp.square(function(*given))), (0, 1, 2, 3, 4))


def without_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    find = expert_rows._find_kernel

    def called(*given: Any) -> Any:
        expert_rows._find_kernel = lambda *_: None
        try:
            return function(*given)
        finally:
            expert_rows._find_kernel = find

    return called


def measure(name: str, tokens: int, repeat: int) -> None:
    sizes, of_tokens, of_experts = MESHES[name]
    mesh = DeviceMesh.of(**sizes)
    draw = np.random.default_rng(0)
    shapes = [(tokens, WIDTH), (WIDTH, COUNT), *[(COUNT, WIDTH, INNER)] * 2, (COUNT, INNER, WIDTH)]
    cuts = [of_tokens, "-, -", *[of_experts] * 3]
    given = [
        sp.array(torch.tensor(draw.normal(size=shape) / 16, dtype=torch.float32), spec(mesh, cut))
        for shape, cut in zip(shapes, cuts, strict=True)
    ]
    routed = make_routed(["tp"] if "tp" in sizes else [])
    for what, wrap in (("forward", lambda f: f), ("with its gradient", with_slopes)):
        plain, rows = wrap(by_one_hot), wrap(routed)
        ways = {
            "one-hot": plain,
            "loop": without_kernel(rows),
            "kernel": rows,
            "program": sp.jit(rows),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repeat + 1):
            for way, function in ways.items():
                began = time.process_time()
                function(*given)
                if turn:
                    taken[way].append(time.process_time() - began)
        moved = {
            way: sp.trace(f, *given).moved_bytes for way, f in (("one-hot", plain), ("rows", rows))
        }
        least = statistics.median(taken["one-hot"])
        said = ", ".join(
            f"{way} {statistics.median(one) * 1e3:.0f} ms ({statistics.median(one) / least:.2f})"
            for way, one in taken.items()
        )
        bytes_said = ", ".join(f"{way} {size / 1e6:.1f} MB" for way, size in moved.items())
        print(f"{name}, {what}: {said}; {bytes_said}; load {os.getloadavg()[0]:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--mesh", nargs="*", choices=[*MESHES], default=[*MESHES])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with sp.running(sp.in_process("torch")):
        for name in arguments.mesh:
            measure(name, arguments.tokens, arguments.repeat)


if __name__ == "__main__":
    main()
