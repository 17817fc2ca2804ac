"""How much does an operation on shards cost beyond what the shards' own computations do?

One process, float32, one thread. Each figure is a median, in microseconds:

    cached         an operation whose operand types were seen: add of `x, -` and `x, -`, matmul of
                   `x, -` and a replicated matrix, less the same calls on the bare shards
    conflict       a cached add of `x, -` and `-, x`, 64x64: the second operand is resharded
    first          the first operation on operands of a shape that was not seen, with no reshard,
                   the shards' computations included, on meshes of 1 to 4 axes of 2

reshard has all shards in this process, NumPy's and PyTorch's, and computes on all of them; the
peer, PyTorch's DTensor on a fake process group, computes on one rank's shard. Both are measured
in turns in one run. Goals: cached at most 10, conflict at most 100, first at most 1,000 and
growing linearly with axes.

Expected before the first run: cached 1 to 3, conflict 30 to 60, first 300 plus 50 an axis.

    python benchmarks/spmd.py [--repeat 2000] [--without-peer]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec

Action = Callable[[], object]


def median_us(actions: dict[str, Action], repeat: int) -> dict[str, float]:
    """The median of each action, all of them done in turns."""
    taken: dict[str, list[int]] = {name: [] for name in actions}
    for action in actions.values():
        for _ in range(10):
            action()
    for _ in range(repeat):
        for name, action in actions.items():
            start = time.perf_counter_ns()
            action()
            taken[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(times) / 1000 for name, times in taken.items()}


def spec(mesh: DeviceMesh, rows: list[str], columns: list[str]) -> ShardingSpec:
    return ShardingSpec(mesh, [rows, columns])


def cached(library: str, ranks: int) -> dict[str, Action]:
    """Operations, and the same computations on bare shards."""
    mesh = DeviceMesh.of(x=ranks)
    with sp.running(sp.in_process(library)):
        data = np.ones((64, 64), np.float32)
        a, b = (sp.array(data, spec(mesh, ["x"], [])) for _ in range(2))
        w = sp.array(data, spec(mesh, [], []))
        c = sp.array(data, spec(mesh, [], ["x"]))
    space = a.runner.library.namespace
    left, right, whole = (tuple(one.shards.values()) for one in (a, b, w))
    return {
        f"add {library}": lambda: a + b,
        f"add {library} bare": lambda: [space.add(x, y) for x, y in zip(left, right, strict=True)],
        f"matmul {library}": lambda: a @ w,
        f"matmul {library} bare": lambda: [
            space.matmul(x, y) for x, y in zip(left, whole, strict=True)
        ],
        f"conflict {library}": lambda: a + c,
    }


def cached_peer(ranks: int) -> dict[str, Action]:
    """The same of DTensor, on one rank's shard."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    data = torch.ones(64, 64)
    a, b, w, c = (
        distribute_tensor(data, mesh, [place])
        for place in (Shard(0), Shard(0), Replicate(), Shard(1))
    )
    left, right, whole = (one.to_local() for one in (a, b, w))
    return {
        "add DTensor": lambda: a + b,
        "add DTensor bare": lambda: left + right,
        "matmul DTensor": lambda: a @ w,
        "matmul DTensor bare": lambda: left @ whole,
        "conflict DTensor": lambda: a + c,
    }


def first(axes: int, shapes: int = 30) -> dict[str, float]:
    """The first add and matmul on shapes that were not seen."""
    names = list("abcd"[:axes])
    mesh = DeviceMesh("first", (2,) * axes, names)
    taken: dict[str, list[int]] = {"add": [], "matmul": []}
    for number in range(shapes):
        data = np.ones((64, 33 + number), np.float32)
        a, b = (sp.array(data, spec(mesh, names, [])) for _ in range(2))
        w = sp.array(data.T.copy(), spec(mesh, [], []))
        operations: dict[str, Action] = {
            "add": lambda a=a, b=b: a + b,
            "matmul": lambda a=a, w=w: a @ w,
        }
        for name, operation in operations.items():
            start = time.perf_counter_ns()
            operation()
            taken[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(times) / 1000 for name, times in taken.items()}


def first_peer(axes: int, shapes: int = 3) -> dict[str, float]:
    """The same of DTensor."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,) * axes, mesh_dim_names=tuple("abcd"[:axes]))
    taken: dict[str, list[int]] = {"add": [], "matmul": []}
    for number in range(shapes):
        data = torch.ones(64, 33 + number)
        a, b = (distribute_tensor(data, mesh, [Shard(0)] * axes) for _ in range(2))
        w = distribute_tensor(data.T.contiguous(), mesh, [Replicate()] * axes)
        operations: dict[str, Any] = {
            "add": lambda a=a, b=b: a + b,
            "matmul": lambda a=a, w=w: a @ w,
        }
        for name, operation in operations.items():
            start = time.perf_counter_ns()
            operation()
            taken[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(times) / 1000 for name, times in taken.items()}


def fake_job(ranks: int) -> None:
    """A process group whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=2000)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    with_peer = not arguments.without_peer
    libraries = ["numpy"]
    if with_peer:
        import torch

        torch.set_num_threads(1)
        libraries.append("torch")
    for ranks in (4, 8):
        actions = {name: one for lib in libraries for name, one in cached(lib, ranks).items()}
        if with_peer:
            fake_job(ranks)
            actions |= cached_peer(ranks)
        found = median_us(actions, arguments.repeat)
        print(f"{ranks} shards       cached add   cached matmul   conflicting add   [us]")
        for who in (*libraries, *(["DTensor"] if with_peer else [])):
            add = found[f"add {who}"] - found[f"add {who} bare"]
            matmul = found[f"matmul {who}"] - found[f"matmul {who} bare"]
            print(f"  {who:12} {add:11.2f} {matmul:15.2f} {found[f'conflict {who}']:17.1f}")
    print("first time     add   matmul [us]   of DTensor: add   matmul")
    for axes in (1, 2, 3, 4):
        own = first(axes)
        line = f"  {axes} axes {own['add']:10.0f} {own['matmul']:8.0f}"
        if with_peer:
            fake_job(2**axes)
            peer = first_peer(axes)
            line += f" {peer['add']:28.0f} {peer['matmul']:8.0f}"
        print(line)


if __name__ == "__main__":
    main()
