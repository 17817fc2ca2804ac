"""What do the gradients of a transformer block move and take, beside its forward pass?

The block of tests/spmd/transformer_block.py: 2048 tokens, 512 channels, 8 experts, float32, over
dp2 tp2, tp4 and dp4. Bytes are those of the trace, which are those that the run moves; times are
medians of five, forward and both taking turns, on PyTorch shards in one process, of a smaller block
(512 tokens), and of PyTorch alone with its autograd on the same machine.

    python benchmarks/spmd_gradients.py [--strategy basic]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import reshard.spmd as sp
from reshard import DeviceMesh

# By its own folder: `spmd` is a benchmark here.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spmd"))
block: Any = import_module("transformer_block")

LARGE = block.Sizes(4, 512, 512, 8, 4, 1024, 8, 4096)
SMALL = block.Sizes(4, 128, 512, 8, 4, 1024, 8, 4096)
MESHES: tuple[dict[str, int], ...] = ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4})


def count_bytes(axes: dict[str, int], strategy: str) -> None:
    mesh = DeviceMesh.of(**axes)
    given = block.shardings(mesh)
    p = {name: sp.abstract(shape, "float32", given[name]) for name, shape in LARGE.shapes().items()}
    tokens = sp.abstract((LARGE.batch, LARGE.length), "int64", block.batch_sharding(mesh))
    found = []
    for function in (block.loss, sp.value_and_grad(block.loss)):
        began = time.perf_counter()
        traced = sp.trace(
            lambda p, a, b, function=function: function(p, a, b, LARGE),
            p,
            tokens,
            tokens,
            strategy=strategy,
        )
        steps = [
            str(step).split("(")[0]
            for one in traced.operations
            for reshard in one.reshards
            if reshard.moved_bytes
            for step in reshard.program.steps
        ]
        took = time.perf_counter() - began
        found.append(
            f"{traced.moved_bytes / 1e6:.1f} MB in {len(steps)} collectives, "
            f"{len(traced.operations)} operations, traced in {took:.2f} s"
        )
    print(f"{axes} {strategy}: forward {found[0]}; with backward {found[1]}", flush=True)


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(6):
        for name, run in ways.items():
            began = processor_s()
            run()
            taken[name].append(processor_s() - began)
    # The first turn compiles operations.
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def time_steps(axes: dict[str, int]) -> None:
    mesh = DeviceMesh.of(**axes)
    data, batch = block.make_parameters(SMALL, "float32"), block.make_batch(SMALL)
    leaves = {name: torch.tensor(one, requires_grad=True) for name, one in data.items()}
    dense = [torch.as_tensor(one) for one in batch]
    given = block.shardings(mesh)
    with sp.running(sp.in_process("torch")):
        p = {name: sp.array(torch.as_tensor(one), given[name]) for name, one in data.items()}
        tokens = [sp.array(one, block.batch_sharding(mesh)) for one in batch]
        both = sp.value_and_grad(block.loss)

        def by_torch() -> None:
            for leaf in leaves.values():
                leaf.grad = None
            block.loss_in_torch(leaves, *dense, SMALL).backward()

        def forward_by_torch() -> None:
            with torch.no_grad():
                block.loss_in_torch(leaves, *dense, SMALL)

        found = measure(
            {
                "forward": lambda: block.loss(p, *tokens, SMALL),
                "both": lambda: both(p, *tokens, SMALL),
                "PyTorch's forward": forward_by_torch,
                "PyTorch's both": by_torch,
            }
        )
    said = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in found.items())
    print(f"{axes}: processor time: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="eager")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for axes in MESHES:
        count_bytes(axes, options.strategy)
    for axes in MESHES:
        time_steps(axes)


if __name__ == "__main__":
    main()
