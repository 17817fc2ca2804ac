"""One rank of a job over hosts that are network namespaces: what crosses their links is counted.

The arguments say, as JSON, which host each rank is on, the processes that keep the hosts, the
address of the first, and the rack of each host.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reshard
from host_network import enter_host
from rank_cases import run_cases
from refit_models import expect, expect_same, part, whole
from reshard.dtypes import dtype
from reshard.plans.hosts.staged_job import StagedJob
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.topology import Topology
from reshard.torch import Refit, redistribute

ORDER: dict[str, Any] = {}
# Above what planning, agreement and the headers of packets take; a second copy is far above it.
_MOST, _FIXED_BYTES = 1.12, 64 << 10
_TRIES = 3
SHAPES = {"up.weight": (1024, 512), "down.weight": (512, 1024), "norm": (1000,)}


def topology() -> Topology:
    return Topology(ORDER["hosts"], ORDER["racks"])


def count_link_bytes() -> list[int]:
    """What each host has sent over its link, once all ranks are here."""
    dist.barrier()
    command = ["ip", "-s", "-j", "link", "show", "eth0"]
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found: list[Any] = [None] * len(ORDER["hosts"])
    dist.all_gather_object(found, link["stats64"]["tx"]["bytes"])
    of_host = dict(zip(ORDER["hosts"], found, strict=True))
    dist.barrier()
    return [of_host[host] for host in sorted(of_host)]


def expect_crossing(action: Callable[[], object], planned: list[int], what: str) -> None:
    """An action sends from each host to others what is planned, or does so when repeated.

    A packet that a busy machine sends twice is counted twice.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        before = count_link_bytes()
        action()
        found = [now - then for now, then in zip(count_link_bytes(), before, strict=True)]
        expect(all(map(operator.ge, found, planned)), f"{what}: {found} sent, {planned} planned")
        if all(one <= _MOST * own + _FIXED_BYTES for one, own in zip(found, planned, strict=True)):
            return
    expect(False, f"{what}: the hosts sent {found}, {planned} were planned")


def sent_by_hosts(staged: StagedJob) -> list[int]:
    """What each host sends to others."""
    sent: list[int] = (staged.host_bytes.sum(axis=1) - staged.host_bytes.diagonal()).tolist()
    expect(sum(sent) == staged.across_hosts_bytes, f"{sent} of {staged.across_hosts_bytes}")
    return sent


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


def planned(source: dict[str, Any], target: dict[str, Any]) -> StagedJob:
    items = [JobItem.between_ranks(n, dtype("float32"), source[n][1], target[n][1]) for n in SHAPES]
    return StagedJob(Job(items), topology())


def found_hosts() -> None:
    """Hosts are told apart by their names, and each byte enters each of them once."""
    source, target, filled = models()
    refit = Refit.prepare(source, target)
    rank = dist.get_rank()
    if ORDER["hosts"][rank]:
        expect(set(refit.report.staged) == set(SHAPES), f"staged: {refit.report}")
    staged = planned(source, target)
    expect_crossing(refit.run, sent_by_hosts(staged), "a refit")
    expect_same(target, filled, "a refit")
    direct = Refit.prepare(source, models()[1], method="exchange")
    hosts = ORDER["hosts"]
    moved = [0] * len(set(hosts))
    for one in direct.plan:
        if hosts[one.sender] != hosts[one.receiver]:
            moved[hosts[one.sender]] += one.size_bytes
    expect_crossing(direct.run, moved, "the exchange")
    expect(sum(moved) > 1.5 * staged.across_hosts_bytes, "the exchange moves copies")


def given_hosts() -> None:
    """A refit, and a redistribution, on the topology that is given."""
    source, target, filled = models()
    staged = planned(source, target)
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


if __name__ == "__main__":
    ORDER |= json.loads(sys.argv[1])
    enter_host(ORDER["keepers"][ORDER["hosts"][int(os.environ["RANK"])]])
    os.environ |= {"MASTER_ADDR": ORDER["address"], "GLOO_SOCKET_IFNAME": "eth0"}
    run_cases([found_hosts, given_hosts])
