"""How flows are divided along a job."""

from __future__ import annotations

import numpy as np

import reshard
from plans.staged_jobs import ON_HOSTS
from reshard.dtypes import dtype
from reshard.layout import Layout
from reshard.plans.hosts.staged_job import StagedJob
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.topology import Topology


def test_large_flows_are_divided_in_every_part_of_a_job() -> None:
    """Eight tensors of 64 MiB: each is sent by all four holders, and not a quarter of them by
    each holder.
    """
    mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    shape = (1 << 13, 1 << 13)
    layouts = [reshard.spec(mesh, f"-, - | only(host={host})").layout(shape) for host in range(2)]
    job = Job(
        JobItem.between_ranks(f"w{i}", dtype("int8"), layouts[0], layouts[1]) for i in range(8)
    )
    staged = StagedJob(job, ON_HOSTS)
    staged.verify()
    for number in range(8):
        exchange, _ = staged.transfers(number)
        sent = np.bincount(exchange.source_slot, exchange.elements)
        assert sent.tolist() == [shape[0] * shape[1] // 4] * 4
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == job.moved_bytes // 4


def test_very_many_bytes_are_divided_without_overflow() -> None:
    """Three ranks of one host hold 2**58 bytes, three of another want them."""
    shape = (1 << 30, 1 << 25)
    source = Layout.whole(shape, [0, 1, 2], 3)
    target = Layout.whole(shape, [3, 4, 5], 6)
    job = Job([JobItem.between_ranks("w", dtype("int64"), source, target)])
    staged = StagedJob(job, Topology.of(hosts=2, ranks_per_host=3))
    staged.verify()
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 1 << 58
    sent = staged.sent_bytes.reshape(2, 3)
    assert (sent.sum(axis=1) == [1 << 58, 1 << 59]).all()
    assert (sent.max(axis=1) * 100 <= sent.min(axis=1) * 101).all()


def test_cuts_fall_between_elements() -> None:
    """Elements of 1, 8 and 2 bytes on one line: nobody sends a part of one."""
    mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    items = []
    for number, kind in enumerate(("int8", "int64", "bfloat16", "int8", "int64")):
        layouts = [
            reshard.spec(mesh, f"- | only(host={host})").layout((7 + number,)) for host in (0, 1)
        ]
        items.append(JobItem.between_ranks(f"w{number}", dtype(kind), layouts[0], layouts[1]))
    staged = StagedJob(Job(items), ON_HOSTS)
    staged.verify()
    fragments = staged.fragments
    assert (fragments.first < fragments.stop).all()
    for number, item in enumerate(staged.job.items):
        mine = fragments.item == number
        length = (fragments.stop - fragments.first)[mine].sum()
        assert length == item.change.source.shape[0]
    # 7 + 64 + 18 + 10 + 88 bytes, a quarter for each sender, to within the widest element.
    assert abs(staged.sent_bytes[:4] - 187 / 4).max() <= 8
