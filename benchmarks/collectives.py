"""How long does it take to find a collective program, and to run one in this process?

search   the 43 reshards of tests/conformance/same_mesh_reshards.json, and larger meshes: the
         default search, and the constructive one alone. Each is found anew; nothing is
         cached. Beside them the program's elements, over the lower bound.
run      a float32 tensor over 8 devices: rows to columns and the like, programs on arrays in
         this process, into arrays that are there (by all threads, and by one) and into new ones.
         The peers, turn by turn: JAX on 8 virtual CPU devices, `jax.device_put` and
         `jit(identity, out_shardings)`, which make new arrays, and a plain copy by one thread of
         as many bytes, those of all targets, into arrays that are there.

In each turn each way runs twice in a row. New arrays are made of pages that the system clears, and
has to find: `first` comes after the other ways, and where the machine is a virtual one whose host
takes back memory that lies free for seconds, its pages may have to come from there; `again` gets
those that its own first run gave back. Medians of the times, and of the ratios of each turn; the
first turn is left out, and for arrays that are there, the first runs.

python benchmarks/collectives.py [--repeat 5] [--size-mib 256] [--cases search run]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import reshard
from reshard.collectives import find_program
from reshard.collectives.search import find_program as search
from reshard.sharding import ShardingSpec

CASES = Path(__file__).parents[1] / "tests" / "conformance" / "same_mesh_reshards.json"
LARGE = [
    ("dp=8,tp=8,pp=4", "dp tp, -", "tp, dp", (4096, 4096)),
    ("dp=8,tp=8,pp=4", "dp tp pp, -", "-, tp", (4096, 4096)),
    ("dp=8,tp=8,pp=4", "dp, - | sum(tp)", "tp, -", (4096, 4096)),
    ("x=16,y=16,z=16", "x y, z", "z, y x", (4096, 4096)),
    ("dp=64,tp=8,pp=4", "dp, tp", "tp, dp", (8192, 8192)),
    ("dp=64,tp=8,pp=4", "dp tp, -", "tp, -", (8192, 8192)),
]
RUNS = [
    ("x=2,y=4", "x, y", "x=2,y=4", "y, x"),
    ("x=8", "x, -", "x=8", "-, x"),
    ("x=8", "-, x", "x=8", "x, -"),
    ("x=2,y=4", "x y, -", "x=2,y=4", "y x, -"),
    ("x=4", "x, -", "x=8", "x, -"),
    ("x=8", "x, -", "x=8", "-, -"),
]


def side(written: dict[str, Any]) -> ShardingSpec:
    axes = written["mesh"]
    mesh = reshard.DeviceMesh("mesh", list(axes.values()), list(axes), written["device_ids"])
    return reshard.spec(mesh, ", ".join(dim.replace(",", " ") or "-" for dim in written["dims"]))


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """The median of `repeat` turns, after one that is left out."""
    run()
    turns = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        turns.append(time.perf_counter() - begin)
    return statistics.median(turns)


def search_times(repeat: int) -> None:
    def found(name: str, *sides: Any) -> Any:
        search.forget()
        return find_program(*sides, search=name)

    cases = [(c["case"], side(c["source"]), side(c["target"]), c["shape"]) for c in
             json.loads(CASES.read_text())]  # fmt: skip
    times: dict[str, list[float]] = {"default": [], "constructive": []}
    for _, *sides in cases:
        for name, column in times.items():
            column.append(1e3 * seconds(lambda n=name, s=sides: found(n, *s), repeat))
    print(f"{'search of 43 cases, ms':<34} {'median':>8} {'90 %':>8} {'longest':>8}")
    for name, column in times.items():
        column.sort()
        tenth = column[math.ceil(0.9 * len(column)) - 1]
        print(f"{name:<34} {statistics.median(column):8.1f} {tenth:8.1f} {column[-1]:8.1f}")
    print(f"\n{'larger meshes, ms':<44} {'default':>8} {'constructive':>13} {'over bound':>11}")
    for axes, before, after, shape in LARGE:
        mesh = reshard.DeviceMesh.parse(axes)
        sides = (reshard.spec(mesh, before), reshard.spec(mesh, after), shape)
        default, quick = (
            1e3 * seconds(lambda n=name, s=sides: found(n, *s), repeat) for name in times
        )
        program = found("default", *sides)
        ratio = program.moved_elements / max(1, program.lower_bound_elements)
        what = f"{axes}: {before} to {after}"
        print(f"{what:<44} {default:8.1f} {quick:13.1f} {ratio:11.3f}")


def run_times(size_mib: int, repeat: int) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    columns = 1 << 12
    shape = (size_mib * (1 << 20) // 4 // columns, columns)
    dense = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)

    def sharding(spec: ShardingSpec) -> Any:
        devices = np.array([jax.devices()[rank] for rank in spec.mesh.devices])
        mesh = Mesh(devices.reshape(spec.mesh.shape), spec.mesh.axis_names)
        dims = [tuple(str(axis) for axis in dim.axes) or None for dim in spec.dim_specs]
        return NamedSharding(mesh, PartitionSpec(*dims))

    print(
        f"\n{f'{size_mib} MiB over 8 devices, ms':<36} {'in place':>9} {'1 thread':>9} "
        f"{'plain copy':>11} {'in place / copy':>16} | {'':>5} {'new':>7} {'device_put':>11} "
        f"{'jit':>7} {'new / JAX':>10}"
    )
    for axes, before, other_axes, after in RUNS:
        source = reshard.spec(reshard.DeviceMesh.parse(axes), before)
        target = reshard.spec(reshard.DeviceMesh.parse(other_axes), after)
        program = find_program(source, target, shape)
        whole = reshard.Layout.whole(shape, [0], 1)
        held = reshard.plan(whole, source.layout(shape)).run({0: dense})
        expected = reshard.plan(whole, target.layout(shape)).run({0: dense})
        there = {rank: np.zeros_like(array) for rank, array in expected.items()}
        theirs, out = jax.device_put(dense, sharding(source)), sharding(target)
        compiled = jax.jit(lambda array: array, out_shardings=out)

        def copy(there: Any = there, expected: Any = expected) -> None:
            for rank, array in expected.items():
                np.copyto(there[rank], array)

        runs = {
            "in place": lambda p=program, h=held, o=there: p.run(h, o),
            "1 thread": lambda p=program, h=held, o=there: p.run(h, o, threads=1),
            "new": lambda p=program, h=held: p.run(h),
            "device_put": lambda a=theirs, o=out: jax.device_put(a, o).block_until_ready(),
            "jit": lambda a=theirs, f=compiled: f(a).block_until_ready(),
            "plain copy": copy,
        }
        if source.mesh.devices != target.mesh.devices:
            del runs["jit"]
        first, again = by_turns(runs, repeat)
        for array in there.values():
            array.fill(0)
        runs["in place"]()
        assert all(np.array_equal(there[rank], expected[rank]) for rank in expected)
        there_ms = {name: 1e3 * statistics.median(again[name]) for name in runs}
        over_copy = ratio(again["in place"], again["plain copy"])
        what = f"{axes}: {before} to {other_axes}: {after}"
        line = (
            f"{what:<36} {there_ms['in place']:9.0f} {there_ms['1 thread']:9.0f} "
            f"{there_ms['plain copy']:11.0f} {over_copy:16.2f}"
        )
        for label, times in (("first", first), ("again", again)):
            of_jax = [times[name] for name in ("device_put", "jit") if name in runs]
            made = {
                name: f"{1e3 * statistics.median(times[name]):.0f}" if name in runs else "-"
                for name in ("new", "device_put", "jit")
            }
            print(
                f"{line} | {label} {made['new']:>7} {made['device_put']:>11} {made['jit']:>7} "
                f"{ratio(times['new'], [min(turn) for turn in zip(*of_jax, strict=True)]):10.2f}",
                flush=True,
            )
            line = " " * len(line)


Times = dict[str, list[float]]


def by_turns(runs: dict[str, Callable[[], Any]], repeat: int) -> tuple[Times, Times]:
    """The seconds of each way's first and second run in each of `repeat` turns.

    One turn comes before those, and is left out.
    """
    times: tuple[Times, Times] = ({name: [] for name in runs}, {name: [] for name in runs})
    names = list(runs)
    for turn in range(repeat + 1):
        # Nobody always comes behind the same other one, and gets the memory that it gave back.
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            for column in times:
                begin = time.perf_counter()
                made = runs[name]()
                taken = time.perf_counter() - begin
                # Memory is given back outside of the time.
                del made
                if turn:
                    column[name].append(taken)
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of each turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--cases", nargs="+", default=["search", "run"], choices=["search", "run"])
    arguments = parser.parse_args()
    if "search" in arguments.cases:
        search_times(arguments.repeat)
    if "run" in arguments.cases:
        run_times(arguments.size_mib, arguments.repeat)


if __name__ == "__main__":
    main()
