"""One rank of a job over hosts that are network namespaces: what crosses their links is counted.

The arguments say, as JSON, which host each rank is on, the processes that keep the hosts and the
racks, the address of the first host, the rack of each, and the rate of their links.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard
from host_network import enter_host
from rank_cases import run_cases
from refit_models import expect, expect_same, part, refused, whole
from reshard.dtypes import dtype
from reshard.errors import UsageError
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Topology
from reshard.torch import Refit, measure_links, redistribute

ORDER: dict[str, Any] = {}
# Above what planning, agreement and the headers of packets take; a second copy is far above it.
_MOST, _FIXED_BYTES = 1.12, 64 << 10
_TRIES = 3
SHAPES = {"up.weight": (1024, 512), "down.weight": (512, 1024), "norm": (1000,)}


def topology() -> Topology:
    return Topology(ORDER["hosts"], ORDER["racks"])


def count_link_bytes() -> list[int]:
    """What each host has sent over its link, and each rack over its own, once all are here."""
    dist.barrier()
    ends = [(pid, "eth0") for pid in ORDER["keepers"]]
    if max(ORDER["racks"]):
        ends += [(pid, "uplink") for pid in ORDER["rack_keepers"]]
    found = []
    for pid, name in ends:
        # The links of the network that the process is in.
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
        (numbers,) = [line.split(":")[1] for line in lines if line.strip().startswith(f"{name}:")]
        found.append(int(numbers.split()[8]))
    dist.barrier()
    return found


def expect_crossing(action: Callable[[], object], planned: list[int], what: str) -> None:
    """An action sends from each host to others what is planned, or does so when repeated.

    A packet that a busy machine sends twice is counted twice.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        before = count_link_bytes()
        action()
        # All ranks judge by what one has seen.
        seen: list[Any] = [
            [now - then for now, then in zip(count_link_bytes(), before, strict=True)]
        ]
        dist.broadcast_object_list(seen, 0)
        (found,) = seen
        expect(all(map(operator.ge, found, planned)), f"{what}: {found} sent, {planned} planned")
        if all(one <= _MOST * own + _FIXED_BYTES for one, own in zip(found, planned, strict=True)):
            return
    expect(False, f"{what}: the hosts sent {found}, {planned} were planned")


def sent_by_hosts(staged: StagedJob) -> list[int]:
    """What each host sends to others, and each rack."""
    sent: list[int] = (staged.host_bytes.sum(axis=1) - staged.host_bytes.diagonal()).tolist()
    expect(sum(sent) == staged.across_hosts_bytes, f"{sent} of {staged.across_hosts_bytes}")
    return sent + sent_by_racks(staged.host_bytes)


def sent_by_racks(host_bytes: Any) -> list[int]:
    """What each rack sends to others, where there are several."""
    racks = ORDER["racks"]
    sent = [0] * (max(racks) + 1)
    for one, row in zip(racks, host_bytes.tolist(), strict=True):
        sent[one] += sum(size for other, size in zip(racks, row, strict=True) if other != one)
    return sent if len(sent) > 1 else []


