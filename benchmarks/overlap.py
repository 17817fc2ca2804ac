"""Movements beside computing: programs of `sp.jit(overlap=...)` beside the blocking order.

Four gloo processes, float32, one thread each, all orders in turns in one job:

    layers     eight layers tanh(x @ w), their weights gathered where they are used, and with the
               gradient, reduce-scattered
    training   the step of examples/train.py over dp=2,tp=2, with ZeRO 3
    products   a gated MLP over tp=4 whose input and result are cut along the sequence: what is
               gathered for products and reduced of them whole, and in pieces (with a topology),
               beside DTensor's ColwiseParallel and RowwiseParallel. Its asynchronous tensor
               parallelism needs symmetric memory, which PyTorch 2.13 has on no CPU
    stages     a pipeline of four stages and eight microbatches whose passes take 20 ms forward and
               40 ms back without a processor, as on accelerators, between them 4 MB: sends that
               nobody waits for, beside those for which sender and receiver wait for one another in
               the schedule's order; and what the timetable says, without sends

With `--rate`, each rank is on a host of its own, a network namespace whose link is held to so many
megabits a second (`tests/host_network.py`, which takes root): who waits then leaves its processor.

A line for each order: the median and the least milliseconds of the clock, and the median of all
processors', with what the trace says that each rank holds at most.

    python benchmarks/overlap.py [--repeat 9] [--case layers|training|products|stages]
        [--rows 2048] [--width 512] [--rate MBIT]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.spmd.programs.pipelines import boundaries
from reshard.topology import Link, Overhead, Topology
from reshard.torch.exchange.exchange import MessageExchange

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

AHEAD = (0, 1, 2, 4)
LAYERS = 8
Case = tuple[str, Callable[[], Any], int]


def label(ahead: int) -> str:
    return f"{ahead} ahead" if ahead else "blocking"


def layers(rows: int, width: int) -> dict[str, list[Case]]:
    """For each function, what runs it in each order, and the bytes that it holds."""
    mesh = DeviceMesh.of(x=4)
    cut, whole = spec(mesh, "x, -"), spec(mesh, "-, -")
    random = np.random.default_rng(0)
    x = sp.array(random.normal(size=(rows, width)).astype("float32"), cut)
    weights = [
        sp.array((random.normal(size=(width, width)) / width**0.5).astype("float32"), cut)
        for _ in range(LAYERS)
    ]

    def forward(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = sp.tanh(x @ w.shard(whole))
        return x

    gradient = sp.value_and_grad(lambda w, x: sp.sum(forward(w, x) ** 2), specs=[cut] * LAYERS)

    def case(function: Callable[..., Any], ahead: int) -> Case:
        program = sp.jit(function, overlap=ahead)
        held = max(program.trace(weights, x).peak_bytes.values())
        return label(ahead), lambda: program(weights, x), held

    return {
        "layers": [case(forward, ahead) for ahead in AHEAD],
        "layers and gradient": [case(gradient, ahead) for ahead in AHEAD],
    }


def training() -> dict[str, list[Case]]:
    """The example's step, likewise."""
    found = importlib.util.spec_from_file_location("example", ROOT / "examples" / "train.py")
    assert found is not None and found.loader is not None
    example: Any = importlib.util.module_from_spec(found)
    sys.modules["example"] = example
    found.loader.exec_module(example)
    run = example.Training(example.Sizes(), DeviceMesh.parse("dp=2,tp=2"), "float32", 3)
    rows = spec(run.mesh, "dp, -")
    batch = [sp.array(one, rows) for one in example.make_batch(run.text, run.sizes, 0)]

    def case(ahead: int) -> Case:
        program = sp.jit(run.step.__wrapped__, overlap=ahead)
        held = max(program.trace(run.parameters, run.state, *batch).peak_bytes.values())
        return label(ahead), lambda: program(run.parameters, run.state, *batch), held

    return {"training": [case(ahead) for ahead in AHEAD]}


