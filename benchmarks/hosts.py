"""What does it cost to bring weights to other hosts, over links that are the limit?

The hosts are network namespaces whose links are held to a rate (`host_turns`); it takes root,
`iproute2` and `util-linux`. A trainer's parameters, cut over its ranks, fill engines; the ways take
turns in one run, begin and end at a barrier, and the median of five is told:

    stages       `Refit.run`, method="stages": a byte enters a rack once, and a host once
    exchange     `Refit.run`, method="exchange": every receiver has it from the trainer
    broadcast    `full_tensor()`, then `broadcast` to all engines, which take their slices
    chain        `full_tensor()`, then buckets from rank to rank of all engines, host by host

Bytes are those that interfaces count, with the headers of packets. *Own* is the time of the slowest
link for the bytes that are planned for it; the goal of the stages is 1.15 of it.

    python benchmarks/hosts.py [SCENARIO ...] [--repeat 5] [--ways stages ...] [--choices]

`--choices` compares the ways in cases of other sizes and layouts, and says which of stages and
exchange the model takes (goal: 9 of 10 right: no way is quicker by more than 10 %).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from host_turns import MBIT, MIB, SCENARIOS, Scenario, Turn, as_rank, run_scenarios, summarise

# Of one tensor, float32: as large as what a bucket of a chain holds.
WIDTH = 512


WAYS = ["stages", "exchange", "broadcast", "chain"]
# Tensors' MiB, cut at the trainer, cut at each engine, and the ranks of an engine.
CHOICES = [
    (16, "fsdp, -", "-, -", 1),
    (16, "fsdp, -", "tp, -", 2),
    (16, "-, fsdp", "-, tp", 2),
    (8, "-, -", "-, -", 1),
    (4, "fsdp, -", "-, -", 1),
    (1, "fsdp, -", "-, -", 1),
    (1, "fsdp, -", "tp, -", 2),
]


def layouts_of(scenario: Scenario, case: tuple[int, str, str, int]) -> list[tuple[Any, Any]]:
    """The layouts of every tensor at the trainer and at all engines."""
    import reshard

    size_mib, before, after, ranks = case
    ends = [2 * scenario.trainer_hosts, 2 * scenario.hosts]
    trainer = reshard.DeviceMesh.of(fsdp=ends[0])
    engine = reshard.DeviceMesh.of(dp=(ends[1] - ends[0]) // ranks, tp=ranks, devices=range(*ends))
    found = [
        reshard.spec(mesh, cut).layout((WIDTH, WIDTH))
        for mesh, cut in ((trainer, before), (engine, after))
    ]
    return [(found[0], found[1])] * size_mib


class Ways:
    """The ways of one rank to fill a model."""

    def __init__(self, scenario: Scenario, case: tuple[int, str, str, int], bucket: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        from reshard.torch import Refit

        rank = dist.get_rank()
        self.trainers = 2 * scenario.trainer_hosts
        self.engines = list(range(self.trainers, 2 * scenario.hosts))
        self._rank = rank
        self.source: dict[str, Any] = {}
        self.target: dict[str, Any] = {}
        for number, (before, after) in enumerate(layouts_of(scenario, case)):
            shapes = [one.local_shapes.get(rank) for one in (before, after)]
            name = f"w{number}"
            value = None if shapes[0] is None else torch.full(shapes[0], float(number + 1))
            filled = None if shapes[1] is None else torch.zeros(shapes[1])
            self.source[name], self.target[name] = (value, before), (filled, after)
        self._mesh = DeviceMesh("cpu", list(range(self.trainers)))
        placed = [Shard(case[1].split(", ").index("fsdp")) if "fsdp" in case[1] else Replicate()]
        self._sharded = [
            DTensor.from_local(value, self._mesh, placed, run_check=False)
            for value, _ in self.source.values()
            if value is not None
        ]
        self._among = dist.new_group([0, *self.engines])
        self._whole = torch.empty(WIDTH, WIDTH)
        numbers = range(case[0])
        self._buckets_of = [numbers[at : at + bucket] for at in range(0, case[0], bucket)]
        self._buckets = [torch.empty(len(one), WIDTH, WIDTH) for one in self._buckets_of]
        known = scenario_topology(scenario)
        self.refits = {
            method: Refit.prepare(self.source, self.target, method=method, topology=known)
            for method in ("stages", "exchange")
        }
        # What an engine's rank has of a whole tensor.
        self._slices = None
        if rank >= self.trainers:
            (found,) = self.target["w0"][1].boxes(rank)
            self._slices = tuple(slice(a, b) for a, b in zip(found.start, found.stop, strict=True))
        self.actions: dict[str, Callable[[], Any]] = {
            "stages": self.refits["stages"].run,
            "exchange": self.refits["exchange"].run,
            "broadcast": self._broadcast,
            "chain": self._chain,
        }

    def _take(self, number: int, whole: Any) -> None:
        self.target[f"w{number}"][0].copy_(whole[self._slices])

    def _broadcast(self) -> None:
        import torch.distributed as dist

        for number in range(len(self.source)):
            whole = self._whole
            if self._rank < self.trainers:
                whole = self._sharded[number].full_tensor()
            if self._rank == 0 or self._slices is not None:
                dist.broadcast(whole, 0, group=self._among)
            if self._slices is not None:
                self._take(number, whole)

    def _chain(self) -> None:
        import torch.distributed as dist

        chain = [0, *self.engines]
        at = chain.index(self._rank) if self._rank in chain else None
        begun = []
        for number, tensors in enumerate(self._buckets_of):
            bucket = self._buckets[number]
            if self._rank < self.trainers:
                for place, tensor in enumerate(tensors):
                    bucket[place].copy_(self._sharded[tensor].full_tensor())
            if at is None:
                continue
            if at > 0:
                dist.recv(bucket, chain[at - 1])
            if at + 1 < len(chain):
                begun.append(dist.isend(bucket, chain[at + 1]))
            if at > 0:
                for place, tensor in enumerate(tensors):
                    self._take(tensor, bucket[place])
        for one in begun:
            one.wait()

    def check(self, way: str) -> None:
        """What arrived is what was sent; and it is gone for the next way."""
        for number, (value, _) in enumerate(self.target.values()):
            if value is not None:
                if not bool((value == number + 1).all()):
                    raise SystemExit(f"{way}: tensor {number} is wrong on rank {self._rank}")
                value.zero_()


def scenario_topology(scenario: Scenario) -> Any:
    """The hosts, and their links as `tc` holds them; within a host memory's speed is assumed."""
    from reshard.topology import Link, Overhead, Topology

    network = Link(scenario.rate / 8, 1e-3)
    uplink = Link(scenario.uplink / 8, 1e-3) if scenario.uplink else None
    return Topology(
        scenario.rank_host,
        scenario.racks or None,
        Link(1e9, 1e-4),
        network,
        uplink or network,
        Overhead(call_s=5e-3, shared_network=network, shared_uplink=uplink),
    )


