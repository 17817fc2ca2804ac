"""Jobs in stages: the same tensors come out, and every byte enters a host once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reshard.dtypes import dtype
from reshard.planning.job import Job, JobItem
from reshard.planning.stages import StagedJob
from reshard.planning.transfers import Transfers
from reshard.testing.oracle import Contents, dense_of, reduced, shards_of
from reshard.testing.rule_definitions import NO_ELEMENT
from reshard.testing.strategies import LayoutAndContents, movements
from reshard.topology import Topology

Movement = tuple[LayoutAndContents, LayoutAndContents]
EXACT_REDUCTIONS = ("sum", "max", "min", "product")
KINDS = ("int8", "int16", "int64")


@st.composite
def topologies(draw: st.DrawFn, ranks: int) -> Topology:
    """Hosts of `ranks` ranks, in any order."""
    hosts = draw(st.integers(1, min(4, ranks)))
    rest = draw(st.lists(st.integers(0, hosts - 1), min_size=ranks - hosts, max_size=ranks - hosts))
    return Topology(draw(st.permutations([*range(hosts), *rest])))


def job_of(moves: Sequence[Movement], kinds: Sequence[str]) -> Job:
    items = []
    for number, (((source, _), (target, _)), kind) in enumerate(zip(moves, kinds, strict=True)):
        items.append(JobItem.between_ranks(f"t{number}", dtype(kind), source, target))
    return Job(items)


@st.composite
def staged_jobs(
    draw: st.DrawFn, reductions: Sequence[str] = EXACT_REDUCTIONS
) -> tuple[StagedJob, list[Movement]]:
    """Small jobs on some hosts, some of their tensors laid out alike."""
    moves = draw(st.lists(movements(reductions), min_size=1, max_size=3))
    moves += draw(st.lists(st.sampled_from(moves), max_size=2))
    kinds = [draw(st.sampled_from(KINDS)) for _ in moves]
    job = job_of(moves, kinds)
    slots = max(max(i.plan.source.slots, i.plan.target.slots) for i in job.items)
    return StagedJob(job, draw(topologies(slots + draw(st.integers(0, 2))))), moves


def wanted(contents: Contents, slot: int, combines: Any) -> set[tuple[int, int]]:
    """The (element, contribution of the source) pairs that a slot is filled from."""
    if slot not in contents.elements:
        return set()
    elements = contents.elements[slot]
    return {
        (element, contribution)
        for element in elements[elements != NO_ELEMENT].tolist()
        for contribution in combines[contents.contribution[slot]]
    }


def least_across_hosts(staged: StagedJob, moves: Sequence[Movement]) -> int:
    """By sets: what the ranks of each host want and none of them holds."""
    total = 0
    for item, ((_, held), (_, target)) in zip(staged.job.items, moves, strict=True):
        for host in range(staged.topology.hosts):
            ranks = staged.topology.ranks_of(host)
            wants = set().union(*(wanted(target, rank, item.plan.combines) for rank in ranks))
            has = set().union(*(held.held(rank) for rank in ranks))
            total += len(wants - has) * item.dtype.itemsize_bytes
    return total


def random_dense(contents: Contents, seed: int) -> list[NDArray[Any]]:
    generator = np.random.default_rng(seed)
    size = (contents.contributions, *contents.shape)
    return list(generator.integers(1, 3, size))


def is_plain(staged: StagedJob) -> bool:
    return all(len(one) <= 1 for item in staged.job.items for one in item.plan.combines)


@given(staged_jobs(), st.integers(0, 99))
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


@given(staged_jobs())
def test_what_crosses_and_what_moves(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, moves = made
    staged.verify()
    assert staged.moved_bytes == staged.job.lower_bound_bytes
    assert staged.sent_bytes.sum() == staged.received_bytes.sum() == staged.host_bytes.sum()
    assert staged.received_bytes[: len(staged.job.received_bytes)].tolist() == (
        staged.job.received_bytes.tolist()
    )
    assert staged.across_hosts_bound_bytes == least_across_hosts(staged, moves)
    assert staged.across_hosts_bytes >= staged.across_hosts_bound_bytes
    if is_plain(staged):
        assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes


@given(staged_jobs())
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


@given(staged_jobs())
@settings(max_examples=40)
def test_the_parts_of_all_ranks_are_the_whole(made: tuple[StagedJob, list[Movement]]) -> None:
    staged, _ = made
    parts = [staged.for_rank(rank) for rank in range(staged.topology.ranks)]
    for number in range(len(staged.job.items)):
        for stage in (0, 1):
            whole = staged.transfers(number)[stage]
            for rank, part in enumerate(parts):
                mine = (whole.source_slot == rank) | (whole.target_slot == rank)
                assert rows(part[number][stage]) == rows(whole.take(mine))