def products(rows: int, width: int, rate: int | None) -> dict[str, list[Case]]:
    """A gated MLP, four times as wide within, forward: ours in each order, and DTensor's."""
    random = np.random.default_rng(0)
    shapes = {"x": (rows, width), "up": (width, 4 * width), "down": (4 * width, width)}
    data = {
        name: (random.normal(size=shape) / shape[0] ** 0.5).astype("float32")
        for name, shape in shapes.items()
    }
    mesh = DeviceMesh.of(tp=4)
    cut, columns = spec(mesh, "tp, -"), spec(mesh, "-, tp")
    x, up, down = (
        sp.array(data[name], one) for name, one in (("x", cut), ("up", columns), ("down", cut))
    )

    def mlp(x: Any, up: Any, down: Any) -> Any:
        n = x.shard(spec(mesh, "-, -"))
        return (sp.relu(n @ up) @ down).shard(cut)

    preset = load_preset("gloo-host")
    topology = preset.topology()
    if rate:
        link = Link(rate * 125_000, 300e-6)
        overhead = Overhead(step_s=2e-3)
        topology = Topology(range(4), None, None, link, None, overhead, preset.device)

    def case(name: str, **options: Any) -> Case:
        program = sp.jit(mlp, library="gloo", **options)
        traced = program.trace(x, up, down)
        name += f" ({len(traced.operations)} operations, {(traced.seconds_s or 0) * 1e3:.0f} ms)"
        return name, lambda: program(x, up, down), max(traced.peak_bytes.values())

    return {
        "products": [
            case("blocking", topology=topology),
            case("2 ahead", overlap=2),
            case("1 ahead, in pieces", overlap=1, topology=topology),
            case("2 ahead, in pieces", overlap=2, topology=topology),
            ("DTensor", in_dtensor(data, mlp(x, up, down)), 0),
        ]
    }


