"""Broadcast trees: every byte enters a host and a rack once, and hosts have even loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import reshard
from plans.staged_jobs import FEWER, Movement, staged_jobs
from reshard.dtypes import dtype
from reshard.plans.broadcast_tree import Reach, compute_max_load, find_flows
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Topology

BYTES = 4800


def refit_job(trainers: int, engines: int, target: str = "-") -> Job:
    """A trainer of two ranks a host to engines, one replica a rank."""
    before = reshard.DeviceMesh.of(fsdp=2 * trainers)
    after = reshard.DeviceMesh.of(
        dp=2 * engines, devices=range(2 * trainers, 2 * (trainers + engines))
    )
    layouts = [
        reshard.spec(mesh, cut).layout((BYTES,))
        for mesh, cut in ((before, "fsdp"), (after, target))
    ]
    return Job([JobItem.between_ranks("w", dtype("int8"), *layouts)])


def across(staged: StagedJob) -> tuple[list[int], list[int]]:
    """What each host sends to others, and receives."""
    between = staged.host_bytes - np.diag(staged.host_bytes.diagonal())
    return between.sum(axis=1).tolist(), between.sum(axis=0).tolist()


def test_a_host_sends_elements_of_three_hosts_once() -> None:
    """By hand: a third of the bytes enters each of three hosts, which hands it on to two others."""
    staged = StagedJob(refit_job(1, 3), Topology.of(hosts=4, ranks_per_host=2))
    staged.verify()
    assert staged.reach == Reach.RACK
    assert staged.stage_names == ("exchange", "between hosts", "fan-out")
    assert across(staged) == ([BYTES] + [2 * BYTES // 3] * 3, [0] + [BYTES] * 3)
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 3 * BYTES


def test_loaded_hosts_do_not_forward() -> None:
    """Two hosts send to two: each sends what each receives, so that nothing is to be saved."""
    staged = StagedJob(refit_job(2, 2), Topology.of(hosts=4, ranks_per_host=2))
    assert staged.reach == Reach.HOST
    assert staged.stage_names == ("exchange", "fan-out")
    assert across(staged) == ([BYTES, BYTES, 0, 0], [0, 0, BYTES, BYTES])


def test_a_byte_enters_a_rack_once() -> None:
    """A host of rack 0 to one beside it, and to two in rack 1."""
    staged = StagedJob(refit_job(1, 3), Topology.of(hosts=4, ranks_per_host=2, hosts_per_rack=2))
    staged.verify()
    assert staged.across_racks_bytes == staged.across_racks_bound_bytes == BYTES
    assert across(staged)[1] == [0, BYTES, BYTES, BYTES]
    # A flow of each host alone would bring two copies into rack 1.
    assert staged.across_hosts_bytes == 3 * BYTES


def test_a_rack_sends_elements_of_three_racks_once() -> None:
    """Racks of two hosts: what enters the three others is handed on between these."""
    topology = Topology.of(hosts=8, ranks_per_host=2, hosts_per_rack=2)
    staged = StagedJob(refit_job(2, 6), topology)
    staged.verify()
    assert staged.reach == Reach.EVERYWHERE
    assert staged.stage_names == ("exchange", "between racks", "between hosts", "fan-out")
    assert staged.across_racks_bytes == staged.across_racks_bound_bytes == 3 * BYTES
    racks = staged.host_bytes.reshape(4, 2, 4, 2).sum(axis=(1, 3))
    np.fill_diagonal(racks, 0)
    assert racks.sum(axis=1).tolist() == [BYTES] + [2 * BYTES // 3] * 3
    assert racks.sum(axis=0).tolist() == [0] + [BYTES] * 3


@pytest.mark.parametrize("hosts_per_rack", [2, 3, 4])
def test_predicted_loads_of_hosts_are_exact(hosts_per_rack: int) -> None:
    """The loads by which is chosen are those of the transfers."""
    topology = Topology.of(hosts=12, ranks_per_host=2, hosts_per_rack=hosts_per_rack)
    for trainers in (1, 2, 5):
        job = refit_job(trainers, 12 - trainers)
        for reach in Reach:
            staged = StagedJob(job, topology)
            staged.__dict__["reach"] = reach
            staged.verify()
            between = staged.host_bytes - np.diag(staged.host_bytes.diagonal())
            rack = topology.host_rack
            racks = np.zeros((topology.racks, topology.racks), np.int64)
            np.add.at(racks, (rack[:, None], rack[None, :]), staged.host_bytes)
            np.fill_diagonal(racks, 0)
            most = max(one.sum(axis=axis).max() for one in (between, racks) for axis in (0, 1))
            change = job.items[0].change
            told = compute_max_load([(change, find_flows(change, topology, reach), 1)], topology)
            assert told == pytest.approx(most, rel=0.1)


@given(staged_jobs())
@FEWER
def test_every_reach_delivers_every_byte_once(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, _ = made
    for reach in Reach:
        other = StagedJob(staged.job, staged.topology)
        other.__dict__["reach"] = reach
        other.verify()
        assert other.moved_bytes == staged.moved_bytes
        assert other.across_hosts_bytes == staged.across_hosts_bytes
        assert other.across_racks_bytes == staged.across_racks_bytes