def take_turns(ways: Ways, names: list[str], repeat: int) -> dict[str, dict[str, Any]]:
    """The median seconds of each way, what each host sent, and the processors' time of all."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(repeat + 1):
        for name in names:
            found = Turn.of(ways.actions[name])
            ways.check(name)
            # The first turn finds memory and connections that nobody has used.
            if turn:
                turns[name].append(found)
    return {name: summarise(of_way) for name, of_way in turns.items()}


def planned_bytes(ways: Ways, method: str, scenario: Scenario) -> tuple[Any, Any]:
    """What each host sends to each, and each rack to each, as planned."""
    import numpy as np

    hosts = scenario.rank_host
    found = np.zeros((scenario.hosts, scenario.hosts), np.int64)
    for move in ways.refits[method].plan:
        found[hosts[move.sender], hosts[move.receiver]] += move.size_bytes
    np.fill_diagonal(found, 0)
    racks = list(scenario.racks or [0] * scenario.hosts)
    between = np.zeros((max(racks) + 1, max(racks) + 1), np.int64)
    np.add.at(between, (np.array(racks)[:, None], np.array(racks)[None, :]), found)
    np.fill_diagonal(between, 0)
    return found, between


def own_seconds(planned: tuple[Any, Any], scenario: Scenario) -> float:
    """The seconds of the slowest link for what is planned for it."""
    slowest = 0.0
    for found, rate in zip(planned, (scenario.rate, scenario.uplink), strict=True):
        if rate:
            slowest = max(slowest, *(float(found.sum(axis=a).max()) * 8 / rate for a in (0, 1)))
    return slowest


def compare_ways(scenario: Scenario, repeat: int, names: list[str]) -> None:
    """Ways, with engines of one rank: each rank has all."""
    import torch.distributed as dist

    ways = Ways(scenario, (scenario.size_mib, "fsdp, -", "-, -", 1), 2)
    found = take_turns(ways, names, repeat)
    planned = {m: planned_bytes(ways, m, scenario) for m in ways.refits}
    if dist.get_rank():
        return
    print(
        f"{scenario.name}: {scenario.hosts} hosts of 2, links of {scenario.rate // MBIT} Mbit/s"
        + (f", uplinks of {scenario.uplink // MBIT}" if scenario.uplink else "")
        + f"; {scenario.size_mib} MiB from {scenario.trainer_hosts} to all ranks of the others; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    for name, one in found.items():
        line = (
            f"  {name:10} {one['seconds']:6.3f} s ({one['spread'][0]:.3f}-{one['spread'][1]:.3f})"
        )
        line += f" {one['processor']:6.2f} s of processors, sent "
        line += ", ".join(f"{size / MIB:.1f}" for size in one["sent"])
        line += f" = {sum(one['sent']) / MIB:.1f} MiB"
        if name in planned:
            total = int(planned[name][0].sum())
            own_s = own_seconds(planned[name], scenario)
            line += f", {sum(one['sent']) / total:.3f} of what is planned; own {own_s:.3f} s, "
            line += f"{one['seconds'] / own_s:.2f} of it"
        print(line)


def compare_choices(scenario: Scenario, repeat: int, names: list[str]) -> None:
    """Ways in other cases, and which of stages and exchange the model takes."""
    import torch.distributed as dist

    from reshard.torch import Refit

    is_first, right = dist.get_rank() == 0, 0
    for case in CHOICES:
        ways = Ways(scenario, case, 2)
        found = take_turns(ways, names, repeat)
        auto = Refit.prepare(
            ways.source, ways.target, method="auto", topology=scenario_topology(scenario)
        )
        staged: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(staged, bool(auto.report.staged))
        taken = "stages" if any(staged) else "exchange"
        seconds = {name: one["seconds"] for name, one in found.items()}
        is_right = seconds[taken] <= 1.1 * min(seconds.values())
        right += is_right
        if is_first:
            size_mib, before, after, ranks = case
            told = ", ".join(f"{name} {seconds_s:6.3f} s" for name, seconds_s in seconds.items())
            print(
                f"  {scenario.name:13} {size_mib:3} MiB  {before:8} to {after:6} engines of {ranks}"
                f"  {told}; takes {taken:8} {'right' if is_right else 'WRONG'}",
                flush=True,
            )
    if is_first:
        print(f"{scenario.name}: {right} of {len(CHOICES)} right, load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=[*SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which take turns")
    parser.add_argument("--choices", action="store_true", help="stages or exchange, many cases")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one scenario")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        order = json.loads(options.rank)
        repeat, ways = order["repeat"], order["ways"]
        if order["choices"]:
            as_rank(order, lambda scenario: compare_choices(scenario, repeat, ways))
        as_rank(order, lambda scenario: compare_ways(scenario, repeat, ways))
    unknown = set(options.scenarios) - SCENARIOS.keys()
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    order = {"repeat": options.repeat, "ways": options.ways, "choices": options.choices}
    run_scenarios(__file__, options.scenarios, options.limit_s, order)


if __name__ == "__main__":
    main()