def in_dtensor(data: dict[str, Any], expected: Any) -> Callable[[], Any]:
    """The same in PyTorch, parallelised by its own styles."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    width = data["x"].shape[1]
    module = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(4 * width, width, bias=False),
    )
    with torch.no_grad():
        module[0].weight.copy_(torch.as_tensor(data["up"].T))
        module[2].weight.copy_(torch.as_tensor(data["down"].T))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(module, init_device_mesh("cpu", (4,)), plan)
    own = torch.as_tensor(data["x"]).chunk(4)[dist.get_rank()]

    def run() -> Any:
        with torch.no_grad():
            return module(own)

    torch.testing.assert_close(run(), expected.shards[dist.get_rank()], rtol=1e-4, atol=1e-4)
    return run


FORWARD_S, BACKWARD_S = 0.02, 0.04


def make_pass(name: str, seconds_s: float, gradient: Any = None) -> Any:
    """An operator that takes its time, and no processor, and returns what it was given."""

    def local(x: Any) -> Any:
        time.sleep(seconds_s)
        return x.clone()

    return sp.operator("([i, j]) -> ([i, j])", local, name=name, gradient=gradient)


def stages() -> dict[str, list[Case]]:
    """A step of four stages, likewise."""
    back = make_pass("pass_back", BACKWARD_S)
    forth = make_pass("pass_forth", FORWARD_S, lambda cotangent, x, result: (back(cotangent),))
    rank, meshes = dist.get_rank(), [DeviceMesh.of(x=1, devices=(n,)) for n in range(4)]
    specs = [spec(mesh, "x, -") for mesh in meshes]
    functions: list[Any] = [lambda w, x: forth(w * x)] * 3
    functions.append(lambda w, x, y: sp.mean(forth(w * x) - y))
    groups = [dist.new_group([n]) for n in range(4)]
    found = {}
    with sp.running(sp.over_processes(groups[rank])):
        x = sp.ones((1024, 1024), dtype="float32", spec=specs[rank])
        weights = [sp.ones((), dtype="float32") if n == rank else None for n in range(4)]
    for order in ("gpipe", "1f1b", "zb-h1"):
        schedule = sp.pipeline_schedule(order, 4, 8)
        pipeline = sp.Pipeline(functions, schedule, specs)
        # The pass back is that of the input; there is next to nothing to do for the weights.
        costs = sp.StageCosts(FORWARD_S, BACKWARD_S, 1e-6, activation_bytes=4 << 20)
        table = sp.Timetable(schedule, costs)
        held = int(max(table.peak_bytes))

        def step(pipeline: Any = pipeline) -> None:
            pipeline(weights, [(x, x)] * 8)

        def step_blocking(step: Callable[[], None] = step) -> None:
            # As on devices: in the thread of the program, in one order on both sides.
            ahead, leaves = boundaries._AHEAD, MessageExchange.can_leave_its_thread
            boundaries._AHEAD = 0
            MessageExchange.can_leave_its_thread = False  # type: ignore
            try:
                step()
            finally:
                boundaries._AHEAD = ahead
                MessageExchange.can_leave_its_thread = leaves  # type: ignore

        name = f"stages, {order}, {table.length * 1e3:.0f} ms said"
        found[name] = [("blocking", step_blocking, held), ("not waited for", step, held)]
    return found


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(name: str, cases: list[Case], repeat: int) -> None:
    clock_s: list[list[float]] = [[] for _ in cases]
    work_s: list[list[float]] = [[] for _ in cases]
    for turn in range(repeat + 2):
        for place, (_, action, _) in enumerate(cases):
            dist.barrier()
            began, used = time.perf_counter(), processor_s()
            action()
            dist.barrier()
            spent = torch.tensor(processor_s() - used, dtype=torch.float64)
            taken_s = time.perf_counter() - began
            dist.all_reduce(spent)
            if turn >= 2:
                clock_s[place].append(taken_s)
                work_s[place].append(spent.item())
    if dist.get_rank() == 0:
        for (way, _, held), one, work in zip(cases, clock_s, work_s, strict=True):
            print(
                f"{name}, {way}: "
                f"{statistics.median(one) * 1e3:.1f} ms, least {min(one) * 1e3:.1f}, processors "
                f"{statistics.median(work) * 1e3:.0f} ms, {held / 2**20:.1f} MiB held; "
                f"load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


def measure(arguments: argparse.Namespace) -> None:
    """One rank."""
    if arguments.keepers:
        from host_network import enter_host

        enter_host(arguments.keepers[int(os.environ["RANK"])])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with sp.running(sp.over_processes()):
        if arguments.case in (None, "layers"):
            for name, cases in layers(arguments.rows, arguments.width).items():
                compare(name, cases, arguments.repeat)
        if arguments.case in (None, "training"):
            for name, cases in training().items():
                compare(name, cases, arguments.repeat)
        if arguments.case in (None, "products"):
            for name, cases in products(arguments.rows, arguments.width, arguments.rate).items():
                compare(name, cases, arguments.repeat)
    if arguments.case in (None, "stages"):
        for name, cases in stages().items():
            compare(name, cases, arguments.repeat)
    dist.destroy_process_group()


def run_on_hosts(command: list[str], rate: int) -> None:
    from host_network import HostNetwork, why_not
    from live_processes import free_port

    missing = why_not()
    if missing:
        raise SystemExit(f"no hosts here: {missing}")
    with HostNetwork(4, rate * 1_000_000) as network:
        environment = {
            **os.environ,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "4",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [*command, "--keepers", *map(str, network.host_pids)],
                env={**environment, "RANK": str(rank)},
            )
            for rank in range(4)
        ]
        try:
            for one in ranks:
                if one.wait(timeout=500):
                    raise SystemExit("a rank ended with an error")
        finally:
            for one in ranks:
                one.kill()
                one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--case", choices=["layers", "training", "products", "stages"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rate", type=int, help="megabits a second of each rank's link")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keepers", type=int, nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    if arguments.rank:
        measure(arguments)
    elif arguments.rate:
        run_on_hosts(command, arguments.rate)
    else:
        from live_processes import run_rank_programs

        print(run_rank_programs(command, 4, timeout_s=500)[0].strip(), flush=True)


if __name__ == "__main__":
    main()
