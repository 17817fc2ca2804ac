"""Ranks on hosts that are network namespaces, and turns of what they run.

A scenario says how many hosts there are, whose they are, and how fast their links. `run_scenario`
starts a script as its ranks, two on each host; `as_rank` is what each of them begins with. A `Turn`
is what one run took: seconds, processor time, and the bytes that each host sent.
"""

from __future__ import annotations

import json
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from host_network import HostNetwork, enter_host, why_not
from live_processes import free_port

MIB, MBIT = 1 << 20, 1_000_000


@dataclass(frozen=True)
class Scenario:
    """Hosts of two ranks, some of which are the trainer's; the others have engines.

    Rates are in bits a second; `uplink` is that of a rack's link to the others.
    """

    name: str
    hosts: int
    trainer_hosts: int
    rate: int
    size_mib: int
    racks: tuple[int, ...] = ()
    uplink: int = 0

    @property
    def rank_host(self) -> list[int]:
        return [rank // 2 for rank in range(2 * self.hosts)]


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("two", 2, 1, 1000 * MBIT, 64),
        Scenario("slow-two", 2, 1, 200 * MBIT, 24),
        Scenario("four", 4, 2, 100 * MBIT, 16),
        Scenario("one-to-three", 4, 1, 100 * MBIT, 16),
        Scenario("racks", 4, 1, 200 * MBIT, 16, (0, 0, 1, 1), 100 * MBIT),
    )
}


def sent_over_links() -> int:
    """What this process's host has sent, as its interface counts."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise SystemExit("no eth0 on this host")


@dataclass(frozen=True)
class Turn:
    """One turn of one way: of the slowest rank, of all processors, and sent by each host."""

    seconds: float
    processor_s: float
    sent: tuple[int, ...]

    @classmethod
    def of(cls, action: Callable[[], Any]) -> Turn:
        """Run what all ranks run, from a barrier to the last of them."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        before, processor_s, start_s = sent_over_links(), time.process_time(), time.time()
        action()
        mine = [time.time() - start_s, time.process_time() - processor_s, 0.0]
        dist.barrier()
        mine[2] = float(sent_over_links() - before)
        told = [torch.zeros(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(told, torch.tensor(mine, dtype=torch.float64))
        every = torch.stack(told)
        sent = tuple(int(one) for one in every[::2, 2])
        return cls(float(every[:, 0].max()), float(every[:, 1].sum()), sent)


def summarise(turns: list[Turn]) -> dict[str, Any]:
    """The medians of a way's turns, and the quickest and slowest."""
    seconds = [one.seconds for one in turns]
    sent = zip(*(one.sent for one in turns), strict=True)
    return {
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "processor": statistics.median(one.processor_s for one in turns),
        "sent": [int(statistics.median(one)) for one in sent],
    }


def run_scenarios(script: str, names: list[str], limit_s: float, order: dict[str, Any]) -> None:
    """The scenarios of these names one after another; each rank is told `order`."""
    missing = why_not()
    if missing:
        raise SystemExit(f"no hosts here: {missing}")
    for name in names:
        _run_scenario(script, SCENARIOS[name], limit_s, order)


def _run_scenario(script: str, scenario: Scenario, limit_s: float, given: dict[str, Any]) -> None:
    """The ranks of a scenario, on hosts that end with it."""
    racks = scenario.racks or None
    uplink = scenario.uplink or None
    with HostNetwork(scenario.hosts, scenario.rate, racks, uplink) as network:
        order = {
            "scenario": asdict(scenario),
            "keepers": network.host_pids,
            **given,
        }
        environment = {
            **os.environ,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(2 * scenario.hosts),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, script, "--rank", json.dumps(order)],
                env={**environment, "RANK": str(rank)},
            )
            for rank in range(2 * scenario.hosts)
        ]
        end_s = time.monotonic() + limit_s
        try:
            while any(one.poll() is None for one in ranks):
                if any(map(operator.truth, (one.poll() or 0 for one in ranks))):
                    raise SystemExit(f"{scenario.name}: ranks ended with an error")
                if time.monotonic() > end_s:
                    raise SystemExit(f"{scenario.name}: not done in {limit_s} s")
                time.sleep(0.1)
        finally:
            for one in ranks:
                one.kill()
                one.wait()


def as_rank(order: dict[str, Any], compare: Callable[[Scenario], None]) -> None:
    """One rank of a scenario, from the host that it is on to the end of its process."""
    scenario = Scenario(**order["scenario"])
    enter_host(order["keepers"][scenario.rank_host[int(os.environ["RANK"])]])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(scenario)
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
