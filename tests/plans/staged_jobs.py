"""Random small jobs in stages, and jobs of a weight between two hosts, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

import reshard
from oracle import Contents
from reshard.dtypes import dtype
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Topology
from rule_definitions import NO_ELEMENT
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]
EXACT_REDUCTIONS = ("sum", "max", "min", "product")
KINDS = ("int8", "int16", "int64")
# A job is several movements.
FEWER = settings(max_examples=settings().max_examples // 2)

HOSTS = reshard.DeviceMesh.of(host=2, gpu=4)
ON_HOSTS = Topology.of(hosts=2, ranks_per_host=4)


@st.composite
def topologies(draw: st.DrawFn, ranks: int) -> Topology:
    """Hosts of `ranks` ranks, in any order, some of them in racks."""
    hosts = draw(st.integers(1, min(5, ranks)))
    rest = draw(st.lists(st.integers(0, hosts - 1), min_size=ranks - hosts, max_size=ranks - hosts))
    racks = draw(st.integers(1, hosts))
    more = draw(st.lists(st.integers(0, racks - 1), min_size=hosts - racks, max_size=hosts - racks))
    of_host = draw(st.permutations([*range(racks), *more]))
    return Topology(draw(st.permutations([*range(hosts), *rest])), of_host)


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
    slots = max(max(i.change.source.slots, i.change.target.slots) for i in job.items)
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


def spec_job(
    source: str, target: str, shape: tuple[int, ...], mesh: reshard.DeviceMesh, kind: str = "int8"
) -> Job:
    layouts = [reshard.spec(mesh, text).layout(shape) for text in (source, target)]
    return Job([JobItem.between_ranks("w", dtype(kind), layouts[0], layouts[1])])