def models() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Cut on the first host; whole, and cut, on every other."""
    ranks, rank = ORDER["hosts"], dist.get_rank()
    trainer = [r for r, host in enumerate(ranks) if host == 0]
    engine = [r for r, host in enumerate(ranks) if host > 0]
    before = reshard.DeviceMesh.of(fsdp=len(trainer), devices=trainer)
    after = reshard.DeviceMesh.of(dp=len(engine) // 2, tp=2, devices=engine)
    values = {n: whole(i, *shape) for i, (n, shape) in enumerate(SHAPES.items())}
    cuts = {
        "up.weight": ("fsdp, -", "-, -"),
        "down.weight": ("fsdp, -", "-, tp"),
        "norm": ("fsdp", "-"),
    }
    sides: list[dict[str, Any]] = []
    for side, mesh in enumerate((before, after)):
        layouts = {n: reshard.spec(mesh, cuts[n][side]).layout(SHAPES[n]) for n in SHAPES}
        sides.append({n: (part(values[n], layouts[n], rank), layouts[n]) for n in SHAPES})
    empty = {
        n: (own if own is None else torch.zeros_like(own), layout)
        for n, (own, layout) in sides[1].items()
    }
    return sides[0], empty, sides[1]


def planned(source: dict[str, Any], target: dict[str, Any], hosts: Topology) -> StagedJob:
    items = [JobItem.between_ranks(n, dtype("float32"), source[n][1], target[n][1]) for n in SHAPES]
    return StagedJob(Job(items), hosts)


def each_byte_enters_a_host_found_by_its_name_once() -> None:
    """Hosts are told apart by their names, and each byte enters each of them once."""
    source, target, filled = models()
    refit = Refit.prepare(source, target)
    rank = dist.get_rank()
    if ORDER["hosts"][rank]:
        expect(set(refit.report.staged) == set(SHAPES), f"staged: {refit.report}")
    # Names tell hosts apart, and not racks.
    staged = planned(source, target, Topology(ORDER["hosts"]))
    expect_crossing(refit.run, sent_by_hosts(staged), "a refit")
    expect_same(target, filled, "a refit")
    direct = Refit.prepare(source, models()[1], method="exchange")
    hosts = ORDER["hosts"]
    moved = np.zeros((len(set(hosts)),) * 2, np.int64)
    for one in direct.plan:
        if hosts[one.sender] != hosts[one.receiver]:
            moved[hosts[one.sender], hosts[one.receiver]] += one.size_bytes
    sent = moved.sum(axis=1).tolist() + sent_by_racks(moved)
    expect_crossing(direct.run, sent, "the exchange")
    expect(moved.sum() > 1.5 * staged.across_hosts_bytes, "the exchange moves copies")


def each_byte_enters_a_host_of_the_topology_once() -> None:
    """A refit, and a redistribution, on the topology that is given."""
    source, target, filled = models()
    staged = planned(source, target, topology())
    expect(staged.across_racks_bytes == staged.across_racks_bound_bytes, "racks are entered once")
    refit = Refit.prepare(source, target, method="stages", topology=topology())
    # Host by host: nobody sends what another should.
    expect_crossing(refit.run, sent_by_hosts(staged), "a refit")
    expect_same(target, filled, "a refit")
    name = "up.weight"
    options = {"source": source[name][1], "dtype": torch.float32, "method": "stages"}
    out = torch.zeros_like(filled[name][0]) if filled[name][0] is not None else None
    job = Job([JobItem.between_ranks(name, dtype("float32"), source[name][1], target[name][1])])
    expect_crossing(
        lambda: redistribute(
            source[name][0], target[name][1], topology=topology(), out=out, **options
        ),
        sent_by_hosts(StagedJob(job, topology())),
        "a redistribution",
    )
    expect_same({name: out}, {name: filled[name][0]}, "a redistribution")


def measured_links_distinguish_hosts() -> None:
    """Links are told apart, and are not quicker than they are held to; all ranks find the same."""
    names = {f"host{host}": f"rack{rack}" for host, rack in enumerate(ORDER["racks"])}
    found = measure_links(racks=names)
    expect(found.rank_host.tolist() == ORDER["hosts"], f"hosts {found.rank_host}")
    expect(found.host_rack.tolist() == ORDER["racks"], f"racks {found.host_rack}")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (found.between_hosts, found.between_racks, found.overhead))
    expect(len(set(told)) == 1, f"ranks found {told}")
    shared = found.overhead
    links = [found.between_hosts, shared.shared_network]
    if found.racks > 1:
        expect(shared.shared_uplink is not None, "no uplink was measured")
        links += [found.between_racks, shared.shared_uplink]
    # A busy machine makes them slower, and nothing makes them much quicker.
    most = 2.5 * ORDER["rate"] / 8
    quick = [link for link in links if link and link.bandwidth_bytes_per_s > most]
    expect(found.between_hosts is not None and not quick, f"{quick} above {most}")
    source, target, filled = models()
    Refit.prepare(source, target, topology=found).run()
    expect_same(target, filled, "a refit on measured links")
    refused(lambda: measure_links(racks={"host0": "a"}), UsageError, "do not have the hosts host1")


if __name__ == "__main__":
    ORDER |= json.loads(sys.argv[1])
    enter_host(ORDER["keepers"][ORDER["hosts"][int(os.environ["RANK"])]])
    os.environ |= {"MASTER_ADDR": ORDER["address"], "GLOO_SOCKET_IFNAME": "eth0"}
    run_cases(
        [
            each_byte_enters_a_host_found_by_its_name_once,
            each_byte_enters_a_host_of_the_topology_once,
            measured_links_distinguish_hosts,
        ]
    )
