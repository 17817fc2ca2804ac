"""How long does tracing the transformer block take, the first time and again?

The block of tests/spmd/transformer_block.py, B*T = 2048, d = 512, over dp=2 tp=2, tp=4 and dp=4,
forward and with its gradient, by each strategy. Processor time and the clock, medians: the first
trace of a process that has imported everything and traced nothing (a new process each time, by
fork), and one behind it, when operators, shardings and layouts are known. Goal: 0.3 s.

    python benchmarks/spmd_tracing.py [--repeat 5] [--strategies eager,basic]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import reshard.spmd as sp
from reshard import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spmd"))

MESHES: tuple[dict[str, int], ...] = ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4})
TURN = struct.Struct("4d")
"""Processor time and the clock, in seconds, of the first trace and of the next."""


def timed(trace: Callable[[], Any]) -> tuple[float, float]:
    start, start_s = time.perf_counter(), time.process_time()
    trace()
    return time.process_time() - start_s, time.perf_counter() - start


def in_new_process(trace: Callable[[], Any]) -> tuple[float, ...]:
    """Times of two traces one behind the other, in a process that has traced nothing before."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        # The child leaves at once, whatever happens: it must not go on as a second parent.
        try:
            os.write(writes, TURN.pack(*timed(trace), *timed(trace)))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    if len(found) != TURN.size:
        raise SystemExit("a trace failed; its error is above")
    return TURN.unpack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--strategies", default="eager,basic,aggressive,cost")
    options = parser.parse_args()
    block = import_module("transformer_block")
    sizes = block.Sizes(4, 512, 512, 8, 4, 1024, 8, 4096)

    def loss(p: Any, tokens: Any, targets: Any) -> Any:
        return block.loss(p, tokens, targets, sizes)

    # Modules are loaded when their names are used: all of them before the first process.
    sp.trace(sp.value_and_grad(lambda x: sp.sum(x * x)), sp.abstract((4,), "float32"))
    for axes in MESHES:
        mesh = DeviceMesh.of(**axes)
        shardings, batch = block.shardings(mesh), block.batch_sharding(mesh)
        p = {
            name: sp.abstract(shape, "float32", shardings[name])
            for name, shape in sizes.shapes().items()
        }
        words = sp.abstract((sizes.batch, sizes.length), "int64", batch)
        for name, function in (("forward", loss), ("with backward", sp.value_and_grad(loss))):
            for strategy in options.strategies.split(","):
                trace = functools.partial(sp.trace, function, p, words, words, strategy=strategy)
                turns = [in_new_process(trace) for _ in range(options.repeat)]
                first, first_clock, again, again_clock = map(
                    statistics.median, zip(*turns, strict=True)
                )
                print(
                    f"{','.join(f'{a}={n}' for a, n in axes.items())}, {name}, {strategy}: "
                    f"first {first:.3f} s of processor time (clock {first_clock:.3f}), "
                    f"again {again:.3f} s ({again_clock:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
