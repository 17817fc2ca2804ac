"""What does it cost to prepare very many small tensors for one engine of a link, and for another?

A trainer of two ranks and two engines of two ranks each, jobs of their own on this machine, with
tensors of `refit_tensors.py`: the trainer's experts lie whole on one rank or the other and all else
over tp, or FSDP2 cuts all (`--kind dtensors`); the engines have tensor parallelism. The trainer
prepares for one engine, and then for the other, which is of the same kind and has met nobody yet.

Told, in processor time (user and system) of the slowest rank, medians of five links:

    first, second   `Refit.prepare` on the trainer, for each engine
    engine          the same on the second engine's ranks
    run             on the trainer, for both

    python benchmarks/link_tensors.py [--tensors 1600 20000 60000] [--kind layouts]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from refit_tensors import distribute, shapes_of, spent_s

RANKS = 2
SIDES = ("trainer", "engine-0", "engine-1")
FIGURES = {"trainer": ("first", "second", "run"), "engine-0": (), "engine-1": ("engine",)}


def make_model(kind: str, tensors: int, is_source: bool, rank: int) -> dict[str, Any]:
    """What one process has."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    import reshard

    shapes, found = shapes_of(tensors), dict[str, Any]()
    if kind == "dtensors":
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        for name, (shape, cut) in shapes.items():
            cuts = Shard(0) if is_source else Replicate() if cut is None else Shard(cut)
            found[name] = distribute(mesh, shape, [cuts], torch.zeros)
        return found
    over, known = reshard.DeviceMesh.of(tp=RANKS), dict[Any, Any]()
    for name, (shape, cut) in shapes.items():
        is_whole = is_source and ".experts." in name
        holder = int(name.split(".experts.")[1].split(".")[0]) % RANKS if is_whole else None
        if (shape, cut, holder) not in known:
            text = ", ".join("tp" if d == cut else "-" for d in range(len(shape)))
            layout = reshard.spec(over, text).layout(shape)
            whole = None if holder is None else reshard.Layout.whole(shape, [holder], RANKS)
            known[shape, cut, holder] = whole or layout
        layout = known[shape, cut, holder]
        local = layout.local_shape(rank)
        made = None if local is None else torch.zeros(local, dtype=torch.bfloat16)
        found[name] = made, layout
    return found


def run_process(options: argparse.Namespace) -> None:
    """One process of a link; its figures are its last line."""
    import torch
    import torch.distributed as dist

    import reshard.torch
    from reshard.torch import Refit

    torch.set_num_threads(1)
    side, rank = options.side, int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = make_model(options.kind, options.tensors[0], side == "trainer", rank)
    spent: list[float] = []
    prepare = Refit.prepare

    def measured(*given: Any, **named: Any) -> Refit:
        begun_s = spent_s()
        try:
            return prepare(*given, **named)
        finally:
            spent.append(spent_s() - begun_s)

    Refit.prepare = measured  # type: ignore[method-assign, assignment]
    named = {"side": "trainer", "engines": 2} if side == "trainer" else {"name": side}
    given = {"side": "engine", "rank": rank, "ranks": RANKS} | named
    with reshard.torch.connect(options.url, **given) as link:
        sync = link.prepare(model)
        sync.run()
        dist.barrier()
        begun_s = spent_s()
        sync.run()
        spent.append(spent_s() - begun_s)
        most = torch.tensor(spent[: len(FIGURES[side])], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        print(*most.tolist(), flush=True)
    os._exit(0)


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def link_once(tensors: int, kind: str) -> dict[str, float]:
    """The figures of one link."""
    url, processes = f"tcp://127.0.0.1:{find_port()}", []
    for side in SIDES:
        arguments = ["--side", side, "--url", url, "--tensors", str(tensors), "--kind", kind]
        home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": "2"}
        for rank in range(RANKS):
            names = {**home, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, *arguments]
            processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **names}, stdout=subprocess.PIPE, text=True
                )
            )
    said = [process.communicate()[0] for process in processes]
    found = {}
    for side, text in zip(SIDES, said[::RANKS], strict=True):
        found |= dict(zip(FIGURES[side], map(float, text.split()), strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1600, 20000, 60000])
    parser.add_argument("--kind", choices=["layouts", "dtensors"], default="layouts")
    parser.add_argument("--repeat", type=int, default=5, help="links")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        run_process(options)
    for tensors in options.tensors:
        turns = [link_once(tensors, options.kind) for _ in range(options.repeat)]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())
        print(f"{tensors:6} {options.kind}: {told}", flush=True)


if __name__ == "__main__":
    main()
