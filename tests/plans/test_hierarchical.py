"""Staged jobs deliver every element, and modified stages raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from oracle import Contents, dense_of, reduced, shards_of
from plans.staged_jobs import (
    FEWER,
    HOSTS,
    ON_HOSTS,
    Movement,
    spec_job,
    staged_jobs,
    wanted,
)
from reshard.binding import Binding, FileRange
from reshard.dtypes import dtype
from reshard.errors import LayoutError, PlanError, ShardError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.hierarchical import StagedJob, verify_stages
from reshard.plans.job import Job, JobItem
from reshard.topology import Link, Topology

STAGED = StagedJob(
    spec_job("gpu, - | only(host=0)", "- , - | only(host=1)", (16, 8), HOSTS), ON_HOSTS
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: (a.take(slice(1, None)), b),
            "stages deliver 0 of its 32 elements",
        ),
        (lambda a, b: (a, b.take(slice(1, None))), "rank 5 receives 96 elements .* of 128"),
        (
            lambda a, b: (a.take(np.append(np.arange(len(a)), 0)), b),
            "stages deliver 64",
        ),
        (lambda a, b: (a, b.take(np.append(np.arange(len(b)), 0))), "receives 160 elements"),
        (
            lambda a, b: (a, replace(b, start=np.add(b.start, [1, 0]))),
            "the relay does not have these indices of dimension 0",
        ),
        (
            lambda a, b: (
                a,
                replace(
                    b,
                    start=np.subtract(b.start, [1, 0]),
                    source_start=np.subtract(b.source_start, [1, 0]),
                ),
            ),
            "does not have these indices",
        ),
        (
            lambda a, b: (a, replace(b, source_slot=b.source_slot[::-1].copy())),
            "the source rank has no such cell",
        ),
        (
            lambda a, b: (replace(a, source_start=np.add(a.source_start, [0, 1])), b),
            "the source does not have these indices",
        ),
        (
            lambda a, b: (
                a,
                replace(
                    b,
                    source_slot=b.target_slot,
                    source_cell=b.target_cell,
                    target_slot=b.source_slot,
                    target_cell=b.source_cell,
                ),
            ),
            "stages deliver 0 of its 32",
        ),
        (
            lambda a, b: (replace(a, shape=np.subtract(a.shape, [1, 0])), b),
            "stages deliver 24 of its 32",
        ),
    ],
)
def test_modified_stages_raise(
    change: Callable[[Transfers, Transfers], tuple[Transfers, Transfers]], message: str
) -> None:
    plan = STAGED.job.items[0].change
    exchange, fan_out = STAGED.transfers(0)
    verify_stages(plan, exchange, fan_out)
    with pytest.raises(PlanError, match=message):
        verify_stages(plan, *change(exchange, fan_out))


def test_held_elements_must_not_be_forwarded() -> None:
    """Two ranks hold all: a fan-out from one to the other is wrong, in place of what stays too."""
    mesh = reshard.DeviceMesh.of(x=2)
    whole = reshard.spec(mesh, "-").layout((4,))
    plan = LayoutChange(whole, whole)
    stays = plan.transfers
    again = replace(
        stays.take([0]),
        target_slot=np.array([1]),
        target_cell=np.array([1]),
        stays=np.array([False]),
    )
    verify_stages(plan, stays, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="holds it already"):
        verify_stages(plan, stays, again)
    with pytest.raises(PlanError, match="holds it already"):
        verify_stages(plan, stays.take([0]), again)


def test_elements_are_not_sent_back_to_their_sender() -> None:
    plan = LayoutChange(Layout.whole((4,), [0], 2), Layout.replicated((4,), 2))
    stays, moves = plan.transfers.take([0]), plan.transfers.take([1])
    back = replace(
        moves,
        source_slot=np.array([1]),
        source_cell=np.array([1]),
        target_slot=np.array([0]),
        target_cell=np.array([0]),
    )
    verify_stages(plan, plan.transfers, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="if and only if both ranks are equal"):
        verify_stages(plan, moves, back)


def least_across(staged: StagedJob, moves: Sequence[Movement], box_of_rank: Sequence[int]) -> int:
    """By sets: what the ranks of each host, or rack, want and none of them holds."""
    total = 0
    for item, ((_, held), (_, target)) in zip(staged.job.items, moves, strict=True):
        for box in set(box_of_rank):
            ranks = [rank for rank, one in enumerate(box_of_rank) if one == box]
            wants = set().union(*(wanted(target, rank, item.change.combines) for rank in ranks))
            has = set().union(*(held.held(rank) for rank in ranks))
            total += len(wants - has) * item.dtype.itemsize_bytes
    return total


def random_dense(contents: Contents, seed: int) -> list[NDArray[Any]]:
    generator = np.random.default_rng(seed)
    size = (contents.contributions, *contents.shape)
    return list(generator.integers(1, 3, size))


def is_plain(staged: StagedJob) -> bool:
    return all(len(one) <= 1 for item in staged.job.items for one in item.change.combines)


@given(staged_jobs(), st.integers(0, 99))
@FEWER
def test_the_target_comes_out(made: tuple[StagedJob, list[Movement]], seed: int) -> None:
    staged, moves = made
    shards, expected = {}, {}
    for item, ((_, held), (_, _)) in zip(staged.job.items, moves, strict=True):
        dense = [part.astype(item.dtype.numpy) for part in random_dense(held, seed)]
        shards[item.name] = shards_of(held, dense, rubbish=77)
        with np.errstate(over="ignore"):
            expected[item.name] = reduced(held.reduction, dense)
    result = staged.run(shards)
    assert result.keys() == expected.keys()
    for item, (_, (_, target)) in zip(staged.job.items, moves, strict=True):
        assert np.array_equal(dense_of(target, result[item.name]), expected[item.name])


@given(staged_jobs(("mean",)), st.integers(0, 99))
@FEWER
def test_means_come_out_as_means(made: tuple[StagedJob, list[Movement]], seed: int) -> None:
    staged, moves = made
    items = [
        JobItem.between_ranks(item.name, dtype("float64"), item.change.source, item.change.target)
        for item in staged.job.items
    ]
    shards, expected = {}, {}
    for item, ((_, held), _) in zip(items, moves, strict=True):
        dense = [part.astype("float64") for part in random_dense(held, seed)]
        shards[item.name] = shards_of(held, dense, rubbish=77)
        expected[item.name] = reduced(held.reduction, dense)
    result = StagedJob(Job(items), staged.topology).run(shards)
    for item, (_, (_, target)) in zip(items, moves, strict=True):
        np.testing.assert_allclose(dense_of(target, result[item.name]), expected[item.name])


@given(staged_jobs())
@FEWER
def test_bytes_between_hosts_and_in_total(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, moves = made
    staged.verify()
    assert staged.moved_bytes == staged.job.lower_bound_bytes
    assert staged.sent_bytes.sum() == staged.received_bytes.sum() == staged.host_bytes.sum()
    assert staged.received_bytes[: len(staged.job.received_bytes)].tolist() == (
        staged.job.received_bytes.tolist()
    )
    host = staged.topology.rank_host
    rack = staged.topology.host_rack[host]
    assert staged.across_hosts_bound_bytes == least_across(staged, moves, host.tolist())
    assert staged.across_racks_bound_bytes == least_across(staged, moves, rack.tolist())
    assert staged.across_hosts_bytes >= staged.across_hosts_bound_bytes
    assert staged.across_racks_bytes >= staged.across_racks_bound_bytes
    if is_plain(staged):
        assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes
        assert staged.across_racks_bytes == staged.across_racks_bound_bytes


@given(staged_jobs())
@FEWER
def test_bytes_are_those_of_the_transfers(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, _ = made
    ranks, hosts = staged.topology.ranks, staged.topology.hosts
    sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    between = np.zeros((hosts, hosts), np.int64)
    for number, item in enumerate(staged.job.items):
        for part in staged.transfers(number):
            moving = part.moving
            size = moving.elements * item.dtype.itemsize_bytes
            np.add.at(sent, moving.source_slot, size)
            np.add.at(received, moving.target_slot, size)
            host = staged.topology.rank_host
            np.add.at(between, (host[moving.source_slot], host[moving.target_slot]), size)
    assert sent.tolist() == staged.sent_bytes.tolist()
    assert received.tolist() == staged.received_bytes.tolist()
    assert between.tolist() == staged.host_bytes.tolist()


def rows(transfers: Transfers) -> set[tuple[object, ...]]:
    columns = [getattr(transfers, name).tolist() for name in Transfers.__dataclass_fields__]
    return {
        tuple(tuple(value) if isinstance(value, list) else value for value in row)
        for row in zip(*columns, strict=True)
    }


def check_parts(staged: StagedJob) -> None:
    parts = [staged.for_rank(rank) for rank in range(staged.topology.ranks)]
    for number in range(len(staged.job.items)):
        for stage in range(len(staged.stage_names)):
            whole = staged.transfers(number)[stage]
            for rank, part in enumerate(parts):
                mine = (whole.source_slot == rank) | (whole.target_slot == rank)
                assert rows(part[number][stage]) == rows(whole.take(mine))


@given(staged_jobs())
@FEWER
def test_the_parts_of_all_ranks_are_the_whole(made: tuple[StagedJob, list[Movement]]) -> None:
    check_parts(made[0])


def test_a_rank_that_alone_sends_other_copies() -> None:
    """Of few elements with several holders, one sends the first copy and another the rest."""
    boxes = [(rank, reshard.Box((rank // 3,), (rank // 3 + 1,))) for rank in range(6)]
    source, target = Layout.from_boxes((2,), boxes), Layout.replicated((2,), 8)
    job = Job([JobItem.between_ranks("w", dtype("int8"), source, target)])
    staged = StagedJob(job, Topology.of(hosts=1, ranks_per_host=8))
    fragments = staged.fragments
    assert (fragments.is_direct & (fragments.second_cell != fragments.source_cell)).any()
    check_parts(staged)


def test_a_replica_for_every_rank_of_another_host_crosses_once() -> None:
    """Four ranks of host 0 hold a quarter each; each rank of host 1 wants all of it.

    By hand: 64 elements cross, 16 to each rank of host 1, which sends them to three others. A
    direct exchange would send 256 across.
    """
    job = spec_job("gpu | only(host=0)", "- | only(host=1)", (64,), HOSTS, "bfloat16")
    staged = StagedJob(job, ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 128
    assert staged.host_bytes.tolist() == [[0, 128], [0, 384]]
    assert staged.sent_bytes.tolist() == [32] * 4 + [96] * 4
    assert staged.received_bytes.tolist() == [0] * 4 + [128] * 4
    exchange, fan_out = staged.transfers(0)
    assert (len(exchange), len(fan_out)) == (4, 12)
    assert sorted(zip(exchange.source_slot, exchange.target_slot, strict=True)) == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


def test_one_holder_does_not_send_to_its_whole_host() -> None:
    """Rank 0 has all, its 7 neighbours want it: it sends it once, and they do the rest."""
    mesh = reshard.DeviceMesh.of(gpu=8)
    job = spec_job("- | only(gpu=0)", "-", (5600,), mesh)
    staged = StagedJob(job, Topology.of(hosts=1, ranks_per_host=8))
    staged.verify()
    assert staged.moved_bytes == 7 * 5600
    assert staged.sent_bytes[0] == staged.sent_bytes.max() == 5600
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 0
    assert job.sent_bytes.max() == 7 * 5600


def test_balanced_loads_are_not_forwarded() -> None:
    """An all-gather within a host: every rank sends its own part to the others."""
    staged = StagedJob(spec_job("gpu", "-", (64,), HOSTS), ON_HOSTS)
    exchange, fan_out = staged.transfers(0)
    assert len(fan_out) == 0
    assert len(exchange.moving) == 2 * 4 * 3
    assert staged.sent_bytes.tolist() == [48] * 8
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes == 0


def test_holders_on_the_host_of_the_receiver_send() -> None:
    """Copies on both hosts, cut anew: nothing crosses."""
    staged = StagedJob(spec_job("gpu, -", "-, gpu", (16, 16), HOSTS), ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bytes == 0
    assert staged.host_bytes.tolist() == [[192, 0], [0, 192]]
    # With quarters 0 and 2 on one host and 1 and 3 on the other, each host lacks two of four
    # blocks in two of its columns, which two ranks want: 4 blocks of 16 enter each host.
    turned = StagedJob(staged.job, Topology([0, 1, 0, 1, 0, 1, 0, 1]))
    turned.verify()
    assert turned.across_hosts_bytes == turned.across_hosts_bound_bytes == 2 * 4 * 16


def test_contributions_that_are_combined_come_directly() -> None:
    staged = StagedJob(spec_job("- | sum(gpu)", "-", (8,), HOSTS), ON_HOSTS)
    staged.verify()
    assert len(staged.transfers(0)[-1]) == 0
    assert staged.across_hosts_bytes == 0
    # Over both hosts, each rank of one wants all contributions of the other.
    staged = StagedJob(spec_job("- | sum(host)", "-", (8,), HOSTS), ON_HOSTS)
    staged.verify()
    assert staged.across_hosts_bound_bytes == 2 * 8
    assert staged.across_hosts_bytes == 4 * 2 * 8


def test_jobs_that_cannot_be_staged_raise() -> None:
    job = spec_job("gpu", "-", (8,), HOSTS)
    with pytest.raises(LayoutError, match=r"rank . of a topology over ranks 0 to 3"):
        StagedJob(job, Topology.of(hosts=1, ranks_per_host=4)).verify()
    item = job.items[0]
    in_files = {slot: FileRange("f", 0) for slot in range(8)}
    source = Binding(item.change.source, in_files, {})
    with pytest.raises(PlanError, match="shard 0 of 'w' is at FileRange"):
        StagedJob(Job([JobItem("w", item.dtype, item.change, source, item.target)]), ON_HOSTS)
    hole = Layout.flat_ranges((4,), {0: (0, 2)})
    holed = Job([JobItem.between_ranks("w", dtype("int8"), hole, Layout.whole((4,), [5], 6))])
    with pytest.raises(PlanError, match="only 2 of the 4 elements that rank 5"):
        StagedJob(holed, ON_HOSTS).fragments  # noqa: B018
    with pytest.raises(ShardError, match="no arrays for tensor 'w'; got"):
        StagedJob(job, ON_HOSTS).run({})


def test_an_empty_job_is_staged() -> None:
    staged = StagedJob(Job([]), ON_HOSTS)
    staged.verify()
    assert (staged.moved_bytes, staged.across_hosts_bytes, staged.run({})) == (0, 0, {})
    assert staged.for_rank(3) == ()
    assert repr(staged) == "<StagedJob of 0 tensors on 2 hosts>"


def test_a_box_needed_twice_by_a_slot_is_sent_twice() -> None:
    box = reshard.Box((0,), (2,))
    source = Layout.whole((2,), [0], 1)
    target = Layout.from_boxes((2,), [(1, box), (1, box), (2, box)])
    staged = StagedJob(
        Job([JobItem.between_ranks("w", dtype("int64"), source, target)]), Topology([0, 0, 1])
    )
    staged.verify()
    assert staged.moved_bytes == 6 * 8
    result = staged.run({"w": {0: np.array([7, 8])}})["w"]
    assert {rank: array.tolist() for rank, array in result.items()} == {1: [7, 8, 7, 8], 2: [7, 8]}


def test_digests_differ_between_jobs_and_hosts() -> None:
    job, other = spec_job("gpu", "-", (8,), HOSTS), spec_job("host", "-", (8,), HOSTS)
    links = Topology.of(hosts=2, ranks_per_host=4, within_host=Link(1e9))
    digests = [
        StagedJob(one, hosts).digest
        for one, hosts in (
            (job, ON_HOSTS),
            (job, links),
            (other, ON_HOSTS),
            (job, Topology.of(hosts=4, ranks_per_host=2)),
        )
    ]
    # How fast links are decides nothing here.
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
