"""The shares of copies have an even load, and fragments divide every flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import reshard
from oracle import contents_of_spec
from plans.staged_jobs import (
    FEWER,
    KINDS,
    ON_HOSTS,
    Movement,
    job_of,
    topologies,
    wanted,
)
from reshard.dtypes import dtype
from reshard.layout import Layout
from reshard.plans.broadcast_tree import Reach
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.topology import Topology


def least_load(staged: StagedJob, moves: Sequence[Movement]) -> float:
    """The least bytes that the most loaded rank can send, as a linear program.

    First copies come from holders, on the host where there are some; other copies from whoever
    is on the host and has, or gets, the element; contributions that are combined from holders.
    """
    classes: Counter[tuple[frozenset[int], frozenset[int], int]] = Counter()
    topology = staged.topology
    for item, ((_, held), (_, target)) in zip(staged.job.items, moves, strict=True):
        holders: dict[tuple[int, int], set[int]] = {}
        for rank in held.elements:
            for pair in held.held(rank):
                holders.setdefault(pair, set()).add(rank)
        for host in range(topology.hosts):
            here = set(topology.ranks_of(host))
            lacking: dict[tuple[int, int], set[int]] = {}
            combined = set()
            for rank in here:
                for pair in wanted(target, rank, item.change.combines) - held.held(rank):
                    lacking.setdefault(pair, set()).add(rank)
                    if len(item.change.combines[target.contribution[rank]]) > 1:
                        combined.add(pair)
            for pair, ranks in lacking.items():
                near = holders[pair] & here
                first = frozenset(near or holders[pair])
                others = first if pair in combined else frozenset(near | ranks)
                classes[first, others, len(ranks)] += item.dtype.itemsize_bytes
    rows: list[list[float]] = []
    demands: list[float] = []
    columns: list[int] = []
    for (first, others, copies), size in classes.items():
        for ranks, times in ((first, 1), (others, copies - 1)):
            demands.append(size * times)
            columns += sorted(ranks)
            rows.append([len(columns) - len(ranks), len(columns)])
    if not columns:
        return 0.0
    equal = np.zeros((len(rows), len(columns) + 1))
    for number, (low, high) in enumerate(rows):
        equal[number, int(low) : int(high)] = 1
    load = np.zeros((topology.ranks, len(columns) + 1))
    load[columns, np.arange(len(columns))] = 1
    load[:, -1] = -1
    cost = np.zeros(len(columns) + 1)
    cost[-1] = 1
    found = linprog(cost, load, np.zeros(topology.ranks), equal, np.array(demands))
    assert found.success
    return float(found.fun)


@st.composite
def larger_jobs(draw: st.DrawFn) -> tuple[StagedJob, list[Movement]]:
    """Tensors of some hundred elements on 8 ranks, held and wanted by some of them."""
    mesh = reshard.DeviceMesh.of(x=2, y=2, z=2)
    moves = []
    for _ in range(draw(st.integers(1, 3))):
        pair = []
        for _ in range(2):
            axes = draw(st.permutations("xyz"))
            cut = draw(st.integers(0, 3))
            texts = [" ".join(axes[:cut]) or "-", "-"]
            only = "".join(
                f" {axis}={draw(st.integers(0, 1))}" for axis in axes[cut:] if draw(st.booleans())
            )
            marks = f" | only({only.strip()})" if only else ""
            spec = reshard.spec(mesh, ", ".join(draw(st.permutations(texts))) + marks)
            pair.append((spec.layout((24, 16)), contents_of_spec(spec, (24, 16))))
        moves.append((pair[0], pair[1]))
    job = job_of(moves, [draw(st.sampled_from(KINDS)) for _ in moves])
    return StagedJob(job, draw(topologies(8))), moves


@given(larger_jobs())
@FEWER
def test_the_maximum_load_is_close_to_the_optimum(
    made: tuple[StagedJob, list[Movement]],
) -> None:
    given, moves = made
    # The program knows nothing of racks, nor of hosts that hand on to each other.
    staged = StagedJob(given.job, Topology(given.topology.rank_host))
    staged.__dict__["reach"] = Reach.HOST
    staged.verify()
    assert staged.across_hosts_bytes == staged.across_hosts_bound_bytes
    widest = max(item.dtype.itemsize_bytes for item in staged.job.items)
    # Handing one element on to 7 others cannot be divided.
    assert staged.sent_bytes.max() <= 1.05 * least_load(staged, moves) + 7 * widest


def test_only_overloaded_senders_are_relayed() -> None:
    """Rank 0 alone has `a`; of `b` every rank has its part, which it can well send to all."""
    mesh = reshard.DeviceMesh.of(gpu=8)
    whole = reshard.spec(mesh, "-").layout((6400,))
    sources = {"a": "- | only(gpu=0)", "b": "gpu"}
    job = Job(
        JobItem.between_ranks(name, dtype("int8"), reshard.spec(mesh, text).layout((6400,)), whole)
        for name, text in sources.items()
    )
    assert job.items[1].change.sent_elements.tolist() == [5600] * 8
    staged = StagedJob(job, Topology.of(hosts=1, ranks_per_host=8))
    staged.verify()
    assert staged.moved_bytes == 2 * 7 * 6400
    assert staged.sent_bytes.max() <= 1.05 * 2 * 7 * 6400 / 8
    assert len(staged.transfers(0)[-1]) > 0
    # Of `b`, others take over what is rank 0's, and the rest comes directly.
    fan_out = staged.transfers(1)[-1]
    assert (fan_out.start + fan_out.shape <= 800).all()
    assert set(staged.transfers(1)[0].moving.source_slot.tolist()) == set(range(8))


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
